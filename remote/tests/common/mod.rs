//! Runs whose bytes follow from their keys.
#![allow(clippy::unwrap_used, dead_code)]

pub mod member;
pub mod node;
pub mod server;

use std::num::NonZeroUsize;
use std::time::{Duration, Instant};

use larder_format::{Namespace, PageKey, PageShape, StoreId, TokenUnits, page_keys};
use larder_remote::run::{Opened, RunFault, open};
use larder_remote::{Draft, Keyring, RunName, RunNames, RunPage, SealKey, Trust};

/// Pages of two parts with padding: three blocks.
pub fn namespace(model: &str) -> Namespace {
    let shape = PageShape::new(&[5000, 300]).unwrap();
    Namespace::builder(model, "", 16, shape).build().unwrap()
}

pub fn key(fill: u8) -> SealKey {
    SealKey::new(&[fill; 32]).unwrap()
}

pub fn trust(fill: u8) -> Trust {
    Trust::Sealed(Keyring::new(key(fill), None))
}

pub fn chain(seed: u64, pages: usize) -> Vec<PageKey> {
    let tokens: Vec<u64> = (0..pages as u64).map(|page| seed << 24 | page).collect();
    page_keys(&tokens, NonZeroUsize::MIN, None, TokenUnits::Single)
}

/// The pages of run `run` of a chain.
pub fn run_of(chain: &[PageKey], run: usize, pages: usize) -> Vec<RunPage> {
    let page = |at: usize| RunPage {
        key: chain[at],
        parent: at.checked_sub(1).map(|before| chain[before]),
        depth: u32::try_from(at).unwrap(),
    };
    (run * pages..(run + 1) * pages).map(page).collect()
}

/// The payload of a page: its parts without their padding are not zero.
pub fn payload(key: &PageKey) -> Vec<u8> {
    let byte = |at: usize| match at {
        0..5000 | 8192..8492 => key.as_bytes()[at % 32] | 1,
        _ => 0,
    };
    (0..12288).map(byte).collect()
}

/// The object of a run, and its name.
pub fn object(namespace: &Namespace, pages: &[RunPage], trust: &Trust) -> (RunName, Vec<u8>) {
    let mut draft = Draft::new(namespace.clone(), pages.to_vec(), trust.clone()).unwrap();
    for (memory, page) in draft.payloads().into_iter().zip(pages) {
        memory.copy_from_slice(&payload(&page.key));
    }
    let name = draft.name().unwrap();
    let object = draft.finish(StoreId::from_bytes([7; 16]), 1);
    (name, object.unwrap().to_vec())
}

/// Keys of the pages that a node takes from an object. Their bytes must be right.
#[track_caller]
pub fn taken(opened: &Opened<'_>) -> Vec<PageKey> {
    let good = opened.pages.iter().filter(|page| page.payload.is_ok());
    let key = |page: &larder_remote::run::OpenedPage<'_>| {
        assert!(page.payload.unwrap() == payload(&page.page.key));
        page.page.key
    };
    good.map(key).collect()
}

/// The number of pages taken of an object.
#[track_caller]
pub fn taken_of(object: &[u8], name: &RunName, trust: &Trust) -> usize {
    let mut object = object.to_vec();
    taken(&open(&mut object, name, trust)).len()
}

/// Why a node does not take an object, or the rest of it.
pub fn fault_of(object: &[u8], name: &RunName, trust: &Trust) -> Option<RunFault> {
    open(&mut object.to_vec(), name, trust).fault
}

/// The names of the runs of a model, for nodes with the key 1.
pub fn names(model: &str) -> RunNames {
    RunNames::of(&trust(1), namespace(model).fingerprint())
}

/// Longer than any test lasts.
pub const LATE: Duration = Duration::from_mins(10);

pub fn later() -> Instant {
    Instant::now() + LATE
}
