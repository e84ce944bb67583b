//! Readers in threads against a writer that appends, evicts and reclaims.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use larder_core::index::{Heat, Index, Parent, Place, Publish, ReadAs, SegmentId};

use super::honest::{PATIENCE, eventually};
use super::model::name_of;
use super::{AMPLE_BLOCKS, HEAT_END, NS, after, chain, key, lease, page, place};

const RACE_SEGMENTS: u32 = 8;
const RACE_BLOCKS: u32 = 64;
const RACE_CHAINS: u32 = 40;
const RACE_DEPTHS: u32 = 8;

/// SplitMix64: the same race each time, as far as the scheduler lets it.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u32) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((word ^ (word >> 31)) % u64::from(sides)) as u32
    }
}

/// A disk of one word a block: the number of the page in it, 0 for none.
struct Disk(Vec<AtomicU64>);

impl Disk {
    fn new() -> Self {
        Self(
            (0..RACE_SEGMENTS * RACE_BLOCKS)
                .map(|_| AtomicU64::new(0))
                .collect(),
        )
    }

    fn block(&self, place: Place) -> &AtomicU64 {
        &self.0[(place.segment.0 * RACE_BLOCKS + place.start) as usize]
    }
}

fn page_number(chain: u32, depth: u32) -> u64 {
    u64::from(chain * RACE_DEPTHS + depth + 1)
}

/// A small log: appends, evicts, and cleans a segment by moving its live pages.
struct Writer<'a> {
    index: &'a Index,
    disk: &'a Disk,
    dice: Dice,
    stored: BTreeMap<(u32, u32), Place>,
    open: u32,
    filled: u32,
}

impl Writer<'_> {
    fn write(&mut self, chain: u32, depth: u32) -> Place {
        let at = place(self.open, self.filled);
        self.filled += 1;
        self.disk
            .block(at)
            .store(page_number(chain, depth), Ordering::Release);
        at
    }

    fn put(&mut self) {
        let chain = self.dice.roll(RACE_CHAINS);
        let mut batch = Vec::new();
        for depth in 0..=self.dice.roll(RACE_DEPTHS) {
            if self.stored.contains_key(&(chain, depth)) {
                continue;
            }
            let at = self.write(chain, depth);
            let parent = depth
                .checked_sub(1)
                .map_or(Parent::Head, |up| after(key(chain, up)));
            let proof = page_number(chain, depth).into();
            batch.push(Publish {
                proof,
                ..page(key(chain, depth), parent, at)
            });
            self.stored.insert((chain, depth), at);
        }
        self.index.publish(&batch);
    }

    fn evict(&mut self, now_ms: u64) {
        if let Some(page) = self.index.evict_coldest(now_ms, |_, _| false, |_| false) {
            let (_, chain, depth) = name_of(page.namespace, page.key);
            assert_eq!(self.stored.remove(&(chain, depth)), Some(page.place));
        }
    }

    /// Moves on to the segment with the fewest pages, moving those within it.
    fn reclaim(&mut self) {
        let live = |segment: u32| {
            self.stored
                .values()
                .filter(|place| place.segment == SegmentId(segment))
                .count()
        };
        let others = (0..RACE_SEGMENTS).filter(|segment| *segment != self.open);
        let victim = others.min_by_key(|segment| live(*segment)).unwrap();
        let inside = self
            .stored
            .iter()
            .filter(|(_, place)| place.segment == SegmentId(victim));
        let moved: Vec<_> = inside.map(|(name, place)| (*name, *place)).collect();
        for ((chain, depth), from) in moved {
            if self.filled == RACE_BLOCKS {
                assert!(self.index.forget(NS, key(chain, depth).prefix(), from));
                self.stored.remove(&(chain, depth));
                continue;
            }
            let to = self.write(chain, depth);
            assert!(
                self.index
                    .relocate(NS, key(chain, depth).prefix(), from, to)
            );
            self.stored.insert((chain, depth), to);
        }
        eventually("the readers leave a segment", || {
            self.index.pins(SegmentId(victim)) == 0
        });
        for start in 0..RACE_BLOCKS {
            self.disk
                .block(place(victim, start))
                .store(0, Ordering::Release);
        }
        (self.open, self.filled) = (victim, 0);
    }
}

/// Ends the readers, also when the writer fails: a scope waits for its threads.
struct Done<'a>(&'a AtomicBool);

impl Drop for Done<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Reports in `have_read` that it has read something, and reads on.
fn read_until(done: &AtomicBool, index: &Index, disk: &Disk, seed: u64, have_read: &AtomicUsize) {
    let mut dice = Dice(seed);
    let mut has_read = false;
    while !done.load(Ordering::Relaxed) {
        let number = dice.roll(RACE_CHAINS);
        let keys = chain(number, RACE_DEPTHS);
        index.longest_prefix(NS, &keys, lease(1, 1), &mut Vec::new());
        let found = index.pin(NS, &keys, ReadAs::Use);
        for _ in 0..2 {
            for (depth, found) in (0..).zip(&found) {
                if let Some(found) = found {
                    let expected = page_number(number, depth);
                    assert_eq!(disk.block(found.place).load(Ordering::Acquire), expected);
                    assert_eq!(found.proof, expected.into());
                    if !std::mem::replace(&mut has_read, true) {
                        have_read.fetch_add(1, Ordering::Relaxed);
                    }
                }
            }
            std::thread::yield_now();
        }
        for found in found.into_iter().flatten() {
            index.unpin(found.place.segment);
        }
    }
}

#[test]
fn a_pinned_page_stays_under_its_reader_while_the_writer_moves_and_evicts() {
    // Heats are lowered in the middle of it.
    let index = Index::with_clock(RACE_SEGMENTS as usize, AMPLE_BLOCKS, Heat(HEAT_END - 5000));
    let (disk, done) = (Disk::new(), AtomicBool::new(false));
    let have_read = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        let readers: Vec<_> = (1..4_u64)
            .map(|seed| {
                let (index, disk, done, have_read) = (&index, &disk, &done, &have_read);
                scope.spawn(move || read_until(done, index, disk, seed, have_read))
            })
            .collect();
        let mut writer = Writer {
            index: &index,
            disk: &disk,
            dice: Dice(0),
            stored: BTreeMap::new(),
            open: 0,
            filled: 0,
        };
        let ending = Done(&done);
        let mut round = 0;
        let until = Instant::now() + PATIENCE;
        // A busy machine may let a reader in late.
        while round < 6000 || have_read.load(Ordering::Relaxed) < readers.len() {
            assert!(Instant::now() < until, "a reader never reads anything");
            round += 1;
            if writer.filled + RACE_DEPTHS > RACE_BLOCKS {
                writer.reclaim();
            } else {
                writer.put();
            }
            while writer.stored.len() > 200 {
                writer.evict(2);
            }
            if round % 64 == 0 {
                index.check_invariants().unwrap();
                std::thread::yield_now();
            }
        }
        drop(ending);
        for reader in readers {
            reader.join().unwrap();
        }
        assert_eq!(index.len(), writer.stored.len());
    });
    assert!((0..RACE_SEGMENTS).all(|segment| index.pins(SegmentId(segment)) == 0));
    index.check_invariants().unwrap();
}
