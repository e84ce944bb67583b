//! Stores that nobody wrote: any records in any segments, their checksums right.

use larder_engine::format::{
    BLOCK_BYTES, BlockHeader, Body, DescriptorBlock, Fingerprint, HEADER_BLOCKS, KeyPrefix,
    PageKey, PageRecord, RECORDS_PER_BLOCK, Record, Run, SegmentHeader, SegmentNo, SegmentState,
    Serial,
};

use crate::machine::{Image, segment_start};
use crate::memory_disk::Block;
use crate::sample::STORE;

/// A segment to be forged: its descriptor blocks, one body each, commits and births in their order.
#[derive(Clone, Debug)]
pub struct Forged {
    /// The volume and the number there.
    pub place: (u16, u32),
    /// Its life.
    pub sequence: Serial,
    /// What its headers say; `None` leaves them out.
    pub state: Option<SegmentState>,
    /// Where each block says that the page data ends.
    pub data_end: u32,
    /// Commits up to here are called proven by its header.
    pub proven: Serial,
    /// Its blocks.
    pub bodies: Vec<Body>,
}

/// The serial that is the `counter`-th of a run.
///
/// # Panics
/// When there is no such run.
#[must_use]
pub fn serial(run: u32, counter: u64) -> Serial {
    let run = Run::new(run).expect("a run");
    Serial::from_raw(Serial::first_of(run).get() + counter)
}

/// A page of one block, at `start`.
#[must_use]
pub fn page(namespace: Fingerprint, key: PageKey, birth: Serial, start: u32) -> PageRecord {
    PageRecord {
        namespace,
        key,
        parent: None,
        depth: 0,
        birth,
        start,
        blocks: 1,
        checksum: u64::from(start) << 32 | birth.counter(),
    }
}

/// The key of this number: its bytes, little-endian, at both ends.
#[must_use]
pub fn key(number: u64) -> PageKey {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    bytes[24..].copy_from_slice(&number.to_le_bytes());
    PageKey::from_bytes(bytes)
}

/// What descriptors keep of that key.
#[must_use]
pub fn prefix(number: u64) -> KeyPrefix {
    key(number).prefix()
}

/// Records, as many to a block as fit.
#[must_use]
pub fn bodies(records: &[Record]) -> Vec<Body> {
    let blocks = records.chunks(RECORDS_PER_BLOCK);
    blocks.map(|block| Body::Records(block.to_vec())).collect()
}

impl Forged {
    /// A sealed segment of the first volume that holds these blocks, and vouches for them.
    #[must_use]
    pub fn sealed(number: u32, sequence: Serial, data_end: u32, bodies: Vec<Body>) -> Forged {
        Forged {
            place: (0, number),
            sequence,
            state: Some(SegmentState::Sealed),
            data_end,
            proven: Serial::from_raw(sequence.get() + (1 << 30)),
            bodies,
        }
    }

    /// The header, as it is written twice.
    #[must_use]
    pub fn header(&self, state: SegmentState) -> SegmentHeader {
        SegmentHeader {
            store: STORE,
            volume: self.place.0,
            segment: SegmentNo(self.place.1),
            sequence: self.sequence,
            state,
            blocks: u32::try_from(self.bodies.len()).unwrap_or(u32::MAX),
            data_end: self.data_end.max(HEADER_BLOCKS),
            proven: self.proven,
            synced: Serial::ZERO,
        }
    }

    /// Descriptor block `index`. Its commit is so far above the life's beginning that all births given out by [`serial`]
    /// for the same run lie below it.
    #[must_use]
    pub fn block(&self, index: usize) -> Block {
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        self.block_of(index, self.bodies[index as usize].clone())
    }

    /// A descriptor block of this body in that place.
    #[must_use]
    pub fn block_of(&self, index: u32, body: Body) -> Block {
        let block = DescriptorBlock {
            header: BlockHeader {
                store: STORE,
                volume: self.place.0,
                segment: SegmentNo(self.place.1),
                sequence: self.sequence,
                index,
                commit: Serial::from_raw(self.sequence.get() + (1 << 29) + u64::from(index)),
                data_end: self.data_end,
                synced: Serial::ZERO,
            },
            body,
        };
        let mut bytes = [0; BLOCK_BYTES];
        block.encode(&mut bytes);
        bytes
    }

    /// Writes it into an image.
    pub fn put(&self, image: &mut Image) {
        let segment_blocks = image.segment_blocks();
        let first = segment_start(segment_blocks, self.place.1);
        let volume = &mut image.volumes[usize::from(self.place.0)];
        if let Some(state) = self.state {
            let mut block = [0; BLOCK_BYTES];
            self.header(state).encode(&mut block);
            volume.put(first, block);
            volume.put(first + 1, block);
        }
        for index in 0..self.bodies.len() {
            let at = first + u64::from(segment_blocks) - 1 - index as u64;
            volume.put(at, self.block(index));
        }
    }
}
