//! The checks of the metadata that the core writes: it is true, and commits that it reports as
//! synced are durable.

use std::collections::BTreeMap;

use larder_core::index::{Index, Place, SegmentId};
use larder_engine::format::{
    BlockAddress, Body, DescriptorBlock, HEADER_BLOCKS, PROBE_OFFSET, Record, SEGMENTS_OFFSET,
    SegmentAddress, SegmentHeader, SegmentNo, SegmentState, Serial,
};
use larder_sim_runtime::medium::Content;

use crate::classes::Class;
use crate::oracle::{Name, VersionId};
use crate::setup::BLOCK;
use crate::world::{Described, Epoch, World};

impl World {
    /// Checks a metadata write before it starts: its content must be true. For headers, returns the
    /// segment state that they state.
    pub fn inspect(
        &mut self,
        live: &mut Epoch,
        volume: usize,
        start: usize,
        blocks: &[Content],
    ) -> Option<SegmentState> {
        if blocks.iter().all(is_zero) {
            self.inspect_probe(live, volume, start, blocks.len());
            return None;
        }
        let (segment, number, within) = self.locate_block(volume, start);
        let is_header = within < HEADER_BLOCKS;
        let mut state = None;
        for (content, at) in blocks.iter().zip(start..) {
            let Content::Bytes(bytes) = content else {
                panic!("a metadata write without metadata");
            };
            let (_, _, within) = self.locate_block(volume, at);
            if is_header {
                let header = SegmentHeader::check(&bytes[..])
                    .and_then(|header| {
                        header.at(&SegmentAddress {
                            store: self.store,
                            volume: volume as u16,
                            segment: SegmentNo(number),
                            segment_blocks: self.setup.segment_blocks,
                        })
                    })
                    .expect("a header that readers reject");
                self.inspect_header(live, segment, &header);
                state = Some(header.state);
            } else {
                let index = self.setup.segment_blocks - 1 - within;
                let block = self
                    .spot(volume, number)
                    .parse_block(index, &bytes[..])
                    .expect("a descriptor block that readers reject");
                self.inspect_block(live, segment, (volume, at), content, &block);
            }
        }
        state
    }

    /// A probe writes to data blocks of a durably free segment, or before the first segment.
    fn inspect_probe(&mut self, live: &Epoch, volume: usize, start: usize, count: usize) {
        if start < SEGMENTS_OFFSET as usize / BLOCK {
            assert!(start == PROBE_OFFSET as usize / BLOCK && count == 1);
            return;
        }
        let (segment, _, within) = self.locate_block(volume, start);
        assert!(
            within >= HEADER_BLOCKS,
            "a probe of {segment:?} destroys its header"
        );
        assert!(within as usize + count <= self.setup.segment_blocks as usize);
        self.check_is_free(segment, "is probed");
        let pins = live.pins.get(&segment).copied().unwrap_or(0);
        assert!(pins == 0, "{segment:?} is probed under {pins} readers");
    }

    fn inspect_header(&mut self, live: &mut Epoch, segment: SegmentId, header: &SegmentHeader) {
        self.note(header.sequence.get(), || {
            format!(
                "header of {segment:?}: {:?} {} blocks {} proven {} synced {}",
                header.state, header.sequence, header.blocks, header.proven, header.synced
            )
        });
        if matches!(header.state, SegmentState::Open | SegmentState::Free) {
            let pins = live.pins.get(&segment).copied().unwrap_or(0);
            assert!(pins == 0, "{segment:?} is released under {pins} readers");
        }
        if header.state == SegmentState::Open {
            live.opened.insert(header.sequence);
            self.check_is_free(segment, "is reused");
            self.tainted.remove(&segment);
            self.shaken.remove(&segment);
            for pages in live.described.values_mut() {
                pages.retain(|page| page.place.segment != segment);
            }
        }
        self.check_mark(live, header.synced);
    }

    /// Whether these blocks are the header of a segment that this epoch has opened or recovered.
    pub fn is_header_again(
        &self,
        live: &Epoch,
        volume: usize,
        start: usize,
        first: &Content,
    ) -> bool {
        let Content::Bytes(bytes) = first else {
            return false;
        };
        if start < self.segment_first_block(0) {
            return false;
        }
        let (_, number, within) = self.locate_block(volume, start);
        let [header, _] = self.spot(volume, number).parse_headers(&bytes[..]);
        let begins = |header: &SegmentHeader| {
            let is_first = header.state == SegmentState::Open && header.blocks == 0;
            is_first && !live.opened.contains(&header.sequence)
        };
        within < HEADER_BLOCKS && !header.is_ok_and(|header| begins(&header))
    }

