//! The calls of all processes of a store, for a recording of them.
//!
//! A process records the traffic through the owner: it takes the calls from a queue here, again and
//! again. Keys leave the owner as numbers: hashed with a salt of the recording, which the owner
//! forgets with it.
//!
//! Nothing waits for a recording. The queue is bounded: a call that finds it full is lost, and
//! counted. Without a recording a call costs one load.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};

use larder_base::ids::ClientId;
use larder_base::runtime::Mutex;
use larder_base::system::processes;
use larder_format::{Fingerprint, PageKey};
use serde::{Deserialize, Serialize};

/// Most pages of the calls that wait in the queue.
const PAGES_MAX: usize = 1 << 19;

/// Most calls that wait in the queue.
const CALLS_MAX: usize = 1 << 16;

/// Most pages of one answer, unless a single call has more.
const TAKEN_MAX: usize = 1 << 17;

/// Bytes of a key that are hashed. A key is a hash itself.
const KEY_BYTES: usize = 16;

/// Bits of a number that stands for a key: JSON has whole numbers up to this size.
const NUMBER_BITS: u32 = 53;

/// The secret of a recording.
pub type Salt = [u8; 32];

/// A kind of call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// It asked which pages are stored.
    Lookup,
    /// It stored pages.
    Put,
    /// It read pages.
    Get,
}

/// A recorded call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    /// Its time, in milliseconds since 1970.
    pub at_ms: u64,
    /// See [`Kind`].
    pub kind: Kind,
    /// The process that made it: a number of the recording's owner, 0 for the owner itself.
    pub process: u32,
    /// The fingerprint of its namespace.
    pub namespace: [u8; 16],
    /// The page before its first one, as far as the call states it.
    pub parent: Option<u64>,
    /// Its pages, in order: each follows the page before it in a chain.
    pub pages: Vec<u64>,
    /// The leading pages that a lookup found, the pages that a get returned, the pages that a put
    /// added.
    pub found: u32,
}

/// Calls of a recording, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Taken {
    /// See [`Call`].
    pub calls: Vec<Call>,
    /// Calls that the queue lost since the answer before, and their pages.
    pub lost_calls: u64,
    /// See `lost_calls`.
    pub lost_pages: u64,
}

/// A call in the queue.
struct Waiting {
    at_ms: u64,
    kind: Kind,
    process: u32,
    namespace: Fingerprint,
    parent: Option<[u8; KEY_BYTES]>,
    pages: Vec<[u8; KEY_BYTES]>,
    found: usize,
}

struct Tape {
    by: ClientId,
    salt: Salt,
    queue: VecDeque<Waiting>,
    pages: usize,
    lost_calls: u64,
    lost_pages: u64,
}

/// A chain of pages in a call.
#[derive(Clone, Copy)]
pub(crate) struct Chain<'a> {
    pub(crate) kind: Kind,
    /// The caller; `None` for the owner.
    pub(crate) by: Option<ClientId>,
    pub(crate) namespace: Fingerprint,
    pub(crate) parent: Option<&'a PageKey>,
    pub(crate) keys: &'a [PageKey],
    pub(crate) found: usize,
}

/// Another process records already.
#[derive(Debug)]
pub(crate) struct Taped;

/// See the module.
#[derive(Default)]
pub(crate) struct Traffic {
    is_recorded: AtomicBool,
    tape: Mutex<Option<Tape>>,
}

impl Traffic {
    /// Whether calls are recorded.
    pub(crate) fn is_recorded(&self) -> bool {
        self.is_recorded.load(Ordering::Relaxed)
    }

    /// Takes note of a call.
    pub(crate) fn note(&self, chain: Chain<'_>) {
        if chain.keys.is_empty() || !self.is_recorded() {
            return;
        }
        let call = Waiting {
            at_ms: (processes::unix_seconds() * 1000.0) as u64,
            kind: chain.kind,
            process: chain.by.map_or(0, |client| client.0),
            namespace: chain.namespace,
            parent: chain.parent.map(short),
            pages: chain.keys.iter().map(short).collect(),
            found: chain.found,
        };
        let mut tape = self.tape.lock();
        if let Some(tape) = tape.as_mut() {
            tape.add(call);
        }
    }

    /// Takes the next calls for this process. Its first question begins the recording.
    pub(crate) fn take(&self, by: ClientId, salt: Salt) -> Result<Taken, Taped> {
        let mut tape = self.tape.lock();
        let own = tape.get_or_insert_with(|| Tape::new(by, salt));
        if own.by != by {
            return Err(Taped);
        }
        let (calls, salt) = (own.take(), own.salt);
        let (lost_calls, lost_pages) = (own.lost_calls, own.lost_pages);
        (own.lost_calls, own.lost_pages) = (0, 0);
        drop(tape);
        self.is_recorded.store(true, Ordering::Relaxed);
        Ok(Taken {
            calls: calls.into_iter().map(|call| call.told(&salt)).collect(),
            lost_calls,
            lost_pages,
        })
    }

    /// A process has gone: its recording ends.
    pub(crate) fn end(&self, by: ClientId) {
        let mut tape = self.tape.lock();
        if tape.as_ref().is_some_and(|tape| tape.by == by) {
            self.is_recorded.store(false, Ordering::Relaxed);
            *tape = None;
        }
    }
}

