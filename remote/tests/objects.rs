//! Objects: what was written is read, damage costs its page, and a forgery is never taken.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use larder_format::{
    ArchiveId, ArchiveItem, ArchiveReader, ArchiveWriter, BLOCK_BYTES, PageChecksum, PageKey,
    StoreId,
};
use larder_remote::run::{PageFault, RunFault, object_bytes, open, pages_of_run};
use larder_remote::{Buffer, Draft, Keyring, RunName, Trust};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;

/// Byte offset of the payload of a page of an object with one group.
fn payload_at(page: usize) -> usize {
    (3 + 3 * page) * BLOCK_BYTES
}

#[test]
fn names_have_one_spelling() {
    let last = chain(1, 1)[0];
    let name = RunName {
        namespace: namespace("model").fingerprint(),
        last,
    };
    let text = name.to_string();
    assert_eq!(text.parse(), Ok(name));
    for wrong in [
        text.to_uppercase(),
        text.replace("v1/", "v2/"),
        text.replace(".run", ""),
        format!("{text}/"),
        text.replace("/", "//"),
    ] {
        assert!(wrong.parse::<RunName>().is_err(), "{wrong}");
    }
}

#[test]
fn a_run_has_at_least_a_page_and_else_so_many_tokens() {
    let namespace = namespace("model");
    let pages = [(512, 32), (16, 1), (8, 1), (0, 1)];
    for (tokens, expected) in pages {
        assert_eq!(pages_of_run(&namespace, tokens).get(), expected);
    }
}

#[test]
fn two_nodes_make_the_same_name_and_an_object_of_the_stated_length() {
    let namespace = namespace("model");
    let run = run_of(&chain(1, 8), 1, 4);
    let (name, sealed) = object(&namespace, &run, &trust(1));
    let (again, _) = object(&namespace, &run, &trust(2));
    assert_eq!(name, again);
    assert_eq!(sealed.len(), object_bytes(&namespace, 4));
}

#[test]
fn used_memory_leaves_nothing_in_an_object() {
    // Longer than the objects of other tests of this process.
    const PAGES: usize = 400;
    let (namespace, run) = (namespace("model"), run_of(&chain(1, PAGES), 0, PAGES));
    let (_, expected) = object(&namespace, &run, &trust(1));
    let mut used = Buffer::of(object_bytes(&namespace, PAGES)).unwrap();
    used.fill(0xee);
    let place = used.as_ptr();
    drop(used);
    let mut draft = Draft::new(namespace.clone(), run.clone(), trust(1)).unwrap();
    for (memory, page) in draft.payloads().into_iter().zip(&run) {
        let payload = payload(&page.key);
        // The parts, without their padding.
        for part in [0..5000, 8192..8492] {
            memory[part.clone()].copy_from_slice(&payload[part]);
        }
    }
    let made = draft.finish(StoreId::from_bytes([7; 16]), 1).unwrap();
    assert_eq!(made.as_ptr(), place);
    assert!(*made == *expected);
}

#[test]
fn a_flipped_byte_costs_at_most_its_page() {
    let run = run_of(&chain(1, 4), 0, 4);
    let (name, whole) = object(&namespace("model"), &run, &trust(1));
    let all: Vec<PageKey> = run.iter().map(|page| page.key).collect();
    for at in (0..whole.len()).step_by(61) {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x10;
        let opened = open(&damaged, &name, &trust(1));
        let page = (0..4).find(|page| (payload_at(*page)..payload_at(page + 1)).contains(&at));
        if let Some(page) = page {
            let mut others = all.clone();
            others.remove(page);
            assert_eq!(taken(&opened), others, "byte {at}");
            assert_eq!(opened.pages[page].payload, Err(PageFault::Checksum));
            assert_eq!(opened.fault, None);
        } else {
            // Zeros behind the seals mean nothing.
            let is_padding = at >= whole.len() - BLOCK_BYTES + 32 + 5 * 32;
            let is_reserved = (24..32).contains(&(at % BLOCK_BYTES));
            assert!(
                opened.fault.is_some() || is_padding || is_reserved,
                "byte {at}"
            );
            taken(&opened);
        }
    }
}