    /// A segment is about to be written to as a free one. It is durably free, unless an earlier
    /// epoch left it with a free header that a failed sync had dropped: reads returned that header,
    /// and this epoch cannot know. Then its old generation may come back with bytes written now.
    fn check_is_free(&mut self, segment: SegmentId, written: &str) {
        if self.is_durably_free(segment) {
            return;
        }
        let is_forgotten = self.forgotten.contains(&segment);
        assert!(
            is_forgotten || self.headless.contains(&segment) || self.torn_inside,
            "{segment:?} {written}, and a power loss would restore its old generation"
        );
        if is_forgotten {
            self.headless.insert(segment);
        }
    }

    /// Whether a segment would be free after a power loss: one header copy states it, or no header
    /// was ever written.
    fn is_durably_free(&self, segment: SegmentId) -> bool {
        let (volume, number) = self.volume_of(segment);
        let first = self.segment_first_block(number);
        let volumes = self.disk.volumes();
        let copies = [first, first + 1].map(|at| volumes[volume].durable(at));
        let says_free = |copy: &&Content| {
            let Content::Bytes(bytes) = copy else {
                return false;
            };
            let header = &self.spot(volume, number).parse_headers(&bytes[..])[0];
            header
                .as_ref()
                .is_ok_and(|header| header.state == SegmentState::Free)
        };
        copies.iter().any(says_free) || copies.iter().all(|copy| **copy == Content::Zero)
    }

    fn inspect_block(
        &mut self,
        live: &mut Epoch,
        segment: SegmentId,
        (volume, at): (usize, usize),
        content: &Content,
        block: &DescriptorBlock,
    ) {
        let header = &block.header;
        self.note(header.commit.get(), || {
            format!(
                "block {} of {segment:?} commit {} synced {} {:?}",
                header.index, header.commit, header.synced, block.body
            )
        });
        self.check_mark(live, header.synced);
        if let Content::Bytes(before) = self.disk.volumes()[volume].visible(at)
            && let Ok(before) = self.check_descriptor(before)
        {
            // A later epoch may overwrite blocks that a crash left behind the last block that
            // recovery found. An empty block may overwrite the rest of a failed write.
            let is_blank = matches!(&block.body, Body::Records(records) if records.is_empty());
            let spot = self.spot(volume, header.segment.0);
            let is_other = before.at(&BlockAddress {
                store: self.store,
                volume: volume as u16,
                segment: header.segment,
                segment_blocks: spot.segment_blocks,
                index: header.index,
            });
            assert!(
                is_other.is_err()
                    || is_other.is_ok_and(|before| {
                        before.header.sequence != header.sequence
                            || before.header.commit.run() < header.commit.run()
                            || is_blank && before.header.commit == header.commit
                    }),
                "a descriptor block is written twice in one generation"
            );
        }
        let Body::Records(records) = &block.body else {
            return;
        };
        for record in records {
            let Record::Page(page) = record else {
                if matches!(record, Record::Evict { birth, .. } if birth.run() == live.run()) {
                    live.evictions.insert(record.birth());
                }
                if self.tainted.contains(&segment) {
                    // No durable header names the generation of this segment: records that are
                    // written behind it are lost.
                    self.spoil_deletion(record);
                }
                self.note_departure(record);
                continue;
            };
            let namespace = self.namespace_of(page.namespace);
            let name = self
                .oracle
                .by_key(namespace, page.key.prefix().as_bytes())
                .expect("a page that was never put");
            let version = self
                .oracle
                .find(name, page.checksum)
                .expect("a version that was never written");
            let known = self.oracle.version(version);
            let stored = known.stored_blocks(page.checksum);
            assert_eq!(
                (page.blocks, Some(page.stored)),
                (known.blocks, stored),
                "{version:?} is recorded with another length than its own"
            );
            if page.stored < page.blocks {
                self.tally.count(Class::Encoded);
            }
            let put_time = self.put_times.entry(page.birth).or_insert(page.put_unix_s);
            assert_eq!(
                *put_time, page.put_unix_s,
                "a copy with another time of the put"
            );
            live.described
                .entry(header.commit)
                .or_default()
                .push(Described {
                    name,
                    version,
                    place: Place::of(segment, page),
                    volume,
                    block: at,
                    content: content.clone(),
                });
        }
    }

    /// A page that a record removes may be missing in any later epoch: the record may vanish for a
    /// time and come back. The same record, written again, removes no later version.
    fn note_departure(&mut self, record: &Record) {
        let (Record::Delete { birth, .. }
        | Record::Clear { birth, .. }
        | Record::Evict { birth, .. }) = record
        else {
            return;
        };
        let now = self.clock;
        for name in self.removed_by(record) {
            let last = self.left.entry(name).or_insert((Serial::ZERO, 0));
            if *birth > last.0 {
                *last = (*birth, now);
            }
        }
    }

