//! The promises made to a script so far, and the check of an image against them.
//!
//! An image is judged once ([`Judge::verdict`]). It is recovered, and its pages are read. An epoch
//! is begun on it and cut short, and it is recovered again, which must give the same pages. The
//! crash decides which promises it must keep: after a kill all acknowledged content, after a power
//! loss all flushed content.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::rc::Rc;
use std::sync::Arc;

use larder_engine::core::Core;
use larder_engine::format::{BLOCK_BYTES, KeyPrefix, OpenState, PageChecksum, Superblock};
use larder_engine::index::{Index, Place};
use larder_engine::recovery::{Recovery, recover};

use super::image::{Image, Platter, Written};
use super::store::{NAMES, Store};

/// A set of page names.
pub type Names = u64;

/// One attempt to store a page.
#[derive(Clone, Copy, Debug, Hash)]
pub struct Version {
    pub name: usize,
    pub checksum: u64,
    /// When its extent was reserved, in operations of the script and their steps.
    pub born: u64,
}

#[derive(Clone, Copy, Debug, Hash)]
pub struct Deletion {
    pub names: Names,
    pub at: u64,
    pub acked: bool,
    pub durable: bool,
}

/// The promises so far.
#[derive(Clone, Debug, Default, Hash)]
pub struct Promises {
    pub versions: Vec<Version>,
    /// Pages that are found and whole: they survive a kill.
    pub present: Names,
    /// The ones among these that survive a power loss.
    pub durable: Names,
    pub deletions: Vec<Deletion>,
}

/// The end of an epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Crash {
    /// The process was killed: all written blocks are present.
    Kill,
    /// The power failed.
    Power,
}

impl Promises {
    pub fn digest(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        self.hash(&mut hasher);
        hasher.finish()
    }

    fn binds(deletion: &Deletion, crash: Crash) -> bool {
        match crash {
            Crash::Kill => deletion.acked,
            Crash::Power => deletion.durable,
        }
    }

    /// Whether the recovered pages keep every promise.
    ///
    /// # Errors
    /// The first broken promise.
    pub fn check(&self, verdict: &Verdict, crash: Crash) -> Result<(), String> {
        let mut whole: Names = 0;
        for page in &verdict.pages {
            let version = self
                .versions
                .iter()
                .find(|version| (version.name, version.checksum) == (page.name, page.checksum))
                .ok_or_else(|| format!("{page:?} was never put"))?;
            let killer = self.deletions.iter().find(|deletion| {
                Promises::binds(deletion, crash)
                    && deletion.names >> page.name & 1 == 1
                    && deletion.at > version.born
            });
            if let Some(deletion) = killer {
                return Err(format!("{page:?} came back after {deletion:?}"));
            }
            if page.whole {
                whole |= 1 << page.name;
            } else if !page.unproven {
                return Err(format!("{page:?} is proven, and is not whole"));
            }
        }
        let owed = match crash {
            Crash::Kill => self.present,
            Crash::Power => self.durable,
        };
        let lost = owed & !whole;
        if lost != 0 {
            return Err(format!("pages {lost:#b} are lost: {:?}", verdict.pages));
        }
        Ok(())
    }

    /// Adapts the promises to the result of a recovery after a crash.
    pub fn end_run(&mut self, verdict: &Verdict, crash: Crash) {
        self.deletions
            .retain(|deletion| Promises::binds(deletion, crash));
        let whole = verdict.pages.iter().filter(|page| page.whole);
        self.present = whole.fold(0, |names, page| names | 1 << page.name);
        self.durable &= self.present;
    }
}

/// A page that recovery found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Page {
    pub name: usize,
    pub checksum: u64,
    pub whole: bool,
    pub unproven: bool,
    place: Place,
}

/// The content of an image.
pub struct Verdict {
    pub pages: Vec<Page>,
}

/// Judges images, each once.
pub struct Judge {
    store: Rc<Store>,
    verdicts: HashMap<(u128, u32, bool), Rc<Verdict>>,
}

impl Judge {
    pub fn new(store: Rc<Store>) -> Judge {
        Judge {
            store,
            verdicts: HashMap::new(),
        }
    }

    /// Images judged so far.
    pub fn judged(&self) -> u64 {
        self.verdicts.len() as u64
    }

