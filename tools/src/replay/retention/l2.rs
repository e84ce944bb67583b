//! The caches of a server above the volume: the core of the tiers, with L1 and L2 of page numbers.
//!
//! A block of the trace is a page of one token. Copies, reads and writes end at once, and a forward
//! ends with its request.

use std::time::Instant;

use larder_core::policy::make;
use larder_engine::Hint;
use larder_tiers::Config;
use larder_tiers::config::{L3Write, PrefetchPolicy};
use larder_tiers::core::{Core, Declined, Done, Fence, Order, Outcome, PrefetchState};
use larder_tiers::prompt::Scope;

use super::Limits;
use super::volume::{Geometry, PAGE_BLOCKS, Played, Volume};
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::policy::Policy;
use crate::replay::requests::{Request, Requests};
use larder_format::BLOCK_BYTES;

/// By its text.
pub(super) fn percent(text: &str) -> Result<f64, String> {
    let percent: Option<f64> = text.parse().ok();
    let percent = percent.filter(|percent| (1.0..=90.0).contains(percent));
    percent.ok_or_else(|| "give 1 to 90".to_owned())
}

/// The result of a run.
pub(super) struct PlayedAbove {
    pub played: Played,
    /// Hits in L1 or L2.
    pub l2_hits: u64,
    pub l2_pages: u64,
    pub store_pages: u64,
    /// Pages that left L2 without having been written.
    pub never_written: u64,
}

/// Caches with so many pages in L2, and an L1 for the longest request.
///
/// # Errors
/// L2 has fewer pages than that request.
pub(super) fn config(
    pages: usize,
    l3_write: L3Write,
    requests: &Requests,
) -> Result<Config, Failure> {
    let longest = requests
        .iter()
        .map(|request| requests.blocks(request).len());
    let l1 = longest.max().unwrap_or(0) + 1;
    if pages < l1 {
        return Err(Failure::usage(format!(
            "an L2 of {pages} pages cannot hold the longest request, of {} blocks; give another \
             --l2 or --percent",
            l1 - 1
        )));
    }
    let page_bytes = u64::from(PAGE_BLOCKS) * BLOCK_BYTES as u64;
    let mut config = Config::new(1, page_bytes, l1 as u32, pages as u32);
    config.l3_write = l3_write;
    config.l3_queue_bytes_max = u64::MAX;
    config.load_threshold_tokens = 0;
    config.prefetch.threshold_tokens = 1;
    config.prefetch.policy = PrefetchPolicy::WaitComplete;
    config.prefetch.l2_percent_max = 100;
    Ok(config)
}

/// Plays a trace through the caches and a volume of this geometry, under the learned policy.
pub(super) fn play(
    requests: &Requests,
    geometry: &Geometry,
    config: Config,
    limits: Limits<'_>,
    interrupt: &Interrupt,
) -> Result<PlayedAbove, Failure> {
    let policy = Policy::Learned.maker().map(|maker| {
        let mut policy = make(&maker);
        policy.recall(limits.lessons, Vec::new());
        policy
    });
    let begun = Instant::now();
    let l2_pages = u64::from(config.l2_pages);
    let core = Core::new(config).map_err(|error| Failure::usage(error.to_string()))?;
    let volume = Volume::new(geometry, policy, limits.budget)?;
    let mut server = Server { core, volume };
    let (mut played, mut l2_hits) = (Played::default(), 0);
    for request in requests.iter() {
        if interrupt.is_raised() {
            break;
        }
        let (hits, in_l2) = server.serve(requests, request)?;
        played.hits += hits as u64;
        played.hits_of.push(hits);
        l2_hits += in_l2 as u64;
        played.written_of.push(server.volume.written());
    }
    let checked = server.core.validate([]);
    checked.map_err(|leak| Failure::environment(leak.to_string()))?;
    server.volume.sum_up(&mut played)?;
    played.seconds = begun.elapsed().as_secs_f64();
    let stats = server.core.stats();
    Ok(PlayedAbove {
        played,
        l2_hits,
        l2_pages,
        store_pages: geometry.pages as u64,
        never_written: stats.put_declined + stats.put_refused,
    })
}

/// Tries of a read for which L2 has no room before writes have ended.
const TRIES: usize = 8;

struct Server {
    core: Core,
    volume: Volume,
}

