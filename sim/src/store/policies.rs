//! Policies: eviction in the order of arrival, at random or by the learned policy, admission at
//! random. And the leases that a policy cannot break: a page that a lookup confirmed is not evicted
//! for room, for every answer of the policy.
//!
//! [`Leases`] has the leases that the store may hold. A lease is certain until a call begins that
//! may read or replace its page: such a page may have lost its lease, or it still has it. All of
//! them count towards the store's limit, a quarter of its blocks. When their total may be above the
//! limit, none is certain.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use larder_core::policy::order::{self, EvictionOrder};
use larder_engine::format::{KeyPrefix, PageKey};
use larder_engine::policy::{
    AdmissionPolicy, Candidate, Departure, EvictionPolicy, PageFacts, PageNumber, PolicyMaker,
    ReclaimLines, Use, Worth,
};
use larder_engine::{NamespaceId, PutStatus, Refusal, policy};
use larder_sim_runtime::dice::Dice;
use larder_sim_runtime::time::Instant;
use rapidhash::RapidHashMap;

use super::kept::Kept;
use crate::classes::Class;
use crate::setup::{Eviction, Setup};
use crate::world::World;

/// Share of the pages that the policy of admission refuses.
const REFUSED: f64 = 0.05;

/// A page: its namespace as the store numbers it, and the bytes of its key's prefix.
type Page = (u16, [u8; 12]);

/// The facts that callers, policies and the driver share. No task waits under its lock.
#[derive(Debug, Default)]
struct Book {
    /// The leases that the store may have, by page.
    leases: RapidHashMap<Page, Leased>,
    /// Pages under counted leases that are certain.
    counted: BTreeSet<Page>,
    /// Pinned pages that are certain.
    pinned: BTreeSet<Page>,
    /// Pages that the opening found unproven. A put may take the place of one, and of its pin.
    unproven: BTreeSet<Page>,
    /// Pages that have left.
    departed: u64,
    /// Begins and ends of calls that may end leases, and begins of calls that take leases.
    calls: u64,
    /// By page: the calls in progress that may end its lease.
    uses: RapidHashMap<Page, u32>,
    /// Blocks that lookups in progress may lease.
    asked: u64,
    /// The page that a policy named last.
    named: Option<Page>,
    evictions: u64,
    refusals: u64,
    /// Answers of the policy of admission.
    answers: u64,
    /// By page: the last of these that took it, and the last that refused it.
    taken: RapidHashMap<Page, u64>,
    refused: RapidHashMap<Page, u64>,
    /// A leased page that was evicted for room.
    broken: Option<Page>,
    kept: Kept,
    /// Faults have ended: every page is admitted.
    is_calm: bool,
}

#[derive(Debug)]
struct Leased {
    /// The end of a lease that is certain.
    until: Option<Instant>,
    /// Blocks of the page.
    blocks: u64,
}

/// See the module.
pub struct Leases {
    book: Arc<Mutex<Book>>,
    duration: Duration,
    blocks_max: u64,
    chosen: Eviction,
    admits_some: bool,
}

/// A lookup in progress.
pub struct Lookup {
    call: u64,
    begun: Instant,
    blocks: u64,
}

impl Book {
    /// Blocks of pages that may be leased.
    fn leased_blocks(&self) -> u64 {
        self.leases.values().map(|lease| lease.blocks).sum()
    }

    /// A page leaves.
    fn left(&mut self, left: Page, why: Departure) {
        let lease = self.leases.remove(&left);
        let is_counted = self.counted.remove(&left) | self.pinned.remove(&left);
        self.unproven.remove(&left);
        self.departed += 1;
        if why == Departure::Evicted {
            self.evictions += 1;
            let until = lease.and_then(|lease| lease.until);
            let is_valid = is_counted || until.is_some_and(|until| Instant::now() < until);
            if is_valid && self.named.take() == Some(left) {
                self.broken = Some(left);
            }
        }
    }
}

