//! Reads the descriptors of one segment: the generation on disk, and its records.
//!
//! The header is a hint. Descriptor blocks identify themselves. The case of a segment follows from
//! the highest sequence in either header copy (`H`) and in descriptor block 0 (`B`), which is the
//! last block of the segment:
//!
//! | case | header | block 0 | meaning | further read |
//! |---|---|---|---|---|
//! | `Blank` | both blank, or blank and damaged | blank or damaged | not fully written | nothing |
//! | `Free` | free | none newer than H | free; its old generation stays on disk | nothing |
//! | `Listed` | names n blocks (1) | of H's generation, or n = 0 | holds n blocks | n blocks |
//! | `Unlisted` | open, of an epoch that was not closed | any | left by the crash | whole scan |
//! | `Newer` | none, or older than B | newer than H | its header was not written | whole scan |
//! | `Hidden` | both damaged, or one bad (2) | blank or damaged | unknown until read | whole scan |
//! | `Hidden` | none whole | foreign or unreadable | unknown until read | whole scan |
//!
//! (1) Its state is Sealed; or it is Open, and a clean close wrote it.
//!
//! (2) One copy is foreign or unreadable, and no copy is whole.
//!
//! *Blank* is a block of zeros. *Foreign* is a block that is not blank and does not begin as a
//! structure of this store. All these places are blank in a new store, so foreign bytes are damage,
//! and never an unwritten segment.
//!
//! A `Listed` segment is scanned whole too in three cases: a block of a newer generation is found;
//! a block of its own generation is found behind the last listed block; its pages end behind the
//! data end in its header. A whole scan reads blocks from the segment's end downwards, past bad
//! ones. It stops when it reaches the data (the highest data end that a block of this generation
//! states), or after [`GAP_BLOCKS`] readable blocks in a row of other generations. Writers keep
//! fewer blocks than that in flight, so a crash cannot leave such a gap before an acknowledged
//! page. Unreadable blocks are skipped, and never taken for empty.

use larder_base::memory::AlignedBuf;
use larder_base::planted;
use larder_core::core::{BLOCKS_IN_FLIGHT_MAX, Descriptors, Victim};
use larder_disk::mailbox::{ReadAhead, ReadAt, read_all};
use larder_disk::{Disk, DiskError};
use larder_format::{
    BLOCK_BYTES, Damage, DescriptorBlock, HEADER_BLOCKS, Run, SegmentHeader, SegmentState, Serial,
    Structure,
};

pub use super::fault::{Disbelief, Fault, FaultReason};
pub use super::spot::{Bodies, Spot};

/// A scan ends after so many readable blocks in a row of other generations.
pub const GAP_BLOCKS: u32 = 2 * BLOCKS_IN_FLIGHT_MAX;

/// Blocks that a scan reads at once.
const WINDOW_BLOCKS: u32 = 256;

/// Listed blocks of one segment read in one piece: the block count of a header must not size an
/// allocation.
const LISTED_AT_ONCE: u32 = 4096;

/// Bytes of descriptor blocks that are read ahead when many segments are listed, and the least and
/// the largest number of segments for which they are.
const AHEAD_BYTES: usize = 8 << 20;
const AHEAD_MIN: usize = 2;
const AHEAD_MAX: usize = 64;

/// The row of the table for a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    /// Never written.
    Blank,
    /// Free.
    Free,
    /// Its header states the number of its blocks.
    Listed,
    /// Open at a crash.
    Unlisted,
    /// Its header is of an older generation, or gone.
    Newer,
    /// Its headers cannot be used, and block 0 does not identify it.
    Hidden,
}

/// The content of a segment.
#[derive(Debug)]
pub struct SegmentScan {
    /// Its case in the table.
    pub case: Case,
    /// The header of the generation on disk, if a copy of it is whole.
    pub header: Option<SegmentHeader>,
    /// The generation on disk; zero when there is none.
    pub sequence: Serial,
    /// Its usable descriptor blocks, by index.
    pub blocks: Vec<DescriptorBlock>,
    /// Descriptor block positions in use, including bad ones.
    pub block_count: u32,
    /// First data block that no page of this generation uses.
    pub data_end: u32,
    /// The faults found. A block that a crash may have interrupted is no fault.
    pub faults: Vec<Fault>,
    /// One header copy is whole, and the other differs or cannot be read.
    pub uneven: bool,
}

