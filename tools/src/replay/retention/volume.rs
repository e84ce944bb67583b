//! A core over a volume in memory that keeps descriptor blocks and headers, and drops the rest.
//!
//! Every write succeeds at once, and a page is as its key says. So a put, a sync or a step of
//! reclaim ends before the next call.

use std::collections::HashMap;
use std::sync::Arc;

use larder_core::capacity::{footprint, usable_blocks};
use larder_core::core::{
    Config, Copied, Core, Descriptors, Effect, InitState, Io, PageCopy, Recovered, SegmentInit,
    Victim,
};
use larder_core::counters::Counted;
use larder_core::grants::{Ask, Grant, ReservationId};
use larder_core::index::{Index, Lease, NamespaceSlot, ReadAs, SEGMENT_BLOCKS_MAX};
use larder_core::policy::order::EvictionOrder;
use larder_engine::{Hint, PutStatus, Refusal, SyncPolicy};
use larder_format::{BLOCK_BYTES, PageKey, Run, Serial, StoreId};
use larder_store::recovery::scan::{Bodies, Spot};

use crate::bench;
use crate::failure::Failure;
use crate::replay::requests::Requests;
use crate::size::ByteSize;
use crate::trace::BLOCK_TOKENS;
use crate::workload;

/// Bytes of a page, and of a segment whose number is not given, and their blocks.
const PAGE_BYTES: u64 = 2 << 20;
const SEGMENT_BYTES: u64 = 16 << 20;
pub(super) const PAGE_BLOCKS: u32 = (PAGE_BYTES / BLOCK_BYTES as u64) as u32;
const SEGMENT_BLOCKS: u32 = (SEGMENT_BYTES / BLOCK_BYTES as u64) as u32;

/// Percent of its room that a store fills at most: see `capacity::usable_blocks`.
pub(super) const FILL: f64 = 87.5;

/// Pages that a step of reclaim looks at.
const STEP_PAGES: usize = 4096;

/// Tries of a put that finds no room, with the retries of reclaim in between.
const TRIES: usize = 8;

type Block = [u8; BLOCK_BYTES];

/// The size of a store.
#[derive(Clone, Copy, Debug)]
pub(super) struct Geometry {
    pub segments: u32,
    segment_blocks: u32,
    /// Most blocks of pages that it keeps, and most pages.
    blocks: u64,
    pub pages: usize,
}

impl Geometry {
    /// The smallest store that keeps this part of the blocks of a trace, and fills at most so many
    /// percent of its room with them: of segments of 16 MiB, or of so many segments.
    pub(super) fn keeping(
        percent: f64,
        fill: f64,
        segments: Option<u32>,
        requests: &Requests,
    ) -> Result<Geometry, Failure> {
        let wanted = (percent / 100.0 * requests.distinct() as f64) as u64;
        let filled = |segments: u32| (f64::from(segments) * FILL / fill).ceil() as u32;
        let of_size = |size: u32| {
            let (segments, segment_blocks) = match segments {
                Some(segments) => (segments, size),
                None => (size, SEGMENT_BLOCKS),
            };
            let blocks = usable_blocks(u64::from(segments), 1, segment_blocks);
            let kept = blocks.checked_div(footprint(segment_blocks, PAGE_BLOCKS));
            Geometry {
                segments: filled(segments),
                segment_blocks,
                blocks,
                pages: kept.unwrap_or(0) as usize,
            }
        };
        let most = segments.map_or(u32::MAX >> 8, |_| SEGMENT_BLOCKS_MAX);
        let mut range = (1, most);
        while range.0 < range.1 {
            let middle = range.0 + (range.1 - range.0) / 2;
            range = if of_size(middle).pages as u64 >= wanted {
                (range.0, middle)
            } else {
                (middle + 1, range.1)
            };
        }
        let found = of_size(range.0);
        if wanted == 0 || (found.pages as u64) < wanted {
            return Err(Failure::usage(format!(
                "no store keeps {percent} % of the trace's {} blocks in such segments with pages \
                 of {}; give another --percent",
                requests.distinct(),
                ByteSize(PAGE_BYTES)
            )));
        }
        Ok(found)
    }
}

/// The result of one run.
#[derive(Clone, Debug, Default)]
pub(super) struct Played {
    pub hits: u64,
    /// By request.
    pub hits_of: Vec<usize>,
    /// Bytes written up to the end of each request.
    pub written_of: Vec<u64>,
    pub put: u64,
    pub refused: u64,
    pub written_bytes: u64,
    pub put_bytes: u64,
    pub copied_bytes: u64,
    pub evicted: u64,
    pub policy_bytes: u64,
    /// What the policy has learned.
    pub lessons: Vec<u8>,
    pub seconds: f64,
}

