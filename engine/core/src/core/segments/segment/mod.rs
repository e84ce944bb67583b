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
//!
//! A fact exists in the states in which it means something:
//!
//! | facts | states |
//! |---|---|
//! | [`Content`] | all but Free and Lost |
//! | [`Intake`] | Open, and Draining after Open |
//! | [`Writes`] | the same, and Draining after Sealed |
//! | [`Attempts`] | all but Free, Lost, Open, and Draining after Open |
//!
//! A segment is changed by methods alone. A method panics in a state in which it means nothing.
//!
//! | module | methods |
//! |---|---|
//! | `emptying` | the content that keeps it from being released, and the attempts to empty it |
//! | `writes` | pages and descriptor blocks on their way into it, and the room for them |
//! | `trust` | the certainty that its content is on the device |

mod emptying;
mod trust;
mod writes;

use larder_format::{HEADER_BLOCKS, Serial};

use crate::core::types::{InitState, SegmentInit};

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

/// A segment on disk.
#[derive(Clone, Debug)]
pub(in crate::core) struct Segment {
    /// The generation on disk; zero when the segment was never written.
    generation: Serial,
    /// The header on disk states the segment's state and content.
    is_header_current: bool,
    body: Body,
}

#[derive(Clone, Debug)]
enum Body {
    /// It may be lent to a holder that writes its blocks for the first time, once.
    Free {
        was_lent: bool,
    },
    Lost,
    Written(Box<Content>),
}

/// The content of a written segment, whatever its state.
#[derive(Clone, Debug)]
struct Content {
    phase: Phase,
    /// The generation before. A power loss may bring it back as long as nothing of this one is
    /// durable.
    previous: Serial,
    /// The first commit of this generation that this run has written.
    first_commit: Option<Serial>,
    /// First unused data block.
    data_end: u32,
    /// Descriptor blocks used.
    blocks: u32,
    /// Blocks of indexed pages.
    live: u64,
    /// Records in it that have to be forwarded, as far as this run has written them. A namespace
    /// counts as a block full.
    records: u32,
    /// Those of them that have been forwarded here: of one victim no two are of one key.
    forwards: u32,
    /// Highest commit number written here.
    last_commit: Serial,
    /// Payload of commits up to here is on the device for certain.
    proven: Serial,
    /// A hole that could not be filled lies behind this commit.
    trust_end: Option<Serial>,
    trust: Trust,
    /// A write into it failed: nothing more is acknowledged here.
    is_poisoned: bool,
    /// The first header of this generation was refused. Recovery may find nothing that was written
    /// here since, unless a later header lists it.
    is_headless: bool,
    /// Commits of pages whose descriptors were written and whose bytes were not. The durable
    /// watermark stays below them until a header excludes them.
    held: Vec<Serial>,
    /// Highest commit number of a copy or newer version of something that lay here. Zero in an
    /// emptied segment that only readers hold.
    forwarded: Serial,
    /// A failed sync may have lost something of that.
    forwarded_to_suspect: bool,
}

/// The state of a written segment, with the facts that hold in it alone.
#[derive(Clone, Debug)]
enum Phase {
    Open(Stream, Intake),
    /// For the first time.
    Draining(Intake),
    /// It takes no pages any more, and reclaim may have tried to empty it.
    Closed(Attempts, Stage),
}

#[derive(Clone, Copy, Debug)]
enum Stage {
    /// Draining again: it takes records.
    Extended(Extension, Writes),
    Sealing(Option<Extension>, InDoubt),
    Sealed(InQuarantine),
    Unreadable(InQuarantine),
    Victim(FreeAs),
    Emptied(FreeAs),
    Releasing(FreeAs),
}

/// A sync failed while the header was being written: the header counts for nothing.
#[derive(Clone, Copy, Debug)]
struct InDoubt(bool);

/// Reclaim could not empty the segment, and leaves it alone until there is more room.
#[derive(Clone, Copy, Debug)]
struct InQuarantine(bool);

/// Generation that the free header of a segment that was not read completely names. Greater than
/// any generation that an unread block may hold. `None` for a segment that was read.
type FreeAs = Option<Serial>;