impl SegmentScan {
    fn empty(case: Case, header: Option<SegmentHeader>, sequence: Serial) -> SegmentScan {
        SegmentScan {
            case,
            header,
            sequence,
            blocks: Vec::new(),
            block_count: 0,
            data_end: HEADER_BLOCKS,
            faults: Vec::new(),
            uneven: false,
        }
    }

    /// Whether it holds nothing and may be written.
    #[must_use]
    pub fn is_free(&self) -> bool {
        matches!(self.case, Case::Blank | Case::Free)
    }

    /// Whether neither a header nor a descriptor block is left.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.case == Case::Hidden && self.sequence == Serial::ZERO
    }

    /// Missing blocks, where no header lists the blocks: index, and commit of the next block found.
    pub fn holes(&self) -> Vec<(u32, Serial)> {
        if !matches!(self.case, Case::Unlisted | Case::Newer | Case::Hidden) {
            return Vec::new();
        }
        let mut holes = Vec::new();
        let mut next = 0;
        for block in &self.blocks {
            holes.extend((next..block.header.index).map(|index| (index, block.header.commit)));
            next = block.header.index.saturating_add(1);
        }
        holes
    }

    /// Above the commit of every record that its damage has lost; zero if none is lost.
    pub(crate) fn lost_until(&self, spot: &Spot) -> Serial {
        let blocks = |fault: &&Fault| fault.structure == Structure::DescriptorBlock;
        let lost = self.faults.iter().filter(blocks).map(|fault| {
            let is_behind =
                |block: &&DescriptorBlock| spot.block_offset(block.header.index) < fault.offset;
            // Commits grow with the index, and the index with a falling offset.
            let next = self.blocks.iter().find(is_behind);
            next.map_or(Serial::MAX, |block| block.header.commit)
        });
        let all = self.is_lost().then_some(Serial::MAX);
        lost.chain(all).max().unwrap_or(Serial::ZERO)
    }
}

/// The result of the first read of a segment.
struct Look {
    header: Option<SegmentHeader>,
    /// A header copy is there, but broken or unreadable.
    header_faults: Vec<Fault>,
    block: Option<Serial>,
    block_fault: Option<Fault>,
    /// As [`SegmentScan::uneven`].
    uneven: bool,
}

/// Scans segments, and calls `found` for each in order. `closed` is the last epoch, if it was
/// closed in order.
pub fn scan(
    disk: &dyn Disk,
    spots: &[Spot],
    closed: Option<Run>,
    mut found: impl FnMut(&Spot, SegmentScan),
) {
    const LOOKS: usize = 1024;
    for spots in spots.chunks(LOOKS) {
        let looks = look(disk, spots);
        scan_looked(disk, spots, looks, closed, &mut found);
    }
}

/// Reads headers and first descriptor blocks.
fn look(disk: &dyn Disk, spots: &[Spot]) -> Vec<Look> {
    let reads: Vec<ReadAt> = spots
        .iter()
        .flat_map(|spot| [spot.headers(), spot.blocks(0, 1)])
        .collect();
    let mut results = read_all(disk, &reads).into_iter();
    spots
        .iter()
        .map(|spot| {
            let headers = results.next().unwrap_or(Err(DiskError::Shutdown));
            let block = results.next().unwrap_or(Err(DiskError::Shutdown));
            let copies = match headers {
                Ok(bytes) => spot
                    .parse_headers(&bytes)
                    .map(|copy| copy.map_err(FaultReason::Damaged)),
                Err(_) => spot.read_copies(disk),
            };
            look_at(spot, copies, block)
        })
        .collect()
}

impl Look {
    /// A header copy or block could not be read. Unreadable is not broken.
    fn is_unreadable(&self) -> bool {
        let mut faults = self.header_faults.iter().chain(&self.block_fault);
        faults.any(|fault| matches!(fault.reason, FaultReason::Unreadable(_)))
    }