/// See the module.
pub(super) struct Volume {
    core: Core,
    index: Arc<Index>,
    namespace: NamespaceSlot,
    segment_blocks: u32,
    /// By byte offset.
    blocks: HashMap<u64, Box<Block>>,
    settled: HashMap<ReservationId, Vec<PutStatus>>,
    wants_reclaim: bool,
    now_ms: u64,
    refused: u64,
    unstored: Option<PutStatus>,
}

impl Volume {
    pub(super) fn new(
        geometry: &Geometry,
        policy: Option<Box<dyn EvictionOrder>>,
        bytes_a_day: Option<u64>,
    ) -> Result<Volume, Failure> {
        let blocks = u64::from(geometry.segments) * u64::from(geometry.segment_blocks);
        let index = Arc::new(Index::new(geometry.segments as usize, blocks));
        if let Some(policy) = policy {
            index.choose(policy);
        }
        let free = SegmentInit {
            state: InitState::Free,
            sequence: Serial::ZERO,
            data_end: 0,
            blocks: 0,
            last_commit: Serial::ZERO,
            proven: Serial::ZERO,
            born_ms: 0,
        };
        let recovered = Recovered {
            volumes: vec![geometry.segments],
            segments: vec![free; geometry.segments as usize],
            namespaces: Vec::new(),
            first: Serial::first_of(Run::FIRST),
            clean: true,
            lost_pages: 0,
            is_partial: false,
        };
        let config = Config {
            store: STORE,
            segment_blocks: geometry.segment_blocks,
            sync: SyncPolicy::Relaxed,
            write_bytes_max: u64::MAX,
            copy_blocks_max: u64::MAX,
            read_only: false,
            began_ms: 0,
        };
        let mut volume = Volume {
            core: Core::new(config, recovered, index.clone()),
            index,
            namespace: NamespaceSlot(0),
            segment_blocks: geometry.segment_blocks,
            blocks: HashMap::new(),
            settled: HashMap::new(),
            wants_reclaim: false,
            now_ms: 0,
            refused: 0,
            unstored: None,
        };
        volume.with_core(|core| core.keep_at_most(geometry.blocks));
        volume.with_core(Core::start);
        if let Some(bytes) = bytes_a_day {
            volume.with_core(|core| core.limit_writes(bytes));
        }
        let shape = workload::shape(ByteSize(PAGE_BYTES), 1)?;
        let namespace = workload::namespace("replay", BLOCK_TOKENS, shape)?;
        let opened = volume.with_core(|core| core.open_namespace(&namespace));
        let id = opened.ok_or_else(|| Failure::environment("the namespace is refused".to_owned()));
        volume.namespace = id?.into();
        Ok(volume)
    }

    /// Moves the time on.
    pub(super) fn tick(&mut self, now_ms: u64) {
        while let Some(due) = self.core.wakes_at()
            && due < now_ms
        {
            self.now_ms = self.now_ms.max(due);
            let due = self.now_ms;
            self.with_core(|core| core.tick(due));
            if self.core.wakes_at() == Some(due) {
                break;
            }
        }
        self.now_ms = self.now_ms.max(now_ms);
        let now_ms = self.now_ms;
        self.with_core(|core| core.tick(now_ms));
    }

    /// Bytes written up to now.
    pub(super) fn written(&self) -> u64 {
        self.core.counters().store.written.total()
    }

    /// The length of the stored prefix. Changes nothing.
    pub(super) fn stored(&self, keys: &[PageKey]) -> usize {
        let stored = self.index.peek(self.namespace, keys);
        stored.iter().take_while(|is_stored| **is_stored).count()
    }

    /// A lookup without leases: the trace has no time between it and its read.
    pub(super) fn look_up(&self, keys: &[PageKey]) {
        let lease = Lease {
            now_ms: self.now_ms,
            duration_ms: 0,
            blocks_per_page: PAGE_BLOCKS,
        };
        self.index
            .longest_prefix(self.namespace, keys, lease, &mut Vec::new());
    }

    /// Pages were used above.
    pub(super) fn touch(&mut self, keys: &[PageKey]) {
        let namespace = self.namespace;
        let now_ms = self.now_ms;
        self.index
            .touch_as(namespace, keys, Hint::default(), now_ms);
    }

    /// Reads pages.
    pub(super) fn read(&mut self, keys: &[PageKey]) {
        for located in self
            .index
            .pin(self.namespace, keys, ReadAs::Use)
            .into_iter()
            .flatten()
        {
            let segment = located.place.segment;
            if self.index.unpin(segment) {
                self.with_core(|core| core.unpinned(segment));
            }
        }
    }

    /// Puts the pages of a chain from `first` on, as a patient caller does.
    pub(super) fn put(&mut self, keys: &[PageKey], first: usize, hint: Hint) {
        let parent = first.checked_sub(1).map(|parent| keys[parent]);
        self.put_after(parent, first, &keys[first..], hint);
    }

