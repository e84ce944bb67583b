//! The promises made to a script so far, and the check of an image against them.
//!
//! An image is judged once ([`Judge::verdict`]). An opening is begun on it and cut short behind its
//! last write, and its pages are read. It is opened again, which must give the same pages. The
//! crash decides which promises it must keep: after a kill all acknowledged content, after a power
//! loss all flushed content.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use larder_core::index::{Index, Place};
use larder_sim_runtime::heap;
use larder_store::recovery::Recovery;
use larder_store::store::LocalStore;

use super::image::{Image, Platter};
use super::store::Store;

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

#[derive(Clone, Copy, Debug, Default, Hash)]
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

    /// Whether a page may have these bytes: without a crash as after a kill.
    ///
    /// # Errors
    /// They were never put, or have been deleted.
    pub fn allow(&self, name: usize, checksum: u64, crash: Crash) -> Result<(), String> {
        let mut versions = self.versions.iter();
        let version = versions
            .find(|version| (version.name, version.checksum) == (name, checksum))
            .ok_or_else(|| format!("page {name} was never put with sum {checksum}"))?;
        let kills = |deletion: &&Deletion| {
            Promises::binds(deletion, crash)
                && deletion.names >> name & 1 == 1
                && deletion.at > version.born
        };
        match self.deletions.iter().find(kills) {
            Some(deletion) => Err(format!("{version:?} came back after {deletion:?}")),
            None => Ok(()),
        }
    }

    /// Whether the recovered pages keep every promise.
    ///
    /// # Errors
    /// The first broken promise.
    pub fn check(&self, pages: &[Page], crash: Crash) -> Result<(), String> {
        let mut whole: Names = 0;
        for page in pages {
            self.allow(page.name, page.checksum, crash)?;
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
            return Err(format!("pages {lost:#b} are lost: {pages:?}"));
        }
        Ok(())
    }

    /// Adapts the promises to the result of a recovery after a crash.
    pub fn end_run(&mut self, pages: &[Page], crash: Crash) {
        self.deletions
            .retain(|deletion| Promises::binds(deletion, crash));
        let whole = pages.iter().filter(|page| page.whole);
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

/// Judges images, each once.
pub struct Judge {
    pub store: Arc<Store>,
    platter: Arc<Platter>,
    /// By the digest of the image.
    pub verdicts: HashMap<u128, Arc<[Page]>>,
}

impl Judge {
    pub fn new(store: Arc<Store>) -> Judge {
        Judge {
            store,
            platter: Arc::new(Platter::new()),
            verdicts: HashMap::new(),
        }
    }

    /// The pages that the opening of an image finds. To be called by a task of a world whose
    /// machine has the volume's file.
    ///
    /// # Errors
    /// A fault that no promise has to exclude: it is always wrong.
    pub fn verdict(&mut self, image: &Image) -> Result<Arc<[Page]>, String> {
        if let Some(known) = self.verdicts.get(&image.digest()) {
            return Ok(known.clone());
        }
        *self.platter.image() = image.clone();
        let pages = judge(&self.store, &self.platter);
        *self.platter.image() = Image::default();
        let pages = pages?;
        Ok(heap::outside(|| {
            let pages: Arc<[Page]> = Arc::from(&pages[..]);
            self.verdicts.insert(image.digest(), pages.clone());
            pages
        }))
    }
}

fn judge(store: &Store, platter: &Arc<Platter>) -> Result<Vec<Page>, String> {
    if let Some(page) = open(store, platter, true)?.iter().find(|page| !page.whole) {
        return Err(format!("a reader sees {page:?}, which is not whole"));
    }
    let pages = open(store, platter, false)?;
    if open(store, platter, false)? != pages {
        return Err(format!("the second recovery does not find {pages:?}"));
    }
    Ok(pages)
}

/// Opens a volume as far as a crash behind the last write of the opening lets it. Returns the
/// pages.
fn open(store: &Store, platter: &Arc<Platter>, read_only: bool) -> Result<Vec<Page>, String> {
    let found = platter.image().superblock();
    let found = found.map_err(|error| format!("no superblock is left: {error}"))?;
    let mut pages = Ok(Vec::new());
    let recovered = |recovery: &Recovery, index: &Arc<Index>| {
        pages = store.pages(index, &platter.image());
        if !recovery.damage.is_empty() {
            let damage = &recovery.damage;
            pages = Err(format!("damage after a crash without faults: {damage:?}"));
        }
    };
    let options = store.options(read_only);
    let core = LocalStore::begin_simulated(vec![Some(found)], platter.clone(), &options, recovered)
        .map_err(|error| format!("an opening fails: {error}"))?;
    core.check_invariants()?;
    pages
}

impl Store {
    /// The pages of an index, by name.
    fn pages(&self, index: &Index, image: &Image) -> Result<Vec<Page>, String> {
        index.check_invariants()?;
        let mut pages = Vec::new();
        let mut strange = None;
        index.each(|page| match self.name_of(page.key) {
            Some(name) => pages.push(Page {
                name,
                checksum: page.proof.checksum,
                whole: self.checksum_at(name, page.place, image) == page.proof.checksum,
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
}
