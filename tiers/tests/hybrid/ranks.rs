//! Two ranks whose L3 have different states: they continue the longest common prefix.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use larder_format::PageKey;
use larder_kernels::{
    Attention, ChunkAt, Device, HostDevice, HostMemory, KvShape, Layout, Ticket, pool_bytes,
};
use larder_tiers::cache::{ComponentPools, Components, Section};
use larder_tiers::config::{PrefetchPolicy, TailConfig, TailKind};
use larder_tiers::core::{LoadBack, PrefetchState};
use larder_tiers::l3::L3;
use larder_tiers::prompt::Scope;
use larder_tiers::ranks::{Ranks, threads};
use larder_tiers::{Cache, Config, Parts};

use super::PATIENCE;
use super::memory::Memory;

/// Pages of the prompt that are computed, of 4 tokens.
const PAGES: usize = 6;

struct Rank {
    cache: Cache,
    tokens: Vec<u64>,
}

fn shape(tokens: u32) -> KvShape {
    KvShape::of_rows(Attention::Mla, 1, 8, tokens).unwrap()
}

impl Rank {
    fn new(ranks: impl Ranks + 'static, l3: &Arc<Memory>, states: &Arc<Memory>) -> Rank {
        let device = HostDevice::new().unwrap();
        let pools = |tokens, pages| {
            let shape = shape(tokens);
            let memory = HostMemory::zeroed(pool_bytes(&shape, pages)).unwrap();
            let layout = Layout::PageFirstDirect;
            Section {
                l1: device.alloc_l1(&shape, pages).unwrap(),
                l2: device.register(memory, layout, &shape, pages).unwrap(),
            }
        };
        let mut config = Config::new(4, 32, 20, 20);
        config.prefetch.threshold_tokens = 1;
        config.prefetch.policy = PrefetchPolicy::WaitComplete;
        config.load_threshold_tokens = 1;
        config.tails = vec![TailConfig {
            kind: TailKind::State { every: 1 },
            l1_pages: 20,
            l2_pages: 20,
        }];
        let Section { l1, l2 } = pools(4, 21);
        let components = Components {
            followers: Vec::new(),
            tails: vec![ComponentPools {
                sections: vec![pools(1, 21)],
                l3: Some(states.clone()),
            }],
        };
        let l3 = l3.clone() as Arc<dyn L3>;
        let parts = Parts {
            device: Arc::new(device),
            l1,
            l2,
            l3: Some(l3),
            ranks: Some(Box::new(ranks)),
        };
        Rank {
            cache: Cache::hybrid(config, parts, components).unwrap(),
            tokens: (0..4 * PAGES as u64 + 1).collect(),
        }
    }

    /// Computes the prompt page by page, and stores its pages and states.
    fn compute(&mut self) {
        let tokens = self.tokens.iter().copied();
        let prompt = self.cache.prompt(&Scope::default(), tokens).unwrap();
        let mut request = self.cache.start(prompt, 0);
        self.cache.extend(&mut request, self.tokens.len()).unwrap();
        for page in 0..PAGES {
            let end = 4 * (page + 1);
            self.cache.prepare(&mut request, end, None).unwrap();
            let at = ChunkAt {
                part: 0,
                layer: 0,
                page: page as u32,
            };
            let bytes = [page as u8; 32];
            self.cache.write_chunk(&request, at, &bytes).unwrap();
            self.cache
                .passed(&mut request, end, &Ticket::done(), None)
                .unwrap();
            self.cache
                .insert_first(&mut request, end, &Ticket::done())
                .unwrap();
        }
        self.cache.finish(request, false, &Ticket::done());
        self.cache.drain().unwrap();
        self.cache.reset().unwrap();
    }

    /// The pages of the prompt with which a request starts.
    fn cached(&mut self) -> (usize, u64) {
        let deadline = Instant::now() + PATIENCE;
        let tokens = self.tokens.iter().copied();
        let mut prompt = self.cache.prompt(&Scope::default(), tokens).unwrap();
        if let Ok(id) = self.cache.prefetch(&mut prompt) {
            loop {
                self.cache.poll().unwrap();
                let state = self.cache.poll_prefetch(id).unwrap();
                if state != PrefetchState::Waiting {
                    break;
                }
                assert!(Instant::now() < deadline);
            }
        }
        let mut request = self.cache.start(prompt, 0);
        let loaded = self.cache.load_back(&mut request, usize::MAX).unwrap();
        assert!(matches!(loaded, LoadBack::Started(..) | LoadBack::Nothing));
        let pages = request.tokens() / 4;
        self.cache.finish(request, false, &Ticket::done());
        self.cache.drain().unwrap();
        (pages, self.cache.core().digest())
    }
}

/// The pages with which each of two ranks starts, after L3 has lost states: rank 0 has those of the
/// first of `kept`, rank 1 those of the second, at these borders.
fn common(kept: [&'static [usize]; 2], before: fn()) -> Vec<usize> {
    let ends = threads(2, Duration::from_secs(20)).unwrap();
    let ranks = ends.into_iter().zip(kept).map(|(end, kept)| {
        thread::spawn(move || {
            before();
            let (l3, states) = (Arc::<Memory>::default(), Arc::<Memory>::default());
            let mut rank = Rank::new(end, &l3, &states);
            rank.compute();
            let mut tokens = rank.tokens.clone();
            tokens.truncate(4 * PAGES);
            let per_page = std::num::NonZeroUsize::new(4).unwrap();
            let units = larder_format::TokenUnits::Single;
            let keys = larder_format::page_keys(&tokens, per_page, None, units);
            let is_kept = |key: &PageKey| kept.iter().any(|border| keys[border - 1] == *key);
            states.evict(|key| !is_kept(key));
            rank.cached()
        })
    });
    let ranks: Vec<_> = ranks.collect();
    let ends: Vec<_> = ranks.into_iter().map(|rank| rank.join().unwrap()).collect();
    assert_eq!(ends[0].1, ends[1].1, "the ranks have different trees");
    ends.into_iter().map(|(pages, _)| pages).collect()
}

#[test]
fn ranks_continue_the_longest_prefix_that_all_of_them_can_continue() {
    let nothing = || {};
    assert_eq!(
        common([&[1, 2, 3, 4, 5, 6], &[1, 2, 3, 4, 5, 6]], nothing),
        [6, 6]
    );
    assert_eq!(common([&[2, 3, 6], &[1, 3, 5]], nothing), [3, 3]);
    assert_eq!(common([&[2, 4, 6], &[1, 2, 3, 5]], nothing), [2, 2]);
    assert_eq!(common([&[2, 4], &[1, 3]], nothing), [0, 0]);
}

#[cfg(debug_assertions)]
#[test]
fn the_minimum_of_lengths_instead_of_a_common_prefix_is_noticed() {
    use larder_tiers::planted::{Bug, plant};

    let bug = || plant(Some(Bug::MinimumOfLengths));
    assert_ne!(common([&[2, 3, 6], &[1, 3, 5]], bug), [3, 3]);
}