fn lock(book: &Mutex<Book>) -> MutexGuard<'_, Book> {
    book.lock().unwrap_or_else(PoisonError::into_inner)
}

fn page(namespace: NamespaceId, prefix: KeyPrefix) -> Page {
    (namespace.0, *prefix.as_bytes())
}

impl Leases {
    pub fn new(setup: &Setup) -> Leases {
        let segments: u32 = setup.volumes.iter().sum();
        Leases {
            book: Arc::default(),
            duration: Duration::from_millis(setup.lease_ms),
            // A volume may be lost: the limit of the store falls to its share.
            blocks_max: u64::from(segments * setup.segment_blocks) / 4 / setup.volumes.len() as u64,
            chosen: setup.eviction,
            admits_some: setup.admits_some,
        }
    }

    /// What the file beside the store keeps.
    pub fn kept<R>(&self, of: impl FnOnce(&mut Kept) -> R) -> R {
        of(&mut lock(&self.book).kept)
    }

    /// A new epoch begins: leases are in RAM alone.
    pub fn clear(&mut self) {
        let mut book = lock(&self.book);
        book.leases.clear();
        book.counted.clear();
        book.pinned.clear();
        book.unproven.clear();
        book.uses.clear();
        book.asked = 0;
        book.named = None;
        book.taken.clear();
        book.refused.clear();
    }

    /// The number of answers of the policy of admission so far.
    pub fn answers(&self) -> u64 {
        lock(&self.book).answers
    }

    /// Checks a put that began after so many answers: it stores a new page only if the policy took
    /// it, and it refuses the page for the policy only if the policy refused it.
    pub fn check_admission(
        &self,
        answers: u64,
        namespace: NamespaceId,
        key: &PageKey,
        status: PutStatus,
    ) {
        let (book, page) = (lock(&self.book), page(namespace, key.prefix()));
        let is_since =
            |all: &RapidHashMap<Page, u64>| all.get(&page).is_some_and(|at| *at > answers);
        let fits = match status {
            PutStatus::Stored => is_since(&book.taken) || !self.admits_some,
            PutStatus::Refused(Refusal::NotAdmitted) => is_since(&book.refused),
            _ => true,
        };
        assert!(
            fits,
            "{page:x?} is {status:?} against the policy of admission"
        );
    }

    pub fn calm_down(&mut self) {
        lock(&self.book).is_calm = true;
    }

    /// A call begins that may end leases of these pages.
    pub fn begin_use(&mut self, namespace: NamespaceId, keys: &[PageKey]) {
        let mut book = lock(&self.book);
        book.calls += 1;
        for key in keys {
            let page = page(namespace, key.prefix());
            if let Some(lease) = book.leases.get_mut(&page) {
                lease.until = None;
            }
            *book.uses.entry(page).or_default() += 1;
        }
    }

    /// Such a call has ended.
    pub fn end_use(&mut self, namespace: NamespaceId, keys: &[PageKey]) {
        let mut book = lock(&self.book);
        book.calls += 1;
        for key in keys {
            let page = page(namespace, key.prefix());
            if let Some(uses) = book.uses.get_mut(&page) {
                *uses = uses.saturating_sub(1);
            }
        }
    }

    /// Pages that have left so far.
    pub fn departed(&self) -> u64 {
        lock(&self.book).departed
    }

    /// These pages have got counted leases, after so many had left.
    pub fn lease(&mut self, departed: u64, namespace: NamespaceId, keys: &[PageKey]) {
        let mut book = lock(&self.book);
        // A page that has left meanwhile may have come back without a lease.
        if book.departed == departed {
            let pages = keys.iter().map(|key| page(namespace, key.prefix()));
            book.counted.extend(pages);
        }
    }

    /// Counted leases of these pages are about to be returned, perhaps not the last ones.
    pub fn unlease(&mut self, namespace: NamespaceId, keys: &[PageKey]) {
        let mut book = lock(&self.book);
        for key in keys {
            book.counted.remove(&page(namespace, key.prefix()));
        }
    }

