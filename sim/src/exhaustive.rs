//! Every crash of every short script, without randomness.
//!
//! A *script* is up to three operations on a small store, young or full (`store`), under one sync
//! policy. Its operations are calls of the engine's own handle (`process`). The device finishes its
//! oldest or its newest work first (`machine`). After each start and each end of a write or a sync,
//! in openings and closes too, the power may fail or the process be killed. Then every subset of
//! the unsynced blocks is tried, blocks in flight included. Each possible image (`image`) is
//! recovered and compared with the promises. It is recovered again after a second crash during the
//! opening (`promises`). Above [`Limits::blocks`] unsynced blocks, all subsets of the newest blocks
//! are tried, each with all and with none of the older ones.
//!
//! Moments of a script's first operations belong to the shorter scripts that it begins with.
//! Moments and images that were checked once are not checked again.
//!
//! All subsets of the newest 8 blocks over all scripts of three operations (8,880 scripts, some
//! 37,500 moments) take about 115 seconds on one core. All subsets of the newest 14 over all
//! scripts of one operation take 22. `tests/run` tries both.
//!
//! Not tried: blocks torn inside (the format's tests tear them at every sector), and faults other
//! than a crash.

mod image;
mod machine;
mod process;
mod promises;
mod store;

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use larder_engine::SyncPolicy;
use larder_sim_runtime::dice::mix;
use larder_sim_runtime::heap;

use machine::{Machine, Moment, Order};
use process::Operation;
use promises::{Crash, Judge};
use store::Store;

use crate::mode::Mode;

/// The limits of a search.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Operations of the longest script.
    pub operations: usize,
    /// Number of unsynced blocks whose subsets are all tried.
    pub blocks: usize,
    /// The scripts to try.
    pub part: Part,
}

/// A part of the scripts, or all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// All of them.
    All,
    /// Scripts on a young store.
    Young,
    /// Scripts on a full store that begin with reclaim.
    Reclaim,
}

impl Part {
    fn takes(self, family: &Family) -> bool {
        match self {
            Part::All => true,
            Part::Young => !family.full,
            Part::Reclaim => family.full && family.first == Operation::Reclaim,
        }
    }
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            operations: 3,
            blocks: 14,
            part: Part::All,
        }
    }
}

/// Counts over a search.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Scripts.
    pub scripts: u64,
    /// Different moments of crashes.
    pub moments: u64,
    /// Subsets of unsynced blocks, over all moments.
    pub subsets: u64,
    /// Different images that the subsets left. Each is recovered and read.
    pub images: u64,
    /// Most unsynced blocks at one moment.
    pub blocks_max: usize,
}

impl Counts {
    fn add(&mut self, other: &Counts) {
        self.scripts += other.scripts;
        self.moments += other.moments;
        self.subsets += other.subsets;
        self.images += other.images;
        self.blocks_max = self.blocks_max.max(other.blocks_max);
    }
}

/// Scripts with the same beginning.
#[derive(Clone, Copy, Debug)]
struct Family {
    full: bool,
    sync: SyncPolicy,
    order: Order,
    first: Operation,
}

/// Tries every crash of every script, on `threads` threads including the calling one.
///
/// # Errors
/// The first script found that breaks a promise, with the moment and the subset.
pub fn exhaust(limits: Limits, threads: usize) -> Result<Counts, String> {
    let mut families = families();
    families.retain(|family| limits.part.takes(family));
    let next = AtomicUsize::new(0);
    let result: Mutex<Result<Counts, String>> = Mutex::new(Ok(Counts::default()));
    let work = || {
        while let Some(family) = families.get(next.fetch_add(1, Ordering::Relaxed)) {
            let outcome = explore(*family, limits);
            let mut result = result.lock().unwrap_or_else(PoisonError::into_inner);
            match (&mut *result, outcome) {
                (Ok(sum), Ok(counts)) => sum.add(&counts),
                (Ok(_), Err(why)) => *result = Err(why),
                (Err(_), _) => return,
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(work);
        }
        work();
    });
    result.into_inner().unwrap_or_else(PoisonError::into_inner)
}

