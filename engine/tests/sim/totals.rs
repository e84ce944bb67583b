//! What a run did, to see that the simulation reaches what it is meant to.

/// Counts over one run, or over many.
#[derive(Clone, Copy, Debug, Default)]
pub struct Totals {
    pub steps: u64,
    pub crashes: u64,
    pub opens: u64,
    pub stored: u64,
    pub duplicates: u64,
    pub refused: u64,
    pub failed: u64,
    pub hits: u64,
    pub misses: u64,
    pub evicted: u64,
    pub moved: u64,
    pub reclaimed: u64,
    pub deleted: u64,
    pub flushes: u64,
    pub failed_syncs: u64,
    pub unproven: u64,
    pub torn: u64,
}

impl Totals {
    pub fn add(&mut self, other: &Totals) {
        self.steps += other.steps;
        self.crashes += other.crashes;
        self.opens += other.opens;
        self.stored += other.stored;
        self.duplicates += other.duplicates;
        self.refused += other.refused;
        self.failed += other.failed;
        self.hits += other.hits;
        self.misses += other.misses;
        self.evicted += other.evicted;
        self.moved += other.moved;
        self.reclaimed += other.reclaimed;
        self.deleted += other.deleted;
        self.flushes += other.flushes;
        self.failed_syncs += other.failed_syncs;
        self.unproven += other.unproven;
        self.torn += other.torn;
    }
}