    /// The pages that a record removes.
    pub fn removed_by(&self, record: &Record) -> Vec<Name> {
        let (fingerprint, prefix) = match record {
            // A failed put is no page that anybody was promised.
            Record::Page(_) | Record::Void { .. } | Record::Pin { .. } => return Vec::new(),
            Record::Delete { namespace, key, .. } => (*namespace, Some(key.prefix())),
            Record::Evict { namespace, key, .. } => (*namespace, Some(*key)),
            Record::Clear { namespace, .. } => (*namespace, None),
        };
        let namespace = self.namespace_of(fingerprint);
        match prefix {
            Some(prefix) => {
                let name = self.oracle.by_key(namespace, prefix.as_bytes());
                name.into_iter().collect()
            }
            None => self.oracle.names_of(namespace),
        }
    }

    /// Commits up to the stated watermark must be durable, as far as the index still knows their
    /// pages there.
    fn check_mark(&mut self, live: &mut Epoch, mark: Serial) {
        if mark <= live.mark || mark.run() != live.run() {
            return;
        }
        let due: Vec<Serial> = live
            .described
            .range(..=mark)
            .map(|(commit, _)| *commit)
            .collect();
        for commit in due {
            for page in live.described.remove(&commit).unwrap_or_default() {
                self.check_synced(live, commit, &page);
            }
        }
        live.mark = mark;
    }

    fn check_synced(&self, live: &Epoch, commit: Serial, page: &Described) {
        let info = self.oracle.name(page.name);
        let slot = live.slots[info.namespace];
        let located = slot.and_then(|slot| live.index.locate(slot, &info.key));
        let version = self.oracle.version(page.version);
        let is_there = located.is_some_and(|found| {
            found.place == page.place && version.has_checksum(found.proof.checksum)
        });
        if !is_there || version.rotten {
            return;
        }
        let (volume, start) = self.address(page.place);
        let volumes = self.disk.volumes();
        let payload: Vec<Content> = (start..start + self.blocks_at(page.version, page.place))
            .map(|at| volumes[volume].durable(at).clone())
            .collect();
        assert!(
            self.oracle.is_payload(page.version, &payload),
            "commit {commit} is reported as synced, but the payload of {:?} at {:?} is not durable",
            page.version,
            page.place
        );
        let is_tainted = self.tainted.contains(&page.place.segment);
        assert!(
            is_tainted || *volumes[page.volume].durable(page.block) == page.content,
            "commit {commit} is reported as synced, but the descriptor of {:?} is not durable",
            page.version
        );
    }

    /// The content of the index, by name.
    pub fn snapshot(
        &self,
        index: &Index,
        namespaces: &[usize],
    ) -> BTreeMap<Name, (VersionId, Place, bool)> {
        let mut pages = Vec::with_capacity(index.len());
        self.each_page(index, namespaces, |name, version, place, unproven| {
            pages.push((name, (version, place, unproven)));
        });
        pages.into_iter().collect()
    }

    /// Passes each page of the index on: its name, version, place, and whether it is unproven.
    /// Everything in the index must have been put.
    pub fn each_page(
        &self,
        index: &Index,
        namespaces: &[usize],
        mut take: impl FnMut(Name, VersionId, Place, bool),
    ) {
        index.each(|page| {
            let namespace = namespaces[usize::from(page.namespace.0)];
            let name = self
                .oracle
                .by_key(namespace, page.key.as_bytes())
                .expect("the index holds a page that was never put");
            let version = self
                .oracle
                .find(name, page.proof.checksum)
                .expect("the index holds a checksum that was never put under this name");
            let stored = self
                .oracle
                .version(version)
                .stored_blocks(page.proof.checksum);
            let length = self.blocks_at(version, page.place) as u32;
            assert_eq!(
                Some(length),
                stored,
                "{version:?} is in the index with another length than its own"
            );
            take(name, version, page.place, page.unproven);
        });
    }

    /// The namespace of each slot.
    pub fn namespaces_by_slot(&self, live: &Epoch) -> Vec<usize> {
        let known = live.slots.iter().enumerate();
        let mut known: Vec<_> = known
            .filter_map(|(namespace, slot)| Some(((*slot)?, namespace)))
            .collect();
        known.sort_unstable();
        known.into_iter().map(|(_, namespace)| namespace).collect()
    }
}

fn is_zero(content: &Content) -> bool {
    match content {
        Content::Zero => true,
        Content::Data(word) => *word == 0,
        Content::Coded(_, bytes) | Content::Bytes(bytes) => bytes.iter().all(|byte| *byte == 0),
    }
}