    /// A block holds bytes that are neither blank nor of this store.
    fn is_foreign(&self) -> bool {
        let mut faults = self.header_faults.iter().chain(&self.block_fault);
        faults.any(|fault| {
            matches!(
                fault.reason,
                FaultReason::Damaged(
                    Damage::Magic(_) | Damage::Elsewhere(larder_format::Elsewhere::Store { .. })
                )
            )
        })
    }
}

fn look_at(
    spot: &Spot,
    copies: [Result<SegmentHeader, FaultReason>; 2],
    block: Result<AlignedBuf, DiskError>,
) -> Look {
    let mut look = Look {
        header: None,
        header_faults: Vec::new(),
        block: None,
        block_fault: None,
        uneven: !matches!(&copies, [Ok(a), Ok(b)] if a == b),
    };
    for (copy, number) in copies.into_iter().zip(0..) {
        match copy {
            Ok(header) => look.header = Some(newer(look.header.take(), header)),
            Err(FaultReason::Damaged(Damage::Blank(_))) => {}
            Err(reason) => look.header_faults.push(Fault {
                offset: spot.offset(number),
                structure: Structure::SegmentHeader,
                reason,
            }),
        }
    }
    match block {
        Err(error) => {
            look.block_fault = Some(Fault {
                offset: spot.block_offset(0),
                structure: Structure::DescriptorBlock,
                reason: FaultReason::Unreadable(error),
            });
        }
        Ok(bytes) => match spot.parse_block(0, &bytes) {
            Ok(block) => look.block = Some(block.header.sequence),
            Err(Damage::Blank(_)) => {}
            Err(damage) => {
                look.block_fault = Some(Fault {
                    offset: spot.block_offset(0),
                    structure: Structure::DescriptorBlock,
                    reason: FaultReason::Damaged(damage),
                });
            }
        },
    }
    look
}

/// The header that counts: the later generation; in one generation, the later state.
pub fn newer(a: Option<SegmentHeader>, b: SegmentHeader) -> SegmentHeader {
    let rank = |header: &SegmentHeader| match header.state {
        SegmentState::Open => 0,
        SegmentState::Sealed => 1,
        SegmentState::Free => 2,
    };
    match a {
        Some(a) if (a.sequence, rank(&a)) >= (b.sequence, rank(&b)) => a,
        _ => b,
    }
}

fn classify(look: &Look, closed: Option<Run>) -> Case {
    let Some(header) = &look.header else {
        return match look.block {
            Some(_) => Case::Newer,
            // Nothing counts before both copies of the first header are written. If one copy was
            // never written, the damaged copy is an interrupted first write, and the blocks are of
            // a generation that a power loss has undone.
            None if look.header_faults.len() == 2 => Case::Hidden,
            None if look.is_unreadable() || look.is_foreign() => Case::Hidden,
            None => Case::Blank,
        };
    };
    if look
        .block
        .is_some_and(|sequence| sequence > header.sequence)
    {
        return Case::Newer;
    }
    match header.state {
        SegmentState::Free => Case::Free,
        SegmentState::Sealed => Case::Listed,
        SegmentState::Open if is_of_close(header, closed) => Case::Listed,
        SegmentState::Open => Case::Unlisted,
    }
}

/// Whether the clean close wrote this header, which states Open. Two other headers state Open too.
/// A segment that could not be read keeps the header of the epoch that crashed. A close names its
/// own epoch in the watermark, since it syncs before it writes headers. And a failed sync may have
/// lost the header that sealed the segment: then the header of its first write is left, which lists
/// nothing.
fn is_of_close(header: &SegmentHeader, closed: Option<Run>) -> bool {
    closed == Some(header.synced.run()) && header.blocks > 0
}

/// The number of blocks to read of a listed segment: its blocks and one more, if there is room for
/// it. `None` for a segment that needs a scan.
fn listed_blocks(spot: &Spot, look: &Look, closed: Option<Run>) -> Option<u32> {
    match (classify(look, closed), &look.header) {
        (Case::Listed, Some(header)) => {
            let room = spot.segment_blocks.saturating_sub(header.data_end);
            Some(header.blocks.saturating_add(1).min(room))
        }
        _ => None,
    }
}