    /// The opening has found this page unproven.
    pub fn note_unproven(&mut self, namespace: NamespaceId, key: &PageKey) {
        lock(&self.book)
            .unproven
            .insert(page(namespace, key.prefix()));
    }

    /// These pages are pinned.
    pub fn pin(&mut self, namespace: NamespaceId, keys: &[PageKey]) {
        let book = &mut *lock(&self.book);
        let pages = keys.iter().map(|key| page(namespace, key.prefix()));
        let certain = pages.filter(|page| !book.unproven.contains(page));
        book.pinned.extend(certain);
    }

    /// Pins of these pages may be taken back from now on.
    pub fn unpin(&mut self, namespace: NamespaceId, keys: &[PageKey]) {
        let mut book = lock(&self.book);
        for key in keys {
            book.pinned.remove(&page(namespace, key.prefix()));
        }
    }

    /// A lookup of pages with so many blocks in all begins.
    pub fn begin_lookup(&mut self, blocks: u64) -> Lookup {
        let book = &mut *lock(&self.book);
        book.calls += 1;
        book.asked += blocks;
        if book.leased_blocks() + book.asked > self.blocks_max {
            book.leases.clear();
        }
        Lookup {
            call: book.calls,
            begun: Instant::now(),
            blocks,
        }
    }

    /// The machine has slept: no lease is certain any more.
    pub fn sleep(&mut self) {
        let book = &mut *lock(&self.book);
        book.leases
            .values_mut()
            .for_each(|lease| lease.until = None);
        // The lookups in progress lease nothing for certain.
        book.calls += 1;
    }

    /// A lookup has confirmed these pages, of so many blocks each.
    pub fn end_lookup(
        &mut self,
        lookup: &Lookup,
        namespace: NamespaceId,
        keys: &[PageKey],
        blocks: u64,
    ) {
        let book = &mut *lock(&self.book);
        let fits = book.leased_blocks() + book.asked <= self.blocks_max;
        book.asked -= lookup.blocks;
        let duration = self.duration.checked_sub(Duration::from_millis(1));
        let duration = duration.filter(|_| fits && book.calls == lookup.call);
        for page in keys.iter().map(|key| page(namespace, key.prefix())) {
            let is_unused = book.uses.get(&page).is_none_or(|uses| *uses == 0);
            let duration = duration.filter(|_| is_unused);
            let until = duration.map(|duration| lookup.begun + duration);
            book.leases.insert(page, Leased { until, blocks });
        }
    }

    /// Between two steps: no lease was broken.
    pub fn check(&mut self, world: &mut World) {
        let mut book = lock(&self.book);
        assert!(
            book.broken.is_none(),
            "a leased page is evicted for room, because a policy names it: {:x?}",
            book.broken
        );
        world
            .tally
            .count_many(Class::ChosenEviction, std::mem::take(&mut book.evictions));
        world
            .tally
            .count_many(Class::NotAdmitted, std::mem::take(&mut book.refusals));
    }

    /// The policy of eviction of a new epoch.
    pub fn eviction(&self, seed: u64) -> Option<PolicyMaker<dyn EvictionOrder>> {
        let (book, chosen) = (self.book.clone(), self.chosen);
        match chosen {
            Eviction::Default => None,
            Eviction::Learned => Some(order::maker(move || {
                Learned::new(book.clone(), Dice::new(seed))
            })),
            Eviction::Fifo | Eviction::Random => Some(PolicyMaker::eviction(move || Chosen {
                book: book.clone(),
                dice: Dice::new(seed),
                is_random: chosen == Eviction::Random,
                leaves: Vec::new(),
            })),
        }
    }

    /// The policy of admission of a new epoch.
    pub fn admission(&self, seed: u64) -> Option<PolicyMaker<dyn AdmissionPolicy>> {
        let book = self.book.clone();
        self.admits_some.then(|| {
            PolicyMaker::admission(move || Moody {
                book: book.clone(),
                dice: Dice::new(seed),
            })
        })
    }
}

