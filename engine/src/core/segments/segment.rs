//! One segment: its state, with the facts that hold in it.
//!
//! | state | event | next state |
//! |---|---|---|
//! | Free | a page or record finds no room in the open segment | Open |
//! | Open | full, or a write or a sync failed, or reclaim wants it | Draining |
//! | Draining | all writes ended and are durable | Sealing |
//! | Draining | a header must exclude pages, or list blocks | Sealing |
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

use std::ops::{Deref, DerefMut};

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

/// The name of a segment's state.
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

/// A segment on disk.
#[derive(Clone, Debug)]
pub(in crate::core) struct Segment {
    /// The generation on disk; zero when the segment was never written.
    pub generation: Serial,
    /// The header on disk states the segment's state and content.
    pub header_is_current: bool,
    body: Body,
}

#[derive(Clone, Debug)]
enum Body {
    /// It may be lent to a holder that writes its blocks for the first time, once.
    Free {
        was_lent: bool,
    },
    Lost,
    Written(Box<Content>, Phase),
}

/// The state of a segment with content, and the facts that hold in this state alone.
#[derive(Clone, Copy, Debug)]
enum Phase {
    Open(Stream),
    Draining(Extension),
    Sealing {
        extension: Extension,
        /// A sync failed while the header was being written: the header counts for nothing.
        in_doubt: bool,
    },
    /// In quarantine, reclaim could not empty it, and leaves it alone until there is more room.
    Sealed {
        in_quarantine: bool,
    },
    Unreadable {
        in_quarantine: bool,
    },
    Victim(FreeAs),
    Emptied(FreeAs),
    Releasing(FreeAs),
}

/// Generation that the free header of a segment that was not read completely names. Greater than
/// any generation that an unread block may hold. `None` for a segment that was read.
type FreeAs = Option<Serial>;

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

/// The content of a written segment.
#[derive(Clone, Debug)]
pub(in crate::core) struct Content {
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
    /// When last tried, its free header could not be written, or its descriptors not be read. It
    /// does not count as capacity.
    pub unusable: bool,
    /// When reads of it by reclaim failed, the first and the last time in a row.
    pub unread_ms: Option<(u64, u64)>,
    /// Records in it that have to be forwarded, as far as this run has written them. A namespace
    /// counts as a block full.
    pub records: u32,
    /// Some of its records have been forwarded here: no two of those are of one key.
    pub has_forwards: bool,
    pub first_header: FirstHeader,
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
}

impl Content {
    const NONE: &Content = &Content::begun(Serial::ZERO, FirstHeader::Written);

    const fn begun(previous: Serial, first_header: FirstHeader) -> Content {
        Content {
            previous,
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
            unusable: false,
            unread_ms: None,
            records: 0,
            has_forwards: false,
            first_header,
            proven: Serial::ZERO,
            holes: Vec::new(),
            trust_end: None,
            poisoned: false,
            held: Vec::new(),
            trust: Trust::Whole,
        }
    }
}

/// The content; that of a free or lost segment is empty.
impl Deref for Segment {
    type Target = Content;

    fn deref(&self) -> &Content {
        match &self.body {
            Body::Written(content, _) => content,
            Body::Free { .. } | Body::Lost => Content::NONE,
        }
    }
}

impl DerefMut for Segment {
    /// # Panics
    /// For a free or lost segment.
    fn deref_mut(&mut self) -> &mut Content {
        match &mut self.body {
            Body::Written(content, _) => content,
            Body::Free { .. } | Body::Lost => panic!("a segment without content is changed"),
        }
    }
}

impl Segment {
    pub(in crate::core) fn free(generation: Serial) -> Segment {
        Segment {
            generation,
            header_is_current: false,
            body: Body::Free { was_lent: false },
        }
    }

    /// A segment as recovery found it: free, open, sealed, unreadable or lost.
    pub(in crate::core) fn recovered(state: State, generation: Serial) -> Segment {
        let phase = match state {
            State::Free => return Segment::free(generation),
            State::Open(stream) => Some(Phase::Open(stream)),
            State::Lost => None,
            State::Unreadable => Some(Phase::Unreadable {
                in_quarantine: false,
            }),
            _ => Some(Phase::Sealed {
                in_quarantine: false,
            }),
        };
        let written = |phase| Body::Written(Box::new(Content::NONE.clone()), phase);
        Segment {
            generation,
            header_is_current: false,
            body: phase.map_or(Body::Lost, written),
        }
    }