impl Tape {
    fn new(by: ClientId, salt: Salt) -> Tape {
        Tape {
            by,
            salt,
            queue: VecDeque::new(),
            pages: 0,
            lost_calls: 0,
            lost_pages: 0,
        }
    }

    fn add(&mut self, call: Waiting) {
        let pages = call.pages.len();
        if self.queue.len() >= CALLS_MAX || self.pages + pages > PAGES_MAX {
            self.lost_calls += 1;
            self.lost_pages += pages as u64;
            return;
        }
        self.pages += pages;
        self.queue.push_back(call);
    }

    fn take(&mut self) -> Vec<Waiting> {
        let (mut taken, mut pages) = (Vec::new(), 0);
        while let Some(call) = self.queue.pop_front() {
            pages += call.pages.len();
            self.pages -= call.pages.len();
            taken.push(call);
            if pages >= TAKEN_MAX {
                break;
            }
        }
        taken
    }
}

impl Waiting {
    fn told(self, salt: &Salt) -> Call {
        Call {
            at_ms: self.at_ms,
            kind: self.kind,
            process: self.process,
            namespace: *self.namespace.as_bytes(),
            parent: self.parent.map(|key| number(salt, &key)),
            pages: self.pages.iter().map(|key| number(salt, key)).collect(),
            found: u32::try_from(self.found).unwrap_or(u32::MAX),
        }
    }
}

/// Splits the pages of a put into chains, as far as it was carried out. `added` tells for each such
/// page whether it is new.
pub(crate) fn chains<'a>(
    keys: &'a [PageKey],
    parents: &'a [Option<PageKey>],
    added: &[bool],
    mut each: impl FnMut(&'a [PageKey], usize, Option<&'a PageKey>),
) {
    let count = keys.len().min(parents.len()).min(added.len());
    let mut first = 0;
    for next in 1..=count {
        if next == count || parents[next] != Some(keys[next - 1]) {
            let new = added[first..next].iter().filter(|is_new| **is_new);
            each(&keys[first..next], new.count(), parents[first].as_ref());
            first = next;
        }
    }
}

fn short(key: &PageKey) -> [u8; KEY_BYTES] {
    let mut short = [0; KEY_BYTES];
    short.copy_from_slice(&key.as_bytes()[..KEY_BYTES]);
    short
}

/// The number that stands for a key in a recording.
fn number(salt: &Salt, key: &[u8; KEY_BYTES]) -> u64 {
    let hash = blake3::keyed_hash(salt, key);
    let bytes = hash.as_bytes().first_chunk().copied().unwrap_or_default();
    u64::from_le_bytes(bytes) >> (u64::BITS - NUMBER_BITS)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const ONE: ClientId = ClientId(1);
    const SALT: Salt = [7; 32];

    fn keys(count: u32) -> Vec<PageKey> {
        let key = |at: u32| {
            let mut bytes = [0; 32];
            bytes[..4].copy_from_slice(&at.to_le_bytes());
            PageKey::from_bytes(bytes)
        };
        (0..count).map(key).collect()
    }

    fn note(traffic: &Traffic, keys: &[PageKey]) {
        traffic.note(Chain {
            kind: Kind::Lookup,
            by: None,
            namespace: Fingerprint::from_bytes([3; 16]),
            parent: None,
            keys,
            found: keys.len(),
        });
    }

    #[test]
    fn calls_are_noted_in_order_from_the_first_question_to_the_end_of_its_process() {
        let (traffic, keys) = (Traffic::default(), keys(3));
        note(&traffic, &keys);
        assert_eq!(traffic.take(ONE, SALT).unwrap(), Taken::default());
        note(&traffic, &keys[..1]);
        note(&traffic, &keys);
        assert!(traffic.take(ClientId(2), SALT).is_err());
        let taken = traffic.take(ONE, SALT).unwrap();
        let pages: Vec<_> = taken.calls.iter().map(|call| call.pages.len()).collect();
        assert_eq!(pages, [1, 3]);
        assert_eq!(taken.calls[0].pages[0], taken.calls[1].pages[0]);
        assert!(taken.calls[1].pages.iter().all(|page| *page < 1 << 53));
        traffic.end(ClientId(2));
        assert!(traffic.is_recorded());
        traffic.end(ONE);
        assert!(!traffic.is_recorded());
        // Another recording has other numbers.
        traffic.take(ONE, [8; 32]).unwrap();
        note(&traffic, &keys[..1]);
        let again = traffic.take(ONE, [8; 32]).unwrap();
        assert_ne!(again.calls[0].pages, taken.calls[0].pages);
    }

    #[test]
    fn a_full_queue_loses_calls_and_counts_them() {
        let (traffic, keys) = (Traffic::default(), keys(1000));
        traffic.take(ONE, SALT).unwrap();
        let fits = PAGES_MAX / keys.len();
        for _ in 0..fits + 3 {
            note(&traffic, &keys);
        }
        let mut calls = 0;
        let first = traffic.take(ONE, SALT).unwrap();
        assert_eq!((first.lost_calls, first.lost_pages), (3, 3000));
        let mut taken = first;
        while !taken.calls.is_empty() {
            assert!(taken.calls.len() <= TAKEN_MAX / keys.len() + 1);
            calls += taken.calls.len();
            taken = traffic.take(ONE, SALT).unwrap();
        }
        assert_eq!(calls, fits);
        assert_eq!(taken.lost_calls, 0);
    }
}
