//! Pages and descriptor blocks on their way into a segment, and the room for them.

use larder_format::{HEADER_BLOCKS, Serial};

use super::{Extension, Hole, Intake, Phase, Segment, Stage, State, Writes};

impl Segment {
    fn intake(&self) -> Option<&Intake> {
        match &self.content()?.phase {
            Phase::Open(_, intake) | Phase::Draining(intake) => Some(intake),
            Phase::Closed(..) => None,
        }
    }

    /// # Panics
    /// For a segment that has taken its last page.
    fn intake_mut(&mut self) -> &mut Intake {
        match &mut self.content_mut().phase {
            Phase::Open(_, intake) | Phase::Draining(intake) => intake,
            Phase::Closed(..) => panic!("a closed segment takes pages"),
        }
    }

    fn writes(&self) -> Writes {
        match self.stage() {
            Some(Stage::Extended(_, writes)) => *writes,
            _ => self.intake().map(|it| it.writes).unwrap_or_default(),
        }
    }

    /// # Panics
    /// For a segment that takes no descriptor blocks.
    fn writes_mut(&mut self) -> &mut Writes {
        match &mut self.content_mut().phase {
            Phase::Open(_, intake) | Phase::Draining(intake) => &mut intake.writes,
            Phase::Closed(_, Stage::Extended(_, writes)) => writes,
            Phase::Closed(..) => panic!("a closed segment takes descriptor blocks"),
        }
    }

    // ---- room

    /// First unused data block.
    pub(in crate::core) fn data_end(&self) -> u32 {
        self.content().map_or(HEADER_BLOCKS, |it| it.data_end)
    }

    /// Descriptor blocks used.
    pub(in crate::core) fn blocks(&self) -> u32 {
        self.content().map_or(0, |it| it.blocks)
    }

    /// Blocks that are used or reserved, those of the header included.
    pub(in crate::core) fn taken_blocks(&self) -> u64 {
        let reserved = self.writes().reserved;
        u64::from(self.data_end()) + u64::from(self.blocks()) + u64::from(reserved)
    }

    pub(in crate::core) fn has_room(&self, segment_blocks: u32, data: u32, blocks: u32) -> bool {
        let taken = self.taken_blocks() + u64::from(data) + u64::from(blocks);
        taken <= u64::from(segment_blocks)
    }

    // ---- the first header

    /// The first header of the generation is being written.
    pub(in crate::core) fn is_opening(&self) -> bool {
        self.intake().is_some_and(|intake| intake.is_opening)
    }

    /// The first header of the generation was refused.
    pub(in crate::core) fn is_headless(&self) -> bool {
        self.content().is_some_and(|it| it.is_headless)
    }

    /// Its first header has been written, or its write failed.
    pub(in crate::core) fn end_opening(&mut self, good: bool) {
        self.intake_mut().is_opening = false;
        self.content_mut().is_headless = !good;
    }

    // ---- pages and blocks

    pub(in crate::core) fn is_open(&self) -> bool {
        matches!(self.state(), State::Open(_))
    }

    /// A page gets an extent, and so many descriptor blocks are reserved for it. Returns its first
    /// block.
    pub(in crate::core::segments) fn take_page(&mut self, data: u32, reserved: u32) -> u32 {
        self.reserve(reserved);
        self.intake_mut().pending += 1;
        let content = self.content_mut();
        let start = content.data_end;
        content.data_end += data;
        start
    }

    /// A page with an extent here has its status.
    pub(in crate::core::segments) fn end_page(&mut self) {
        self.intake_mut().pending -= 1;
    }

    pub(in crate::core::segments) fn reserve(&mut self, blocks: u32) {
        self.writes_mut().reserved += blocks;
    }

    /// Reserved descriptor blocks are used, or not needed.
    pub(in crate::core) fn end_reservation(&mut self, blocks: u32) {
        self.writes_mut().reserved -= blocks;
    }

    /// The next descriptor blocks are written with this commit.
    pub(in crate::core) fn begin_blocks(&mut self, blocks: u32, commit: Serial) -> Hole {
        self.writes_mut().in_flight += 1;
        let content = self.content_mut();
        content.first_commit.get_or_insert(commit);
        let hole = Hole {
            first: content.blocks,
            blocks,
            commit,
            behind: std::mem::replace(&mut content.last_commit, commit),
        };
        content.blocks += blocks;
        hole
    }

    /// The write of these descriptor blocks is answered. A hole is filled before the segment is
    /// sealed. No header lists the blocks of an extension: a hole there stays.
    pub(in crate::core) fn end_blocks(&mut self, hole: Hole, good: bool) {
        self.writes_mut().in_flight -= 1;
        if !good && self.is_extended() {
            self.end_trust(hole.behind);
        } else if !good {
            self.intake_mut().holes.push(hole);
        }
    }

    /// Holes; each is to be filled once.
    pub(in crate::core) fn begin_filling(&mut self) -> Vec<Hole> {
        let holes = match &mut self.content_mut().phase {
            Phase::Open(_, intake) | Phase::Draining(intake) => std::mem::take(&mut intake.holes),
            Phase::Closed(..) => return Vec::new(),
        };
        self.writes_mut().in_flight += u32::try_from(holes.len()).unwrap_or(u32::MAX);
        holes
    }

    /// The hole behind this commit is filled, or it stays.
    pub(in crate::core) fn end_filling(&mut self, behind: Serial, good: bool) {
        self.writes_mut().in_flight -= 1;
        if !good {
            self.end_trust(behind);
        }
    }

    /// Nothing is under way into it.
    pub(in crate::core) fn is_quiet(&self) -> bool {
        let writes = self.writes();
        let takes_none = |intake: &Intake| intake.pending == 0 && !intake.is_opening;
        writes.reserved == 0 && writes.in_flight == 0 && self.intake().is_none_or(takes_none)
    }

    /// It takes no more, and nothing is under way into it.
    pub(in crate::core) fn is_drained(&self) -> bool {
        self.state() == State::Draining && self.is_quiet()
    }

    pub(super) fn extension(&self) -> Option<Extension> {
        match self.stage() {
            Some(Stage::Extended(extension, _)) => Some(*extension),
            Some(Stage::Sealing(extension, _)) => *extension,
            _ => None,
        }
    }

    pub(in crate::core::segments) fn may_be_extended(&self) -> bool {
        matches!(self.stage(), Some(Stage::Sealed(_) | Stage::Extended(..)))
    }

    pub(in crate::core) fn is_extended(&self) -> bool {
        self.extension().is_some()
    }
}