    /// Puts the pages of a chain behind `depth` others, the last of them `parent`. Returns how many
    /// the store then has, from the first one on.
    pub(super) fn put_after(
        &mut self,
        parent: Option<PageKey>,
        depth: usize,
        keys: &[PageKey],
        hint: Hint,
    ) -> usize {
        let mut first = 0;
        let mut tries = 0;
        while first < keys.len() && tries < TRIES {
            let asks: Vec<Ask> = (first..keys.len())
                .map(|at| Ask {
                    key: keys[at],
                    parent: at
                        .checked_sub(1)
                        .map_or(parent, |parent| Some(keys[parent])),
                    depth: (depth + at) as u32,
                    saved: 0,
                })
                .collect();
            let statuses = self.put_once(&asks, hint);
            let stored = statuses
                .iter()
                .take_while(|status| status.is_present())
                .count();
            first += stored;
            tries = if stored == 0 { tries + 1 } else { 0 };
            let Some(status) = statuses.get(stored) else {
                continue;
            };
            self.unstored = Some(*status);
            if *status != PutStatus::Refused(Refusal::NoSpace) {
                break;
            }
            if stored == 0
                && let Some(due) = self.core.wakes_at()
            {
                self.tick(due);
            }
        }
        self.refused += (keys.len() - first) as u64;
        first
    }

    fn put_once(&mut self, asks: &[Ask], hint: Hint) -> Vec<PutStatus> {
        let namespace = self.namespace;
        let (id, grants) = self.with_core(|core| core.reserve(namespace, asks, hint));
        let is_granted = |grant: &Grant| matches!(grant, Grant::Write(_));
        let checksums: Vec<_> = grants
            .iter()
            .map(|g| is_granted(g).then_some(0.into()))
            .collect();
        let landed: Vec<_> = (0..grants.len())
            .filter(|at| is_granted(&grants[*at]))
            .map(|at| (at, true))
            .collect();
        self.with_core(|core| core.landed(id, &landed));
        self.with_core(|core| core.commit(id, &checksums));
        self.settled.remove(&id).unwrap_or_default()
    }

    /// Calls the core, and carries out all its effects.
    fn with_core<R>(&mut self, call: impl FnOnce(&mut Core) -> R) -> R {
        let result = call(&mut self.core);
        loop {
            let effects = self.core.take_effects();
            if effects.is_empty() && !std::mem::take(&mut self.wants_reclaim) {
                return result;
            }
            for effect in effects {
                self.carry_out(effect);
            }
            while self.core.reclaim_step(STEP_PAGES) {}
        }
    }

    fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::Io { id, io, .. } => {
                if let Io::Write { offset, bytes } = io {
                    for (at, bytes) in bytes.chunks_exact(BLOCK_BYTES).enumerate() {
                        let mut block = Box::new([0; BLOCK_BYTES]);
                        block.copy_from_slice(bytes);
                        self.blocks
                            .insert(offset + (at * BLOCK_BYTES) as u64, block);
                    }
                }
                self.core.io_done(id, Ok(()));
            }
            Effect::Settled(id, statuses) => {
                self.settled.insert(id, statuses);
            }
            Effect::ReadDescriptors(victim) => {
                let read = self.descriptors(&victim);
                self.core.descriptors_read(read);
            }
            Effect::Copy(id, pages) => {
                let copied: Vec<Copied> = pages.iter().map(PageCopy::written).collect();
                self.core.copied(id, &copied);
            }
            Effect::Reclaim => self.wants_reclaim = true,
            Effect::Room
            | Effect::Finished(..)
            | Effect::ReadOnly(..)
            | Effect::ReadWrite(_)
            | Effect::Damaged(_) => {}
        }
    }

    fn descriptors(&self, victim: &Victim) -> Descriptors {
        let spot = Spot {
            store: STORE,
            volume: 0,
            number: victim.number,
            segment_blocks: self.segment_blocks,
            bodies: Bodies::Clear,
        };
        let blocks = (0..victim.blocks).filter_map(|index| {
            let block = self.blocks.get(&spot.block_offset(index))?;
            spot.parse_block(index, &**block).ok()
        });
        Descriptors {
            blocks: blocks
                .filter(|block| block.header.sequence == victim.sequence)
                .collect(),
            some_unreadable: false,
        }
    }

    /// Adds its counters.
    pub(super) fn sum_up(&self, played: &mut Played) -> Result<(), Failure> {
        let counters = self.core.counters();
        if let (Some(status), true) = (self.unstored, counters.pages_put == 0) {
            return Err(Failure::usage(bench::reason(status)));
        }
        self.core.check_invariants().map_err(Failure::environment)?;
        played.put = counters.pages_put;
        played.evicted = counters.store.evicted;
        played.refused = self.refused;
        let written = &counters.store.written;
        played.put_bytes = written.pages_bytes;
        played.copied_bytes = written.copies_bytes;
        played.written_bytes = written.total();
        played.policy_bytes = self.index.policy_ram_bytes() as u64;
        (played.lessons, _) = self.index.lessons(0);
        Ok(())
    }
}

const STORE: StoreId = StoreId::from_bytes([0x4c; 16]);
