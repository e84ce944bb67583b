//! Ranks whose devices and stores differ in speed, faults and correctness, as threads and as
//! processes. Their trees stay equal, and a rank that stops is an error.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

#[path = "../../tests/support/honest.rs"]
mod honest;

use std::collections::HashSet;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use honest::{Process, found};
use larder_engine::{GetPage, PutPage};
use larder_format::PageKey;
use larder_kernels::host::{Faults, Moment};
use larder_kernels::{
    Device, DeviceError, HostDevice, HostMemory, KvShape, Layout, Promise, Ticket, pool_bytes,
};
use larder_tiers::config::{L3Write, PrefetchPolicy, WritePolicy};
use larder_tiers::core::{PrefetchId, PrefetchState, Request, Stats};
use larder_tiers::l3::L3;
use larder_tiers::prompt::Scope;
use larder_tiers::ranks::{Ranks, RanksError, SocketRank, ThreadRank, Timeouts, threads};
use larder_tiers::{Cache, CacheError, Config, Parts};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

/// The pages of an L3.
type Pages = Arc<Mutex<HashSet<PageKey>>>;

/// The L3 of one rank. It usually has the pages that were put.
struct Moody {
    has: Pages,
    dice: Mutex<Pcg64Mcg>,
}

impl Moody {
    fn some(&self, of: usize) -> usize {
        let mut dice = self.dice.lock().unwrap();
        for _ in 0..dice.random_range(0..20) {
            std::thread::yield_now();
        }
        if dice.random_bool(0.2) {
            dice.random_range(0..=of)
        } else {
            of
        }
    }
}

impl L3 for Moody {
    fn longest_prefix(&self, keys: &[PageKey]) -> usize {
        let has = self.has.lock().unwrap();
        self.some(keys.iter().take_while(|key| has.contains(*key)).count())
    }

    fn get(&self, pages: &mut [GetPage<'_, '_>]) -> usize {
        let has = self.has.lock().unwrap();
        self.some(
            pages
                .iter()
                .take_while(|page| has.contains(&page.key))
                .count(),
        )
    }

