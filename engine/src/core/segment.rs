//! A segment: what is known of it, and what it is just now.
//!
//! A segment's life, and who moves it on:
//!
//! ```text
//!   Free -> Open -> Draining -> Sealing -> Sealed -> Victim -> Emptied -> Releasing -> Free
//!        |      |            |          |         |         |          |            |
//!     first   full,       all landed, sealed   reclaim   all of it  a sync covers  free
//!     page    or poisoned  and synced  header   picks it  carried    what was       header
//!                                      written            out        carried out    written
//!                                                                    and nobody     and
//!                                                                    has it pinned  synced
//! ```

use larder_format::{HEADER_BLOCKS, Serial};

/// Why a segment is being written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stream {
    /// New pages.
    Put,
    /// Pages that survived reclaim. They live longer than new ones; kept apart, whole segments die together.
    Copy,
}

pub(super) const STREAMS: usize = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum State {
    Free,
    Open(Stream),
    Draining,
    Sealing,
    Sealed,
    Victim,
    Emptied,
    Releasing,
    /// Some of its descriptors could not be read at the open, or its header not be written: it is left as it is until one can.
    Unreadable,
    /// On a volume that is gone for good.
    Lost,
}

#[derive(Clone, Debug)]
pub(crate) struct Segment {
    pub state: State,
    /// The life now on disk; zero when the segment was never written.
    pub sequence: Serial,
    /// The life before, which a power loss may bring back as long as nothing of this one is durable.
    pub former: Serial,
    /// The first commit of this life, once there is one that this run has written.
    pub first_commit: Serial,
    /// First unused data block.
    pub data_end: u32,
    /// Descriptor blocks given out.
    pub blocks: u32,
    /// Descriptor blocks promised and not yet given out.
    pub credits: u32,
    /// Blocks of indexed pages.
    pub live: u64,
    /// Pages given extents here and not yet settled.
    pub pending: u32,
    /// Descriptor block writes in flight.
    pub writing: u32,
    /// Highest commit number written here.
    pub last_commit: Serial,
    /// Highest commit number of a copy or newer version of something that lay here.
    pub carried: Serial,
    /// Something of what was carried out of it may have been lost by a failed sync.
    pub carried_to_suspect: bool,
    /// Records being carried out of it.
    pub carrying: u32,
    /// A record could not be carried out of it for lack of room.
    pub stuck: bool,
    /// Reclaim got nowhere with it for lack of room, and lets it be until there is more.
    pub shunned: bool,
    /// When it was last tried the header that gives it back could not be written, or the descriptors that say what is in it not be read.
    pub stranded: bool,
    /// Of a victim that could not all be read: the life that its free header names. It is above any that a block may carry which the
    /// device would not give.
    pub free_as: Option<Serial>,
    /// Records in it that are carried on when it is emptied, as far as this run has written them; a namespace's counts as a block full.
    pub notes: u32,
    /// Some of them have been carried here: there are no two of one key among those.
    pub is_carried_to: bool,
    /// What a failed sync may have lost of it is being written into it again.
    pub healing: bool,
    /// Its first header is being written. Another one must not be before that: the later write could land first.
    pub opening: bool,
    /// Its first header could not be written: recovery may find nothing that was written here since, unless a later one lists it.
    pub headless: bool,
    /// The header on disk says what it is: sealed, and what it holds; or free. A failed sync may have taken the header with it: then
    /// it is written again.
    pub listed: bool,
    /// The header that says so was on its way when a sync failed: it counts for nothing.
    pub doubted: bool,
    /// Sealed, and taking records nevertheless: they count when a header lists them.
    pub extended: bool,
    /// Commits up to here have their payload on the device for certain.
    pub proven: Serial,
    /// Descriptor writes that failed, and are still to be filled.
    pub holes: Vec<Hole>,
    /// Behind this commit there is a hole that could not be filled.
    pub hole: Option<Serial>,
    /// A write into it failed: nothing more is acknowledged here.
    pub poisoned: bool,
    /// Commits of pages whose descriptors were written and whose bytes were not, until a header says that they are not proven. A mark
    /// must not reach them: it would vouch for them.
    pub held: Vec<Serial>,
    /// A sync failed after writes into it: every page must be read back and rewritten.
    pub suspect: bool,
    /// Of a suspect: that has been done, or what it held is forgotten.
    pub rewritten: bool,
    /// It is free, and lent or was: it is not lent again.
    pub lent: bool,
}

