//! The engine's own handle with its threads, called by many callers, under crashes and faults.
#![allow(clippy::unwrap_used)]

use larder_sim::{Class, Mode, campaign, report};

const SEEDS: u64 = 300;

/// Classes that such a process meets, and that this number of seeds reaches.
const REACHED: [Class; 25] = [
    Class::Kill,
    Class::Power,
    Class::CrashInPut,
    Class::CrashInGroup,
    Class::CrashInSync,
    Class::CrashInReclaim,
    Class::CrashInFlush,
    Class::CrashInClose,
    Class::CrashInOpen,
    Class::TornPrefix,
    Class::TornSubset,
    Class::TornInside,
    Class::DataError,
    Class::DescriptorError,
    Class::HeaderError,
    Class::NoSpace,
    Class::ShortWrite,
    Class::ShortRead,
    Class::SyncError,
    Class::SyncDropped,
    Class::LostWrite,
    Class::MisdirectedRead,
    Class::RotPayload,
    Class::Delayed,
    Class::Reordered,
];

#[test]
fn no_seed_of_the_store_with_its_threads_breaks_a_promise() {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let campaign = campaign(Mode::Store, 0, SEEDS, threads, None);
    if let Some(&seed) = campaign.failed.first() {
        let _ = report(Mode::Store, seed);
    }
    let again = campaign.failed.iter();
    let again: Vec<String> = again.map(|seed| Mode::Store.command(*seed)).collect();
    assert!(again.is_empty(), "these fail: {again:?}");
    let sum = &campaign.totals;
    let reached = [sum.stored, sum.hits, sum.evicted, sum.moved, sum.reclaimed];
    assert!(reached.iter().all(|count| *count > 0), "{sum:?}");
    for class in REACHED {
        let times = campaign.tally.times(class);
        assert!(times > 0, "never: {}", class.title());
    }
}

#[test]
fn a_seed_of_the_store_with_its_threads_plays_the_same_each_time() {
    for seed in 0..6 {
        let digest = || Mode::Store.play(seed, None).0;
        assert_eq!(digest(), digest(), "{}", Mode::Store.command(seed));
    }
}