    pub(in crate::core) fn state(&self) -> State {
        match &self.body {
            Body::Free { .. } => State::Free,
            Body::Lost => State::Lost,
            Body::Written(_, phase) => match phase {
                Phase::Open(stream) => State::Open(*stream),
                Phase::Draining(_) => State::Draining,
                Phase::Sealing { .. } => State::Sealing,
                Phase::Sealed { .. } => State::Sealed,
                Phase::Unreadable { .. } => State::Unreadable,
                Phase::Victim(_) => State::Victim,
                Phase::Emptied(_) => State::Emptied,
                Phase::Releasing(_) => State::Releasing,
            },
        }
    }

    // ---- transitions

    /// # Panics
    /// For a transition that is not in the table.
    fn move_to(&mut self, next: Phase) {
        let before = self.state();
        if let Body::Written(_, phase) = &mut self.body {
            *phase = next;
        }
        let after = self.state();
        assert!(before.may_become(after), "{before:?} becomes {after:?}");
    }

    /// Begins a generation.
    pub(super) fn begin(&mut self, generation: Serial, stream: Stream) {
        let before = self.state();
        assert!(before == State::Free, "{before:?} begins a generation");
        let content = Content::begun(self.generation, FirstHeader::InFlight);
        self.body = Body::Written(Box::new(content), Phase::Open(stream));
        self.generation = generation;
        self.header_is_current = false;
    }

    /// Takes the pages of another stream.
    pub(super) fn change_stream(&mut self, stream: Stream) {
        self.move_to(Phase::Open(stream));
    }

    /// Takes nothing more.
    pub(super) fn close(&mut self) {
        self.move_to(Phase::Draining(Extension::None));
    }

    /// Takes records, sealed as it is.
    pub(super) fn extend(&mut self, with: Extension) {
        if self.extension() == Extension::None {
            self.move_to(Phase::Draining(with));
        }
    }

    /// Its sealed header is about to be written.
    pub(in crate::core) fn begin_sealing(&mut self) {
        let extension = self.extension();
        self.move_to(Phase::Sealing {
            extension,
            in_doubt: false,
        });
    }

    /// Its sealed header has been written or refused, or it needs none.
    pub(in crate::core) fn seal(&mut self) {
        self.move_to(Phase::Sealed {
            in_quarantine: false,
        });
    }

    /// Reclaim empties it.
    pub(in crate::core) fn become_victim(&mut self, free_as: FreeAs) {
        self.move_to(Phase::Victim(free_as));
    }

    /// Everything is out of it.
    pub(super) fn empty(&mut self) {
        self.move_to(Phase::Emptied(self.free_as()));
        if self.is_suspect() {
            self.trust = Trust::Rewritten;
        }
    }

    /// Something is left in it.
    pub(super) fn put_back(&mut self) {
        let in_quarantine = true;
        self.move_to(match self.free_as() {
            Some(_) => Phase::Unreadable { in_quarantine },
            None => Phase::Sealed { in_quarantine },
        });
    }

    /// Its free header is about to be written.
    pub(in crate::core) fn begin_releasing(&mut self) {
        self.move_to(Phase::Releasing(self.free_as()));
    }

    /// Its free header is durable. The generation stays on disk until the next one begins.
    pub(super) fn end(&mut self) {
        let before = self.state();
        assert!(before.may_become(State::Free), "{before:?} becomes free");
        self.generation = self.free_as().unwrap_or(self.generation);
        self.body = Body::Free { was_lent: false };
    }

    // ---- facts of one state

    /// Whether a free segment can still be lent; if so, it is.
    pub(super) fn lend(&mut self) -> bool {
        match &mut self.body {
            Body::Free { was_lent } => !std::mem::replace(was_lent, true),
            Body::Lost | Body::Written(..) => false,
        }
    }

    pub(super) fn was_lent(&self) -> bool {
        matches!(self.body, Body::Free { was_lent: true })
    }

    fn phase(&self) -> Option<&Phase> {
        match &self.body {
            Body::Written(_, phase) => Some(phase),
            Body::Free { .. } | Body::Lost => None,
        }
    }

    fn phase_mut(&mut self) -> Option<&mut Phase> {
        match &mut self.body {
            Body::Written(_, phase) => Some(phase),
            Body::Free { .. } | Body::Lost => None,
        }
    }

    pub(in crate::core) fn extension(&self) -> Extension {
        match self.phase() {
            Some(Phase::Draining(extension) | Phase::Sealing { extension, .. }) => *extension,
            _ => Extension::None,
        }
    }

