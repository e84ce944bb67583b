//! Objects with encoded pages: what was written is read, damage costs its page, and agents publish
//! and take them.
#![allow(clippy::unwrap_used)]

mod common;

use common::node::{Node, Watched, listed_once};
use common::*;
use larder_engine::CodecChoice;
use larder_format::{BLOCK_BYTES, Namespace, PageKey, PageShape, StoreId};
use larder_remote::run::{Opened, PageFault, open};
use larder_remote::{Draft, RunName, RunPage};
use larder_store::encoder::Encoder;

const PARTS: [u32; 2] = [40_000, 30_000];

fn smooth() -> Namespace {
    let shape = PageShape::new(&PARTS).unwrap();
    Namespace::builder("smooth", "", 16, shape).build().unwrap()
}

/// Values in bf16 with few exponents, with the padding of their parts.
fn content(key: &PageKey) -> Vec<u8> {
    let key = key.as_bytes();
    let mut page = Vec::new();
    for part in PARTS {
        let start = page.len();
        let byte = |at: usize| match at % 2 {
            0 => key[at % 32].wrapping_mul(u8::try_from(at / 32 % 251).unwrap()),
            _ => key[at % 31] & 0x83 | 0x3c,
        };
        page.extend((0..part as usize).map(byte));
        page.resize(start + (part as usize).next_multiple_of(BLOCK_BYTES), 0);
    }
    page
}

/// An object whose pages are encoded, all but those at `plain`.
fn encoded(pages: &[RunPage], plain: &[usize]) -> (RunName, Vec<u8>) {
    let namespace = smooth();
    let encoder = Encoder::of(CodecChoice::Bf16, &namespace).unwrap();
    let mut draft = Draft::new(namespace, pages.to_vec(), trust(1)).unwrap();
    for (at, (memory, page)) in draft.payloads().into_iter().zip(pages).enumerate() {
        match plain.contains(&at) {
            true => memory.copy_from_slice(&noise(memory.len())),
            false => memory.copy_from_slice(&content(&page.key)),
        }
    }
    draft.encode(&encoder);
    let name = draft.name().unwrap();
    let object = draft.finish(StoreId::from_bytes([7; 16]), 1);
    (name, object.unwrap().to_vec())
}

/// Bytes that no codec makes smaller.
fn noise(bytes: usize) -> Vec<u8> {
    let mut hasher = blake3::Hasher::new();
    let mut noise = vec![0; bytes];
    hasher.update(b"noise").finalize_xof().fill(&mut noise);
    noise
}

/// The pages that a node takes. Their bytes must be right.
#[track_caller]
fn taken(opened: &Opened<'_>, plain: &[usize]) -> Vec<usize> {
    let namespace = smooth();
    let mut memory = vec![0xee; content(&chain(1, 1)[0]).len()];
    let mut taken = Vec::new();
    for (at, page) in opened.pages.iter().enumerate() {
        let Ok(bytes) = page.plain(namespace.shape(), &mut memory) else {
            continue;
        };
        match plain.contains(&at) {
            true => assert!(bytes == noise(bytes.len()), "page {at}"),
            false => assert!(bytes == content(&page.page.key), "page {at}"),
        }
        taken.push(at);
    }
    taken
}

#[test]
fn an_object_has_the_shorter_form_of_each_page() {
    // More pages than a group of an archive has.
    const PAGES: usize = 130;
    let pages = run_of(&chain(1, PAGES), 0, PAGES);
    let plain = [0, 3, 64, 129];
    let (name, mut object) = encoded(&pages, &plain);
    let longest = larder_remote::run::object_bytes(&smooth(), PAGES);
    assert!(
        object.len() * 5 < longest * 4,
        "{} of {longest}",
        object.len()
    );
    let opened = open(&mut object, &name, &trust(1));
    assert_eq!(opened.fault, None);
    assert_eq!(taken(&opened, &plain), (0..PAGES).collect::<Vec<_>>());
    for (at, page) in opened.pages.iter().enumerate() {
        assert_eq!(page.page.saved == 0, plain.contains(&at), "page {at}");
    }
    assert_eq!(opened.page_faults().count(), 0);
    // A length tells something of the content: there are few of them.
    let unit = larder_store::encoder::sealed_unit(content(&pages[0].key).len());
    let lengths = opened.pages.iter().map(|page| page.payload.unwrap().len());
    assert!(
        lengths
            .into_iter()
            .all(|length| length.is_multiple_of(unit))
    );
}

#[test]
fn a_flipped_byte_costs_at_most_its_page() {
    let pages = run_of(&chain(1, 4), 0, 4);
    let (name, whole) = encoded(&pages, &[1]);
    for at in (0..whole.len()).step_by(487) {
        let mut damaged = whole.clone();
        damaged[at] ^= 0x10;
        let opened = open(&mut damaged, &name, &trust(1));
        let taken = taken(&opened, &[1]).len();
        let faults = opened.page_faults().count();
        let costs_a_page = taken + faults == 4 && faults <= 1;
        assert!(opened.fault.is_some() || costs_a_page, "byte {at}");
    }
}

#[test]
fn bytes_with_a_right_seal_that_no_codec_made_are_a_fault_of_their_page() {
    let namespace = smooth();
    let pages = run_of(&chain(1, 2), 0, 2);
    let (name, mut whole) = encoded(&pages, &[]);
    let mut opened = open(&mut whole, &name, &trust(1));
    let garbage = vec![0xff; opened.pages[0].payload.unwrap().len()];
    opened.pages[0].payload = Ok(&garbage);
    let mut memory = vec![0; content(&pages[0].key).len()];
    let fault = opened.pages[0].plain(namespace.shape(), &mut memory);
    assert_eq!(fault, Err(PageFault::Undecodable));
    let faults: Vec<_> = opened.page_faults().map(|(page, _)| page.key).collect();
    assert_eq!(faults, [pages[0].key]);
}

#[test]
fn an_agent_publishes_as_the_remote_is_set_and_another_takes_it() {
    let remote = Watched {
        encodes: true,
        ..Watched::default()
    };
    let pages = chain(1, member::RUN_PAGES);
    let node = Node::with(Box::new(remote.clone()), listed_once);
    node.eventually(|| node.count("listings") == 1);
    node.put_of(&smooth(), &pages, content);
    node.eventually(|| node.count("published_runs") == 1);
    let sent = node.count("published_bytes");
    node.close();
    let objects = remote.objects.lock().unwrap().clone();
    let (name, object) = objects.first_key_value().unwrap();
    assert_eq!(object.len() as u64, sent);
    let mut object = object.clone();
    let opened = open(&mut object, name, &trust(1));
    assert!(opened.pages.iter().all(|page| page.page.saved > 0));
    let other = Node::with(Box::new(remote.clone()), listed_once);
    other.eventually(|| other.read_of(&smooth(), &pages, content) == pages.len());
    assert_eq!(other.count("faulty_pages"), 0);
    other.close();
}