/// Without the seals of the run no page can be verified.
#[test]
fn a_cut_object_gives_no_page_with_keys_and_whole_pages_without() {
    let run = run_of(&chain(1, 4), 0, 4);
    let (name, whole) = object(&namespace("model"), &run, &trust(1));
    // The last bytes are zeros behind the seals.
    for cut in (0..whole.len() - BLOCK_BYTES).step_by(977) {
        let opened = open(&whole[..cut], &name, &trust(1));
        assert_eq!(opened.fault, Some(RunFault::CutOff));
        assert!(opened.pages.is_empty());
        let opened = open(&whole[..cut], &name, &Trust::Unsigned);
        let before = (0..4).take_while(|page| payload_at(page + 1) <= cut);
        let before = before.count();
        // A head states more pages than so short an object can have.
        assert!([0, before].contains(&taken(&opened).len()), "cut at {cut}");
    }
}

#[test]
fn whatever_follows_the_end_is_found() {
    let run = run_of(&chain(1, 2), 0, 2);
    let (name, mut whole) = object(&namespace("model"), &run, &trust(1));
    whole.push(0);
    assert_eq!(
        open(&whole, &name, &trust(1)).fault,
        Some(RunFault::Surplus)
    );
}

#[test]
fn keys_are_rotated_with_two_of_them() {
    let run = run_of(&chain(1, 2), 0, 2);
    let (name, old) = object(&namespace("model"), &run, &trust(1));
    let rotating = Trust::Sealed(Keyring::new(key(2), Some(key(1))));
    assert_eq!(taken_of(&old, &name, &rotating), 2);
    let (_, new) = object(&namespace("model"), &run, &rotating);
    assert_eq!(taken_of(&new, &name, &trust(2)), 2);
    let fault = open(&old, &name, &trust(2)).fault;
    assert_eq!(fault, Some(RunFault::UnknownKey(key(1).id())));
}

#[test]
fn without_keys_all_checksums_count_and_with_keys_seals_alone() {
    let run = run_of(&chain(1, 2), 0, 2);
    let (name, unsigned) = object(&namespace("model"), &run, &Trust::Unsigned);
    assert_eq!(taken_of(&unsigned, &name, &Trust::Unsigned), 2);
    let opened = open(&unsigned, &name, &trust(1));
    assert_eq!(opened.fault, Some(RunFault::Unsealed));
    assert!(opened.pages.is_empty());
    let (_, sealed) = object(&namespace("model"), &run, &trust(1));
    assert_eq!(taken_of(&sealed, &name, &Trust::Unsigned), 2);
}

#[test]
fn an_object_stands_for_its_own_run_alone() {
    let chain = chain(1, 8);
    let (name, first) = object(&namespace("model"), &run_of(&chain, 0, 4), &trust(1));
    let (other, _) = object(&namespace("model"), &run_of(&chain, 1, 4), &trust(1));
    let (foreign, _) = object(&namespace("other"), &run_of(&chain, 0, 4), &trust(1));
    assert_eq!(taken_of(&first, &name, &trust(1)), 4);
    assert_eq!(taken_of(&first, &other, &trust(1)), 0);
    assert_eq!(taken_of(&first, &foreign, &trust(1)), 0);
}

/// Byte offset of the seal of a page; that of the run stands before the first.
fn seal_at(object: &[u8], page: usize) -> usize {
    object.len() - BLOCK_BYTES + 64 + 32 * page
}

/// Replaces a payload as a writer without the key can: structures and checksums are right.
fn forge(whole: &[u8], name: &RunName, page: usize, payload: &[u8]) -> Vec<u8> {
    let mut forged = whole.to_vec();
    forged[payload_at(page)..payload_at(page + 1)].copy_from_slice(payload);
    let archive = ArchiveId::from_bytes(whole[24..40].try_into().unwrap());
    let (mut reader, mut writer) = (ArchiveReader::new(), ArchiveWriter::new(archive));
    while !reader.is_over() {
        let start = usize::try_from(reader.offset()).unwrap();
        let mut item = reader.item(&whole[start..start + BLOCK_BYTES]).unwrap();
        if let ArchiveItem::Pages(pages) = &mut item {
            let mut checksum = PageChecksum::new(name.namespace, &pages[page].key);
            checksum.blocks(payload);
            pages[page].checksum = checksum.finish();
        }
        let block = writer.item(&item).unwrap();
        forged[start..start + BLOCK_BYTES].copy_from_slice(&*block);
    }
    forged
}