/// Descriptor blocks on their way into a segment.
#[derive(Clone, Copy, Debug, Default)]
struct Writes {
    /// Descriptor blocks reserved and not yet used.
    reserved: u32,
    /// Descriptor block writes in flight.
    in_flight: u32,
}

/// Pages and blocks on their way into a segment that is written for the first time.
#[derive(Clone, Debug, Default)]
struct Intake {
    writes: Writes,
    /// Pages with extents here that have no status yet.
    pending: u32,
    /// The first header of the generation is being written. No other header may be written before
    /// it: the later write could land first. Recovery finds the segment by it, or by its first
    /// block.
    is_opening: bool,
    /// Failed descriptor writes that are still to be filled.
    holes: Vec<Hole>,
}

/// The attempts of reclaim to empty a segment. They outlast a single one: a segment may be put back
/// while some of its records are still on their way elsewhere.
#[derive(Clone, Copy, Debug, Default)]
struct Attempts {
    /// Records being forwarded out of it.
    forwarding: u32,
    /// A record could not be forwarded out of it for lack of room.
    is_stuck: bool,
    /// When last tried, its free header could not be written, or its descriptors not be read. It
    /// does not count as capacity.
    unusable: bool,
    /// When reads of it failed, the first and the last time in a row.
    unread_ms: Option<(u64, u64)>,
}

/// Whether a failed sync may have lost something of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trust {
    Whole,
    /// Every page must be read back and written again.
    Suspect,
    /// A suspect whose pages have been written again, or are forgotten.
    Rewritten,
}

/// Records that a sealed segment takes. They count when a header lists them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::core) enum Extension {
    /// Records that found no room elsewhere.
    Records,
    /// Its own records that a failed sync may have lost.
    Rewrite,
}

/// Descriptor blocks of one write. A hole, if the write failed.
#[derive(Clone, Copy, Debug)]
pub(in crate::core) struct Hole {
    pub first: u32,
    pub blocks: u32,
    /// The commit of these blocks.
    pub commit: Serial,
    /// The commit of the blocks before them.
    pub behind: Serial,
}

impl Content {
    fn begun(previous: Serial, phase: Phase) -> Content {
        Content {
            phase,
            previous,
            first_commit: None,
            data_end: HEADER_BLOCKS,
            blocks: 0,
            live: 0,
            records: 0,
            forwards: 0,
            last_commit: Serial::ZERO,
            proven: Serial::ZERO,
            trust_end: None,
            trust: Trust::Whole,
            is_poisoned: false,
            is_headless: false,
            held: Vec::new(),
            forwarded: Serial::ZERO,
            forwarded_to_suspect: false,
        }
    }
}

/// An event of the table, other than the first and the last one of a generation.
#[derive(Clone, Copy, Debug)]
enum Step {
    ChangeStream(Stream),
    Close,
    Extend(Extension),
    BeginSealing,
    Seal,
    Pick(FreeAs),
    Empty,
    PutBack,
    BeginReleasing,
}

impl Phase {
    fn closed(stage: Stage) -> Phase {
        Phase::Closed(Attempts::default(), stage)
    }

    /// The table above. `None` for a step that is not in it.
    fn after(self, step: Step) -> Option<Phase> {
        use Stage::{Emptied, Extended, Releasing, Sealed, Sealing, Unreadable, Victim};
        let next = match (self, step) {
            (Phase::Open(_, intake), Step::ChangeStream(stream)) => Phase::Open(stream, intake),
            (Phase::Open(_, intake), Step::Close) => Phase::Draining(intake),
            (Phase::Draining(_), Step::BeginSealing) => {
                Phase::closed(Sealing(None, InDoubt(false)))
            }
            (Phase::Draining(_), Step::Seal) => Phase::closed(Sealed(InQuarantine(false))),
            (Phase::Closed(attempts, stage), step) => {
                let next = match (stage, step) {
                    (Sealed(_), Step::Extend(with)) => Extended(with, Writes::default()),
                    (Extended(..), Step::Extend(_)) => stage,
                    (Extended(with, _), Step::BeginSealing) => Sealing(Some(with), InDoubt(false)),
                    (Extended(..) | Sealing(..), Step::Seal) => Sealed(InQuarantine(false)),
                    (Sealed(_) | Unreadable(_), Step::Pick(free_as)) => Victim(free_as),
                    (Victim(free_as), Step::Empty) => Emptied(free_as),
                    (Victim(None) | Emptied(None), Step::PutBack) => Sealed(InQuarantine(true)),
                    (Victim(_) | Emptied(_), Step::PutBack) => Unreadable(InQuarantine(true)),
                    (Emptied(free_as), Step::BeginReleasing) => Releasing(free_as),
                    _ => return None,
                };
                Phase::Closed(attempts, next)
            }
            _ => return None,
        };
        Some(next)
    }
}

