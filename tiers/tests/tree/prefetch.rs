//! Prefetches: when one is declined or cut, and where its pages stay.

use larder_tiers::config::WritePolicy;
use larder_tiers::core::{Core, Declined, Done, Order, Outcome, PrefetchState};
use larder_tiers::prompt::Scope;

use super::{answer, core, matched, prompt, run, settle};

#[test]
fn a_prefetch_is_cut_to_the_share_of_prefetches_in_l2() {
    let mut core = core(|config| config.l2_pages = 16);
    let scope = Scope::default();
    let mut long = prompt(&mut core, &scope, 0..80);
    let first = core.prefetch(&mut long).unwrap();
    let mut other = prompt(&mut core, &scope, 100..180);
    assert_eq!(core.prefetch(&mut other), Err(Declined::L2Share));
    settle(&mut core);
    assert_eq!(core.poll_prefetch(first, false), PrefetchState::Ended(8));
    assert_eq!(core.peek(&long), (0, 8));
    assert_eq!(core.prefetches_out(), 0);
}

#[test]
fn the_first_lookup_of_a_prompt_counts_and_a_later_try_does_not() {
    let mut core = core(|_| ());
    let mut prompt = prompt(&mut core, &Scope::default(), 0..16);
    for is_first in [true, false] {
        let _ = core.prefetch(&mut prompt).unwrap();
        let Some(Order::Exists { id, is_counted, .. }) = core.next_order() else {
            panic!("no lookup");
        };
        assert_eq!(is_counted, is_first);
        // L3 has none of the pages.
        let outcome = Outcome::Pages(0);
        core.complete(Done { id, outcome }).unwrap();
    }
}

#[test]
fn a_prefetch_is_declined_unless_its_parent_is_in_l2() {
    let mut core = core(|config| config.write_policy = WritePolicy::WriteThroughSelective);
    let scope = Scope::default();
    let first = prompt(&mut core, &scope, 0..8);
    run(&mut core, first, 0);
    let mut longer = prompt(&mut core, &scope, 0..40);
    assert_eq!(core.prefetch(&mut longer), Err(Declined::AnchorNotInL2));
    let again = prompt(&mut core, &scope, 0..8);
    run(&mut core, again, 0);
    settle(&mut core);
    let id = core.prefetch(&mut longer).unwrap();
    let orders = settle(&mut core);
    let reads = orders
        .iter()
        .filter(|order| matches!(order, Order::Get { .. }))
        .count();
    assert_eq!(reads, 4, "eight pages in batches of two");
    assert_eq!(core.poll_prefetch(id, false), PrefetchState::Ended(8));
    assert_eq!(matched(&mut core, &scope, 0..40), (2, 8));
    assert_eq!(core.prefetch(&mut longer), Err(Declined::BelowThreshold));
}

#[test]
fn a_read_that_is_slower_than_computing_is_declined() {
    let mut core = core(|config| {
        config.prefetch.break_even_tokens_per_second = std::num::NonZeroU32::new(1000);
    });
    let scope = Scope::default();
    for (micros, is_worth) in [(1000, true), (1_000_000, false)] {
        // A page of 4 tokens takes 4 ms to compute.
        for _ in 0..50 {
            core.observe_read(4096, micros);
        }
        let mut prompt = prompt(&mut core, &scope, micros..micros + 16);
        let id = core.prefetch(&mut prompt).unwrap();
        settle(&mut core);
        let state = core.poll_prefetch(id, false);
        assert_eq!(state == PrefetchState::Ended(4), is_worth, "{state:?}");
    }
    assert_eq!(core.stats().declined.break_even, 1);
}

/// A request may wait long after its pages have arrived. Without the hold, all of them would have
/// left again with a full queue.
#[test]
fn prefetched_pages_stay_in_l2_until_their_request_polls() {
    for is_cancelled in [false, true] {
        let mut core = core(|config| config.l2_pages = 16);
        let scope = Scope::default();
        let mut waiting = prompt(&mut core, &scope, 0..32);
        let id = core.prefetch(&mut waiting).unwrap();
        settle(&mut core);
        // Other requests need all of L2.
        let press = |core: &mut Core, from: u64| {
            for number in from..from + 4 {
                let other = prompt(core, &scope, number * 100..number * 100 + 32);
                run(core, other, 0);
                settle(core);
            }
            core.validate([]).unwrap();
        };
        press(&mut core, 1);
        assert_eq!(core.peek(&waiting), (0, 8));
        if is_cancelled {
            core.cancel_prefetch(id);
        } else {
            assert_eq!(core.poll_prefetch(id, false), PrefetchState::Ended(8));
        }
        // No request waits for them any more.
        press(&mut core, 5);
        assert_eq!(core.peek(&waiting), (0, 0));
    }
}