    fn put(&self, pages: &[PutPage<'_>]) -> usize {
        let stored = self.some(pages.len());
        self.has
            .lock()
            .unwrap()
            .extend(pages[..stored].iter().map(|page| page.key));
        stored
    }

    fn touch(&self, _: &[PageKey]) {}
}

fn unreliable(seed: u64) -> Faults {
    let dice = Mutex::new(Pcg64Mcg::seed_from_u64(seed));
    Box::new(move |moment| {
        let is_bad = dice.lock().unwrap().random_bool(0.05);
        match moment {
            Moment::Copy(_, layer) if is_bad => Err(DeviceError::Copy {
                layer,
                why: "a test".into(),
            }),
            Moment::Submit(_) if is_bad => Err(DeviceError::Busy { in_flight: 1 }),
            _ => Ok(()),
        }
    })
}

/// The cache of one rank. With even seeds, one rank writes to an L3 that all ranks read (MLA);
/// otherwise each rank has its own L3.
fn cache(seed: u64, ranks: Box<dyn Ranks>, shared: &Pages) -> Cache {
    let mut dice = Pcg64Mcg::seed_from_u64(seed);
    let shape = KvShape::mha(2, 1, 4, 1, 2).unwrap();
    let mut config = Config::new(2, u64::from(shape.page_bytes()), 30, 40);
    config.write_policy = WritePolicy::ALL[dice.random_range(0..3)];
    config.l3_write = [L3Write::OnBackup, L3Write::Late][dice.random_range(0..2)];
    if config.l3_write == L3Write::Late {
        config.write_policy = WritePolicy::WriteThrough;
        config.late_percent = [20, 50, 100][dice.random_range(0..3)];
    }
    config.prefetch.policy = PrefetchPolicy::ALL[dice.random_range(0..3)];
    config.prefetch.timeout_base_us = 100;
    config.prefetch.threshold_tokens = 2;
    config.prefetch.batch_pages = 2;
    config.load_threshold_tokens = 2;
    let is_shared = seed.is_multiple_of(2);
    config.writes_l3 = ranks.rank() == 0 || !is_shared;
    // Each rank has its own faults.
    let own = seed * 100 + u64::from(ranks.rank());
    let device = HostDevice::with_faults(unreliable(own)).unwrap();
    let l3 = Arc::new(Moody {
        has: if is_shared {
            shared.clone()
        } else {
            Pages::default()
        },
        dice: Mutex::new(Pcg64Mcg::seed_from_u64(own)),
    });
    over(config, &shape, device, Some(l3), ranks)
}

fn over(
    config: Config,
    shape: &KvShape,
    device: HostDevice,
    l3: Option<Arc<dyn L3>>,
    ranks: Box<dyn Ranks>,
) -> Cache {
    let device = Arc::new(device);
    let pages = config.l2_pages + 1;
    let memory = HostMemory::zeroed(pool_bytes(shape, pages)).unwrap();
    let parts = Parts {
        l1: device.alloc_l1(shape, config.l1_pages + 1).unwrap(),
        l2: device
            .register(memory, Layout::PageFirst, shape, pages)
            .unwrap(),
        device,
        l3,
        ranks: Some(ranks),
    };
    Cache::new(config, parts).unwrap()
}

/// Two ranks without faults and without an L3.
fn pair() -> Vec<Cache> {
    let shape = KvShape::mha(2, 1, 4, 1, 2).unwrap();
    let config = Config::new(2, u64::from(shape.page_bytes()), 40, 40);
    let of = |ranks: ThreadRank| {
        let device = HostDevice::new().unwrap();
        over(config.clone(), &shape, device, None, Box::new(ranks))
    };
    let group = threads(2, TIMEOUT).unwrap();
    group.into_iter().map(of).collect()
}

/// Makes the same calls on every rank at the same time. Returns the results in their order.
fn each<R: Send>(caches: &mut [Cache], calls: impl Fn(usize, &mut Cache) -> R + Sync) -> Vec<R> {
    let calls = &calls;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = caches
            .iter_mut()
            .enumerate()
            .map(|(rank, cache)| scope.spawn(move || calls(rank, cache)))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// A request with slots for all its tokens.
fn begun(cache: &mut Cache, tokens: std::ops::Range<u64>) -> Request {
    let slots = tokens.clone().count();
    let prompt = cache.prompt(&Scope::default(), tokens).unwrap();
    let mut request = cache.start(prompt, 0);
    cache.extend(&mut request, slots).unwrap();
    request
}

/// The script of one rank. Every rank runs the same script.
struct Script {
    cache: Cache,
    dice: Pcg64Mcg,
    running: Vec<Request>,
    prefetches: Vec<PrefetchId>,
    /// Forwards end at different times and with different outcomes on each rank.
    own_dice: Pcg64Mcg,
    forwards: Vec<Promise>,
}

impl Script {
    fn forward(&mut self) -> Ticket {
        let (promise, ticket) = Ticket::promised();
        self.forwards.push(promise);
        ticket
    }

    fn end_a_forward(&mut self) {
        if self.forwards.is_empty() {
            return;
        }
        let at = self.own_dice.random_range(0..self.forwards.len());
        let is_bad = self.own_dice.random_bool(0.05);
        let outcome = if is_bad {
            Err(DeviceError::Closed)
        } else {
            Ok(())
        };
        self.forwards.swap_remove(at).settle(outcome);
    }

    fn tokens(&mut self) -> Vec<u64> {
        let document = self.dice.random_range(0..4) * 100;
        (0..self.dice.random_range(4..20))
            .map(|at| document + at)
            .collect()
    }

    /// Ends all work. Only L3 survives.
    fn rest(&mut self) {
        for request in std::mem::take(&mut self.running) {
            let forward = self.forward();
            self.cache.finish(request, true, &forward);
        }
        while !self.forwards.is_empty() {
            self.end_a_forward();
        }
        for prefetch in self.prefetches.drain(..) {
            self.cache.cancel_prefetch(prefetch);
        }
        self.cache.drain().unwrap();
        self.cache.reset().unwrap();
    }

    fn step(&mut self) -> Result<(), CacheError> {
        for _ in 0..self.own_dice.random_range(0..=self.forwards.len()) {
            self.end_a_forward();
        }
        let tokens = self.tokens();
        let at = if self.running.is_empty() {
            0
        } else {
            self.dice.random_range(0..self.running.len())
        };
        match self.dice.random_range(0..12) {
            0..3 if self.running.len() < 4 => {
                let prompt = self.cache.prompt(&Scope::default(), tokens).unwrap();
                let mut request = self.cache.start(prompt, 0);
                // The matched pages may be lost in the meantime; the checks below detect this.
                let _ = self.cache.load_back(&mut request, 100);
                self.running.push(request);
            }
            3..6 if !self.running.is_empty() => {
                let forward = self.forward();
                if self.cache.is_broken(&self.running[at]) {
                    let request = self.running.swap_remove(at);
                    let tokens = request.prompt().words().len();
                    let again = self.cache.restart(request, tokens, &forward);
                    self.running.push(again);
                    return Ok(());
                }
                let request = &mut self.running[at];
                let units = request.prompt().words().len();
                let left = units - request.tokens().min(units);
                if self.cache.extend(request, left).is_ok() {
                    self.cache.insert(request, &forward).unwrap();
                }
            }
            6..8 if !self.running.is_empty() => {
                let forward = self.forward();
                let request = self.running.swap_remove(at);
                self.cache.finish(request, true, &forward);
            }
            8 => {
                let mut prompt = self.cache.prompt(&Scope::default(), tokens).unwrap();
                self.prefetches.extend(self.cache.prefetch(&mut prompt));
                if self.dice.random_bool(0.5) {
                    while !self.forwards.is_empty() {
                        self.end_a_forward();
                    }
                    self.cache.drain()?;
                }
            }
            9 => {
                if let Some(id) = self.prefetches.pop()
                    && self.cache.poll_prefetch(id)? == PrefetchState::Waiting
                {
                    self.prefetches.insert(0, id);
                }
            }
            10 => {
                self.cache.evict(tokens.len());
            }
            _ => {
                self.cache.poll()?;
            }
        }
        Ok(())
    }
}

fn play(
    seed: u64,
    shared: &Pages,
    ranks: Box<dyn Ranks>,
    mut checks: Box<dyn Ranks>,
    steps: usize,
) -> Stats {
    let rank = ranks.rank();
    let mut script = Script {
        cache: cache(seed, ranks, shared),
        dice: Pcg64Mcg::seed_from_u64(seed),
        running: Vec::new(),
        prefetches: Vec::new(),
        own_dice: Pcg64Mcg::seed_from_u64(seed * 1000 + u64::from(rank)),
        forwards: Vec::new(),
    };
    for step in 0..steps {
        if step % 30 == 29 {
            script.rest();
        } else {
            script.step().unwrap();
        }
        script.cache.core().validate(&script.running).unwrap();
        let (l1, l2) = script.cache.core().free_pages();
        let own = [script.cache.core().digest(), u64::from(l1), u64::from(l2)];
        let (mut least, mut most) = (own, own);
        checks.min(&mut least).unwrap();
        checks.max(&mut most).unwrap();
        assert_eq!(
            least, most,
            "seed {seed}, step {step}: rank {rank} has {own:?}"
        );
    }
    script.cache.stats().clone()
}

/// Longer than any test: a slow rank is not a failure.
const TIMEOUT: Duration = Duration::from_secs(600);

#[test]
fn trees_of_two_to_eight_ranks_are_equal_after_every_step_in_spite_of_local_faults() {
    let mut all = Vec::new();
    for (seed, size) in (0..).zip([2, 3, 4, 8, 2, 5, 2, 2]) {
        let (group, checks) = (
            threads(size, TIMEOUT).unwrap(),
            threads(size, TIMEOUT).unwrap(),
        );
        let shared = &Pages::default();
        let stats: Vec<Stats> = std::thread::scope(|scope| {
            let ranks = group.into_iter().zip(checks);
            let ranks: Vec<_> = ranks
                .map(|(ranks, checks): (ThreadRank, ThreadRank)| {
                    let (ranks, checks) = (Box::new(ranks), Box::new(checks));
                    scope.spawn(move || play(seed, shared, ranks, checks, 600))
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert!(
            stats.iter().all(|of_rank| *of_rank == stats[0]),
            "counters differ"
        );
        all.push(stats[0].clone());
    }
    let counts: [fn(&Stats) -> u64; 7] = [
        |stats| stats.forward_failed,
        |stats| stats.backed_up,
        |stats| stats.backup_failed,
        |stats| stats.loaded,
        |stats| stats.put,
        |stats| stats.l3_hits,
        |stats| stats.prefetch_short,
    ];
    let totals = counts.map(|count| all.iter().map(count).sum::<u64>());
    assert!(!totals.contains(&0), "something never happened: {totals:?}");
}

#[test]
fn inserts_share_a_forward_whose_ticket_has_settled_on_one_rank_only() {
    let mut caches = pair();
    let (mut promises, tickets): (Vec<Promise>, Vec<Ticket>) =
        (0..2).map(|_| Ticket::promised()).unzip();
    each(&mut caches, |rank, cache| {
        let request = begun(cache, 0..8);
        cache.finish(request, true, &tickets[rank]);
    });
    promises.pop().unwrap().settle(Ok(()));
    each(&mut caches, |rank, cache| {
        assert_eq!(cache.poll().unwrap(), 0);
        let request = begun(cache, 100..108);
        cache.finish(request, true, &tickets[rank]);
    });
    promises.pop().unwrap().settle(Ok(()));
    let pending = each(&mut caches, |_, cache| {
        cache.poll().unwrap();
        cache.core().inserts_pending()
    });
    assert_eq!(pending, [0, 0]);
    let backed_up = each(&mut caches, |_, cache| {
        cache.drain().unwrap();
        cache.stats().backed_up
    });
    assert_eq!(backed_up, [8, 8]);
}

#[test]
fn one_poll_takes_every_forward_that_has_ended_on_all_ranks() {
    const FORWARDS: u64 = 30;
    let are_broken = each(&mut pair(), |_, cache| {
        let insert = |at| {
            let mut request = begun(cache, 2 * at..2 * at + 2);
            let (promise, ticket) = Ticket::promised();
            cache.insert(&mut request, &ticket).unwrap();
            (request, promise)
        };
        let (requests, mut promises): (Vec<Request>, Vec<Promise>) =
            (0..FORWARDS).map(insert).unzip();
        let last = promises.pop().unwrap();
        last.settle(Err(DeviceError::Closed));
        promises
            .into_iter()
            .for_each(|promise| promise.settle(Ok(())));
        cache.poll().unwrap();
        let are_broken: Vec<bool> = requests.iter().map(|r| cache.is_broken(r)).collect();
        for request in requests {
            cache.finish(request, false, &Ticket::done());
        }
        are_broken
    });
    for of_rank in are_broken {
        let broken: Vec<usize> = (0..of_rank.len()).filter(|at| of_rank[*at]).collect();
        assert_eq!(broken, [29]);
    }
}

#[test]
fn a_rank_that_stops_or_ends_is_an_error_for_the_others_and_not_a_hang() {
    for goes in [false, true] {
        let mut group = threads(2, Duration::from_millis(50)).unwrap();
        let other = group.pop().unwrap();
        let mut cache = cache(0, Box::new(group.pop().unwrap()), &Pages::default());
        // Dropping the end of a group counts as the end of the rank.
        let kept = (!goes).then_some(other);
        let error = cache.poll().unwrap_err();
        let is_right = match error {
            CacheError::Ranks(RanksError::Stalled { .. }) => kept.is_some(),
            CacheError::Ranks(RanksError::Gone { rank: 1 }) => kept.is_none(),
            _ => false,
        };
        assert!(is_right, "{error}");
    }
}

/// The directory where the processes of a group meet, and the action of the child.
const PLACE: &str = "LARDER_TEST_CACHE_RANK";
const ACT: &str = "LARDER_TEST_CACHE_ACT";

/// Steps of ranks that are processes.
const STEPS: usize = 300;

/// A timeout that a test waits for: long enough for a process on a busy machine to join a call.
const SHORT: Duration = Duration::from_secs(8);

/// One of two processes that meet at a path.
fn enter(path: &Path, rank: u32, call: Duration) -> Box<dyn Ranks> {
    let gather = TIMEOUT;
    let timeouts = Timeouts { gather, call };
    let rank = match rank {
        0 => SocketRank::host(path, 2, timeouts),
        _ => SocketRank::join(path, rank, 2, timeouts),
    };
    Box::new(rank.unwrap())
}

/// Plays scripts in step with the other process.
fn play_together(place: &Path, rank: u32) {
    let mut moved = [0; 3];
    // Odd seeds: each process has its own L3.
    for seed in [1, 3, 5, 7] {
        let at = |name: &str| place.join(format!("{name}-{seed}"));
        let ranks = enter(&at("ranks"), rank, TIMEOUT);
        let checks = enter(&at("checks"), rank, TIMEOUT);
        let stats = play(seed, &Pages::default(), ranks, checks, STEPS);
        for (sum, count) in moved
            .iter_mut()
            .zip([stats.backed_up, stats.loaded, stats.put])
        {
            *sum += count;
        }
    }
    assert!(!moved.contains(&0), "something never happened: {moved:?}");
}

#[test]
#[ignore = "runs in the processes of the next tests"]
fn child() {
    let place = std::env::var_os(PLACE).expect("where to meet the others");
    let place = Path::new(&place);
    if std::env::var(ACT).unwrap() == "play" {
        return play_together(place, 1);
    }
    let rank = u32::from(std::env::var(ACT).unwrap() != "host");
    let ranks = enter(&place.join("ranks"), rank, TIMEOUT);
    let mut cache = cache(1, ranks, &Pages::default());
    // Until this process is killed, or the other one ends.
    while cache.poll().is_ok() {}
}

fn start_child(place: &Path, act: &str) -> Process {
    let started = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "child"])
        .env(PLACE, place)
        .env(ACT, act)
        .stdout(Stdio::null())
        .spawn();
    Process(started.unwrap())
}

#[test]
fn trees_of_ranks_that_are_processes_are_equal_after_every_step() {
    let place = tempfile::tempdir().unwrap();
    let mut child = start_child(place.path(), "play");
    play_together(place.path(), 0);
    let ended = child.0.wait().unwrap();
    assert!(ended.success(), "the other process failed");
}

#[test]
fn a_process_that_is_stopped_is_an_error_for_the_others_cache_within_the_timeout() {
    let place = tempfile::tempdir().unwrap();
    let mut child = start_child(place.path(), "poll");
    let ranks = enter(&place.path().join("ranks"), 0, SHORT);
    let mut cache = cache(1, ranks, &Pages::default());
    for _ in 0..100 {
        cache.poll().unwrap();
    }
    let pid = Pid::from_child(&child.0);
    kill_process(pid, Signal::STOP).unwrap();
    // Messages sent before the stop still count.
    let error = found("the stop is detected", || cache.poll().err());
    let wanted = RanksError::Stalled {
        ranks: vec![1],
        timeout: SHORT,
    };
    assert!(
        matches!(&error, CacheError::Ranks(found) if *found == wanted),
        "{error}"
    );
    // The error persists, and only the group is lost.
    assert!(cache.poll().is_err());
    assert_eq!(cache.core().free_pages(), (30, 40));
    kill_process(pid, Signal::CONT).unwrap();
    child.0.wait().unwrap();
}

#[test]
fn a_host_that_is_stopped_for_less_than_the_timeout_goes_on() {
    let place = tempfile::tempdir().unwrap();
    let mut child = start_child(place.path(), "host");
    let ranks = enter(&place.path().join("ranks"), 1, TIMEOUT);
    let mut cache = cache(1, ranks, &Pages::default());
    let pid = Pid::from_child(&child.0);
    // Most stops hit the host while it waits for the next call.
    for _ in 0..50 {
        cache.poll().unwrap();
        kill_process(pid, Signal::STOP).unwrap();
        let (_, status) = waitpid(Some(pid), WaitOptions::UNTRACED).unwrap().unwrap();
        assert!(status.stopped());
        kill_process(pid, Signal::CONT).unwrap();
    }
    cache.poll().unwrap();
    drop(cache);
    assert!(child.0.wait().unwrap().success());
}