    /// The result of recovering an image under this superblock.
    ///
    /// # Errors
    /// A fault that no promise has to exclude: it is always wrong.
    pub fn verdict(
        &mut self,
        platter: &Platter,
        superblock: &Superblock,
    ) -> Result<Rc<Verdict>, String> {
        let clean = superblock.state == OpenState::Clean;
        let digest = platter.image().digest();
        match self.verdicts.entry((digest, superblock.run.get(), clean)) {
            Entry::Occupied(known) => Ok(known.get().clone()),
            Entry::Vacant(place) => {
                let verdict = Rc::new(self.store.judge(platter, superblock)?);
                Ok(place.insert(verdict).clone())
            }
        }
    }
}

impl Store {
    pub fn recover(
        &self,
        platter: &Platter,
        superblock: &Superblock,
        reads: bool,
    ) -> (Arc<Index>, Recovery) {
        let index = Arc::new(self.index());
        let recovery = recover(platter, &[Some(superblock)], &index, reads);
        (index, recovery)
    }

    fn judge(&self, platter: &Platter, superblock: &Superblock) -> Result<Verdict, String> {
        let (index, recovery) = self.recover(platter, superblock, false);
        if !recovery.damage.is_empty() {
            return Err(format!(
                "damage after a crash without faults: {:?}",
                recovery.damage
            ));
        }
        let pages = self.pages(&index, &platter.image())?;
        let (shown, _) = self.recover(platter, superblock, true);
        let shown = self.pages(&shown, &platter.image())?;
        if let Some(page) = shown.iter().find(|page| !page.whole) {
            return Err(format!("a reader sees {page:?}, which is not whole"));
        }
        let next = self.superblock(recovery.recovered.first.run(), OpenState::Open);
        let adopted = adoptions(self, &recovery);
        Core::new(self.config.clone(), recovery.recovered, index).check_invariants()?;
        let before = platter.image().clone();
        for written in &adopted {
            platter.image().put(written);
        }
        let (again, _) = self.recover(platter, &next, false);
        let found = self.pages(&again, &platter.image());
        *platter.image() = before;
        if found? != pages {
            return Err(format!("the second recovery does not find {pages:?}"));
        }
        Ok(Verdict { pages })
    }

    /// The pages of an index, by name.
    fn pages(&self, index: &Index, image: &Image) -> Result<Vec<Page>, String> {
        index.check_invariants()?;
        let mut pages = Vec::new();
        let mut strange = None;
        index.each(|page| match self.name_of(page.key) {
            Some(name) => pages.push(Page {
                name,
                checksum: page.checksum,
                whole: self.checksum_at(name, page.place, image) == page.checksum,
                unproven: page.unproven,
                place: page.place,
            }),
            None => strange = Some(page.key),
        });
        pages.sort_unstable();
        match strange {
            Some(key) => Err(format!("{key} was never put")),
            None => Ok(pages),
        }
    }

    pub fn name_of(&self, key: KeyPrefix) -> Option<usize> {
        (0..NAMES).find(|name| self.keys[*name].prefix() == key)
    }

    /// The checksum of the bytes at a place, under a name.
    pub fn checksum_at(&self, name: usize, place: Place, image: &Image) -> u64 {
        let offset = self.map.extent(place).offset;
        let count = self.page_blocks as usize;
        let sum = || {
            let mut bytes = vec![0; count * BLOCK_BYTES];
            let mut checksum = PageChecksum::new(self.namespace.fingerprint(), &self.keys[name]);
            if image.read(offset, &mut bytes) {
                checksum.blocks(&bytes);
            }
            checksum.finish()
        };
        let mut sums = self.sums.borrow_mut();
        *sums
            .entry((name, image.print(offset, count)))
            .or_insert_with(sum)
    }
}

/// The headers that an open writes because of the result of recovery.
pub fn adoptions(store: &Store, recovery: &Recovery) -> Vec<Written> {
    let mut written = Vec::new();
    for (_, header) in &recovery.adoptions {
        let mut bytes = [0; 2 * BLOCK_BYTES];
        for copy in bytes.as_chunks_mut::<BLOCK_BYTES>().0 {
            header.encode(copy);
        }
        written.extend(Written::blocks(
            store.segment_offset(header.segment.0),
            &bytes,
        ));
    }
    written
}