/// Descriptor blocks whose write failed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Hole {
    pub first: u32,
    pub blocks: u32,
    /// The group that they were of.
    pub commit: Serial,
    /// The commit of what was written before them.
    pub behind: Serial,
}

impl Segment {
    /// Nothing needs to be copied out of it: giving it back early costs nothing. Deletions are carried on and on: a segment of
    /// them alone would be emptied into the next one without end.
    pub(crate) fn is_dead(&self) -> bool {
        self.live == 0 && self.notes == 0
    }

    pub(crate) fn free(sequence: Serial) -> Segment {
        Segment {
            state: State::Free,
            sequence,
            former: Serial::ZERO,
            first_commit: Serial::ZERO,
            data_end: HEADER_BLOCKS,
            blocks: 0,
            credits: 0,
            live: 0,
            pending: 0,
            writing: 0,
            last_commit: Serial::ZERO,
            carried: Serial::ZERO,
            carried_to_suspect: false,
            carrying: 0,
            stuck: false,
            shunned: false,
            stranded: false,
            free_as: None,
            notes: 0,
            is_carried_to: false,
            healing: false,
            opening: false,
            headless: false,
            listed: false,
            doubted: false,
            extended: false,
            proven: Serial::ZERO,
            holes: Vec::new(),
            hole: None,
            poisoned: false,
            held: Vec::new(),
            suspect: false,
            rewritten: false,
            lent: false,
        }
    }

    pub(super) fn begin(&mut self, sequence: Serial, stream: Stream) {
        *self = Segment {
            state: State::Open(stream),
            former: self.sequence,
            ..Segment::free(sequence)
        };
    }

    pub(super) fn room_for(&self, segment_blocks: u32, data: u32, descriptors: u32) -> bool {
        let used = u64::from(self.data_end) + u64::from(self.blocks) + u64::from(self.credits);
        used + u64::from(data) + u64::from(descriptors) <= u64::from(segment_blocks)
    }

    /// A hole behind this commit stays: no header may vouch for what lies behind it.
    pub(crate) fn vouch_no_further(&mut self, commit: Serial) {
        self.hole = Some(self.hole.map_or(commit, |hole| hole.min(commit)));
    }

    /// Everything written into it is on the device. What an earlier header vouched for may be beyond the last block that can be read:
    /// that is lost, and stays so.
    pub(crate) fn prove(&mut self) {
        let through = self.last_commit.min(self.hole.unwrap_or(self.last_commit));
        self.proven = self.proven.max(through);
    }

    /// It is still in this life, takes no more, and nothing is under way in it.
    pub(crate) fn is_draining(&self, life: Serial) -> bool {
        self.state == State::Draining && self.sequence == life && self.is_quiet()
    }

    /// Something was written into it that is not known to be durable.
    pub(crate) fn is_beyond(&self, synced: Serial) -> bool {
        self.last_commit > synced.max(self.proven)
    }

    /// It may become a victim.
    pub(crate) fn is_candidate(&self) -> bool {
        self.state == State::Sealed && !self.shunned
    }

    /// Nothing on the device says which of its pages are not there, since its header could not be written: the mark stands still for it,
    /// and its other pages are better off elsewhere. Or its descriptors could not be read when it was last tried, and it holds no page:
    /// when they can be, the store has a segment more.
    pub(crate) fn is_overdue(&self) -> bool {
        !self.held.is_empty() || self.stranded && self.live == 0
    }

    /// What a failed sync may have lost of it may be nowhere else.
    pub(crate) fn is_unsure(&self) -> bool {
        self.suspect && (!self.rewritten || self.carrying > 0 || self.stuck)
    }

    /// Nothing is under way here any more.
    pub(crate) fn is_quiet(&self) -> bool {
        self.pending == 0 && self.writing == 0 && self.credits == 0 && !self.opening
    }
}
