//! One segment: its state, and the facts that are known of it.
//!
//! | state | event | next state |
//! |---|---|---|
//! | Free | a page or record finds no room in the open segment | Open |
//! | Open | full, or a write failed, or reclaim wants it | Draining |
//! | Draining | all writes ended and are durable | Sealing |
//! | Draining | a sync failed, or nothing needs a header | Sealed |
//! | Sealing | the sealed header is written, or refused | Sealed |
//! | Sealed | records find no room elsewhere | Draining |
//! | Sealed, Unreadable | reclaim picks it | Victim |
//! | Victim | pages or records are left in it | Sealed, Unreadable |
//! | Victim | everything is out of it | Emptied |
//! | Emptied | a forwarded record found no room after all | Sealed, Unreadable |
//! | Emptied | all that left it is durable, and no reader has it pinned | Releasing |
//! | Releasing | its free header is durable | Free |
//! | Open | a tool that makes copies alone changes its stream | Open |
//!
//! A segment on a volume that is gone is Lost, for good.

use larder_format::{HEADER_BLOCKS, Serial};

/// Why a segment is being written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::core) enum Stream {
    /// New pages.
    Put,
    /// Pages that survived reclaim. They live longer than new ones. Kept apart, whole segments die
    /// together.
    Copy,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::core) enum State {
    Free,
    Open(Stream),
    Draining,
    Sealing,
    Sealed,
    Victim,
    Emptied,
    Releasing,
    /// Some of its descriptors could not be read at the open, or its header could not be written.
    Unreadable,
    /// Its volume is gone for good.
    Lost,
}

impl State {
    /// The table above.
    fn may_become(self, next: State) -> bool {
        use State::{
            Draining, Emptied, Free, Open, Releasing, Sealed, Sealing, Unreadable, Victim,
        };
        matches!(
            (self, next),
            (Free | Open(_), Open(_))
                | (Open(_), Draining)
                | (Draining, Sealing | Sealed)
                | (Sealing, Sealed)
                | (Sealed, Draining | Victim)
                | (Unreadable, Victim)
                | (Victim, Sealed | Unreadable | Emptied)
                | (Emptied, Sealed | Unreadable | Releasing)
                | (Releasing, Free)
        )
    }
}

/// The first header of a generation. Recovery finds the segment by it, or by its first block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::core) enum FirstHeader {
    /// No other header may be written before it: the later write could land first.
    InFlight,
    Written,
    /// Recovery may find nothing that was written here since, unless a later header lists it.
    Failed,
}

/// Whether a failed sync may have lost something of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::core) enum Trust {
    Whole,
    /// Every page must be read back and written again.
    Suspect,
    /// A suspect whose pages have been written again, or are forgotten.
    Rewritten,
}

/// Records that a sealed segment takes. They count when a header lists them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::core) enum Extension {
    None,
    /// Records that found no room elsewhere.
    Records,
    /// Its own records that a failed sync may have lost.
    Rewrite,
}

