//! Copies that fail: an L3 that refuses pages, a device that refuses backups. Without progress
//! nothing is ordered again.

use larder_tiers::core::{Core, Done, Order, Outcome};
use larder_tiers::prompt::Scope;

use super::{core, prompt, run};

/// Completes every order: puts store at most `stored` pages in all, and backups succeed if
/// `copies`. Returns the depths and pages of the puts, and the number of backups.
fn answer(core: &mut Core, mut stored: usize, copies: bool) -> (Vec<(usize, usize)>, usize) {
    let (mut puts, mut backups) = (Vec::new(), 0);
    while let Some(order) = core.next_order() {
        let (id, outcome) = match order {
            Order::BackUp { id, .. } => {
                backups += 1;
                (id, Outcome::Copied(copies))
            }
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
        assert!(puts.len() + backups < 1000, "orders without end");
    }
    core.validate([]).unwrap();
    (puts, backups)
}

fn insert(core: &mut Core, first: u64, pages: u64) {
    let prompt = prompt(core, &Scope::default(), first..first + 4 * pages + 1);
    run(core, prompt, 0);
}

/// The queue has room for three pages.
fn with_short_queue() -> Core {
    core(|config| config.l3_queue_bytes_max = 3 * 4096)
}

#[test]
fn the_rest_of_a_path_is_not_ordered_while_l3_refuses_its_beginning() {
    let mut core = with_short_queue();
    insert(&mut core, 0, 10);
    assert_eq!(answer(&mut core, 0, true), (vec![(0, 3)], 1));
    assert_eq!(core.orders_out(), 0);
    assert_eq!(core.stats().put_failed, 3);
}

#[test]
fn refused_pages_are_tried_again_after_pauses_that_double() {
    let mut core = core(|_| {});
    let mut attempts = Vec::new();
    for round in 0..40_u64 {
        // The first prompt takes part in no later round.
        insert(&mut core, 1000 * round, 2);
        let (puts, _) = answer(&mut core, 0, true);
        attempts.push(puts.len());
    }
    let tried = attempts.iter().sum::<usize>() as u64;
    assert_eq!(core.stats().put_failed, 2 * tried);
    // Of a page that is `n` rounds old: the first attempt, and one for each doubling of `n`.
    let most: u64 = (0..40_u64)
        .map(|age| 2 + u64::from((age + 1).ilog2()))
        .sum();
    assert!(
        (40..=most).contains(&tried),
        "{tried} of at most {most}: {attempts:?}"
    );
    assert!(tried > 100, "{tried}: refused pages are tried again");
}

#[test]
fn pages_follow_in_their_order_when_l3_takes_pages_again() {
    let mut core = with_short_queue();
    insert(&mut core, 0, 10);
    answer(&mut core, 0, true);
    // Another request of the same prompt, and the pause is over.
    insert(&mut core, 0, 10);
    let (puts, _) = answer(&mut core, usize::MAX, true);
    assert_eq!(puts, [(0, 3), (3, 3), (6, 3), (9, 1)]);
    assert_eq!(core.stats().put, 10);
}

#[test]
fn pages_that_l3_has_taken_are_not_given_again_with_refused_ones() {
    let mut core = core(|_| {});
    insert(&mut core, 0, 10);
    assert_eq!(answer(&mut core, 4, true).0[0], (0, 10));
    let (before, failed) = (core.stats().put, core.stats().put_failed);
    core.retry_failed();
    assert_eq!(
        answer(&mut core, usize::MAX, true).0,
        [(before as usize, 10 - before as usize)]
    );
    assert_eq!((core.stats().put, core.stats().put_failed), (10, failed));
}

#[test]
fn the_last_chance_tries_each_refused_page_once() {
    let mut core = with_short_queue();
    insert(&mut core, 0, 10);
    insert(&mut core, 1000, 2);
    answer(&mut core, 0, true);
    for _ in 0..5 {
        let before = core.stats().put_failed;
        core.retry_failed();
        let (puts, _) = answer(&mut core, 0, true);
        assert!((1..=2).contains(&puts.len()), "{puts:?}");
        assert!(core.stats().put_failed <= before + 5);
    }
    core.retry_failed();
    answer(&mut core, usize::MAX, true);
    assert_eq!(core.stats().put, 12);
}

/// Two nodes of a path, which have room in L2 one at a time.
#[test]
fn a_device_that_refuses_backups_is_asked_a_bounded_number_of_times() {
    let mut core = core(|config| config.l2_pages = 12);
    insert(&mut core, 0, 8);
    assert_eq!(answer(&mut core, 0, false).1, 1);
    insert(&mut core, 0, 16);
    let (_, backups) = answer(&mut core, 0, false);
    assert!(backups <= 3, "{backups} backups");
    for _ in 0..3 {
        core.retry_failed();
        let (_, backups) = answer(&mut core, 0, false);
        assert!(backups <= 2, "{backups} backups");
    }
    // It copies again: what L2 has room for is in L3.
    core.retry_failed();
    answer(&mut core, usize::MAX, true);
    assert_eq!(core.stats().put, 8);
}

/// The rest of a refused path is split, and its last part leaves L2.
#[test]
fn pages_that_wait_for_l3_are_not_forgotten_with_the_pages_behind_them() {
    let mut core = core(|config| {
        config.l3_queue_bytes_max = 3 * 4096;
        config.l2_pages = 12;
    });
    insert(&mut core, 0, 10);
    answer(&mut core, 0, true);
    core.evict(100);
    let beginning = prompt(&mut core, &Scope::default(), 0..20);
    assert_eq!(core.match_prefix(&beginning).pages(), 5);
    insert(&mut core, 1000, 7);
    answer(&mut core, 0, true);
    assert_eq!(core.stats().l2_evicted, 5);
    core.retry_failed();
    let (puts, _) = answer(&mut core, usize::MAX, true);
    assert!(puts.contains(&(3, 2)), "{puts:?}");
    assert_eq!(core.stats().put, 5 + 7);
}