/// Scans segments after their first reads. Blocks of listed segments are read ahead, into memory
/// that is used again: the kernel clears fresh memory, which costs more than the rest of a read.
fn scan_looked(
    disk: &dyn Disk,
    spots: &[Spot],
    looks: Vec<Look>,
    closed: Option<Run>,
    found: &mut impl FnMut(&Spot, SegmentScan),
) {
    let first_piece = |(spot, look): (&Spot, &Look)| {
        let count = listed_blocks(spot, look, closed)?;
        (count > 0).then(|| spot.blocks(0, count.min(LISTED_AT_ONCE)))
    };
    let pieces: Vec<ReadAt> = spots.iter().zip(&looks).filter_map(first_piece).collect();
    let longest = pieces.iter().map(|piece| piece.bytes).max().unwrap_or(0);
    let depth = (AHEAD_BYTES / longest.max(1)).clamp(AHEAD_MIN, AHEAD_MAX);
    // Without memory for it, blocks are read in windows.
    let mut ahead = ReadAhead::new(disk, depth.min(pieces.len()), longest).ok();
    let mut pieces = pieces.into_iter();
    for (spot, look) in spots.iter().zip(looks) {
        if let Some(ahead) = &mut ahead {
            while ahead.has_room()
                && let Some(piece) = pieces.next()
            {
                ahead.start(piece);
            }
        }
        let case = classify(&look, closed);
        let uneven = look.uneven;
        let scan = match case {
            Case::Blank => SegmentScan::empty(case, None, Serial::ZERO),
            Case::Free => {
                let sequence = look
                    .header
                    .as_ref()
                    .map_or(Serial::ZERO, |header| header.sequence);
                SegmentScan {
                    faults: look.header_faults,
                    ..SegmentScan::empty(case, look.header, sequence)
                }
            }
            Case::Listed => {
                let count = listed_blocks(spot, &look, closed).unwrap_or(0);
                let ahead = ahead.as_mut().filter(|_| count > 0);
                let piece = ahead.and_then(ReadAhead::take).and_then(Result::ok);
                list(disk, spot, look, count, piece)
            }
            Case::Unlisted | Case::Newer | Case::Hidden => scan_whole(disk, spot, look, case),
        };
        found(spot, SegmentScan { uneven, ..scan });
    }
}

/// Reads a segment whose header states the number of its blocks.
fn list(disk: &dyn Disk, spot: &Spot, look: Look, count: u32, piece: Option<&[u8]>) -> SegmentScan {
    let Some(header) = look.header else {
        return scan_whole(disk, spot, look, Case::Hidden);
    };
    let sequence = header.sequence;
    let mut scan = SegmentScan::empty(Case::Listed, Some(header), sequence);
    scan.block_count = header.blocks;
    scan.data_end = header.data_end;
    scan.faults.clone_from(&look.header_faults);
    let mut holes = Vec::new();
    let mut next = 0;
    if let Some(piece) = piece {
        for (bytes, index) in piece.rchunks_exact(BLOCK_BYTES).zip(0..count) {
            if let Some(case) = parse_listed(disk, spot, bytes, index, &mut scan, &mut holes) {
                return scan_whole(disk, spot, look, case);
            }
            next = index + 1;
        }
    }
    // Blocks outside the first piece: very many blocks, or blocks behind a bad sector, which must
    // not hide them.
    while next < count {
        let window = read_window(disk, spot, next, WINDOW_BLOCKS.min(count - next));
        for bytes in window.blocks() {
            match bytes {
                Ok(bytes) => {
                    if let Some(case) = parse_listed(disk, spot, bytes, next, &mut scan, &mut holes)
                    {
                        return scan_whole(disk, spot, look, case);
                    }
                }
                Err(_) if next >= header.blocks => {}
                Err(error) => scan.faults.push(Fault {
                    offset: spot.block_offset(next),
                    structure: Structure::DescriptorBlock,
                    reason: FaultReason::Unreadable(error),
                }),
            }
            next += 1;
        }
    }
    // Its pages end where their blocks state. A header with a lower data end would let new pages
    // overwrite them.
    if scan
        .blocks
        .iter()
        .any(|block| block.header.data_end > header.data_end)
    {
        return scan_whole(disk, spot, look, Case::Unlisted);
    }
    report_holes(spot, header.proven, &holes, &mut scan);
    scan
}

