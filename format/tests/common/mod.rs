//! Samples and strategies shared by the tests of this crate.
#![allow(dead_code, reason = "each test binary uses a part of this")]

pub mod keyring;
pub mod quotas;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::num::{NonZeroU16, NonZeroU32};

use larder_format::*;
use proptest::prelude::*;

pub type Block = [u8; BLOCK_BYTES];

const CRC_AT: usize = 16;

pub const SEGMENT_BLOCKS: u32 = 65_536;
pub const STORE: StoreId = StoreId::from_bytes([0x5a; 16]);

/// The block with its CRC recomputed. Models hostile or buggy software that writes whole blocks.
pub fn with_right_crc(mut block: Block) -> Block {
    block[CRC_AT..CRC_AT + 4].fill(0);
    let crc = crc32fast::hash(&block);
    block[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
    block
}

pub fn patched(block: &Block, at: usize, bytes: &[u8]) -> Block {
    let mut block = *block;
    block[at..at + bytes.len()].copy_from_slice(bytes);
    with_right_crc(block)
}

pub fn serial(run: u32, counter: u64) -> Serial {
    let first = Serial::first_of(Run::new(run).unwrap());
    Serial::from_raw(first.get() + counter)
}

pub fn key(fill: u8) -> PageKey {
    PageKey::from_bytes([fill; 32])
}

pub fn namespace() -> Namespace {
    Namespace::new(NamespaceFields {
        model: "Qwen/Qwen3-8B".to_owned(),
        weights: "a1b2c3".to_owned(),
        dtype: "bfloat16".to_owned(),
        layout: "page_first_direct".to_owned(),
        page_tokens: 64,
        shape: PageShape::new(&[4_718_592, 4_718_592]).unwrap(),
        tp: Rank::new(1, 4).unwrap(),
        pp: Rank::ALONE,
        cp: Rank::ALONE,
        pool: "kv".to_owned(),
        extra: BTreeMap::from([
            ("rope".to_owned(), "yarn".to_owned()),
            ("tag".to_owned(), String::new()),
        ]),
    })
    .unwrap()
}

pub fn superblock() -> Superblock {
    let volume = |fill: u8, segments, lost, path: &str| VolumeEntry {
        id: VolumeId::from_bytes([fill; 16]),
        segments,
        lost,
        path: path.to_owned(),
    };
    Superblock {
        store: STORE,
        volume: 2,
        generation: 77,
        run: Run::new(9).unwrap(),
        state: OpenState::Clean,
        created_unix_s: 1_790_000_000,
        holder: Holder {
            pid: 4242,
            pid_scope: [0xb0; 16],
        },
        history: History::default(),
        clock: Clock::default().at(1_790_000_200_500),
        keyring: 0,
        quotas: 0,
        segment_blocks: SEGMENT_BLOCKS,
        features: Features::default(),
        volumes: vec![
            volume(1, 4096, false, "/data/larder.0"),
            volume(2, 4096, true, "/data/larder.1"),
            volume(3, 12, false, ""),
        ],
    }
}

/// The superblock of a store with features.
pub fn featured() -> Superblock {
    Superblock {
        features: Features {
            compatible: 5,
            read_only_compatible: 1 << 40,
            release: Label::new("0.1.0").unwrap(),
            names: Label::new("tree wide").unwrap(),
        },
        ..superblock()
    }
}

pub fn segment_address() -> SegmentAddress {
    SegmentAddress {
        store: STORE,
        volume: 2,
        segment: SegmentNo(11),
        segment_blocks: SEGMENT_BLOCKS,
    }
}

pub fn segment_header() -> SegmentHeader {
    SegmentHeader {
        store: STORE,
        volume: 2,
        segment: SegmentNo(11),
        sequence: serial(9, 1000),
        state: SegmentState::Sealed,
        blocks: 12,
        data_end: 65_000,
        proven: serial(9, 1900),
        synced: serial(9, 2000),
        born_ms: 1_796_000_000_000,
    }
}

pub fn block_address() -> BlockAddress {
    BlockAddress {
        store: STORE,
        volume: 2,
        segment: SegmentNo(11),
        segment_blocks: SEGMENT_BLOCKS,
        index: 3,
    }
}

pub fn block_header() -> BlockHeader {
    BlockHeader {
        store: STORE,
        volume: 2,
        segment: SegmentNo(11),
        sequence: serial(9, 1000),
        index: 3,
        commit: serial(9, 2050),
        data_end: 5000,
        synced: serial(9, 2000),
    }
}

pub fn page_record() -> PageRecord {
    PageRecord {
        namespace: namespace().fingerprint(),
        key: key(0x11),
        parent: Some(key(0x22).prefix()),
        depth: 5,
        birth: serial(9, 2049),
        start: 2,
        blocks: 2304,
        stored: 1731,
        put_unix_s: 1_795_000_000,
        checksum: 0x0123_4567_89ab_cdef,
        seal: None,
    }
}

pub fn records_block() -> DescriptorBlock {
    let namespace = namespace().fingerprint();
    let head = PageRecord {
        parent: None,
        depth: 0,
        birth: serial(3, 70),
        start: 2306,
        stored: 2304,
        key: key(0x33),
        ..page_record()
    };
    DescriptorBlock {
        header: block_header(),
        body: Body::Records(vec![
            Record::Page(page_record()),
            Record::Page(head),
            Record::Delete {
                namespace,
                key: key(0x44),
                birth: serial(9, 2048),
            },
            Record::Clear {
                namespace,
                birth: serial(8, 1),
            },
            Record::Evict {
                namespace,
                key: key(0x55).prefix(),
                birth: serial(9, 2049),
                home: home(),
            },
            Record::Pin {
                namespace,
                key: key(0x77),
                birth: serial(9, 2047),
                until_unix_s: 1_795_003_600,
            },
        ]),
    }
}

pub fn home() -> PageHome {
    PageHome {
        volume: 1,
        segment: SegmentNo(17),
        sequence: serial(4, 12),
    }
}

/// A block with the record of a failed put.
pub fn void_block() -> DescriptorBlock {
    DescriptorBlock {
        header: block_header(),
        body: Body::Records(vec![Record::Void {
            namespace: namespace().fingerprint(),
            key: key(0x66).prefix(),
            birth: serial(9, 2049),
            home: home(),
        }]),
    }
}

pub fn closing_statement() -> ClosingStatement {
    ClosingStatement {
        store: superblock().store,
        volume: 1,
        generation: 23,
        run: Run::new(9).unwrap(),
        holdings: Holdings {
            used: 11,
            unread: 2,
            sequences: (1 << 70) + 5,
            pages: 165,
            unproven: 7,
        },
    }
}

pub fn encode_closing(statement: &ClosingStatement) -> Block {
    let mut block = [0xa5; BLOCK_BYTES];
    statement.encode(&mut block);
    block
}

pub fn decode_closing(block: &[u8]) -> Result<ClosingStatement, Damage> {
    let expected = closing_statement();
    ClosingStatement::decode(block, expected.store, expected.volume)
}

pub fn namespace_block() -> DescriptorBlock {
    DescriptorBlock {
        header: block_header(),
        body: Body::Namespace(namespace()),
    }
}

pub fn encode_header(header: &SegmentHeader) -> Block {
    let mut block = [0xee; BLOCK_BYTES];
    header.encode(&mut block);
    block
}

pub fn encode_block(descriptors: &DescriptorBlock) -> Block {
    let mut block = [0xee; BLOCK_BYTES];
    descriptors.encode(&mut block);
    block
}

pub fn decode_header(block: &[u8]) -> Result<SegmentHeader, Damage> {
    SegmentHeader::check(block)?.at(&segment_address())
}

pub fn decode_block(block: &[u8]) -> Result<DescriptorBlock, Damage> {
    DescriptorBlock::check(block)?.at(&block_address())
}

pub const ARCHIVE: ArchiveId = ArchiveId::from_bytes([0xa1; 16]);

pub fn archived_page(fill: u8) -> ArchivedPage {
    ArchivedPage {
        key: key(fill),
        parent: (fill > 1).then(|| key(fill - 1).prefix()),
        depth: u32::from(fill) - 1,
        checksum: u64::from(fill) << 40,
        saved: 0,
        seal: None,
    }
}

pub fn archive_unnamed(page_blocks: u32) -> ArchiveItem {
    ArchiveItem::Namespace(ArchivedNamespace::Unnamed {
        fingerprint: namespace().fingerprint(),
        page_blocks,
    })
}

pub fn archive_head(pages: u64, blocks: u64) -> ArchiveItem {
    ArchiveItem::Head(ArchiveHead {
        store: STORE,
        created_unix_s: 1_790_000_000,
        pages,
        blocks,
        wrap: None,
    })
}

pub fn archive_end(pages: u64, blocks: u64, left_out: u64) -> ArchiveItem {
    ArchiveItem::End(ArchiveCounts {
        pages,
        blocks,
        left_out,
    })
}

/// Two namespaces, three pages, one left out.
pub fn archive_items() -> Vec<ArchiveItem> {
    let blocks = u64::from(namespace().shape().page_blocks());
    vec![
        archive_head(4, 2 * blocks + 20),
        ArchiveItem::Namespace(ArchivedNamespace::Whole(namespace())),
        ArchiveItem::Pages(vec![archived_page(1), archived_page(2)]),
        archive_unnamed(10),
        ArchiveItem::Pages(vec![archived_page(7)]),
        archive_end(3, 2 * blocks + 10, 1),
    ]
}

/// The structures of an archive, in order, one block each.
pub fn encode_archive(id: ArchiveId, items: &[ArchiveItem]) -> Vec<Block> {
    let mut writer = ArchiveWriter::new(id);
    let blocks = items.iter().map(|item| *writer.item(item).unwrap());
    blocks.collect()
}

fn text(pattern: &'static str) -> impl Strategy<Value = String> {
    proptest::string::string_regex(pattern).unwrap()
}

fn bytes16() -> impl Strategy<Value = [u8; 16]> {
    any::<[u8; 16]>()
}

fn any_key() -> impl Strategy<Value = PageKey> {
    any::<[u8; 32]>().prop_map(PageKey::from_bytes)
}

fn rank() -> impl Strategy<Value = Rank> {
    (1..=64_u32)
        .prop_flat_map(|size| (0..size).prop_map(move |rank| Rank::new(rank, size).unwrap()))
}

pub fn any_shape() -> impl Strategy<Value = PageShape> {
    prop::collection::vec(1..100_000_000_u32, 1..=PARTS_MAX)
        .prop_map(|parts| PageShape::new(&parts).unwrap())
}

pub fn any_namespace() -> impl Strategy<Value = Namespace> {
    let named = "[a-zA-Z0-9/_. -]{1,40}";
    let texts = (
        text(named),
        text("\\PC{0,30}"),
        text(named),
        text(named),
        text("\\PC{0,30}"),
    );
    let extra = prop::collection::btree_map(text("\\PC{1,12}"), text("\\PC{0,24}"), 0..8);
    (
        texts,
        1..=u32::MAX,
        any_shape(),
        (rank(), rank(), rank()),
        extra,
    )
        .prop_map(
            |((model, weights, dtype, layout, pool), page_tokens, shape, (tp, pp, cp), extra)| {
                let fields = NamespaceFields {
                    model,
                    weights,
                    dtype,
                    layout,
                    page_tokens,
                    shape,
                    tp,
                    pp,
                    cp,
                    pool,
                    extra,
                };
                Namespace::new(fields).unwrap()
            },
        )
}

fn features() -> impl Strategy<Value = Features> {
    let text = prop::collection::vec(any::<u8>(), 64);
    (any::<u64>(), any::<u64>(), bytes16(), text).prop_map(
        |(compatible, read_only_compatible, release, names)| Features {
            compatible,
            read_only_compatible,
            release: Label::from_bytes(release),
            names: Label::from_bytes(names.try_into().unwrap()),
        },
    )
}

pub fn any_superblock() -> impl Strategy<Value = Superblock> {
    let entry = (1..=1_000_000_u32, any::<bool>(), text("\\PC{0,50}"));
    let entries = prop::collection::vec(entry, 1..=VOLUMES_MAX);
    let numbers = (
        any::<u64>(),
        1..1_u32 << 24,
        any::<bool>(),
        any::<u64>(),
        any::<u32>(),
    );
    let unclosed = (any::<u64>(), any::<NonZeroU32>());
    let unclosed = unclosed.prop_map(|(opened_unix_s, pid)| Unclosed { opened_unix_s, pid });
    let history = (any::<u64>(), prop::option::of(unclosed));
    let clock = (any::<u64>(), any::<u64>());
    let clock = clock.prop_map(|(store_ms, unix_ms)| Clock { store_ms, unix_ms });
    (
        bytes16(),
        bytes16(),
        numbers,
        (history, clock, any::<[u64; 2]>()),
        4096..=1_u32 << 20,
        features(),
        entries,
        any::<prop::sample::Index>(),
    )
        .prop_map(
            |(
                store,
                pid_scope,
                (generation, run, open, created_unix_s, pid),
                ((opened_unix_s, unclosed), clock, [keyring, quotas]),
                segment_blocks,
                features,
                entries,
                own,
            )| {
                let own = own.index(entries.len());
                let volumes =
                    entries
                        .into_iter()
                        .enumerate()
                        .map(|(place, (segments, lost, path))| VolumeEntry {
                            id: VolumeId::from_bytes([u8::try_from(place).unwrap(); 16]),
                            segments,
                            lost: lost && place != own,
                            path,
                        });
                Superblock {
                    store: StoreId::from_bytes(store),
                    volume: u16::try_from(own).unwrap(),
                    generation,
                    run: Run::new(run).unwrap(),
                    state: if open {
                        OpenState::Open
                    } else {
                        OpenState::Clean
                    },
                    created_unix_s,
                    holder: Holder { pid, pid_scope },
                    history: History {
                        opened_unix_s,
                        unclosed,
                    },
                    clock,
                    keyring,
                    quotas,
                    segment_blocks,
                    features,
                    volumes: volumes.collect(),
                }
            },
        )
}

fn drawn() -> impl Strategy<Value = Serial> {
    (serial(1, 0).get()..).prop_map(Serial::from_raw)
}

pub fn any_segment_header() -> impl Strategy<Value = SegmentHeader> {
    let states = prop_oneof![
        Just(SegmentState::Open),
        Just(SegmentState::Sealed),
        Just(SegmentState::Free)
    ];
    let serials = (drawn(), drawn(), prop_oneof![Just(Serial::ZERO), drawn()]);
    (
        serials,
        states,
        2..SEGMENT_BLOCKS / 2,
        0..SEGMENT_BLOCKS / 2,
    )
        .prop_map(
            |((sequence, proven, synced), state, data_end, blocks)| SegmentHeader {
                sequence,
                state,
                blocks,
                data_end,
                proven,
                synced,
                ..segment_header()
            },
        )
}

fn any_seal() -> impl Strategy<Value = Seal> {
    let bytes = (any::<[u8; 12]>(), any::<[u8; 16]>());
    let seal =
        (any::<NonZeroU16>(), bytes).prop_map(|(slot, (salt, tag))| Seal { slot, salt, tag });
    seal.prop_filter("zeros are none", |seal| {
        (seal.salt, seal.tag) != ([0; 12], [0; 16])
    })
}

fn any_record(header: BlockHeader) -> impl Strategy<Value = Record> {
    let birth = (serial(1, 0).get()..header.commit.get()).prop_map(Serial::from_raw);
    let extent = (2..header.data_end).prop_flat_map(move |start| {
        let stored = 1..=header.data_end - start;
        stored.prop_flat_map(move |stored| (Just(start), stored..1 << 18, Just(stored)))
    });
    let parent = prop::option::of(any_key().prop_map(|key| key.prefix()));
    let namespace = bytes16().prop_map(Fingerprint::from_bytes);
    (
        0..6_u8,
        namespace,
        any_key(),
        parent,
        any::<u32>(),
        birth,
        extent,
        any::<u64>(),
        prop::option::of(any_seal()),
    )
        .prop_map(
            |(kind, namespace, key, parent, depth, birth, extent, checksum, seal)| match kind {
                0 => Record::Page(PageRecord {
                    namespace,
                    key,
                    parent,
                    depth,
                    birth,
                    start: extent.0,
                    blocks: extent.1,
                    stored: extent.2,
                    put_unix_s: depth,
                    checksum,
                    seal,
                }),
                1 => Record::Delete {
                    namespace,
                    key,
                    birth,
                },
                2 => Record::Clear { namespace, birth },
                3 => Record::Evict {
                    namespace,
                    key: key.prefix(),
                    birth,
                    home: any_home(depth, extent.0, checksum),
                },
                4 => Record::Void {
                    namespace,
                    key: key.prefix(),
                    birth,
                    home: any_home(depth, extent.0, checksum),
                },
                _ => Record::Pin {
                    namespace,
                    key,
                    birth,
                    until_unix_s: depth,
                },
            },
        )
}

fn any_home(volume: u32, segment: u32, sequence: u64) -> PageHome {
    PageHome {
        volume: volume as u16,
        segment: SegmentNo(segment),
        sequence: Serial::from_raw(sequence),
    }
}

pub fn any_closing_statement() -> impl Strategy<Value = ClosingStatement> {
    let counts = (
        any::<u32>(),
        any::<u32>(),
        any::<u128>(),
        any::<u64>(),
        any::<u64>(),
    );
    (any::<u64>(), 0..1_u32 << 24, counts).prop_map(
        |(generation, run, (used, unread, sequences, pages, unproven))| ClosingStatement {
            generation,
            run: Run::new(run).unwrap(),
            holdings: Holdings {
                used,
                unread,
                sequences,
                pages,
                unproven,
            },
            ..closing_statement()
        },
    )
}

pub fn any_records_block() -> impl Strategy<Value = DescriptorBlock> {
    let serials =
        (drawn(), drawn(), drawn()).prop_filter_map("three serials differ", |(a, b, c)| {
            let mut all = [a, b, c];
            all.sort_unstable();
            let [sequence, synced, commit] = all;
            (synced < commit).then_some((sequence, synced, commit))
        });
    (serials, 3..SEGMENT_BLOCKS - 4).prop_flat_map(|((sequence, synced, commit), data_end)| {
        let header = BlockHeader {
            sequence,
            synced,
            commit,
            data_end,
            ..block_header()
        };
        prop::collection::vec(any_record(header), 0..=RECORDS_PER_BLOCK).prop_map(move |records| {
            DescriptorBlock {
                header,
                body: Body::Records(records),
            }
        })
    })
}

/// Why a value was refused. Panics with the value if it was accepted.
pub fn refused<T: Debug, E: Debug>(result: Result<T, E>) -> E {
    match result {
        Ok(accepted) => panic!("accepted: {accepted:?}"),
        Err(reason) => reason,
    }
}