impl Segment {
    /// A segment as recovery found it. An open one stays open for the stream, if there is one.
    pub(super) fn recovered(
        init: &SegmentInit,
        stream: impl FnOnce() -> Option<Stream>,
    ) -> Segment {
        let sealed = Phase::closed(Stage::Sealed(InQuarantine(false)));
        let unreadable = Phase::closed(Stage::Unreadable(InQuarantine(false)));
        let open = |stream| Phase::Open(stream, Intake::default());
        let written = |phase| {
            Body::Written(Box::new(Content {
                data_end: init.data_end,
                blocks: init.blocks,
                last_commit: init.last_commit,
                proven: init.proven,
                ..Content::begun(Serial::ZERO, phase)
            }))
        };
        Segment {
            generation: init.sequence,
            is_header_current: matches!(init.state, InitState::Sealed | InitState::Free),
            body: match init.state {
                InitState::Free => Body::Free { was_lent: false },
                InitState::Lost => Body::Lost,
                InitState::Open => written(stream().map_or(sealed, open)),
                InitState::Closed | InitState::Sealed => written(sealed),
                InitState::Unreadable => written(unreadable),
            },
        }
    }

    pub(in crate::core) fn state(&self) -> State {
        match &self.body {
            Body::Free { .. } => State::Free,
            Body::Lost => State::Lost,
            Body::Written(content) => match &content.phase {
                Phase::Open(stream, _) => State::Open(*stream),
                Phase::Draining(_) | Phase::Closed(_, Stage::Extended(..)) => State::Draining,
                Phase::Closed(_, Stage::Sealing(..)) => State::Sealing,
                Phase::Closed(_, Stage::Sealed(_)) => State::Sealed,
                Phase::Closed(_, Stage::Unreadable(_)) => State::Unreadable,
                Phase::Closed(_, Stage::Victim(_)) => State::Victim,
                Phase::Closed(_, Stage::Emptied(_)) => State::Emptied,
                Phase::Closed(_, Stage::Releasing(_)) => State::Releasing,
            },
        }
    }

    // ---- transitions

    /// # Panics
    /// If the state has no such transition.
    fn pass(&mut self, step: Step) {
        let before = self.state();
        if let Body::Written(mut content) = std::mem::replace(&mut self.body, Body::Lost)
            && let Some(phase) = content.phase.after(step)
        {
            content.phase = phase;
            self.body = Body::Written(content);
        } else {
            panic!("{step:?} of a segment that is {before:?}");
        }
    }

    /// Begins a generation.
    pub(super) fn begin(&mut self, generation: Serial, stream: Stream) {
        let before = self.state();
        assert!(before == State::Free, "{before:?} begins a generation");
        let intake = Intake {
            is_opening: true,
            ..Intake::default()
        };
        let content = Content::begun(self.generation, Phase::Open(stream, intake));
        *self = Segment {
            generation,
            is_header_current: false,
            body: Body::Written(Box::new(content)),
        };
    }

    /// Takes the pages of another stream.
    pub(super) fn change_stream(&mut self, stream: Stream) {
        self.pass(Step::ChangeStream(stream));
    }

    /// Takes nothing more.
    pub(super) fn close(&mut self) {
        self.pass(Step::Close);
    }

    /// Takes records, sealed as it is, and reserves descriptor blocks for them. It may take some
    /// already.
    pub(in crate::core) fn extend(&mut self, with: Extension, blocks: u32) {
        self.pass(Step::Extend(with));
        self.reserve(blocks);
    }

    /// Its sealed header is about to be written. It is drained.
    pub(in crate::core) fn begin_sealing(&mut self) {
        self.pass(Step::BeginSealing);
    }

    /// It is drained, and needs no sealed header.
    pub(in crate::core) fn seal(&mut self) {
        self.pass(Step::Seal);
    }

