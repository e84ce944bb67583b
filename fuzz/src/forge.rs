//! Forged stores: any records in any segments, with valid checksums.

use larder_engine::format::{
    BLOCK_BYTES, BlockHeader, Body, DescriptorBlock, Fingerprint, HEADER_BLOCKS, KeyPrefix,
    PageKey, PageRecord, RECORDS_PER_BLOCK, Record, Run, SegmentHeader, SegmentNo, SegmentState,
    Serial,
};

use crate::machine::{Image, segment_start};
use crate::memory_disk::Block;
use crate::sample::STORE;

/// A segment to be forged: its descriptor blocks, each with one body. Commits and versions are in
/// order.
#[derive(Clone, Debug)]
pub struct Forged {
    /// The volume and the number there.
    pub place: (u16, u32),
    /// Its generation.
    pub sequence: Serial,
    /// The state in its headers. `None` leaves the headers out.
    pub state: Option<SegmentState>,
    /// The end of page data, as each block states it.
    pub data_end: u32,
    /// Its header states commits up to here as proven.
    pub proven: Serial,
    /// Its blocks.
    pub bodies: Vec<Body>,
}

/// The `counter`-th serial of an epoch.
///
/// # Panics
/// If there is no such epoch.
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
        stored: 1,
        put_unix_s: 0,
        checksum: u64::from(start) << 32 | birth.counter(),
        seal: None,
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

/// The part of that key that descriptors keep.
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
    /// A sealed segment of the first volume with these blocks, all of them proven.
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

    /// The header. Two copies of it are written.
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
            born_ms: 0,
        }
    }

    /// Descriptor block `index`. Its commit is far above the beginning of the generation: all
    /// serials that [`serial`] returns for the same epoch are below it.
    #[must_use]
    pub fn block(&self, index: usize) -> Block {
        let index = u32::try_from(index).unwrap_or(u32::MAX);
        self.block_of(index, self.bodies[index as usize].clone())
    }

    /// A descriptor block with this body, for that index.
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

    /// Writes the segment into an image.
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
