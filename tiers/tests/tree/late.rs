//! An L3 that is written late: pages are put when they leave a window of L2.

use larder_tiers::config::{L3Write, WritePolicy};
use larder_tiers::core::{Core, Done, Fence, Order, Outcome};
use larder_tiers::prompt::Scope;

use super::{core, prompt, run, settle};

/// The window has room for ten of 20 pages.
fn late() -> Core {
    core(|config| {
        config.l1_pages = 10;
        config.l2_pages = 20;
        config.l3_write = L3Write::Late;
    })
}

fn insert(core: &mut Core, first: u64, pages: u64) {
    let prompt = prompt(core, &Scope::default(), first..first + 4 * pages + 1);
    run(core, prompt, 0);
}

/// Completes every order. Puts store at most `stored` pages in all. Returns their depths and pages.
fn answer(core: &mut Core, mut stored: usize) -> Vec<(usize, usize)> {
    let mut puts = Vec::new();
    while let Some(order) = core.next_order() {
        let (id, outcome) = match order {
            Order::BackUp { id, .. } | Order::Load { id, .. } => (id, Outcome::Copied(true)),
            Order::Put {
                id, keys, depth, ..
            } => {
                puts.push((depth, keys.len()));
                let taken = keys.len().min(stored);
                stored -= taken;
                (id, Outcome::Pages(taken))
            }
            other => panic!("{other:?}"),
        };
        core.complete(Done { id, outcome }).unwrap();
        core.validate([]).unwrap();
    }
    puts
}

#[test]
fn pages_are_written_when_the_window_is_full_oldest_first() {
    let mut core = late();
    for chain in 0..5 {
        insert(&mut core, 1000 * chain, 2);
        assert_eq!(answer(&mut core, usize::MAX), []);
    }
    insert(&mut core, 5000, 1);
    assert_eq!(answer(&mut core, usize::MAX), [(0, 2)]);
    assert_eq!(core.counts().unwritten_pages, 9);
}

#[test]
fn a_page_comes_with_all_pages_before_it_as_one_write() {
    let mut core = late();
    insert(&mut core, 0, 1);
    insert(&mut core, 0, 3);
    // The first page is used again, those behind it are not.
    for chain in 1..4 {
        insert(&mut core, 1000 * chain, 2);
    }
    insert(&mut core, 0, 1);
    assert_eq!(answer(&mut core, usize::MAX), []);
    insert(&mut core, 4000, 2);
    assert_eq!(answer(&mut core, usize::MAX), [(0, 3)]);
}

#[test]
fn declined_pages_are_never_written_and_counted_unless_they_are_used_again() {
    let mut core = late();
    for chain in 0..5 {
        insert(&mut core, 1000 * chain, 2);
        assert_eq!(answer(&mut core, 0), []);
    }
    insert(&mut core, 5000, 2);
    assert_eq!(answer(&mut core, 0), [(0, 2)]);
    // L2 is full: the declined chain leaves it first.
    for chain in 6..11 {
        insert(&mut core, 1000 * chain, 2);
        answer(&mut core, 0);
    }
    let stats = core.stats().clone();
    assert!(stats.put_declined > 0 && stats.put == 0, "{stats:?}");
    assert_eq!(
        (stats.put_declined, stats.put_refused),
        (stats.l2_evicted, 0)
    );
    // The chain that was declined last is used again.
    insert(&mut core, 5000, 2);
    let unwritten = core.counts().unwritten_pages;
    core.retry_failed();
    let written: usize = answer(&mut core, usize::MAX).iter().map(|put| put.1).sum();
    assert!(
        written >= unwritten && unwritten >= 2,
        "{written}, {unwritten}"
    );
}

#[test]
fn the_rest_of_a_chain_that_l3_took_in_part_is_declined() {
    let mut core = late();
    insert(&mut core, 0, 6);
    assert_eq!(answer(&mut core, 4), []);
    insert(&mut core, 1000, 6);
    assert_eq!(answer(&mut core, 4), [(0, 6)]);
    assert_eq!((core.stats().put, core.counts().unwritten_pages), (4, 6));
    // A page behind them is not written alone.
    insert(&mut core, 2000, 6);
    assert_eq!(answer(&mut core, usize::MAX), [(0, 6)]);
}

#[test]
fn a_caller_that_waits_for_l3_empties_the_window_and_it_fills_again() {
    let mut core = late();
    for chain in 0..4 {
        insert(&mut core, 1000 * chain, 2);
    }
    assert_eq!(answer(&mut core, usize::MAX), []);
    core.retry_failed();
    assert_eq!(answer(&mut core, usize::MAX), [(0, 2); 4]);
    assert_eq!(core.counts().unwritten_pages, 0);
    insert(&mut core, 9000, 2);
    assert_eq!(answer(&mut core, usize::MAX), []);
}

#[test]
fn pages_of_former_weights_are_written_before_they_leave() {
    let mut core = late();
    for chain in 0..4 {
        insert(&mut core, 1000 * chain, 2);
    }
    answer(&mut core, usize::MAX);
    core.new_weights("v2");
    assert_eq!(answer(&mut core, usize::MAX), [(0, 2); 4]);
}

#[test]
fn a_full_queue_lets_pages_leave_unwritten_and_counts_them() {
    let mut core = core(|config| {
        config.l1_pages = 10;
        config.l2_pages = 20;
        config.l3_write = L3Write::Late;
        config.late_percent = 100;
        config.l3_queue_bytes_max = 2 * 4096;
    });
    // L3 answers nothing.
    for chain in 0..20 {
        insert(&mut core, 1000 * chain, 2);
        while let Some(order) = core.next_order() {
            if let Order::BackUp { id, .. } = order {
                let outcome = Outcome::Copied(true);
                core.complete(Done { id, outcome }).unwrap();
            }
        }
        core.validate([]).unwrap();
    }
    let stats = core.stats();
    assert!(stats.put_refused > 0 && stats.put == 0, "{stats:?}");
    assert_eq!(stats.put_refused, stats.l2_evicted);
}

#[test]
fn a_window_with_write_back_is_refused() {
    let mut config = super::config();
    config.l3_write = L3Write::Late;
    config.check_with_l3().unwrap();
    config.write_policy = WritePolicy::WriteBack;
    let error = config.check_with_l3().unwrap_err();
    assert_eq!(error.field, "late_percent");
}

#[test]
fn pages_that_came_from_l3_are_not_written_again() {
    let mut core = late();
    let mut asked = prompt(&mut core, &Scope::default(), 0..17);
    let id = core.prefetch(&mut asked).unwrap();
    settle(&mut core);
    let _state = core.poll_prefetch(id, false);
    run(&mut core, asked, 0);
    core.retry_failed();
    assert_eq!(answer(&mut core, usize::MAX), []);
    core.forwards_ended(Fence(0));
    assert_eq!(core.counts().unwritten_pages, 0);
}