fn families() -> Vec<Family> {
    let mut families = Vec::new();
    for full in [true, false] {
        for sync in [SyncPolicy::Relaxed, SyncPolicy::Always] {
            for order in [Order::Oldest, Order::Newest] {
                families.extend(Operation::ALL.map(|first| Family {
                    full,
                    sync,
                    order,
                    first,
                }));
            }
        }
    }
    families
}

/// Plays all scripts of a family.
fn explore(family: Family, limits: Limits) -> Result<Counts, String> {
    let mut explorer = Explorer::new(family.sync, limits.blocks);
    let mut scripts: Vec<Vec<Operation>> = vec![vec![family.first]];
    while let Some(script) = scripts.pop() {
        explorer.counts.scripts += 1;
        let played = play_apart(family, &script, explorer);
        explorer = played.map_err(|why| format!("{family:?}, script {script:?}: {why}"))?;
        if script.len() < limits.operations {
            for operation in Operation::ALL {
                let longer = script.iter().copied().chain([operation]);
                scripts.push(longer.collect());
            }
        }
    }
    explorer.counts.images = explorer.judge.verdicts.len() as u64;
    Ok(explorer.counts)
}

/// Plays a script with memory of its own, but for the explorer's and the failure's.
fn play_apart(
    family: Family,
    script: &[Operation],
    explorer: Explorer,
) -> Result<Explorer, String> {
    let mut explorer = Some(explorer);
    let mut failure = None;
    let play = |own| Machine::new(family.order, family.full, script, own).play();
    let run = || match explorer.take().map(play) {
        Some(Err(why)) => failure = heap::outside(|| Some(why.clone())),
        own => explorer = own.and_then(Result::ok),
    };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| Mode::Store.apart(run))) {
        let said = panic.downcast_ref::<String>().cloned();
        failure = Some(said.unwrap_or_else(|| "panic without a message".to_owned()));
    }
    explorer.ok_or_else(|| failure.unwrap_or_default())
}

/// Examines moments: tries every subset of blocks that a crash may leave.
struct Explorer {
    judge: Judge,
    blocks: usize,
    seen: HashSet<(u128, u64)>,
    counts: Counts,
}

impl Explorer {
    fn new(sync: SyncPolicy, blocks: usize) -> Explorer {
        Explorer {
            judge: Judge::new(Arc::new(Store::new(sync))),
            blocks,
            seen: HashSet::new(),
            counts: Counts::default(),
        }
    }

    /// Examines a moment, unless it was examined before.
    fn see(&mut self, moment: &Moment<'_>) -> Result<(), String> {
        let Moment {
            blocks, promises, ..
        } = *moment;
        let mut digest = mix(moment.completed as u64, promises.digest());
        for print in blocks.iter().map(|block| block.print) {
            digest = mix(mix(digest, print as u64), (print >> 64) as u64);
        }
        let state = (moment.durable.digest(), digest);
        if !heap::outside(|| self.seen.insert(state)) {
            return Ok(());
        }
        self.counts.moments += 1;
        self.counts.blocks_max = self.counts.blocks_max.max(blocks.len());
        let (rest, chosen) = blocks.split_at(blocks.len().saturating_sub(self.blocks));
        let completed = moment.completed.saturating_sub(rest.len());
        let written = (1_usize << completed) - 1;
        for keeps_rest in [true, false] {
            let mut base = moment.durable.clone();
            if keeps_rest {
                rest.iter().for_each(|block| base.put(block));
            } else if rest.is_empty() {
                break;
            }
            for subset in 0..1_usize << chosen.len() {
                let mut image = base.clone();
                let kept = (0..chosen.len()).filter(|at| subset >> at & 1 == 1);
                kept.for_each(|at| image.put(&chosen[at]));
                self.counts.subsets += 1;
                let is_kill = keeps_rest && subset & written == written;
                let judged = self.judge.verdict(&image).and_then(|pages| {
                    if is_kill {
                        promises.check(&pages, Crash::Kill)?;
                    }
                    promises.check(&pages, Crash::Power)
                });
                judged.map_err(|why| {
                    let blocks: Vec<usize> = blocks.iter().map(|block| block.at).collect();
                    let (written, last) = (moment.completed, chosen.len());
                    format!(
                        "{why}; of the blocks {blocks:?}, {written} of them written, \
                         the last {last} are kept as {subset:b}"
                    )
                })?;
            }
        }
        Ok(())
    }
}