impl Server {
    /// The pages that a request finds, and those of them in L1 or L2. The others are computed.
    fn serve(&mut self, requests: &Requests, request: &Request) -> Result<(usize, usize), Failure> {
        self.volume.tick(request.at_ms);
        let broken = |error| Failure::environment(format!("a defect of the replay: {error}"));
        let blocks = requests.blocks(request);
        let mut prompt = self.core.prompt(&Scope::default());
        // A token behind them: the last one is always computed.
        let tokens = blocks.iter().map(|block| u64::from(*block));
        let tokens = tokens.chain([requests.distinct() as u64]);
        self.core
            .extend_prompt(&mut prompt, tokens)
            .map_err(|full| broken(full.to_string()))?;
        let (l1, l2) = self.core.peek(&prompt);
        for _ in 0..TRIES {
            let Ok(id) = self.core.prefetch(&mut prompt) else {
                break;
            };
            self.carry_out();
            match self.core.poll_prefetch(id, false) {
                PrefetchState::Declined(Declined::L2Room) => {}
                PrefetchState::Waiting => {
                    return Err(broken("a read has not ended".to_owned()));
                }
                _ => break,
            }
        }
        let mut taken = self.core.start(prompt, 0);
        self.core
            .load_back(&mut taken, usize::MAX)
            .map_err(|error| broken(error.to_string()))?;
        self.carry_out();
        let hits = taken.row_and_loads().0.shared_pages();
        let left = blocks.len() + 1 - taken.tokens();
        self.core
            .extend(&mut taken, left)
            .map_err(|error| broken(error.to_string()))?;
        self.core
            .insert_first(&mut taken, blocks.len(), Fence::default())
            .map_err(|error| broken(error.to_string()))?;
        self.core.finish(taken, false, Fence::default());
        self.core.tell_warmth();
        self.carry_out();
        Ok((hits, hits.min(l1 + l2)))
    }

    fn carry_out(&mut self) {
        while let Some(order) = self.core.next_order() {
            let (id, outcome) = match order {
                Order::BackUp { id, .. } | Order::Load { id, .. } => (id, Outcome::Copied(true)),
                Order::Put {
                    id,
                    keys,
                    parent,
                    depth,
                    ..
                } => {
                    let hint = Hint::default();
                    let stored = self.volume.put_after(parent, depth, &keys, hint);
                    (id, Outcome::Pages(stored))
                }
                Order::Exists { id, keys, .. } => {
                    self.volume.look_up(&keys);
                    (id, Outcome::Pages(self.volume.stored(&keys)))
                }
                Order::Get { id, keys, .. } => {
                    self.volume.read(&keys);
                    (id, Outcome::Pages(keys.len()))
                }
                Order::Touch { keys } => {
                    self.volume.touch(&keys);
                    continue;
                }
                // A replayed model has no windows and no states.
                Order::BackUpTails { .. }
                | Order::GetTails { .. }
                | Order::PutTail { .. }
                | Order::TouchTails { .. } => continue,
            };
            let answered = self.core.complete(Done { id, outcome });
            answered.expect("each order is answered once");
        }
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::super::curve::{CHAT, published};
    use super::super::volume::FILL;
    use super::super::{Hints, bytes_a_day, play as play_store};
    use super::*;

    /// The part of the hits of a store alone that is lost with half of its writes, by an L2 of a
    /// fifth of its pages above the rest.
    fn lost(requests: &Requests, percent: f64, ways: [L3Write; 2]) -> [f64; 2] {
        let never = Interrupt::never();
        let whole = Geometry::keeping(percent, FILL, None, requests).unwrap();
        let below = Geometry::keeping(0.8 * percent, FILL, None, requests).unwrap();
        let (policy, limits) = (Policy::Learned, Limits::default());
        let all = play_store(requests, &whole, policy, Hints::Sglang, limits, &never).unwrap();
        let budget = Some(bytes_a_day(requests, all.written_bytes, 50.0));
        ways.map(|l3_write| {
            let config = config(whole.pages - below.pages, l3_write, requests).unwrap();
            let limits = Limits {
                budget,
                ..Limits::default()
            };
            let run = play(requests, &below, config, limits, &never).unwrap();
            assert!(run.played.written_bytes < all.written_bytes * 51 / 100);
            assert!(run.never_written > 0 && run.l2_hits > 0);
            1.0 - run.played.hits as f64 / all.hits as f64
        })
    }

    #[test]
    #[ignore = "takes half a minute"]
    fn written_late_the_chat_trace_loses_at_most_12_percent_of_its_hits_with_half_the_writes() {
        if let Some(requests) = published(CHAT) {
            let [at_once, late] = lost(&requests, 10.0, [L3Write::OnBackup, L3Write::Late]);
            println!(
                "{:.1} % lost at once, {:.1} % late",
                at_once * 100.0,
                late * 100.0
            );
            assert!(late <= 0.12, "{late}");
            assert!(late < at_once, "{late}, {at_once}");
        }
    }
}