/// Without occasional reads, the cache would never measure that L3 is fast again after one slow
/// moment of its disk.
#[test]
fn a_slow_moment_of_l3_does_not_stop_reads_for_ever() {
    let mut core = core(|config| {
        config.prefetch.break_even_tokens_per_second = std::num::NonZeroU32::new(1000);
    });
    let scope = Scope::default();
    core.observe_read(4096, 1_000_000);
    let mut read = 0;
    for number in 0..200 {
        let mut prompt = prompt(&mut core, &scope, number * 100..number * 100 + 16);
        let id = core.prefetch(&mut prompt).unwrap();
        settle(&mut core);
        if core.poll_prefetch(id, false) == PrefetchState::Ended(4) {
            read += 1;
            core.observe_read(4096, 1);
        }
    }
    // A few reads to measure the speed, then all.
    assert!((100..200).contains(&read), "{read} of 200");
    assert_eq!(core.stats().declined.break_even, 200 - read);
}

#[test]
fn a_cancelled_prefetch_keeps_the_pages_of_its_read_until_that_has_ended() {
    let mut core = core(|_| {});
    let mut prompt = prompt(&mut core, &Scope::default(), 0..32);
    let id = core.prefetch(&mut prompt).unwrap();
    answer(&mut core, Outcome::Pages(8));
    answer(&mut core, Outcome::Pages(2));
    let Some(Order::Get { id: read, .. }) = core.next_order() else {
        panic!("no second batch");
    };
    assert_eq!(core.free_pages().1, 200 - 8);
    core.cancel_prefetch(id);
    core.validate([]).unwrap();
    assert_eq!(
        core.free_pages().1,
        200 - 2,
        "the two that are being read into"
    );
    assert_eq!(core.poll_prefetch(id, false), PrefetchState::Unknown);
    core.complete(Done {
        id: read,
        outcome: Outcome::Pages(2),
    })
    .unwrap();
    assert_eq!(core.free_pages().1, 200);
    assert_eq!(core.peek(&prompt), (0, 0));
}

#[test]
fn a_backup_that_l2_refused_is_ordered_after_the_read_of_a_cancelled_prefetch() {
    let mut core = core(|config| config.l2_pages = 10);
    let mut waiting = prompt(&mut core, &Scope::default(), 0..20);
    let id = core.prefetch(&mut waiting).unwrap();
    answer(&mut core, Outcome::Pages(5));
    let Some(Order::Get { id: read, .. }) = core.next_order() else {
        panic!("no read");
    };
    core.cancel_prefetch(id);
    let other = prompt(&mut core, &Scope::default(), 100..136);
    run(&mut core, other, 0);
    assert_eq!(core.stats().backup_no_room, 9);
    assert_eq!(core.next_order(), None);
    core.complete(Done {
        id: read,
        outcome: Outcome::Pages(2),
    })
    .unwrap();
    settle(&mut core);
    assert_eq!(core.stats().put, 9);
}

#[test]
fn a_prefetch_that_is_overdue_ends_with_what_has_arrived() {
    let mut core = core(|config| {
        config.prefetch.timeout_base_us = 1000;
        config.prefetch.timeout_per_1024_tokens_us = 32_000;
    });
    let mut prompt = prompt(&mut core, &Scope::default(), 0..32);
    let id = core.prefetch(&mut prompt).unwrap();
    answer(&mut core, Outcome::Pages(8));
    answer(&mut core, Outcome::Pages(2));
    answer(&mut core, Outcome::Pages(2));
    // 1000 us plus 32,000 us per 1,024 tokens for 32 tokens, counted from the first poll that finds
    // it unfinished.
    for (now, is_overdue) in [(5_000_000, false), (5_002_000, false), (5_002_001, true)] {
        assert_eq!(core.is_prefetch_overdue(id, now), is_overdue);
        let state = core.poll_prefetch(id, is_overdue);
        let expected = if is_overdue {
            PrefetchState::Ended(4)
        } else {
            PrefetchState::Waiting
        };
        assert_eq!(state, expected);
    }
    assert_eq!(core.peek(&prompt), (0, 4));
    settle(&mut core);
    assert_eq!(core.free_pages().1, 200 - 4);
}

#[test]
fn pages_read_for_a_parent_that_is_not_in_l2_are_given_back_and_counted() {
    let mut core = core(|config| config.write_policy = WritePolicy::WriteThroughSelective);
    let scope = Scope::default();
    let mut long = prompt(&mut core, &scope, 0..32);
    let id = core.prefetch(&mut long).unwrap();
    answer(&mut core, Outcome::Pages(8));
    // In the meantime another request computes the first pages, and they stay in L1 only.
    let short = prompt(&mut core, &scope, 0..9);
    run(&mut core, short, 0);
    settle(&mut core);
    assert_eq!(core.poll_prefetch(id, false), PrefetchState::Ended(0));
    assert_eq!(
        (core.stats().prefetch_wasted, core.stats().prefetch_orphans),
        (2, 6)
    );
    assert_eq!(core.free_pages().1, 200);
}