    /// Its sealed header has been written or refused. Returns whether the header was to list an
    /// extension. Then a good one makes a suspect whole again that has its records in it.
    pub(in crate::core) fn end_sealing(&mut self, good: bool) -> bool {
        let extension = self.extension();
        let is_in_doubt = matches!(self.stage(), Some(Stage::Sealing(_, InDoubt(true))));
        self.is_header_current = good && !is_in_doubt;
        self.seal();
        let content = self.content_mut();
        content.is_poisoned |= extension.is_some() && !good;
        if extension == Some(Extension::Rewrite) && good {
            content.trust = Trust::Whole;
        }
        extension.is_some()
    }

    /// Reclaim empties it.
    pub(in crate::core) fn become_victim(&mut self, free_as: FreeAs) {
        self.pass(Step::Pick(free_as));
    }

    /// Everything is out of it.
    pub(super) fn empty(&mut self) {
        self.pass(Step::Empty);
        if self.is_suspect() {
            self.note_rewritten();
        }
    }

    /// Something is left in it.
    pub(super) fn put_back(&mut self) {
        self.pass(Step::PutBack);
    }

    /// Its free header is about to be written.
    pub(in crate::core) fn begin_releasing(&mut self) {
        self.pass(Step::BeginReleasing);
    }

    /// Its free header is durable. The generation stays on disk until the next one begins.
    pub(super) fn end(&mut self) {
        let before = self.state();
        assert!(before == State::Releasing, "{before:?} becomes free");
        self.generation = self.free_as().unwrap_or(self.generation);
        self.body = Body::Free { was_lent: false };
    }

    // ---- parts

    fn content(&self) -> Option<&Content> {
        match &self.body {
            Body::Written(content) => Some(content),
            Body::Free { .. } | Body::Lost => None,
        }
    }

    /// # Panics
    /// For a free or lost segment: nothing lies or goes there.
    fn content_mut(&mut self) -> &mut Content {
        match &mut self.body {
            Body::Written(content) => content,
            Body::Free { .. } | Body::Lost => panic!("a segment without content is changed"),
        }
    }

    fn stage(&self) -> Option<&Stage> {
        match &self.content()?.phase {
            Phase::Closed(_, stage) => Some(stage),
            Phase::Open(..) | Phase::Draining(_) => None,
        }
    }

    fn stage_mut(&mut self) -> Option<&mut Stage> {
        match &mut self.body {
            Body::Written(content) => match &mut content.phase {
                Phase::Closed(_, stage) => Some(stage),
                Phase::Open(..) | Phase::Draining(_) => None,
            },
            Body::Free { .. } | Body::Lost => None,
        }
    }

    // ---- facts of a free segment

    /// Whether a free segment can still be lent; if so, it is.
    pub(super) fn lend(&mut self) -> bool {
        match &mut self.body {
            Body::Free { was_lent } => !std::mem::replace(was_lent, true),
            Body::Lost | Body::Written(_) => false,
        }
    }

    pub(super) fn was_lent(&self) -> bool {
        matches!(self.body, Body::Free { was_lent: true })
    }

    // ---- generation and header

    pub(in crate::core) fn generation(&self) -> Serial {
        self.generation
    }

    pub(in crate::core) fn is_header_current(&self) -> bool {
        self.is_header_current
    }

    /// The free header on disk counts, or it was refused, or a failed sync may have lost it.
    pub(in crate::core) fn note_free_header(&mut self, good: bool) {
        self.is_header_current = good;
    }

    pub(in crate::core) fn free_as(&self) -> FreeAs {
        match self.stage() {
            Some(Stage::Victim(it) | Stage::Emptied(it) | Stage::Releasing(it)) => *it,
            _ => None,
        }
    }