/// Evicts leaves in the order in which they were filed, or at random. It looks at no use.
struct Chosen {
    book: Arc<Mutex<Book>>,
    dice: Dice,
    is_random: bool,
    leaves: Vec<PageNumber>,
}

impl std::fmt::Debug for Chosen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Chosen {{ {} leaves }}", self.leaves.len())
    }
}

impl EvictionPolicy for Chosen {
    fn left(&mut self, _: PageNumber, facts: &PageFacts, why: Departure) {
        lock(&self.book).left(page(facts.namespace, facts.key), why);
    }

    fn file(&mut self, page: PageNumber, _: &PageFacts) {
        self.leaves.push(page);
    }

    fn coldest(
        &mut self,
        facts: &mut dyn FnMut(PageNumber) -> Option<PageFacts>,
    ) -> Option<PageNumber> {
        lock(&self.book).named = None;
        while !self.leaves.is_empty() {
            let at = match self.is_random {
                true => self.dice.below(self.leaves.len()),
                false => 0,
            };
            let leaf = self.leaves.remove(at);
            if let Some(facts) = facts(leaf) {
                lock(&self.book).named = Some(page(facts.namespace, facts.key));
                return Some(leaf);
            }
        }
        None
    }

    fn worth(&self, _: PageNumber, facts: &PageFacts) -> Worth {
        Worth(facts.depth)
    }
}

/// The learned policy, and what it owes the store: it names each leaf that it holds once, and no
/// other page; it names the least recently used one while it follows LRU; and it takes no harm from
/// lessons of any content.
///
/// The rule about the number of segments is left out: these stores are small.
struct Learned {
    policy: Box<dyn EvictionOrder>,
    book: Arc<Mutex<Book>>,
    dice: Dice,
    /// The leaves that it holds.
    held: BTreeSet<PageNumber>,
    /// By page: when it was used last.
    used: RapidHashMap<PageNumber, Duration>,
    /// The last use of the leaf that it named last under LRU, if no other could have come since.
    coldest: Duration,
}

/// The learned policy takes times that lie closer together for one.
const TICK: Duration = Duration::from_millis(20);

/// Share of the opens with damaged lessons and notes.
const DAMAGED: f64 = 0.3;

impl Learned {
    fn new(book: Arc<Mutex<Book>>, dice: Dice) -> Learned {
        Learned {
            policy: larder_core::policy::make(&policy::learned()),
            book,
            dice,
            held: BTreeSet::new(),
            used: RapidHashMap::default(),
            coldest: Duration::ZERO,
        }
    }
}

impl std::fmt::Debug for Learned {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Learned {{ {} leaves }}", self.held.len())
    }
}

impl EvictionPolicy for Learned {
    fn arrived(&mut self, page: PageNumber, facts: &PageFacts) {
        self.used.insert(page, facts.now);
        self.policy.arrived(page, facts);
    }

    fn used(&mut self, page: PageNumber, facts: &PageFacts, by: Use) {
        if by != Use::Lookup {
            self.used.insert(page, facts.now);
        }
        self.policy.used(page, facts, by);
    }

    fn left(&mut self, number: PageNumber, facts: &PageFacts, why: Departure) {
        lock(&self.book).left(page(facts.namespace, facts.key), why);
        self.held.remove(&number);
        self.used.remove(&number);
        self.policy.left(number, facts, why);
    }

    fn file(&mut self, page: PageNumber, facts: &PageFacts) {
        self.coldest = Duration::ZERO;
        self.held.insert(page);
        self.policy.file(page, facts);
    }

