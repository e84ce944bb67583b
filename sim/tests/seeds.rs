//! One process that uses a store, and several that share one, under crashes and faults.
//! `cargo run --profile simulation -p larder-sim` plays more seeds.

use larder_sim::{Campaign, Class, Heap, Mode, campaign, play_script, report};

#[global_allocator]
static HEAP: Heap = Heap;

const SEEDS: u64 = 1000;

/// Too rare for this number of seeds.
const RARE: [Class; 4] = [
    Class::OpenedByEnd,
    Class::VolumeLost,
    Class::RotSuperblocks,
    Class::GivenUp,
];

/// Seeds of an owner and its clients, and of nodes with a remote, which take far longer.
const SHARED_SEEDS: u64 = 500;
const AGENTS_SEEDS: u64 = 100;

fn without_failures(mode: Mode, seeds: u64) -> Campaign {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let campaign = campaign(mode, 0, seeds, threads, None);
    if let Some(&seed) = campaign.failed.first() {
        let _ = report(mode, seed);
    }
    let again: Vec<String> = campaign.failed.iter().map(|n| mode.command(*n)).collect();
    assert!(
        again.is_empty(),
        "these fail (`cargo run --release -p larder-sim -- ...` plays one again): {again:?}"
    );
    campaign
}

fn check_reached(campaign: &Campaign, is_due: impl Fn(Class) -> bool) {
    for class in Class::ALL.iter().filter(|class| is_due(**class)) {
        let times = campaign.tally.times(*class);
        assert!(times > 0, "never: {}", class.title());
    }
}

#[test]
fn no_seed_breaks_a_promise() {
    let campaign = without_failures(Mode::Store, SEEDS);
    // A simulation that reaches none of these states proves nothing.
    let sum = &campaign.totals;
    let reached = [
        sum.stored,
        sum.hits,
        sum.evicted,
        sum.moved,
        sum.reclaimed,
        sum.torn,
    ];
    assert!(reached.iter().all(|count| *count > 0), "{sum:?}");
    check_reached(&campaign, |class| {
        !class.is_shared() && !RARE.contains(&class)
    });
}

#[test]
fn no_seed_of_an_owner_and_its_clients_breaks_a_promise() {
    let campaign = without_failures(Mode::Shared, SHARED_SEEDS);
    check_reached(&campaign, |class| {
        class == Class::Encoded || class.is_shared() && !RARE.contains(&class)
    });
    let sum = &campaign.totals;
    let reached = [
        sum.stored,
        sum.duplicates,
        sum.hits,
        sum.deleted,
        sum.flushes,
        sum.evicted,
        sum.moved,
        sum.reclaimed,
    ];
    assert!(reached.iter().all(|count| *count > 0), "{sum:?}");
}

#[test]
fn no_seed_of_nodes_with_a_remote_breaks_a_promise() {
    let sum = without_failures(Mode::Agents, AGENTS_SEEDS).totals;
    let reached = [sum.stored, sum.hits, sum.published, sum.fetched];
    assert!(reached.iter().all(|count| *count > 0), "{sum:?}");
}

#[test]
fn a_script_plays_the_same_each_time_and_breaks_no_promise() {
    for first in 0..40_u8 {
        let script: Vec<u8> = (0..200_u8).map(|at| at.wrapping_mul(31) ^ first).collect();
        let (digest, totals, _) = play_script(&script);
        assert_eq!(play_script(&script).0, digest, "{script:?}");
        assert!(totals.opens > 0, "{script:?}");
    }
}

#[test]
fn a_seed_plays_the_same_each_time() {
    for (mode, seeds) in [(Mode::Store, 8), (Mode::Shared, 100), (Mode::Agents, 20)] {
        for seed in 0..seeds {
            let digest = || mode.play(seed, None).0;
            assert_eq!(digest(), digest(), "{}", mode.command(seed));
        }
    }
}
