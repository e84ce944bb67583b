//! Pacing as a store uses it: the words of its volumes, and the counters.
//!
//! Owns: the words of all volumes, and the counters of this process. [`pace`](super::pace) decides.
//!
//! The words are in a page of memory that the owner of a store makes and its clients map, since
//! each process does its own I/O. A process without the page paces its own operations alone.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use larder_base::latency::{Latency, LatencySummary};
use larder_base::sealed::Sealed;
use larder_format::VOLUMES_MAX;
use rustix::fs::MemfdFlags;
use rustix::time::{ClockId, clock_gettime};

#[cfg(test)]
use super::pace::{CLAIM, MS};
use super::pace::{Nanos, Pace, Traffic, Words};
use super::{Op, Purpose};
#[cfg(test)]
use larder_base::runtime::thread;

/// Bytes of the page with the words.
const PAGE_BYTES: usize = 4096;

type AllWords = [Words; VOLUMES_MAX];

const _: () = assert!(size_of::<AllWords>() <= PAGE_BYTES && align_of::<AllWords>() <= PAGE_BYTES);

/// The present moment, on the clock that all processes of a machine share.
pub(super) fn now() -> Nanos {
    let now = clock_gettime(ClockId::Monotonic);
    let part = |part: i64| u64::try_from(part).unwrap_or(0);
    part(now.tv_sec) * 1_000_000_000 + part(now.tv_nsec)
}

/// See the module. By default nothing is paced.
#[derive(Debug, Default)]
pub struct Pacing {
    memory: Memory,
    /// Another process has the page.
    is_shared: AtomicBool,
    volumes: [Volume; VOLUMES_MAX],
    /// How long writes of puts waited for their turn.
    waits: Latency,
}

/// Where the words are.
#[derive(Debug, Default)]
enum Memory {
    /// Nowhere: nothing is paced.
    #[default]
    Nothing,
    /// In this process alone, and why.
    Own(Box<AllWords>, String),
    /// In a page for other processes.
    Page(Sealed),
}

/// The counters of one volume.
#[derive(Debug, Default)]
struct Volume {
    /// The last rate, in bytes per second.
    rate: AtomicU64,
    paced_writes: AtomicU64,
    paced_bytes: AtomicU64,
}

/// The pacing of one process at a moment. `Stats` of the engine explains the figures.
pub struct Paced {
    pub state: String,
    pub writes: u64,
    pub bytes: u64,
    pub rate: u64,
    pub read_slowdown: f64,
    pub waits: LatencySummary,
}

impl Pacing {
    /// Pacing among the operations of this process, with a page for others if there is memory.
    #[must_use]
    pub fn create() -> Pacing {
        match Sealed::create("larder-pacing", PAGE_BYTES, MemfdFlags::empty()) {
            Ok(page) => Pacing::with(Memory::Page(page)),
            Err(error) => Pacing::local(format!("no memory to share: {error}")),
        }
    }

    /// Pacing among the operations of this process alone.
    pub fn local(why: String) -> Pacing {
        Pacing::with(Memory::Own(Box::default(), why))
    }

    /// Pacing among all processes that have this page.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] if it is no such page; the kernel's.
    pub fn adopt(page: OwnedFd) -> io::Result<Pacing> {
        let page = Sealed::adopt(page, |bytes| bytes == PAGE_BYTES as u64)?;
        Ok(Pacing {
            is_shared: AtomicBool::new(true),
            ..Pacing::with(Memory::Page(page))
        })
    }

    fn with(memory: Memory) -> Pacing {
        Pacing {
            memory,
            ..Pacing::default()
        }
    }

    /// The page, to be passed to another process; `None` if there is none.
    pub fn share(&self) -> Option<BorrowedFd<'_>> {
        let Memory::Page(page) = &self.memory else {
            return None;
        };
        self.is_shared.store(true, Relaxed);
        Some(page.file())
    }

    /// The words of a volume; `None` if nothing is paced.
    pub(super) fn words(&self, volume: usize) -> Option<&Words> {
        let all = match &self.memory {
            Memory::Nothing => return None,
            Memory::Own(words, _) => &**words,
            Memory::Page(page) => {
                let words = page.start()?.cast::<AllWords>();
                // SAFETY: the mapping has the size and the alignment (asserted above), holds only
                // atomics, which are valid with any content, and lives as long as `self`.
                unsafe { &*words }
            }
        };
        all.get(volume)
    }

    /// A write of a put, or an operation in the background, gets its turn after a wait.
    pub(super) fn note(&self, volume: usize, pace: &Pace, op: &Op, waited: Nanos) {
        if op.purpose == Purpose::Call {
            self.waits.record(Duration::from_nanos(waited));
        }
        let Some(counters) = self.volumes.get(volume).filter(|_| pace.is_beside()) else {
            return;
        };
        counters.rate.store(pace.rate() as u64, Relaxed);
        counters.paced_writes.fetch_add(1, Relaxed);
        let bytes = Traffic::of(op).bytes();
        counters.paced_bytes.fetch_add(bytes, Relaxed);
    }

    /// The figures of this process.
    pub fn paced(&self) -> Paced {
        let mut paced = Paced {
            state: match &self.memory {
                Memory::Nothing => "off".to_owned(),
                Memory::Own(_, why) => format!("local: {why}"),
                Memory::Page(_) if self.is_shared.load(Relaxed) => "shared".to_owned(),
                Memory::Page(_) => "local".to_owned(),
            },
            writes: 0,
            bytes: 0,
            rate: 0,
            read_slowdown: 0.0,
            waits: self.waits.summary(),
        };
        let is_off = matches!(self.memory, Memory::Nothing);
        let now = if is_off { 0 } else { now() };
        for (volume, counters) in self.volumes.iter().enumerate() {
            paced.writes += counters.paced_writes.load(Relaxed);
            paced.bytes += counters.paced_bytes.load(Relaxed);
            let claimed = self.words(volume).filter(|words| words.is_claimed(now));
            if let Some(words) = claimed {
                paced.rate += counters.rate.load(Relaxed);
                paced.read_slowdown = paced.read_slowdown.max(words.slowdown());
            }
        }
        paced
    }
}

#[cfg(test)]
impl Pacing {
    /// Waits for a claim on a volume, and whether it outlasts a claim without renewal.
    pub(super) fn is_renewed(&self, volume: usize) -> bool {
        let is_claimed = |now| {
            self.words(volume)
                .is_some_and(|words| words.is_claimed(now))
        };
        let patience = 60_000 * MS;
        let until = |begun: Nanos, is_over: &dyn Fn(Nanos) -> bool| {
            std::iter::repeat_with(now)
                .inspect(|_| thread::yield_now())
                .take_while(|now| now - begun < patience)
                .find(|now| is_over(*now))
        };
        // A claim may be younger than the moment at which it was looked for, by less than its time.
        until(now(), &is_claimed)
            .and_then(|begun| until(begun, &|now| now > begun + 2 * CLAIM && is_claimed(now)))
            .is_some()
    }
}
