//! The promises of the store: every version of every page that was ever written, every deletion,
//! and which of them must have survived which events.
//!
//! Each attempt to store a page is a *version* with its own bytes. So bytes of an older attempt, of
//! another page or of a deleted page are recognised. Versions and deletions are ordered by the
//! moment of their reservation. The store's own version numbers have the same order.

use std::collections::BTreeMap;
use std::sync::Arc;

use larder_core::index::SegmentId;
use larder_engine::format::{Namespace, PageChecksum, PageKey, Proof};
use larder_sim_runtime::dice::mix;
use larder_sim_runtime::medium::{Block, Content, word_of};

use crate::coded::{self, Coded};
use crate::setup::{BLOCK, Setup};

/// Bits of the checksum of an encrypted page that an index leaves out.
const SEALED_CHECKSUM_REST: u32 = u64::BITS - Proof::SEALED_CHECKSUM_BITS;

/// A page's name: its position in the list of all names.
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
    /// The moment of its reservation, or one after it and before its publication. `u64::MAX` while
    /// nothing of it was written.
    pub reserved_at: u64,
    /// A moment before its reservation.
    pub begun_at: u64,
    checksum: u64,
    pub blocks: u32,
    /// Its form by the codec, if that is smaller. The store may keep either form.
    coded: Option<Coded>,
    /// Its encrypted forms: one for each try of its put.
    sealed: Vec<Coded>,
    /// Must survive a power loss as long as it is in the index.
    pub durable: bool,
    /// The version that must survive in place of this one: an older version of the page, in this
    /// segment, which this version replaced in the index.
    pub in_place_of: Option<(VersionId, SegmentId)>,
    /// A failed sync dropped part of it after its last proof of durability: the volume, and the
    /// number of good syncs of that volume before.
    pub dropped: Option<(usize, u64)>,
    /// The device refused a write of it or of a copy.
    pub refused: bool,
    /// The device spoiled a copy of it.
    pub rotten: bool,
    /// Bytes of it were changed under the same checksum.
    pub forged: bool,
    /// A crash cut its write short.
    pub torn: bool,
}

#[derive(Clone, Debug)]
struct Deletion {
    request: u64,
    at: u64,
    /// The pages have left the index for certain.
    happened: bool,
    acked: bool,
    /// The moment of the acknowledgement.
    acked_at: u64,
    durable: bool,
    dropped: bool,
    /// The device spoiled a block that recorded the deletion: it may be undone.
    spoiled: bool,
}

impl Version {
    /// Whether this is the checksum of one of its forms.
    pub fn has_checksum(&self, checksum: u64) -> bool {
        self.stored_blocks(checksum).is_some()
    }

    /// The blocks of the form with this checksum.
    pub fn stored_blocks(&self, checksum: u64) -> Option<u32> {
        // An index keeps a part of the checksum of an encrypted page.
        let is_it = |form: &&Coded| (form.checksum ^ checksum) << SEALED_CHECKSUM_REST == 0;
        if let Some(sealed) = self.sealed.iter().find(is_it) {
            return Some(sealed.blocks.len() as u32);
        }
        let coded = self.coded.as_ref();
        let coded = coded.filter(|coded| coded.checksum == checksum);
        let plain = (self.checksum == checksum).then_some(self.blocks);
        plain.or_else(|| Some(coded?.blocks.len() as u32))
    }
}

pub struct Oracle {
    salt: u64,
    /// Pages have values that a codec can shrink.
    is_coded: bool,
    /// Pages are stored encrypted.
    is_sealed: bool,
    /// By digest: the blocks of the codec and of the cipher, and the versions that they belong to.
    coded: BTreeMap<u64, VersionId>,
    names: Vec<NameInfo>,
    /// Number of names in one namespace.
    names_each: usize,
    versions: Vec<Version>,
    deletions: Vec<Deletion>,
}

