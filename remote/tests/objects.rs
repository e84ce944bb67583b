//! Objects: what was written is read, damage costs its page, and a forgery is never taken.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use larder_format::{BLOCK_BYTES, PageKey, StoreId};
use larder_remote::run::{PageFault, RunFault, object_bytes, open, pages_of_run};
use larder_remote::{Buffer, Draft, Keyring, RunName, RunNames, Trust};
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
    let (again, other) = object(&namespace, &run, &trust(1));
    assert_eq!(name, again);
    assert_eq!(sealed.len(), object_bytes(&namespace, 4));
    // With the same pages, and another key of its own.
    assert_eq!(taken_of(&other, &name, &trust(1)), 4);
    assert_ne!(sealed[payload_at(0)..], other[payload_at(0)..]);
}

/// Who can list a bucket and knows a prompt cannot test whether a node has seen it.
#[test]
fn names_and_objects_show_nothing_without_the_key() {
    let namespace = namespace("a-model-with-its-name");
    let run = run_of(&chain(1, 4), 0, 4);
    let (plain, clear) = object(&namespace, &run, &Trust::Unsigned);
    let last = run[3].key;
    assert_eq!(
        (plain.namespace, plain.last),
        (namespace.fingerprint(), last)
    );
    let (name, sealed) = object(&namespace, &run, &trust(1));
    let (foreign, _) = object(&namespace, &run, &trust(2));
    for other in [plain, foreign] {
        assert_ne!(name.namespace, other.namespace);
        assert_ne!(name.last, other.last);
    }
    // Runs of another namespace have other names, also those with the same keys.
    let names = |model: &str| names(model).name(&last);
    assert_ne!(names("a").last, names("b").last);
    let has = |object: &[u8], needle: &[u8]| object.windows(needle.len()).any(|at| at == needle);
    let mut needles = vec![&b"a-model-with"[..]];
    needles.extend(run.iter().map(|page| &page.key.as_bytes()[..12]));
    let payload = payload(&run[0].key);
    needles.push(&payload[..16]);
    for needle in needles {
        assert!(has(&clear, needle) && !has(&sealed, needle), "{needle:?}");
    }
    assert!(!has(&sealed, namespace.fingerprint().as_bytes()));
}

#[test]
fn used_memory_leaves_nothing_in_an_object() {
    // Longer than the objects of other tests of this process.
    const PAGES: usize = 400;
    let (namespace, run) = (namespace("model"), run_of(&chain(1, PAGES), 0, PAGES));
    let (_, expected) = object(&namespace, &run, &Trust::Unsigned);
    let mut used = Buffer::of(object_bytes(&namespace, PAGES)).unwrap();
    used.fill(0xee);
    let place = used.as_ptr();
    drop(used);
    let mut draft = Draft::new(namespace.clone(), run.clone(), Trust::Unsigned).unwrap();
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
        let opened = open(&mut damaged, &name, &trust(1));
        let page = (0..4).find(|page| (payload_at(*page)..payload_at(page + 1)).contains(&at));
        if let Some(page) = page {
            let mut others = all.clone();
            others.remove(page);
            assert_eq!(taken(&opened), others, "byte {at}");
            assert_eq!(opened.pages[page].payload, Err(PageFault::Checksum));
            assert_eq!(opened.fault, None);
        } else {
            assert!(opened.fault.is_some(), "byte {at}");
            taken(&opened);
        }
    }
}

#[test]
fn a_cut_object_gives_its_whole_pages() {
    let run = run_of(&chain(1, 4), 0, 4);
    for trust in [trust(1), Trust::Unsigned] {
        let (name, whole) = object(&namespace("model"), &run, &trust);
        for cut in (0..whole.len()).step_by(977) {
            let mut object = whole[..cut].to_vec();
            let opened = open(&mut object, &name, &trust);
            assert_eq!(opened.fault, Some(RunFault::CutOff));
            let before = (0..4).take_while(|page| payload_at(page + 1) <= cut);
            let before = before.count();
            // A head states more pages than so short an object can have.
            assert!([0, before].contains(&taken(&opened).len()), "cut at {cut}");
        }
    }
}

#[test]
fn whatever_follows_the_end_is_found() {
    let run = run_of(&chain(1, 2), 0, 2);
    let (name, mut whole) = object(&namespace("model"), &run, &trust(1));
    whole.push(0);
    assert_eq!(fault_of(&whole, &name, &trust(1)), Some(RunFault::Surplus));
}

#[test]
fn keys_are_rotated_with_two_of_them() {
    let run = run_of(&chain(1, 2), 0, 2);
    let (name, old) = object(&namespace("model"), &run, &trust(1));
    let rotating = Trust::Sealed(Keyring::new(key(2), Some(key(1))));
    assert_eq!(taken_of(&old, &name, &rotating), 2);
    let (new_name, new) = object(&namespace("model"), &run, &rotating);
    assert_eq!(taken_of(&new, &new_name, &trust(2)), 2);
    let names = RunNames::of(&rotating, namespace("model").fingerprint());
    let names: Vec<_> = names.all(&run[1].key).collect();
    assert_eq!(names, [new_name, name]);
    let fault = fault_of(&old, &name, &trust(2));
    assert_eq!(fault, Some(RunFault::UnknownKey(key(1).id())));
}