    /// The oldest generation that the next open may find here: the generation on disk, or the
    /// generation that a power loss brings back. Commits up to `synced` are durable.
    pub(super) fn oldest_generation(&self, synced: Serial) -> Option<Serial> {
        let may_return = |it: &&Content| it.first_commit.is_none_or(|first| first > synced);
        let returning = self.content().filter(may_return).map(|it| it.previous);
        match self.state() {
            State::Lost => None,
            // Nothing is known of it: it may hold any.
            State::Unreadable if self.generation == Serial::ZERO => Some(Serial::ZERO),
            _ => {
                let mut generations = returning.into_iter().chain([self.generation]);
                generations.find(|generation| *generation > Serial::ZERO)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use State::{
        Draining, Emptied, Free, Lost, Open, Releasing, Sealed, Sealing, Unreadable, Victim,
    };

    use super::*;
    use crate::core::segments::tests::init;

    const STATES: [State; 11] = [
        Free,
        Open(Stream::Put),
        Open(Stream::Copy),
        Draining,
        Sealing,
        Sealed,
        Victim,
        Emptied,
        Releasing,
        Unreadable,
        Lost,
    ];

    const TRANSITIONS: [fn(&mut Segment); 14] = [
        |segment| segment.begin(Serial::from_raw(9), Stream::Put),
        |segment| segment.begin(Serial::from_raw(9), Stream::Copy),
        |segment| segment.change_stream(Stream::Put),
        |segment| segment.change_stream(Stream::Copy),
        Segment::close,
        |segment| segment.extend(Extension::Records, 0),
        Segment::begin_sealing,
        Segment::seal,
        |segment| assert!(!segment.end_sealing(true)),
        |segment| segment.become_victim(None),
        Segment::empty,
        Segment::put_back,
        Segment::begin_releasing,
        Segment::end,
    ];

    /// A segment that recovery has found in one state, in another one.
    fn moved(found: InitState, state: State) -> Segment {
        let mut segment = Segment::recovered(&init(&(found, 5)), || None);
        let free_as = (found == InitState::Unreadable).then(|| Serial::from_raw(7));
        let steps: &[fn(&mut Segment)] = match state {
            Free | Sealed | Unreadable | Lost => &[],
            Open(Stream::Put) => &TRANSITIONS[..1],
            Open(Stream::Copy) => &TRANSITIONS[1..2],
            Draining => &[TRANSITIONS[0], Segment::close],
            Sealing => &[TRANSITIONS[0], Segment::close, Segment::begin_sealing],
            Victim => &[],
            Emptied => &[Segment::empty],
            Releasing => &[Segment::empty, Segment::begin_releasing],
        };
        if matches!(state, Victim | Emptied | Releasing) {
            segment.become_victim(free_as);
        }
        steps.iter().for_each(|step| step(&mut segment));
        assert_eq!(segment.state(), state);
        segment
    }

    /// The states that a segment can be moved to.
    fn reached(segment: &Segment) -> Vec<State> {
        let moved = TRANSITIONS.iter().map(|transition| {
            let mut segment = segment.clone();
            catch_unwind(AssertUnwindSafe(|| transition(&mut segment))).map(|()| segment.state())
        });
        moved.filter_map(Result::ok).collect()
    }

    #[test]
    fn only_the_transitions_of_the_table_are_possible() {
        let (put, copy) = (Open(Stream::Put), Open(Stream::Copy));
        let (unused, sealed) = (&[InitState::Free][..], &[InitState::Sealed][..]);
        let (unread, lost) = (&[InitState::Unreadable][..], &[InitState::Lost][..]);
        let victim = &[InitState::Sealed, InitState::Unreadable][..];
        let table: [(State, &[InitState], &[State]); 11] = [
            (Free, unused, &[put, copy]),
            (put, unused, &[put, copy, Draining]),
            (copy, unused, &[put, copy, Draining]),
            (Draining, unused, &[Sealing, Sealed]),
            (Sealing, unused, &[Sealed]),
            (Sealed, sealed, &[Draining, Victim]),
            (Victim, victim, &[Sealed, Emptied, Unreadable]),
            (Emptied, victim, &[Sealed, Releasing, Unreadable]),
            (Releasing, victim, &[Free]),
            (Unreadable, unread, &[Victim]),
            (Lost, lost, &[]),
        ];
        for (before, found, allowed) in table {
            let moved = found
                .iter()
                .flat_map(|found| reached(&moved(*found, before)));
            let moved: Vec<State> = moved.collect();
            for next in STATES {
                let is_allowed = allowed.contains(&next);
                assert_eq!(moved.contains(&next), is_allowed, "{before:?} {next:?}");
            }
        }
    }
}
