//! The promises, as a caller sees them. Calls overlap. So a result is wrong only if no order of the
//! overlapping calls explains it.
//!
//! Each attempt to store a page is a *version* with bytes of its own. The counter of moments grows
//! with each begin and each end of a call. A call of a killed process never ends: it may have had
//! its effect, or have it until the end. So may a put or a deletion that returned an error: its
//! message may lie in the socket of an owner that was stopped, which reads it when it goes on.
//!
//! - Bytes that a get returns are those of one version of that page. A version is not returned by a
//!   get that began after a deletion of the page ended, if the version's put had ended before the
//!   deletion began.
//! - A page whose put returned "present" is found by every later call that had an owner all the
//!   time, unless a deletion overlaps with or follows its put.
//! - After a power loss this holds for the pages and deletions that were durable: with the sync
//!   policy "always" when the call ended, else when a flush that began later ended well.
//!
//! A roomy store has room for all versions: no page is evicted, unless writes fail, or an owner
//! gives up a segment because crashes have left no free one and no room for copies. A tight one
//! evicts. Then pages may be missing, but not more of them than pages were evicted. A page that is
//! missing with wrong bytes is lost in either.

use larder_engine::PutStatus;
use larder_engine::format::BLOCK_BYTES;
use larder_sim_runtime::dice::mix;
use larder_sim_runtime::medium::{Block, word_of};

use crate::coded;

/// A moment: the number of the begins and ends of calls before it.
pub type Moment = u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VersionId(pub usize);

#[derive(Debug)]
struct Version {
    name: usize,
    begun: Moment,
    ended: Option<Moment>,
    /// The page is in the store, as the put returned.
    is_present: bool,
    is_durable: bool,
    /// It was not durable at a power loss.
    may_be_lost: bool,
}

#[derive(Debug)]
struct Deletion {
    names: Vec<usize>,
    begun: Moment,
    ended: Option<Moment>,
    is_done: bool,
    is_durable: bool,
    /// It was not durable at a power loss.
    may_be_undone: bool,
}

/// See the module.
#[derive(Debug)]
pub struct Promises {
    salt: u64,
    /// A codec can shrink the contents.
    is_coded: bool,
    moment: Moment,
    versions: Vec<Version>,
    deletions: Vec<Deletion>,
    /// Every put is durable when it returns.
    always: bool,
    /// Pages found missing that were stored before.
    pub missing: u64,
}

impl Promises {
    pub fn new(salt: u64, always: bool, is_coded: bool) -> Promises {
        Promises {
            is_coded,
            missing: 0,
            salt,
            moment: 0,
            versions: Vec::new(),
            deletions: Vec::new(),
            always,
        }
    }

    pub fn next_moment(&mut self) -> Moment {
        self.moment += 1;
        self.moment
    }

    /// The word that block `block` of a version repeats.
    fn word(&self, version: VersionId, block: usize) -> u64 {
        if self.is_coded {
            return coded::word(version.0, block as u32, self.salt);
        }
        let name = (version.0 as u64) << 16 | block as u64;
        name << 24 | mix(self.salt, name) & 0xff_ffff
    }

    pub fn fill(&self, version: VersionId, first: usize, part: &mut [u8]) {
        for (block, bytes) in (first..).zip(part.chunks_exact_mut(BLOCK_BYTES)) {
            let word = self.word(version, block).to_le_bytes();
            bytes
                .chunks_exact_mut(8)
                .for_each(|chunk| chunk.copy_from_slice(&word));
        }
    }

    /// The version that the parts of a page hold.
    fn version_of(&self, parts: &[&[u8]]) -> Option<VersionId> {
        let first = parts.first()?.get(..8)?;
        let word = u64::from_le_bytes(first.try_into().ok()?);
        let version = VersionId(match self.is_coded {
            true => coded::block_of(word).0,
            false => (word >> 40) as usize,
        });
        let blocks = parts.iter().flat_map(|part| part.chunks_exact(BLOCK_BYTES));
        let is_whole = (0..).zip(blocks).all(|(block, bytes)| {
            let word = self.word(version, block).to_le_bytes();
            bytes.chunks_exact(8).all(|chunk| chunk == word)
        });
        (version.0 < self.versions.len() && is_whole).then_some(version)
    }

    /// Whether a block has the bytes of a page that was put.
    pub fn has_block(&self, block: &Block) -> bool {
        let Some(word) = word_of(block) else {
            return false;
        };
        let (version, number) = match self.is_coded {
            true => coded::block_of(word),
            false => ((word >> 40) as usize, (word >> 24 & 0xffff) as u32),
        };
        version < self.versions.len() && self.word(VersionId(version), number as usize) == word
    }

    // ---- puts