#[derive(Clone, Debug)]
pub(in crate::core) struct Segment {
    state: State,
    /// The generation on disk; zero when the segment was never written.
    pub generation: Serial,
    /// The generation before. A power loss may bring it back as long as nothing of this one is
    /// durable.
    pub previous: Serial,
    /// The first commit of this generation that this run has written.
    pub first_commit: Serial,
    /// First unused data block.
    pub data_end: u32,
    /// Descriptor blocks used.
    pub blocks: u32,
    /// Descriptor blocks reserved and not yet used.
    pub reserved: u32,
    /// Blocks of indexed pages.
    pub live: u64,
    /// Pages with extents here that have no status yet.
    pub pending: u32,
    /// Descriptor block writes in flight.
    pub writing: u32,
    /// Highest commit number written here.
    pub last_commit: Serial,
    /// Highest commit number of a copy or newer version of something that lay here. Zero in an
    /// emptied segment that only readers hold.
    pub forwarded: Serial,
    /// A failed sync may have lost something of that.
    pub forwarded_to_suspect: bool,
    /// Records being forwarded out of it.
    pub forwarding: u32,
    /// A record could not be forwarded out of it for lack of room.
    pub stuck: bool,
    /// Reclaim could not empty it, and leaves it alone until there is more room.
    pub quarantined: bool,
    /// When last tried, its free header could not be written, or its descriptors not be read. It
    /// does not count as capacity.
    pub unusable: bool,
    /// Generation that the free header of a segment that was not read completely names. Greater
    /// than any generation that an unread block may hold.
    pub free_as: Option<Serial>,
    /// Records in it that have to be forwarded, as far as this run has written them. A namespace
    /// counts as a block full.
    pub records: u32,
    /// Some of its records have been forwarded here: no two of those are of one key.
    pub has_forwards: bool,
    pub first_header: FirstHeader,
    /// The header on disk states its state and content.
    pub header_is_current: bool,
    /// A sync failed while its sealed header was being written: the header counts for nothing.
    pub header_in_doubt: bool,
    pub extension: Extension,
    /// Payload of commits up to here is on the device for certain.
    pub proven: Serial,
    /// Failed descriptor writes that are still to be filled.
    pub holes: Vec<Hole>,
    /// A hole that could not be filled lies behind this commit.
    pub trust_end: Option<Serial>,
    /// A write into it failed: nothing more is acknowledged here.
    pub poisoned: bool,
    /// Commits of pages whose descriptors were written and whose bytes were not. The durable
    /// watermark stays below them until a header excludes them.
    pub held: Vec<Serial>,
    pub trust: Trust,
    /// It is free, and is lent or was: it is not lent again.
    pub lent: bool,
}

/// Descriptor blocks whose write failed.
#[derive(Clone, Copy, Debug)]
pub(in crate::core) struct Hole {
    pub first: u32,
    pub blocks: u32,
    /// The commit of these blocks.
    pub commit: Serial,
    /// The commit of the blocks before them.
    pub behind: Serial,
}

impl Segment {
    pub(in crate::core) fn free(generation: Serial) -> Segment {
        Segment {
            state: State::Free,
            generation,
            previous: Serial::ZERO,
            first_commit: Serial::ZERO,
            data_end: HEADER_BLOCKS,
            blocks: 0,
            reserved: 0,
            live: 0,
            pending: 0,
            writing: 0,
            last_commit: Serial::ZERO,
            forwarded: Serial::ZERO,
            forwarded_to_suspect: false,
            forwarding: 0,
            stuck: false,
            quarantined: false,
            unusable: false,
            free_as: None,
            records: 0,
            has_forwards: false,
            first_header: FirstHeader::Written,
            header_is_current: false,
            header_in_doubt: false,
            extension: Extension::None,
            proven: Serial::ZERO,
            holes: Vec::new(),
            trust_end: None,
            poisoned: false,
            held: Vec::new(),
            trust: Trust::Whole,
            lent: false,
        }
    }

    /// A segment as recovery found it.
    pub(in crate::core) fn recovered(state: State, generation: Serial) -> Segment {
        Segment {
            state,
            ..Segment::free(generation)
        }
    }

    pub(in crate::core) fn state(&self) -> State {
        self.state
    }

    /// # Panics
    /// For a transition that is not in the table.
    pub(in crate::core) fn move_to(&mut self, next: State) {
        let before = self.state;
        assert!(before.may_become(next), "{before:?} becomes {next:?}");
        self.state = next;
    }

    /// Begins a generation.
    pub(super) fn begin(&mut self, generation: Serial, stream: Stream) {
        self.move_to(State::Open(stream));
        *self = Segment {
            previous: self.generation,
            first_header: FirstHeader::InFlight,
            ..Segment::recovered(self.state, generation)
        };
    }

    /// Its free header is durable. The generation stays on disk until the next one begins.
    pub(super) fn end(&mut self) {
        self.move_to(State::Free);
        *self = Segment {
            header_is_current: self.header_is_current,
            ..Segment::free(self.free_as.unwrap_or(self.generation))
        };
    }

    /// Nothing has to be copied out of it. Tombstones are forwarded without end: a segment of them
    /// alone would be emptied into the next one again and again.
    pub(in crate::core) fn is_dead(&self) -> bool {
        self.live == 0 && self.records == 0
    }

    pub(in crate::core) fn is_open(&self) -> bool {
        matches!(self.state, State::Open(_))
    }