/// Parses one listed block, or the block after the last. Returns another case if the block is of a
/// newer generation, or of this generation and not listed: then records were being added to a
/// sealed segment.
fn parse_listed(
    disk: &dyn Disk,
    spot: &Spot,
    bytes: &[u8],
    index: u32,
    scan: &mut SegmentScan,
    holes: &mut Vec<(u32, Damage)>,
) -> Option<Case> {
    let sequence = scan.sequence;
    let is_listed = index < scan.block_count;
    let block = if is_listed {
        spot.parse_twice(disk, index, sequence, bytes)
    } else {
        spot.parse_block(index, bytes)
    };
    match block {
        Ok(block) if block.header.sequence > sequence => return Some(Case::Newer),
        Ok(block) if block.header.sequence == sequence => {
            if is_behind(&scan.blocks, &block) {
                if is_listed {
                    holes.push((index, Damage::Magic(Structure::DescriptorBlock)));
                }
                return None;
            }
            if !is_listed {
                return Some(Case::Unlisted);
            }
            scan.blocks.push(block);
        }
        _ if !is_listed => {}
        // A block of an older generation where this generation wrote one: the write was lost.
        Ok(_) => holes.push((index, Damage::Magic(Structure::DescriptorBlock))),
        Err(damage) => holes.push((index, damage)),
    }
    None
}

/// Commits grow with the index. A block with a lower commit was added to a sealed segment by an
/// epoch that a crash ended before a header listed the block. The recovery after that crash did not
/// take it in, so it must not count later.
fn is_behind(blocks: &[DescriptorBlock], block: &DescriptorBlock) -> bool {
    let last = blocks.last().map(|last| last.header.commit);
    last.is_some_and(|last| last > block.header.commit)
}

/// Reads the descriptor blocks of a victim's generation, except blocks that recovery did not take
/// in: reclaim would write their records again, and they would count from then on. `spot` is the
/// location of the segment.
pub fn read_descriptors(disk: &dyn Disk, spot: &Spot, victim: &Victim) -> Descriptors {
    let mut read = Descriptors {
        blocks: Vec::with_capacity(victim.blocks as usize),
        some_unreadable: false,
    };
    let mut next = 0;
    while next < victim.blocks {
        let count = WINDOW_BLOCKS.min(victim.blocks - next);
        let window = read_window(disk, spot, next, count);
        for (bytes, index) in window.blocks().zip(next..) {
            let Ok(bytes) = bytes else {
                read.some_unreadable = true;
                continue;
            };
            if let Ok(block) = spot.parse_twice(disk, index, victim.sequence, bytes)
                && block.header.sequence == victim.sequence
                && !is_behind(&read.blocks, &block)
            {
                read.blocks.push(block);
            }
        }
        next += count;
    }
    read
}

/// Reports listed blocks with other bytes than were written. A block above `proven` is no damage: a
/// crash left it, in a segment whose header recovery wrote, or while records were being added after
/// the last block.
fn report_holes(spot: &Spot, proven: Serial, holes: &[(u32, Damage)], scan: &mut SegmentScan) {
    for (index, damage) in holes {
        // Commits grow with the index: the commit of the hole lies between those of its neighbours.
        let behind = scan
            .blocks
            .partition_point(|block| block.header.index <= *index);
        let next = scan.blocks.get(behind);
        let last = scan.blocks.last();
        let is_vouched_for = match (next, last) {
            (Some(next), _) => next.header.commit <= proven,
            (None, Some(last)) => last.header.commit < proven,
            (None, None) => proven > scan.sequence,
        };
        if is_vouched_for {
            scan.faults.push(Fault {
                offset: spot.block_offset(*index),
                structure: Structure::DescriptorBlock,
                reason: FaultReason::Damaged(*damage),
            });
        }
    }
}

