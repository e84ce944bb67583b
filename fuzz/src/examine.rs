//! The checks that every image must pass, whatever edits it had. It can be surveyed, opened, read,
//! written and opened again. It never returns bytes that were not put under the requested name.

use std::collections::BTreeMap;

use larder_core::index::NamespaceSlot;
use larder_engine::PutStatus;
use larder_engine::format::PageKey;
use larder_store::recovery::Damage;

use crate::feed::Feed;
use crate::machine::{Image, Machine};
use crate::memory_disk::MemoryDisk;
use crate::sample::{Name, Truth, chain, namespaces, new_pages};

/// Chains put into an image once it is open.
const CHAINS: u64 = 12;

/// The result of an opening and of reading every page.
#[derive(Debug, Default)]
pub struct Found {
    /// Pages that were read and were whole.
    pub hits: Vec<Name>,
    /// The reported damage.
    pub damage: Vec<Damage>,
}

/// Reads an image as a reader beside its owner does.
///
/// # Panics
/// If the index is broken.
pub fn look(image: &Image) {
    let disk = MemoryDisk::new(image.volumes.clone());
    let index = image.index();
    image.recover(&*disk, &index, true);
    if let Err(broken) = index.check_invariants() {
        panic!("{broken}");
    }
}

/// The slots of the samples' namespaces in an open store. `None` if it has too many others.
fn slots(machine: &mut Machine) -> [Option<NamespaceSlot>; 2] {
    let [a, b] = namespaces();
    [machine.namespace(a), machine.namespace(b)]
}

/// Reads every page that was ever put.
///
/// # Panics
/// If bytes are returned that were never put under that name.
pub fn read_all(machine: &mut Machine, truth: &Truth) -> Vec<Name> {
    let slots = slots(machine);
    let mut hits = Vec::new();
    for name in truth.names() {
        let (namespace, key) = name;
        let Some(slot) = slots[namespace] else {
            continue;
        };
        let blocks = namespaces()[namespace].shape().page_blocks();
        if let Some(bytes) = machine.get(slot, &key, blocks) {
            assert!(
                truth.was_put(&name, &bytes),
                "wrong bytes for {key} in namespace {namespace}"
            );
            hits.push(name);
        }
    }
    hits
}

/// Opens an image and reads it all. Returns `None` if no epoch number is left.
#[must_use]
pub fn open_and_read(image: Image, truth: &Truth) -> Option<Found> {
    let (mut machine, damage) = Machine::open(image)?;
    let hits = read_all(&mut machine, truth);
    machine.check();
    Some(Found { hits, damage })
}

/// Opens an image, reads it, works on it as the input describes, and opens it again. Pages that
/// were put and flushed meanwhile must be present.
///
/// # Panics
/// If a promise is broken.
pub fn live_on(image: Image, mut truth: Truth, feed: &mut Feed<'_>) {
    look(&image);
    let Some((mut machine, _)) = Machine::open(image) else {
        return;
    };
    read_all(&mut machine, &truth);
    machine.check();
    let put = work(&mut machine, &mut truth, feed);
    assert!(machine.flush(), "a flush fails without a failed sync");
    let slots = slots(&mut machine);
    let mut promised: Vec<(Name, Vec<u8>)> = Vec::new();
    for (name, bytes) in put {
        let (namespace, key) = name;
        let there = slots[namespace].and_then(|slot| machine.index.locate(slot, &key));
        promised.extend(there.map(|_| (name, bytes)));
    }
    let image = if feed.byte().is_multiple_of(2) {
        machine.close()
    } else {
        machine.kill()
    };
    let Some((mut machine, _)) = Machine::open(image) else {
        return;
    };
    read_all(&mut machine, &truth);
    for ((namespace, key), bytes) in promised {
        let slot = machine.namespace(&namespaces()[namespace]);
        let blocks = namespaces()[namespace].shape().page_blocks();
        let found = slot.and_then(|slot| machine.get(slot, &key, blocks));
        assert!(
            found.as_ref() == Some(&bytes),
            "{key} of namespace {namespace} was put and flushed, and is {}",
            if found.is_some() { "wrong" } else { "lost" }
        );
    }
}

/// Puts, deletes and reclaims. Returns the pages put by it, and their bytes.
fn work(machine: &mut Machine, truth: &mut Truth, feed: &mut Feed<'_>) -> BTreeMap<Name, Vec<u8>> {
    let mut put = BTreeMap::new();
    for round in 0..CHAINS {
        let namespace = feed.below(2);
        let Some(slot) = slots(machine)[namespace] else {
            continue;
        };
        // Some chains of the sample, and some others.
        let seed = if feed.byte() < 128 {
            feed.below(16) as u64
        } else {
            0x0fff + round
        };
        let keys = chain(seed, 1 + feed.below(8));
        match feed.byte() % 8 {
            0 => {
                machine.delete(slot, &keys);
                put.retain(|name: &Name, _| name.0 != namespace || !keys.contains(&name.1));
            }
            1 if feed.byte() < 32 => {
                machine.clear(slot);
                put.retain(|name: &Name, _| name.0 != namespace);
            }
            _ => put_chain(machine, truth, (namespace, slot), &keys, &mut put),
        }
        machine.reclaim();
        machine.check();
    }
    put
}

fn put_chain(
    machine: &mut Machine,
    truth: &mut Truth,
    (namespace, slot): (usize, NamespaceSlot),
    keys: &[PageKey],
    put: &mut BTreeMap<Name, Vec<u8>>,
) {
    let blocks = namespaces()[namespace].shape().page_blocks();
    let pages = new_pages(truth, namespace, keys);
    let statuses = machine.put_patiently(slot, &pages);
    for (page, status) in pages.into_iter().zip(statuses) {
        let name = (namespace, page.key);
        match status {
            PutStatus::Stored => {
                // A later page of the same batch may have evicted it.
                if machine.index.locate(slot, &page.key).is_none() {
                    put.remove(&name);
                    continue;
                }
                let found = machine.get(slot, &page.key, blocks);
                assert!(
                    found.as_ref() == Some(&page.bytes),
                    "a new page returns wrong bytes"
                );
                put.insert(name, page.bytes);
            }
            PutStatus::Duplicate | PutStatus::Refused(_) => {}
            PutStatus::Failed(why) => panic!("a put fails ({why:?}) without a failed write"),
        }
    }
}