    pub fn begin_put(&mut self, name: usize) -> VersionId {
        let begun = self.next_moment();
        self.versions.push(Version {
            name,
            begun,
            ended: None,
            is_present: false,
            is_durable: false,
            may_be_lost: false,
        });
        VersionId(self.versions.len() - 1)
    }

    pub fn end_put(&mut self, version: VersionId, status: PutStatus) {
        let ended = self.next_moment();
        let version = &mut self.versions[version.0];
        version.is_present = status.is_present();
        version.ended = version.is_present.then_some(ended);
        version.is_durable = status.is_present() && self.always;
    }

    // ---- deletions

    pub fn begin_deletion(&mut self, names: Vec<usize>) -> usize {
        let begun = self.next_moment();
        self.deletions.push(Deletion {
            names,
            begun,
            ended: None,
            is_done: false,
            is_durable: false,
            may_be_undone: false,
        });
        self.deletions.len() - 1
    }

    pub fn end_deletion(&mut self, number: usize, is_done: bool) {
        let ended = self.next_moment();
        let deletion = &mut self.deletions[number];
        deletion.is_done = is_done;
        deletion.ended = is_done.then_some(ended);
    }

    /// A deletion that has ended is durable.
    pub fn is_for_good(&mut self, number: usize) {
        self.deletions[number].is_durable = true;
    }

    // ---- durability

    /// A flush that began at this moment has ended well.
    pub fn flushed(&mut self, begun: Moment) {
        let is_before = |ended: Option<Moment>| ended.is_some_and(|ended| ended < begun);
        for version in &mut self.versions {
            version.is_durable |= version.is_present && is_before(version.ended);
        }
        for deletion in &mut self.deletions {
            deletion.is_durable |= deletion.is_done && is_before(deletion.ended);
        }
    }

    pub fn power_lost(&mut self) {
        for version in &mut self.versions {
            version.may_be_lost |= !version.is_durable;
        }
        for deletion in &mut self.deletions {
            deletion.may_be_undone |= !deletion.is_durable;
        }
    }

    // ---- checks

    /// The version that a call which begins at `from` must find, if there is one.
    pub fn awaited(&self, name: usize, from: Moment) -> Option<VersionId> {
        let is_awaited = |version: &Version| {
            let overlaps = |deletion: &Deletion| {
                let ends_late = deletion.ended.is_none_or(|ended| ended > version.begun);
                ends_late && deletion.names.contains(&name)
            };
            version.name == name
                && version.is_present
                && !version.may_be_lost
                && version.ended.is_some_and(|ended| ended < from)
                && !self.deletions.iter().any(overlaps)
        };
        let position = self.versions.iter().rposition(is_awaited);
        position.map(VersionId)
    }

    /// Whether a call that begins at `from` must not find this version.
    fn is_dead(&self, version: VersionId, from: Moment) -> bool {
        let of = &self.versions[version.0];
        self.deletions.iter().any(|deletion| {
            let follows = of.ended.is_some_and(|ended| ended < deletion.begun);
            let is_over = deletion.ended.is_some_and(|ended| ended < from);
            deletion.is_done
                && !deletion.may_be_undone
                && follows
                && is_over
                && deletion.names.contains(&of.name)
        })
    }

    /// Whether no version of the page may be found by a call that begins at `from`.
    pub fn is_absent(&self, name: usize, from: Moment) -> bool {
        let mut own = (0..self.versions.len()).map(VersionId);
        own.all(|version| self.versions[version.0].name != name || self.is_dead(version, from))
    }

    /// A get that began at `from` returned these bytes.
    ///
    /// # Panics
    /// If it may not return them.
    pub fn check_hit(&self, name: usize, from: Moment, parts: &[&[u8]]) {
        let version = self.version_of(parts);
        let version = version.unwrap_or_else(|| {
            let head: Vec<u8> = parts[0][..16].to_vec();
            panic!("page {name} is returned with bytes that were never put: {head:x?}")
        });
        let of = &self.versions[version.0];
        assert!(
            of.name == name,
            "page {name} is returned with the bytes of page {}",
            of.name
        );
        assert!(
            !self.is_dead(version, from),
            "page {name} is returned as {version:?}, which was deleted"
        );
    }

    /// A call that began at `from`, and had an owner all the time, did not find a page. The store
    /// evicts if it `may_evict`.
    ///
    /// # Panics
    /// If it had to find the page.
    pub fn check_miss(&mut self, name: usize, from: Moment, may_evict: bool, why: &str) {
        let Some(version) = self.awaited(name, from) else {
            return;
        };
        assert!(
            may_evict,
            "page {name} is lost: {version:?} was stored, and is missed: {why}"
        );
        self.missing += 1;
        for version in &mut self.versions {
            version.may_be_lost |= version.name == name;
        }
    }
}