#[test]
fn of_a_thousand_forgeries_with_right_checksums_none_is_taken() {
    let mut random = Pcg64::seed_from_u64(48);
    let run = run_of(&chain(1, 4), 0, 4);
    let (name, whole) = object(&namespace("model"), &run, &trust(1));
    // With the true payload it is the object itself.
    assert_eq!(forge(&whole, &name, 2, &payload(&run[2].key)), whole);
    let foreign = object(&namespace("model"), &run, &trust(9)).1;
    for forgery in 0..1000 {
        let page = random.random_range(0..4_usize);
        let mut bytes = payload(&run[page].key);
        let at = random.random_range(0..bytes.len());
        bytes[at] ^= random.random_range(1..=255_u8);
        let mut forged = forge(&whole, &name, page, &bytes);
        let seal = seal_at(&whole, page);
        match forgery % 5 {
            // The seals of the true bytes.
            0 => {}
            // A seal of the forger's own.
            1 => forged[seal..seal + 32].copy_from_slice(&random.random::<[u8; 32]>()),
            // The seal of another page.
            2 => {
                let other = seal_at(&whole, (page + 1) % 4);
                forged.copy_within(other..other + 32, seal);
            }
            // The forger's own key, under the name of the nodes' key.
            3 => {
                let seals = seal_at(&whole, 0) - 32;
                let (from, to) = (&foreign[seals..], &mut forged[seals..]);
                to.copy_from_slice(from);
            }
            // No seals.
            _ => forged.truncate(whole.len() - BLOCK_BYTES),
        }
        // Anybody takes it who looks at checksums alone.
        let loose = open(&forged, &name, &Trust::Unsigned);
        assert_eq!(loose.fault, None);
        assert!(loose.pages.iter().all(|page| page.payload.is_ok()));
        let opened = open(&forged, &name, &trust(1));
        let forged_page = opened.pages.get(page);
        assert!(forged_page.is_none_or(|page| page.payload == Err(PageFault::Seal)));
        assert_eq!(opened.fault.is_some(), forgery % 5 > 0);
        taken(&opened);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn every_run_is_read_as_it_was_written(
        pages in 1..150_usize,
        run in 0..3_usize,
        is_sealed in any::<bool>(),
    ) {
        let chain = chain(5, 3 * pages);
        let run = run_of(&chain, run, pages);
        let trust = if is_sealed { trust(1) } else { Trust::Unsigned };
        let (name, whole) = object(&namespace("model"), &run, &trust);
        let opened = open(&whole, &name, &trust);
        prop_assert_eq!(opened.fault.as_ref(), None);
        let expected: Vec<PageKey> = run.iter().map(|page| page.key).collect();
        prop_assert_eq!(taken(&opened), expected);
        for (page, opened) in run.iter().zip(&opened.pages) {
            prop_assert_eq!(opened.page.depth, page.depth);
            prop_assert_eq!(opened.page.parent, page.parent.map(|parent| parent.prefix()));
        }
    }

    #[test]
    fn arbitrary_bytes_are_refused_without_harm(
        start in 0..5_usize,
        bytes in prop::collection::vec(any::<u8>(), 0..9000),
    ) {
        let run = run_of(&chain(1, 2), 0, 2);
        let (name, whole) = object(&namespace("model"), &run, &trust(1));
        let mut object = whole[..start * BLOCK_BYTES].to_vec();
        object.extend(bytes);
        let opened = open(&object, &name, &trust(1));
        prop_assert!(opened.fault.is_some());
        taken(&opened);
    }
}