    fn coldest(
        &mut self,
        facts: &mut dyn FnMut(PageNumber) -> Option<PageFacts>,
    ) -> Option<PageNumber> {
        lock(&self.book).named = None;
        let mut found = None;
        let held = &mut self.held;
        let named = self.policy.coldest(&mut |number| {
            assert!(
                held.contains(&number),
                "the policy does not hold {number:?}"
            );
            let seen = facts(number);
            if seen.is_none() {
                held.remove(&number);
            }
            found = seen.map(|facts| (number, page(facts.namespace, facts.key)));
            seen
        });
        let Some(number) = named else {
            assert!(held.is_empty(), "the policy has lost the leaves {held:?}");
            return None;
        };
        assert!(
            held.remove(&number),
            "the policy names {number:?}, which it does not hold"
        );
        let (seen, page) = found.expect("a policy looks at a leaf before it names it");
        assert_eq!(seen, number, "the policy names a page that is no leaf");
        lock(&self.book).named = Some(page);
        let used = self.used.get(&number).copied().unwrap_or_default();
        if self.policy.order() != "learned" {
            assert!(
                used + TICK >= self.coldest,
                "LRU: {number:?} was used at {used:?}, the leaf before it at {:?}",
                self.coldest
            );
            self.coldest = used;
        }
        Some(number)
    }

    fn worth(&self, page: PageNumber, facts: &PageFacts) -> Worth {
        self.policy.worth(page, facts)
    }

    fn lines(&self) -> ReclaimLines {
        self.policy.lines()
    }

    fn ram_bytes(&self) -> usize {
        self.policy.ram_bytes()
    }
}

impl EvictionOrder for Learned {
    fn fetch(&self, names: &mut dyn Iterator<Item = (NamespaceId, KeyPrefix)>) {
        self.policy.fetch(names);
    }

    fn fetch_used(&self, pages: &[PageNumber]) {
        self.policy.fetch_used(pages);
    }

    fn linked(&mut self, page: PageNumber, facts: &PageFacts) {
        self.policy.linked(page, facts);
    }

    fn child(&self, page: PageNumber) -> Option<PageNumber> {
        self.policy.child(page)
    }

    fn sees_lookups(&self) -> bool {
        self.policy.sees_lookups()
    }

    fn written(&mut self, put: u64, copied: u64) {
        self.policy.written(put, copied);
    }

    fn note(&self, page: PageNumber, key: KeyPrefix) -> Option<u128> {
        let note = self.policy.note(page, key);
        lock(&self.book).kept.note(note);
        note
    }

    fn lessons(&self) -> Vec<u8> {
        let lessons = self.policy.lessons();
        lock(&self.book).kept.save(&lessons);
        lessons
    }

    fn recall(&mut self, lessons: &[u8], mut notes: Vec<u128>) {
        lock(&self.book).kept.check_recalled(lessons, &notes);
        let mut lessons = lessons.to_owned();
        if !lessons.is_empty() && self.dice.chance(DAMAGED) {
            // The classes come first; there is most to be wrong.
            let at = self.dice.below(lessons.len().min(64));
            lessons[at] ^= 1 << self.dice.below(8);
            for note in &mut notes {
                *note ^= 1 << self.dice.below(64);
            }
            notes.sort_unstable();
        }
        self.policy.recall(&lessons, notes);
    }

    fn loaded(&mut self) {
        self.policy.loaded();
    }

    fn scale(&self) -> u64 {
        self.policy.scale()
    }
}

/// Refuses some pages, for no reason.
struct Moody {
    book: Arc<Mutex<Book>>,
    dice: Dice,
}

impl std::fmt::Debug for Moody {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Moody")
    }
}

impl AdmissionPolicy for Moody {
    fn admits(&mut self, candidate: &Candidate) -> bool {
        let refuses = self.dice.chance(REFUSED);
        let book = &mut *lock(&self.book);
        let refuses = refuses && !book.is_calm;
        book.refusals += u64::from(refuses);
        book.answers += 1;
        let answered = match refuses {
            true => &mut book.refused,
            false => &mut book.taken,
        };
        let page = page(candidate.namespace, candidate.key.prefix());
        answered.insert(page, book.answers);
        !refuses
    }
}