/// Reads every place where a descriptor block may be.
fn scan_whole(disk: &dyn Disk, spot: &Spot, look: Look, case: Case) -> SegmentScan {
    let known = look
        .header
        .as_ref()
        .map_or(Serial::ZERO, |header| header.sequence);
    let mut sequence = known.max(look.block.unwrap_or(Serial::ZERO));
    let mut blocks: Vec<DescriptorBlock> = Vec::new();
    let mut unreadable: Vec<Fault> = Vec::new();
    let mut data_end = HEADER_BLOCKS;
    let mut gap = 0;
    let mut next = 0;
    let last = spot.segment_blocks - HEADER_BLOCKS;
    while next < last.min(spot.segment_blocks.saturating_sub(data_end)) && gap < GAP_BLOCKS {
        let count = WINDOW_BLOCKS.min(last - next);
        let window = read_window(disk, spot, next, count);
        for (bytes, index) in window.blocks().zip(next..) {
            let block = match bytes {
                Err(error) => {
                    unreadable.push(Fault {
                        offset: spot.block_offset(index),
                        structure: Structure::DescriptorBlock,
                        reason: FaultReason::Unreadable(error),
                    });
                    continue;
                }
                // Read twice only where a hole begins, and at the end.
                Ok(bytes) if gap == 0 => spot.parse_twice(disk, index, sequence, bytes),
                Ok(bytes) => spot.parse_block(index, bytes),
            };
            match block {
                Ok(block) if block.header.sequence >= sequence || planted!(StaleSequence) => {
                    if block.header.sequence > sequence {
                        // All blocks taken so far belong to an older generation.
                        sequence = block.header.sequence;
                        blocks.clear();
                        data_end = HEADER_BLOCKS;
                    }
                    gap = 0;
                    // Data and descriptors never overlap: a block in the midst of page data is not
                    // of this generation, whatever its header states.
                    let is_in_data = spot.segment_blocks - 1 - index < data_end;
                    if !is_in_data && !is_behind(&blocks, &block) || planted!(StaleSequence) {
                        data_end = data_end.max(block.header.data_end);
                        blocks.push(block);
                    }
                }
                _ if planted!(FirstGapEnds) => {
                    gap = GAP_BLOCKS;
                    break;
                }
                _ => gap += 1,
            }
        }
        next += count;
    }
    let header = look.header.filter(|header| header.sequence == sequence);
    let is_blank = look.header_faults.is_empty() && !look.is_foreign();
    if sequence == Serial::ZERO && unreadable.is_empty() && is_blank {
        return SegmentScan::empty(Case::Blank, None, Serial::ZERO);
    }
    let block_count = blocks.last().map_or(0, |block| block.header.index + 1);
    unreadable.extend(look.header_faults);
    if case == Case::Hidden {
        unreadable.extend(look.block_fault);
    }
    SegmentScan {
        case,
        header,
        sequence,
        blocks,
        block_count,
        data_end,
        faults: unreadable,
        uneven: false,
    }
}

/// Neighbouring blocks, first one first.
pub(crate) enum Window {
    /// Read in one piece, with the last block first.
    Whole(AlignedBuf),
    /// Each read by itself: one bad sector must not hide the others.
    Each(Vec<Result<AlignedBuf, DiskError>>),
}

impl Window {
    pub(crate) fn blocks(&self) -> impl Iterator<Item = Result<&[u8], DiskError>> {
        let (whole, each) = match self {
            Window::Whole(bytes) => (Some(bytes.rchunks_exact(BLOCK_BYTES)), None),
            Window::Each(blocks) => (None, Some(blocks.iter())),
        };
        let whole = whole.into_iter().flatten().map(Ok);
        let each = each.into_iter().flatten();
        whole.chain(each.map(|block| block.as_ref().map(|bytes| &bytes[..]).map_err(|e| *e)))
    }
}

pub(crate) fn read_window(disk: &dyn Disk, spot: &Spot, first: u32, count: u32) -> Window {
    if let Some(Ok(bytes)) = read_all(disk, &[spot.blocks(first, count)]).pop() {
        return Window::Whole(bytes);
    }
    let reads: Vec<ReadAt> = (first..first + count)
        .map(|index| spot.blocks(index, 1))
        .collect();
    Window::Each(read_all(disk, &reads))
}