    pub(in crate::core) fn has_room(&self, segment_blocks: u32, data: u32, blocks: u32) -> bool {
        let used = u64::from(self.data_end) + u64::from(self.blocks) + u64::from(self.reserved);
        used + u64::from(data) + u64::from(blocks) <= u64::from(segment_blocks)
    }

    /// The hole behind this commit stays: no header may prove what lies behind it.
    pub(in crate::core) fn end_trust(&mut self, commit: Serial) {
        self.trust_end = Some(self.trust_end.map_or(commit, |end| end.min(commit)));
    }

    /// Everything written into it is on the device. An earlier header may have proven more than the
    /// last block that can be read: that is lost, and stays so.
    pub(in crate::core) fn prove(&mut self) {
        let end = self.trust_end.unwrap_or(self.last_commit);
        self.proven = self.proven.max(self.last_commit.min(end));
    }

    /// It is still in this generation, takes no more, and nothing is under way in it.
    pub(in crate::core) fn is_draining(&self, generation: Serial) -> bool {
        self.state == State::Draining && self.generation == generation && self.is_quiet()
    }

    /// It holds writes above this watermark that are not proven.
    pub(in crate::core) fn is_beyond(&self, mark: Serial) -> bool {
        self.last_commit > mark.max(self.proven)
    }

    pub(in crate::core) fn is_suspect(&self) -> bool {
        self.trust != Trust::Whole
    }

    pub(in crate::core) fn is_extended(&self) -> bool {
        self.extension != Extension::None
    }

    /// It may become a victim.
    pub(in crate::core) fn is_candidate(&self) -> bool {
        self.state == State::Sealed && !self.quarantined
    }

    /// It must be emptied however many segments are free: (a) its header could not be written, so
    /// the durable watermark stays below it; or (b) its descriptors were unreadable when last tried
    /// and it holds no page, so the store gains a segment as soon as they can be read.
    pub(in crate::core) fn must_be_emptied(&self) -> bool {
        !self.held.is_empty() || self.unusable && self.live == 0
    }

    /// A failed sync may have lost something that lies nowhere else.
    pub(in crate::core) fn is_unsure(&self) -> bool {
        match self.trust {
            Trust::Whole => false,
            Trust::Suspect => true,
            Trust::Rewritten => self.forwarding > 0 || self.stuck,
        }
    }

    /// Only readers, or writers that were stopped, keep it from being released.
    pub(in crate::core) fn is_held_by_pins(&self) -> bool {
        let is_forwarded = self.forwarding == 0 && self.forwarded == Serial::ZERO;
        self.state == State::Emptied && is_forwarded
    }

    /// Nothing is under way here.
    pub(in crate::core) fn is_quiet(&self) -> bool {
        let is_opening = self.first_header == FirstHeader::InFlight;
        self.pending == 0 && self.writing == 0 && self.reserved == 0 && !is_opening
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATES: [State; 11] = [
        State::Free,
        State::Open(Stream::Put),
        State::Open(Stream::Copy),
        State::Draining,
        State::Sealing,
        State::Sealed,
        State::Victim,
        State::Emptied,
        State::Releasing,
        State::Unreadable,
        State::Lost,
    ];

    #[test]
    fn only_the_transitions_of_the_table_are_possible() {
        use State::{
            Draining, Emptied, Free, Open, Releasing, Sealed, Sealing, Unreadable, Victim,
        };
        let (put, copy) = (Open(Stream::Put), Open(Stream::Copy));
        let table: [(State, &[State]); 11] = [
            (Free, &[put, copy]),
            (put, &[put, copy, Draining]),
            (copy, &[put, copy, Draining]),
            (Draining, &[Sealing, Sealed]),
            (Sealing, &[Sealed]),
            (Sealed, &[Draining, Victim]),
            (Victim, &[Sealed, Emptied, Unreadable]),
            (Emptied, &[Sealed, Releasing, Unreadable]),
            (Releasing, &[Free]),
            (Unreadable, &[Victim]),
            (State::Lost, &[]),
        ];
        for (before, allowed) in table {
            for next in STATES {
                let is_allowed = allowed.contains(&next);
                assert_eq!(before.may_become(next), is_allowed, "{before:?} {next:?}");
            }
        }
    }
}
