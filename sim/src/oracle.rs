//! What the store promised: every version of every page that was ever written, every deletion, and which of them must have
//! survived what.
//!
//! Each attempt to store a page is a *version* with bytes of its own, so that bytes of an older attempt, of another page or of
//! a deleted one are recognised. Versions and deletions are ordered by the moment of their reservation, as births are.

use std::collections::BTreeMap;

use larder_engine::format::{Namespace, PageChecksum, PageKey};

use crate::dice::mix;
use crate::disk::Content;
use crate::setup::{BLOCK, Setup};

/// A page's name: its place in the list of all names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name(pub usize);

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct VersionId(pub usize);

pub struct NameInfo {
    pub namespace: usize,
    pub key: PageKey,
    pub parent: Option<Name>,
    pub depth: u32,
    versions: Vec<VersionId>,
    deletions: Vec<usize>,
}

#[derive(Clone, Debug)]
pub struct Version {
    pub name: Name,
    pub reserved_at: u64,
    pub checksum: u64,
    pub blocks: u32,
    word: u64,
    /// Must survive a power loss for as long as it is in the index.
    pub durable: bool,
    /// It is this older version of the page that must, this one having taken its place in the index.
    pub in_place_of: Option<VersionId>,
    /// A failed sync dropped part of it after its last proof of durability.
    pub dropped: bool,
    /// The device refused a write of it or of a copy.
    pub refused: bool,
    /// The device spoiled a copy of it.
    pub rotten: bool,
    /// A crash cut its write short.
    pub torn: bool,
}

#[derive(Clone, Debug)]
struct Deletion {
    request: u64,
    at: u64,
    acked: bool,
    durable: bool,
    dropped: bool,
}

pub struct Oracle {
    salt: u64,
    names: Vec<NameInfo>,
    by_key: BTreeMap<(usize, [u8; 12]), Name>,
    versions: Vec<Version>,
    by_checksum: BTreeMap<(Name, u64), VersionId>,
    by_word: BTreeMap<u64, VersionId>,
    deletions: Vec<Deletion>,
    /// The device spoiled metadata: deletions may be undone.
    pub spoiled: bool,
}

impl Oracle {
    pub fn new(setup: &Setup, salt: u64) -> Oracle {
        let mut names = Vec::new();
        let mut by_key = BTreeMap::new();
        for namespace in 0..setup.namespaces.len() {
            let first = names.len();
            for chain in 0..setup.chains {
                for depth in 0..setup.depth {
                    let at = |chain: usize, depth: usize| Name(first + chain * setup.depth + depth);
                    // Odd chains branch off the one before them after its second page.
                    let parent = match depth {
                        0 => None,
                        2 if chain % 2 == 1 => Some(at(chain - 1, 1)),
                        depth => Some(at(chain, depth - 1)),
                    };
                    // The same keys in every namespace: they must not meet.
                    let key = key_of(chain, depth);
                    by_key.insert((namespace, *key.prefix().as_bytes()), at(chain, depth));
                    names.push(NameInfo {
                        namespace,
                        key,
                        parent,
                        depth: depth as u32,
                        versions: Vec::new(),
                        deletions: Vec::new(),
                    });
                }
            }
        }
        Oracle {
            salt,
            names,
            by_key,
            versions: Vec::new(),
            by_checksum: BTreeMap::new(),
            by_word: BTreeMap::new(),
            deletions: Vec::new(),
            spoiled: false,
        }
    }

    pub fn names(&self) -> usize {
        self.names.len()
    }

    pub fn name(&self, name: Name) -> &NameInfo {
        &self.names[name.0]
    }

    pub fn by_key(&self, namespace: usize, prefix: &[u8; 12]) -> Option<Name> {
        self.by_key.get(&(namespace, *prefix)).copied()
    }

    /// A new attempt to store a page.
    pub fn write(&mut self, name: Name, now: u64, namespace: &Namespace) -> VersionId {
        let id = VersionId(self.versions.len());
        let word = mix(self.salt, id.0 as u64);
        let blocks = namespace.shape().page_blocks();
        let mut checksum = PageChecksum::new(namespace.fingerprint(), &self.names[name.0].key);
        let mut bytes = [0; BLOCK];
        for at in 0..blocks {
            let block = content(word, at);
            if let Content::Data(word) = block {
                self.by_word.insert(word, id);
            }
            block.render(&mut bytes);
            checksum.blocks(&bytes);
        }
        let checksum = checksum.finish();
        self.versions.push(Version {
            name,
            reserved_at: now,
            checksum,
            blocks,
            word,
            durable: false,
            in_place_of: None,
            dropped: false,
            refused: false,
            rotten: false,
            torn: false,
        });
        self.names[name.0].versions.push(id);
        self.by_checksum.insert((name, checksum), id);
        id
    }