#[test]
fn a_plain_object_is_taken_without_keys_alone_and_an_encrypted_one_with_its_key() {
    let run = run_of(&chain(1, 2), 0, 2);
    let (name, plain) = object(&namespace("model"), &run, &Trust::Unsigned);
    assert_eq!(taken_of(&plain, &name, &Trust::Unsigned), 2);
    let (sealed_name, sealed) = object(&namespace("model"), &run, &trust(1));
    for name in [name, sealed_name] {
        assert_eq!(fault_of(&plain, &name, &trust(1)), Some(RunFault::Unsealed));
        let fault = fault_of(&sealed, &name, &Trust::Unsigned);
        assert_eq!(fault, Some(RunFault::UnknownKey(key(1).id())));
        assert_eq!(taken_of(&plain, &name, &trust(1)), 0);
        assert_eq!(taken_of(&sealed, &name, &Trust::Unsigned), 0);
    }
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

/// A block with a right CRC.
fn with_crc(object: &mut [u8], block: usize) {
    let block = &mut object[block * BLOCK_BYTES..][..BLOCK_BYTES];
    block[16..20].fill(0);
    let crc = crc32fast::hash(block);
    block[16..20].copy_from_slice(&crc.to_le_bytes());
}

#[test]
fn of_a_thousand_forgeries_with_right_checksums_none_is_taken() {
    let mut random = Pcg64::seed_from_u64(48);
    let run = run_of(&chain(1, 4), 0, 4);
    let (name, whole) = object(&namespace("model"), &run, &trust(1));
    let again = object(&namespace("model"), &run, &trust(1)).1;
    let other = object(&namespace("model"), &run_of(&chain(1, 8), 1, 4), &trust(1)).1;
    let plain = object(&namespace("model"), &run, &Trust::Unsigned).1;
    let foreign = object(&namespace("model"), &run, &trust(9)).1;
    let structures = [0, 1, 2, whole.len() / BLOCK_BYTES - 1];
    for forgery in 0..1000 {
        let mut forged = whole.clone();
        let (at, flip) = (
            random.random_range(24..120_usize),
            random.random_range(1..=255_u8),
        );
        let structure = structures[random.random_range(0..4_usize)];
        let page = random.random_range(0..4_usize);
        match forgery % 7 {
            // A structure. Its bytes behind the body have to be zero.
            0 => {
                forged[structure * BLOCK_BYTES + at] ^= flip;
                with_crc(&mut forged, structure);
            }
            // A payload.
            1 => forged[payload_at(page) + at] ^= flip,
            // The payload of another page.
            2 => {
                let from = payload_at((page + 1) % 4);
                forged.copy_within(from..from + 3 * BLOCK_BYTES, payload_at(page));
            }
            // A structure of another object of the run, or of another run.
            3 => {
                let from = if flip > 127 { &again } else { &other };
                let block = structure * BLOCK_BYTES..(structure + 1) * BLOCK_BYTES;
                forged[block.clone()].copy_from_slice(&from[block]);
            }
            // Another run.
            4 => forged.clone_from(&other),
            // The forger's own key, under the name of the nodes' key.
            5 => {
                forged.clone_from(&foreign);
                forged[120..136].copy_from_slice(&whole[120..136]);
                with_crc(&mut forged, 0);
            }
            // No key.
            _ => forged.clone_from(&plain),
        }
        let opened = open(&mut forged, &name, &trust(1));
        let faulty = opened.page_faults().count();
        // All pages that are taken are those of the run.
        let taken = taken(&opened);
        assert!(
            taken
                .iter()
                .all(|key| run.iter().any(|page| page.key == *key))
        );
        match forgery % 7 {
            1 | 2 => assert_eq!((taken.len(), faulty, opened.fault.is_some()), (3, 1, false)),
            _ => assert!(opened.fault.is_some(), "{forgery}, {structure}, {at}"),
        }
        if matches!(forgery % 7, 4..) {
            assert_eq!(taken, []);
        }
    }
}

#[test]
fn a_wrong_payload_is_damage_of_its_page_alone() {
    let run = run_of(&chain(1, 2), 0, 2);
    let (name, whole) = object(&namespace("model"), &run, &trust(1));
    let mut damaged = whole.clone();
    damaged[payload_at(1)] ^= 1;
    let opened = open(&mut damaged, &name, &trust(1));
    assert_eq!(opened.pages[1].payload, Err(PageFault::Checksum));
    assert_eq!(taken(&opened), [run[0].key]);
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
        let (name, mut whole) = object(&namespace("model"), &run, &trust);
        let opened = open(&mut whole, &name, &trust);
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
        let opened = open(&mut object, &name, &trust(1));
        prop_assert!(opened.fault.is_some());
        taken(&opened);
    }
}