    /// After a failed sync: the records that it takes may be lost with its others, and a header
    /// that is being written counts for nothing.
    pub(in crate::core) fn doubt(&mut self) {
        match self.phase_mut() {
            Some(Phase::Sealing {
                extension,
                in_doubt,
            }) => {
                *in_doubt = true;
                extension.end_rewrite();
            }
            Some(Phase::Draining(extension)) => extension.end_rewrite(),
            _ => {}
        }
    }

    /// Whether the header that is being written counts.
    pub(in crate::core) fn is_header_in_doubt(&self) -> bool {
        matches!(self.phase(), Some(Phase::Sealing { in_doubt: true, .. }))
    }

    pub(in crate::core) fn free_as(&self) -> FreeAs {
        match self.phase() {
            Some(Phase::Victim(it) | Phase::Emptied(it) | Phase::Releasing(it)) => *it,
            _ => None,
        }
    }

    pub(super) fn in_quarantine(&self) -> bool {
        matches!(
            self.phase(),
            Some(
                Phase::Sealed {
                    in_quarantine: true
                } | Phase::Unreadable {
                    in_quarantine: true
                }
            )
        )
    }

    pub(super) fn end_quarantine(&mut self) {
        if let Some(Phase::Sealed { in_quarantine } | Phase::Unreadable { in_quarantine }) =
            self.phase_mut()
        {
            *in_quarantine = false;
        }
    }

    // ---- content

    /// Nothing has to be copied out of it. Tombstones are forwarded without end: a segment of them
    /// alone would be emptied into the next one again and again.
    pub(in crate::core) fn is_dead(&self) -> bool {
        self.live == 0 && self.records == 0
    }

    pub(in crate::core) fn is_open(&self) -> bool {
        matches!(self.state(), State::Open(_))
    }

    pub(in crate::core) fn has_room(&self, segment_blocks: u32, data: u32, blocks: u32) -> bool {
        let used = u64::from(self.data_end) + u64::from(self.blocks) + u64::from(self.reserved);
        used + u64::from(data) + u64::from(blocks) <= u64::from(segment_blocks)
    }

    /// The hole behind this commit stays: no header may prove blocks behind it.
    pub(in crate::core) fn end_trust(&mut self, commit: Serial) {
        self.trust_end = Some(self.trust_end.map_or(commit, |end| end.min(commit)));
    }

    /// Everything written into it is on the device. An earlier header may have proven more than the
    /// last block that can be read: that is lost, and stays so.
    pub(in crate::core) fn prove(&mut self) {
        if let Body::Written(content, _) = &mut self.body {
            let end = content.trust_end.unwrap_or(content.last_commit);
            content.proven = content.proven.max(content.last_commit.min(end));
        }
    }

    /// It is still in this generation, takes no more, and nothing is under way in it.
    pub(in crate::core) fn is_draining(&self, generation: Serial) -> bool {
        self.state() == State::Draining && self.generation == generation && self.is_quiet()
    }

    /// It holds writes above this watermark that are not proven.
    pub(in crate::core) fn is_beyond(&self, mark: Serial) -> bool {
        self.last_commit > mark.max(self.proven)
    }

    pub(in crate::core) fn is_suspect(&self) -> bool {
        self.trust != Trust::Whole
    }

    pub(in crate::core) fn is_extended(&self) -> bool {
        self.extension() != Extension::None
    }

    /// It may become a victim.
    pub(in crate::core) fn is_candidate(&self) -> bool {
        self.state() == State::Sealed && !self.in_quarantine()
    }

    /// It must be emptied however many segments are free: (a) its header could not be written, so
    /// the durable watermark stays below it; or (b) its descriptors were unreadable when last tried
    /// and it holds no page, so the store gains a segment as soon as they can be read.
    pub(in crate::core) fn must_be_emptied(&self) -> bool {
        !self.held.is_empty() || self.unusable && self.live == 0
    }

    /// Recovery finds each record that was written into it: it is sealed, and no write or sync that
    /// failed has touched it.
    pub(in crate::core) fn holds_records(&self) -> bool {
        self.state() == State::Sealed
            && !self.is_suspect()
            && !self.poisoned
            && self.trust_end.is_none()
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
        self.state() == State::Emptied && is_forwarded
    }

    /// Nothing is under way here.
    pub(in crate::core) fn is_quiet(&self) -> bool {
        let is_opening = self.first_header == FirstHeader::InFlight;
        self.pending == 0 && self.writing == 0 && self.reserved == 0 && !is_opening
    }
}

impl Extension {
    fn end_rewrite(&mut self) {
        if *self == Extension::Rewrite {
            *self = Extension::Records;
        }
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
