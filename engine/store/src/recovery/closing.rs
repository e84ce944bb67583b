//! Compares a store with the closing statements of its last clean close.
//!
//! Without a statement, a segment whose contents have become zeros was never used, and a page
//! behind a header that is lost was cut short by a crash. A statement shows the loss. It counts
//! only while its epoch and its superblock are the newest of its volume.

use larder_base::planted;
use larder_disk::Disk;
use larder_disk::mailbox::{ReadAt, read_all};
use larder_format::{
    BLOCK_BYTES, CLOSING_OFFSET, ClosingStatement, Damage, Holdings, OpenState, Serial, Structure,
    Superblock,
};

use super::fault::{Fault, FaultReason};
use super::gather::SegmentSummary;
use super::scan::{Case, SegmentScan, Spot};

/// The closing statement of a volume.
#[derive(Clone, Debug)]
pub enum Statement {
    /// The volume was not closed in order, or by a release without statements.
    None,
    /// It cannot be used.
    Unusable(Fault),
    /// How much the volume held.
    Holds(Holdings),
}

impl Statement {
    /// The stated holdings, if they are known and cover all segments.
    pub(crate) fn whole(&self) -> Option<&Holdings> {
        match self {
            Statement::Holds(holdings) if holdings.unread == 0 => Some(holdings),
            _ => None,
        }
    }

    /// Pages that the volume held, if that is known.
    pub fn pages(&self) -> Option<u64> {
        self.whole().map(|holdings| holdings.pages)
    }

    /// Whether every page of the volume is proven: a crash has cut none of them short.
    pub fn proves_all(&self) -> bool {
        self.whole().is_some_and(|holdings| holdings.unproven == 0)
    }

    /// Most pages of the volume whose bytes a crash, or a failed write, may have left unfinished.
    pub fn unfinished_max(&self) -> u64 {
        self.whole().map_or(u64::MAX, |holdings| holdings.unproven)
    }
}

/// Reads the statement of each volume of a store that was closed in order.
pub fn read_statements(disk: &dyn Disk, superblocks: &[Option<&Superblock>]) -> Vec<Statement> {
    let mut there = superblocks.iter().flatten();
    let is_clean = there.all(|superblock| superblock.state == OpenState::Clean);
    if !is_clean || planted!(BlindClosing) {
        return vec![Statement::None; superblocks.len()];
    }
    let reads: Vec<ReadAt> = (0..superblocks.len())
        .filter(|volume| superblocks[*volume].is_some())
        .map(|volume| ReadAt {
            volume,
            offset: CLOSING_OFFSET,
            bytes: BLOCK_BYTES,
        })
        .collect();
    let mut blocks = read_all(disk, &reads).into_iter();
    let mut read = |superblock: &Superblock| {
        let decoded = match blocks.next() {
            Some(Ok(block)) => {
                ClosingStatement::decode(&block, superblock.store, superblock.volume)
                    .map_err(FaultReason::Damaged)
            }
            Some(Err(error)) => Err(FaultReason::Unreadable(error)),
            None => return Statement::None,
        };
        match decoded {
            Ok(statement) => {
                let names = (statement.run, statement.generation);
                match names == (superblock.run, superblock.generation) {
                    true => Statement::Holds(statement.holdings),
                    false => Statement::None,
                }
            }
            // A store that was never closed by a release with statements.
            Err(FaultReason::Damaged(Damage::Blank(_))) => Statement::None,
            Err(reason) => Statement::Unusable(fault(reason)),
        }
    };
    superblocks
        .iter()
        .map(|superblock| superblock.map_or(Statement::None, &mut read))
        .collect()
}

fn fault(reason: FaultReason) -> Fault {
    Fault {
        offset: CLOSING_OFFSET,
        structure: Structure::ClosingStatement,
        reason,
    }
}

/// Adds the faults of a segment that only a store closed in order shows: there, no crash has left a
/// generation without its header, or a hole among its blocks.
pub fn judge(spot: &Spot, mut scan: SegmentScan, statement: &Statement) -> SegmentScan {
    if statement.whole().is_none() || scan.is_free() {
        return scan;
    }
    let is_known = |structure: Structure, offset: Option<u64>| {
        let mut faults = scan.faults.iter();
        faults.any(|fault| {
            fault.structure == structure && offset.is_none_or(|offset| fault.offset == offset)
        })
    };
    let mut more = Vec::new();
    if scan.header.is_none() && !is_known(Structure::SegmentHeader, None) {
        more.push(Fault {
            offset: spot.headers().offset,
            structure: Structure::SegmentHeader,
            reason: FaultReason::NoHeader,
        });
    }
    if statement.proves_all() {
        for (index, _) in scan.holes() {
            let offset = spot.block_offset(index);
            if !is_known(Structure::DescriptorBlock, Some(offset)) {
                more.push(Fault {
                    offset,
                    structure: Structure::DescriptorBlock,
                    reason: FaultReason::Damaged(Damage::Magic(Structure::DescriptorBlock)),
                });
            }
        }
    }
    scan.faults.extend(more);
    scan
}

/// The segments of a volume, as they are summed up for the comparison.
#[derive(Clone, Debug, Default)]
pub struct Found {
    used: u32,
    sequences: u128,
    /// Some segment has an unknown generation, or could not be read.
    some_unknown: bool,
}

impl Found {
    pub fn add(&mut self, segment: &SegmentSummary) {
        self.some_unknown |= segment.is_unreadable();
        if matches!(segment.case, Case::Blank | Case::Free) {
            return;
        }
        self.used += 1;
        self.sequences += u128::from(segment.sequence.get());
        self.some_unknown |= segment.sequence == Serial::ZERO;
    }

    /// The difference from the statement, if there is one.
    pub fn compare(&self, statement: &Statement) -> Option<Fault> {
        let stated = match statement {
            Statement::None => return None,
            Statement::Unusable(fault) => return Some(fault.clone()),
            Statement::Holds(stated) => stated,
        };
        let lost = stated.used.saturating_sub(self.used);
        if lost > 0 {
            let used = stated.used;
            return Some(fault(FaultReason::Emptied { lost, used }));
        }
        let is_comparable = stated.unread == 0 && !self.some_unknown;
        let differs = (self.used, self.sequences) != (stated.used, stated.sequences);
        (is_comparable && differs).then(|| fault(FaultReason::OtherGenerations))
    }

    /// The pages that the statement counts and that are not found. Zero where segments cannot be
    /// read: their pages may be there.
    pub fn lost_pages(&self, statement: &Statement, found: u64) -> u64 {
        let is_comparable = !self.some_unknown;
        let stated = statement.whole().filter(|_| is_comparable);
        stated.map_or(0, |stated| stated.pages.saturating_sub(found))
    }
}