impl Oracle {
    pub fn new(setup: &Setup, salt: u64) -> Oracle {
        let mut names = Vec::new();
        for namespace in 0..setup.namespaces.len() {
            let first = names.len();
            for chain in 0..setup.chains {
                for depth in 0..setup.depth {
                    let at = |chain: usize, depth: usize| Name(first + chain * setup.depth + depth);
                    // Odd chains branch off the chain before them after its second page.
                    let parent = match depth {
                        0 => None,
                        2 if chain % 2 == 1 => Some(at(chain - 1, 1)),
                        depth => Some(at(chain, depth - 1)),
                    };
                    // Every namespace has the same keys: namespaces must not mix.
                    let key = key_of(chain * setup.depth + depth);
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
            is_coded: setup.codec.is_some(),
            is_sealed: setup.sealed,
            coded: BTreeMap::new(),
            names,
            names_each: setup.chains * setup.depth,
            versions: Vec::new(),
            deletions: Vec::new(),
        }
    }

    pub fn names(&self) -> usize {
        self.names.len()
    }

    pub fn name(&self, name: Name) -> &NameInfo {
        &self.names[name.0]
    }

    pub fn names_of(&self, namespace: usize) -> Vec<Name> {
        let first = namespace * self.names_each;
        (first..first + self.names_each).map(Name).collect()
    }

    pub fn by_key(&self, namespace: usize, prefix: &[u8; 12]) -> Option<Name> {
        let [.., a, b, c, d] = *prefix;
        let ordinal = u32::from_le_bytes([a, b, c, d]) as usize;
        let name = Name(namespace * self.names_each + ordinal);
        let is_one =
            ordinal < self.names_each && self.names[name.0].key.prefix().as_bytes() == prefix;
        is_one.then_some(name)
    }

    /// A new attempt to store a page. Writes the bytes of the page to `out`.
    pub fn write(
        &mut self,
        name: Name,
        now: u64,
        namespace: &Namespace,
        out: &mut [u8],
    ) -> VersionId {
        let id = VersionId(self.versions.len());
        let blocks = namespace.shape().page_blocks();
        let mut checksum = PageChecksum::new(namespace.fingerprint(), &self.names[name.0].key);
        for (at, block) in (0..blocks).zip(out.chunks_exact_mut(BLOCK)) {
            self.content(id, at).render(block);
            checksum.blocks(block);
        }
        let coded = self.is_coded.then(|| {
            let checksum = PageChecksum::new(namespace.fingerprint(), &self.names[name.0].key);
            Coded::of(out, checksum)
        });
        let coded = coded.flatten();
        for digest in coded.iter().flat_map(|coded| &coded.blocks) {
            let other = self.coded.insert(*digest, id);
            let is_own = other.is_none_or(|other| other == id);
            assert!(is_own, "two versions with the same encoded block");
        }
        self.versions.push(Version {
            name,
            reserved_at: now,
            begun_at: now,
            checksum: checksum.finish(),
            blocks,
            coded,
            sealed: Vec::new(),
            durable: false,
            in_place_of: None,
            dropped: None,
            refused: false,
            rotten: false,
            forged: false,
            torn: false,
        });
        self.names[name.0].versions.push(id);
        id
    }

    pub fn version(&self, id: VersionId) -> &Version {
        &self.versions[id.0]
    }

    pub fn version_mut(&mut self, id: VersionId) -> &mut Version {
        &mut self.versions[id.0]
    }

    /// The version of a page with this checksum.
    pub fn find(&self, name: Name, checksum: u64) -> Option<VersionId> {
        let versions = self.names[name.0].versions.iter().rev();
        versions
            .copied()
            .find(|version| self.versions[version.0].has_checksum(checksum))
    }

    /// Whether `is` holds for a later version of the same page.
    pub fn has_successor(&self, id: VersionId, is: impl Fn(&Version) -> bool) -> bool {
        let versions = &self.names[self.versions[id.0].name.0].versions;
        let begun = self.versions[id.0].begun_at;
        let is_later =
            |other: &VersionId| *other != id && self.versions[other.0].reserved_at >= begun;
        versions
            .iter()
            .any(|other| is_later(other) && is(&self.versions[other.0]))
    }

    /// Whether some version of a page lost bytes by a fault.
    pub fn has_bad_version(&self, name: Name) -> bool {
        let mut versions = self.names[name.0].versions.iter();
        versions.any(|id| {
            let version = &self.versions[id.0];
            version.rotten || version.dropped.is_some() || version.torn
        })
    }

    /// The version that a block of page data belongs to.
    pub fn owner(&self, block: &Content) -> Option<VersionId> {
        let word = match *block {
            Content::Data(word) => word,
            Content::Coded(digest, _) => return self.coded.get(&digest).copied(),
            Content::Zero | Content::Bytes(_) => return None,
        };
        let (id, at) = match self.is_coded {
            true => coded::block_of(word),
            false => ((word >> 40) as usize, (word >> 24) as u32 & 0xffff),
        };
        let id = VersionId(id);
        (id.0 < self.versions.len() && self.content(id, at) == *block).then_some(id)
    }

    /// The content of one block of memory.
    pub fn content_of(&self, block: &Block) -> Content {
        let content = match word_of(block) {
            Some(0) => return Content::Zero,
            Some(word) => Content::Data(word),
            None if self.is_coded || self.is_sealed => Content::coded(block),
            None => return Content::Bytes(Arc::new(*block)),
        };
        match self.owner(&content) {
            Some(_) => content,
            None => Content::Bytes(Arc::new(*block)),
        }
    }

    /// A block of a version: the version, the block's number, and a word that shows that the block
    /// is whole. It is odd: no block of a page is a block of zeros.
    fn content(&self, id: VersionId, at: u32) -> Content {
        assert!(
            id.0 < 1 << 24 && at < 1 << 16,
            "a run has fewer versions and smaller pages"
        );
        let name = (id.0 as u64) << 16 | u64::from(at);
        if self.is_coded {
            return Content::Data(coded::word(id.0, at, self.salt));
        }
        Content::Data(name << 24 | mix(self.salt, name) & 0xff_ffff | 1)
    }

    /// Whether these blocks are one of the forms of a version.
    pub fn is_payload(&self, id: VersionId, blocks: &[Content]) -> bool {
        let version = &self.versions[id.0];
        if blocks.len() == version.blocks as usize {
            let mut all = (0..).zip(blocks);
            if all.all(|(at, block)| *block == self.content(id, at)) {
                return true;
            }
        }
        let mut forms = version.coded.iter().chain(&version.sealed);
        forms.any(|form| {
            let digests = blocks.iter().map(coded::digest);
            digests.eq(form.blocks.iter().copied().map(Some))
        })
    }

    /// A version is encrypted.
    pub fn sealed(&mut self, id: VersionId, checksum: u64, stored: &[u8]) {
        let form = coded::sealed(checksum, stored);
        self.coded
            .extend(form.blocks.iter().map(|digest| (*digest, id)));
        self.versions[id.0].sealed.push(form);
    }

    /// Whether bytes of some version of a page were changed under the same checksum.
    pub fn has_forged_version(&self, name: Name) -> bool {
        let mut versions = self.names[name.0].versions.iter();
        versions.any(|id| self.versions[id.0].forged)
    }

    /// An encrypted block with wrong bytes, under the same checksum.
    pub fn forge(&mut self, block: &Content) -> Option<(VersionId, Content)> {
        let id = self.owner(block)?;
        let Content::Coded(_, bytes) = block else {
            return None;
        };
        let wrong = coded::forged(bytes);
        self.coded.insert(coded::digest(&wrong)?, id);
        Some((id, wrong))
    }

    /// A block of the codec with wrong bytes, under the same checksum, which no decoder takes.
    pub fn miscode(&mut self, block: &Content) -> Option<(VersionId, Content)> {
        let id = self.owner(block)?;
        let Content::Coded(digest, bytes) = block else {
            return None;
        };
        let version = &self.versions[id.0];
        let at = version
            .coded
            .as_ref()?
            .blocks
            .iter()
            .position(|of| of == digest)?;
        let mut page = vec![0; version.blocks as usize * BLOCK];
        for (at, out) in (0..).zip(page.chunks_exact_mut(BLOCK)) {
            self.content(id, at).render(out);
        }
        let wrong = coded::miscoded(&page, at, bytes)?;
        let Content::Coded(digest, _) = wrong else {
            return None;
        };
        self.coded.insert(digest, id);
        Some((id, wrong))
    }

    // ---- deletions

    pub fn delete(&mut self, names: &[Name], request: u64, now: u64) {
        let at = self.deletions.len();
        self.deletions.push(Deletion {
            request,
            at: now,
            happened: true,
            acked: false,
            acked_at: u64::MAX,
            durable: false,
            dropped: false,
            spoiled: false,
        });
        for name in names {
            self.names[name.0].deletions.push(at);
        }
    }

    /// A deletion begins that takes effect before its acknowledgement, at a moment not known.
    pub fn begin_delete(&mut self, names: &[Name], request: u64, now: u64) {
        self.delete(names, request, now);
        if let Some(deletion) = self.deletions.last_mut() {
            deletion.happened = false;
        }
    }

    /// Such a deletion is acknowledged.
    pub fn end_delete(&mut self, request: u64, durable: bool, now: u64) {
        self.deleted(request, durable);
        let deletions = self.deletions.iter_mut().rev();
        for deletion in deletions.filter(|deletion| deletion.request == request) {
            deletion.happened = true;
            deletion.acked_at = now;
        }
    }

    /// A deletion was acknowledged.
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
        for deletion in self.deletions_of(name) {
            let deletion = &mut self.deletions[deletion];
            deletion.dropped = !deletion.durable;
        }
    }

    /// The device spoiled a block that recorded deletions of this name (of any, when `None`).
    pub fn deletion_spoiled(&mut self, name: Option<Name>) {
        for deletion in self.deletions_of(name) {
            self.deletions[deletion].spoiled = true;
        }
    }

    fn deletions_of(&self, name: Option<Name>) -> Vec<usize> {
        match name {
            Some(name) => self.names[name.0].deletions.clone(),
            None => (0..self.deletions.len()).collect(),
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

    /// Whether a version was deleted and must not be visible.
    pub fn is_dead(&self, id: VersionId) -> bool {
        let version = &self.versions[id.0];
        self.names[version.name.0].deletions.iter().any(|&at| {
            let deletion = &self.deletions[at];
            deletion.happened && !deletion.spoiled && deletion.at > version.reserved_at
        })
    }

    /// Whether the acknowledgement of its deletion came before a moment.
    pub fn was_dead(&self, id: VersionId, moment: u64) -> bool {
        let version = &self.versions[id.0];
        self.names[version.name.0].deletions.iter().any(|&at| {
            let deletion = &self.deletions[at];
            let is_after = deletion.at > version.reserved_at;
            is_after && !deletion.spoiled && deletion.acked_at < moment
        })
    }

    /// The epoch is over: deletions that need not have survived are forgotten.
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
        // The next epoch does not know of the failed sync. Dropped data that was not rewritten is
        // lost, whatever reads return now.
        for version in &mut self.versions {
            version.rotten |= version.dropped.is_some();
        }
    }
}

/// The key of a name. Its prefix ends with the name's position in its namespace.
fn key_of(ordinal: usize) -> PageKey {
    let mut bytes = [0; 32];
    for (at, chunk) in bytes.chunks_exact_mut(8).enumerate() {
        let word = mix(ordinal as u64, at as u64);
        chunk.copy_from_slice(&word.to_le_bytes());
    }
    bytes[8..12].copy_from_slice(&(ordinal as u32).to_le_bytes());
    PageKey::from_bytes(bytes)
}