    pub fn version(&self, id: VersionId) -> &Version {
        &self.versions[id.0]
    }

    pub fn version_mut(&mut self, id: VersionId) -> &mut Version {
        &mut self.versions[id.0]
    }

    pub fn find(&self, name: Name, checksum: u64) -> Option<VersionId> {
        self.by_checksum.get(&(name, checksum)).copied()
    }

    /// The version that a block of page data belongs to.
    pub fn owner(&self, block: &Content) -> Option<VersionId> {
        match block {
            Content::Data(word) => self.by_word.get(word).copied(),
            _ => None,
        }
    }

    pub fn payload(&self, id: VersionId) -> Vec<Content> {
        let version = &self.versions[id.0];
        (0..version.blocks)
            .map(|at| content(version.word, at))
            .collect()
    }

    pub fn is_payload(&self, id: VersionId, blocks: &[Content]) -> bool {
        let version = &self.versions[id.0];
        blocks.len() == version.blocks as usize
            && blocks
                .iter()
                .zip(0..)
                .all(|(block, at)| *block == content(version.word, at))
    }

    // ---- deletions

    pub fn delete(&mut self, names: &[Name], request: u64, now: u64) {
        let at = self.deletions.len();
        self.deletions.push(Deletion {
            request,
            at: now,
            acked: false,
            durable: false,
            dropped: false,
        });
        for name in names {
            self.names[name.0].deletions.push(at);
        }
    }

    /// A deletion has been answered.
    pub fn deleted(&mut self, request: u64, durable: bool) {
        if let Some(deletion) = self
            .deletions
            .iter_mut()
            .rev()
            .find(|d| d.request == request)
        {
            deletion.acked = true;
            deletion.durable |= durable;
        }
    }

    /// Requests of deletions that a flush beginning now must make durable.
    pub fn acked_deletions(&self) -> Vec<u64> {
        let acked = |d: &&Deletion| d.acked && !d.durable;
        self.deletions
            .iter()
            .filter(acked)
            .map(|d| d.request)
            .collect()
    }

    /// A failed sync dropped a block that recorded deletions of this name (of any, when `None`).
    pub fn deletion_dropped(&mut self, name: Option<Name>) {
        match name {
            Some(name) => {
                for &at in &self.names[name.0].deletions {
                    let deletion = &mut self.deletions[at];
                    deletion.dropped = !deletion.durable;
                }
            }
            None => {
                for deletion in &mut self.deletions {
                    deletion.dropped = !deletion.durable;
                }
            }
        }
    }

    pub fn deletions_durable(&mut self, requests: &[u64]) {
        for deletion in &mut self.deletions {
            if requests.contains(&deletion.request) {
                deletion.durable = true;
                deletion.dropped = false;
            }
        }
    }

    /// Whether a version must not be seen any more.
    pub fn is_dead(&self, id: VersionId) -> bool {
        let version = &self.versions[id.0];
        !self.spoiled
            && self.names[version.name.0]
                .deletions
                .iter()
                .any(|&at| self.deletions[at].at > version.reserved_at)
    }

    /// The run is over: deletions that need not have survived are forgotten.
    pub fn end_run(&mut self, power_lost: bool) {
        for name in &mut self.names {
            name.deletions.retain(|&at| {
                let deletion = &self.deletions[at];
                if power_lost {
                    deletion.durable
                } else {
                    deletion.durable || deletion.acked && !deletion.dropped
                }
            });
        }
        // Nobody remembers the failed sync: what it dropped and was not rewritten is lost however it reads now.
        for version in &mut self.versions {
            version.rotten |= version.dropped;
        }
    }
}

fn key_of(chain: usize, depth: usize) -> PageKey {
    let mut bytes = [0; 32];
    for (at, chunk) in bytes.chunks_exact_mut(8).enumerate() {
        let word = mix((chain as u64) << 32 | depth as u64, at as u64);
        chunk.copy_from_slice(&word.to_le_bytes());
    }
    PageKey::from_bytes(bytes)
}

fn content(word: u64, at: u32) -> Content {
    Content::Data(mix(word, u64::from(at)))
}
