//! The tree through the core: sharing, eviction order, splits, and that keys are hashed and uses
//! reported only once. `prefetch`: reads from L3 before a request starts. `late`: late writes.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod late;
mod prefetch;
mod refused;

use larder_tiers::config::{Config, L3Write, WritePolicy};
use larder_tiers::core::{Core, Done, Fence, NoRoom, OpId, Order, Outcome, Request, Retries};
use larder_tiers::prompt::{Prompt, Scope};
use larder_tiers::tree::EvictionOrder;

const PAGE: u32 = 4;

fn config() -> Config {
    let mut config = Config::new(PAGE, 4096, 200, 200);
    config.prefetch.threshold_tokens = 4;
    config.prefetch.batch_pages = 2;
    config.load_threshold_tokens = 1;
    config
}

fn core(change: impl FnOnce(&mut Config)) -> Core {
    let mut config = config();
    change(&mut config);
    Core::new(config).unwrap()
}

fn prompt(core: &mut Core, scope: &Scope, tokens: impl IntoIterator<Item = u64>) -> Prompt {
    let mut prompt = core.prompt(scope);
    core.extend_prompt(&mut prompt, tokens).unwrap();
    prompt
}

/// Computes a prompt and keeps its pages.
fn run(core: &mut Core, prompt: Prompt, priority: i32) {
    let request = computed(core, prompt, priority);
    core.finish(request, true, Fence(0));
}

fn computed(core: &mut Core, prompt: Prompt, priority: i32) -> Request {
    let tokens = prompt.words().len();
    let mut request = core.start(prompt, priority);
    let left = tokens - request.tokens();
    core.extend(&mut request, left).unwrap();
    request
}

/// Completes every order successfully.
fn settle(core: &mut Core) -> Vec<Order> {
    let mut all = Vec::new();
    while let Some(order) = core.next_order() {
        let end = match &order {
            Order::BackUp { id, .. } | Order::Load { id, .. } => Some((*id, Outcome::Copied(true))),
            Order::Put { id, keys, .. }
            | Order::Exists { id, keys, .. }
            | Order::Get { id, keys, .. } => Some((*id, Outcome::Pages(keys.len()))),
            _ => None,
        };
        if let Some((id, outcome)) = end {
            core.complete(Done { id, outcome }).unwrap();
        }
        all.push(order);
    }
    core.validate([]).unwrap();
    all
}

fn matched(
    core: &mut Core,
    scope: &Scope,
    tokens: impl IntoIterator<Item = u64>,
) -> (usize, usize) {
    let prompt = prompt(core, scope, tokens);
    let matched = core.match_prefix(&prompt);
    (matched.l1.pages() as usize, matched.l2_pages)
}

#[test]
fn equal_tokens_under_another_extra_key_salt_or_unit_share_no_node() {
    let mut core = core(|_| {});
    let text = |text: &str| Some(text.to_owned());
    let scopes = [
        Scope::default(),
        Scope {
            extra_key: text("tenant"),
            ..Scope::default()
        },
        Scope {
            cache_salt: text("tenant"),
            ..Scope::default()
        },
        Scope {
            bigram: true,
            ..Scope::default()
        },
    ];
    for (before, scope) in scopes.iter().enumerate() {
        assert_eq!(matched(&mut core, scope, 0..21), (0, 0));
        let prompt = prompt(&mut core, scope, 0..21);
        run(&mut core, prompt, 0);
        // One root and one node per scope.
        assert_eq!(core.counts().nodes, 2 * (before + 1));
        assert_eq!(core.counts().l1_pages, 5 * (before + 1));
    }
    for scope in &scopes {
        assert_eq!(matched(&mut core, scope, 0..21), (5, 0));
    }
    // Bigrams with a different first token are different prompts, although every later token is
    // equal.
    assert_eq!(
        matched(&mut core, &scopes[3], [7].into_iter().chain(1..21)),
        (0, 0)
    );
    settle(&mut core);
}

#[test]
fn a_match_splits_at_page_boundaries_only_and_both_parts_go_on() {
    let mut core = core(|_| {});
    let scope = Scope::default();
    let long = prompt(&mut core, &scope, 0..40);
    run(&mut core, long, 0);
    assert_eq!(
        matched(&mut core, &scope, (0..14).chain([99; 10])),
        (3, 0),
        "14 tokens are 3 pages and a half"
    );
    assert_eq!(core.counts().nodes, 3);
    assert_eq!(matched(&mut core, &scope, 0..40), (10, 0));
    settle(&mut core);
}

#[test]
fn an_insert_frees_duplicates_and_keeps_the_unaligned_tail_with_the_request() {
    let mut core = core(|config| config.l1_pages = 20);
    let scope = Scope::default();
    let (a, b) = (
        prompt(&mut core, &scope, 0..18),
        prompt(&mut core, &scope, 0..18),
    );
    let (mut a, mut b) = (computed(&mut core, a, 0), computed(&mut core, b, 0));
    assert_eq!(core.free_pages().0, 20 - 2 * 5);
    assert_eq!(core.insert(&mut a, Fence(0)).unwrap().duplicates, 0);
    let end = core.insert(&mut b, Fence(0)).unwrap();
    assert_eq!((end.pages, end.duplicates), (4, 4));
    assert_eq!(core.free_pages().0, 20 - 6);
    assert_eq!(
        a.row_and_loads().0.pages()[..4],
        b.row_and_loads().0.pages()[..4],
        "the row names the tree's pages"
    );
    assert_eq!((a.own_pages().len(), b.own_pages().len()), (1, 1));
    core.validate([&a, &b]).unwrap();
    core.finish(a, false, Fence(0));
    core.finish(b, false, Fence(0));
    settle(&mut core);
    assert_eq!(core.free_pages().0, 20 - 4);
}

#[test]
fn an_insert_brings_evicted_nodes_back_without_a_copy() {
    let mut core = core(|_| {});
    let scope = Scope::default();
    let first = prompt(&mut core, &scope, 0..16);
    run(&mut core, first, 0);
    settle(&mut core);
    core.evict(100);
    assert_eq!(matched(&mut core, &scope, 0..16), (0, 4));
    let again = prompt(&mut core, &scope, 0..16);
    let mut request = computed(&mut core, again, 0);
    core.load_back(&mut request, 0).unwrap();
    core.finish(request, true, Fence(0));
    assert_eq!(matched(&mut core, &scope, 0..16), (4, 0));
    assert_eq!(core.stats().duplicates, 0);
    assert!(settle(&mut core).is_empty(), "L2 has them already");
}

/// The prompts, by number, in the order in which they leave L1.
fn leaving(order: EvictionOrder) -> Vec<u64> {
    let mut core = core(|config| {
        config.eviction = order;
        config.l3_write = L3Write::Never;
    });
    let scope = Scope::default();
    for (number, priority) in [(0, 2), (1, 0), (2, 1), (3, 1)] {
        let prompt = prompt(&mut core, &scope, number * 100..number * 100 + 8);
        run(&mut core, prompt, priority);
    }
    // 0 is hit three more times and 2 once; after that 1 is used without a hit.
    for number in [0, 0, 0, 2] {
        let prompt = prompt(&mut core, &scope, number * 100..number * 100 + 8);
        run(&mut core, prompt, 0);
    }
    matched(&mut core, &scope, 100..108);
    settle(&mut core);
    let mut left = Vec::new();
    while left.len() < 4 {
        core.evict(1);
        let keys_left: Vec<u64> = (0..4)
            .filter(|number| core_has_left(&core, *number))
            .collect();
        left.extend(
            keys_left
                .into_iter()
                .filter(|number| !left.contains(number))
                .collect::<Vec<_>>(),
        );
    }
    left
}

fn core_has_left(core: &Core, number: u64) -> bool {
    let mut prompt = core.prompt(&Scope::default());
    let mut vocabulary = larder_tiers::prompt::Vocabulary::new(0);
    prompt
        .extend(&mut vocabulary, number * 100..number * 100 + 8)
        .unwrap();
    core.peek(&prompt).0 == 0
}

#[test]
fn each_eviction_order_evicts_by_its_definition() {
    assert_eq!(leaving(EvictionOrder::Lru), [3, 0, 2, 1]);
    assert_eq!(leaving(EvictionOrder::Mru), [1, 2, 0, 3]);
    assert_eq!(leaving(EvictionOrder::Fifo), [0, 1, 2, 3]);
    assert_eq!(leaving(EvictionOrder::Filo), [3, 2, 1, 0]);
    assert_eq!(leaving(EvictionOrder::Lfu), [3, 1, 2, 0]);
    assert_eq!(leaving(EvictionOrder::Priority), [1, 3, 2, 0]);
}

#[test]
fn leaves_are_evicted_before_their_parents_and_held_nodes_never() {
    let mut core = core(|config| {
        config.write_policy = WritePolicy::WriteThroughSelective;
        config.selective_hits = 9;
    });
    let scope = Scope::default();
    for tokens in [8, 16] {
        let prompt = prompt(&mut core, &scope, 0..tokens);
        run(&mut core, prompt, 0);
    }
    core.evict(1);
    assert_eq!(matched(&mut core, &scope, 0..16), (2, 0));
    let held = prompt(&mut core, &scope, 0..9);
    let held = core.start(held, 0);
    assert_eq!(core.evict(10).freed, 0);
    assert_eq!(core.available_pages(), 200 - 2);
    core.finish(held, false, Fence(0));
    assert_eq!(core.evict(10).freed, 2);
    assert_eq!(core.available_pages(), 200);
}

#[test]
fn selective_copies_at_the_second_request_and_a_request_counts_once() {
    let mut core = core(|config| config.write_policy = WritePolicy::WriteThroughSelective);
    let scope = Scope::default();
    let first = prompt(&mut core, &scope, 0..17);
    let mut request = computed(&mut core, first, 0);
    for _ in 0..3 {
        core.insert(&mut request, Fence(0)).unwrap();
    }
    core.finish(request, true, Fence(0));
    assert!(settle(&mut core).is_empty());
    let second = prompt(&mut core, &scope, 0..17);
    run(&mut core, second, 0);
    let orders = settle(&mut core);
    assert!(
        matches!(orders[..], [Order::BackUp { .. }, Order::Put { .. }]),
        "{orders:?}"
    );
}

#[test]
fn selective_writing_to_l3_waits_for_the_second_request_too() {
    let mut core = core(|config| config.l3_write = L3Write::Selective);
    let scope = Scope::default();
    for round in 0..3 {
        let prompt = prompt(&mut core, &scope, 0..17);
        run(&mut core, prompt, 0);
        let puts = settle(&mut core)
            .into_iter()
            .filter(|order| matches!(order, Order::Put { .. }));
        assert_eq!(puts.count(), usize::from(round == 1));
    }
}

#[test]
fn write_back_copies_evicted_pages_and_frees_them_after_the_copy() {
    let mut core = core(|config| config.write_policy = WritePolicy::WriteBack);
    let scope = Scope::default();
    let first = prompt(&mut core, &scope, 0..16);
    run(&mut core, first, 0);
    assert!(settle(&mut core).is_empty());
    let evicted = core.evict(4);
    assert_eq!((evicted.freed, evicted.pending), (0, 4));
    assert_eq!(core.free_pages().0, 196);
    settle(&mut core);
    assert_eq!(core.free_pages().0, 200);
    assert_eq!(matched(&mut core, &scope, 0..16), (0, 4));
}

#[test]
fn keys_are_hashed_once_from_prefetch_to_the_last_insert() {
    let mut core = core(|_| {});
    let mut prompt = prompt(&mut core, &Scope::default(), 0..40);
    let id = core.prefetch(&mut prompt).unwrap();
    assert_eq!(prompt.hashed_pages(), 10);
    core.cancel_prefetch(id);
    settle(&mut core);
    let mut request = computed(&mut core, prompt, 0);
    core.insert(&mut request, Fence(0)).unwrap();
    core.extend_prompt(request.prompt_mut(), 40..48).unwrap();
    core.extend(&mut request, 8).unwrap();
    assert_eq!(request.prompt().hashed_pages(), 10);
    core.insert(&mut request, Fence(0)).unwrap();
    assert_eq!(request.prompt().hashed_pages(), 12);
    core.finish(request, false, Fence(0));
    settle(&mut core);
}

#[test]
fn the_l3_queue_is_bounded_in_bytes_and_the_tail_follows_when_it_is_empty() {
    let mut core = core(|config| config.l3_queue_bytes_max = 3 * 4096);
    let first = prompt(&mut core, &Scope::default(), 0..40);
    run(&mut core, first, 0);
    let orders = settle(&mut core);
    let put = |order: &Order| match order {
        Order::Put { keys, depth, .. } => Some((*depth, keys.len())),
        _ => None,
    };
    let puts: Vec<_> = orders.iter().filter_map(put).collect();
    assert_eq!(puts, [(0, 3), (3, 3), (6, 3), (9, 1)]);
    assert_eq!((core.stats().put, core.stats().put_refused), (10, 0));
    assert_eq!(core.stats().put_delayed, 7);
    core.validate([]).unwrap();
}

#[test]
fn a_request_without_room_learns_of_pages_that_backups_hold() {
    let mut core = core(|config| config.l1_pages = 20);
    let scope = Scope::default();
    let first = prompt(&mut core, &scope, 0..60);
    run(&mut core, first, 0);
    let other = prompt(&mut core, &scope, 100..140);
    let mut request = core.start(other, 0);
    let refused = core.extend(&mut request, 40);
    let no_room = NoRoom {
        short: 5,
        pending: 15,
    };
    assert_eq!(refused, Err(no_room.into()));
    settle(&mut core);
    core.extend(&mut request, 40).unwrap();
    core.finish(request, false, Fence(0));
    settle(&mut core);
}

#[test]
fn a_request_tries_again_after_some_passes_and_not_for_ever() {
    let core = core(|_| {});
    let mut retries = Retries::default();
    let due: Vec<u64> = (0..100)
        .filter(|pass| retries.is_due(&core, *pass, false))
        .collect();
    assert_eq!(due, [0, 8, 16, 24, 32, 40, 48, 56]);
    let mut retries = Retries::default();
    assert!(retries.is_due(&core, 0, false) && retries.is_due(&core, 1, true));
}

#[test]
fn pages_used_in_upper_tiers_are_reported_to_l3_once_per_batch() {
    let mut core = core(|_| {});
    let scope = Scope::default();
    let first = prompt(&mut core, &scope, 0..40);
    run(&mut core, first, 0);
    settle(&mut core);
    core.tell_warmth();
    assert_eq!(core.next_order(), None);
    for _ in 0..3 {
        matched(&mut core, &scope, 0..40);
    }
    core.tell_warmth();
    let order = core.next_order();
    assert!(
        matches!(&order, Some(Order::Touch { keys }) if keys.len() == 10),
        "{order:?}"
    );
    core.tell_warmth();
    assert_eq!(core.next_order(), None);
}

#[test]
fn an_answer_without_order_or_of_the_wrong_kind_is_an_error_that_changes_nothing() {
    let mut core = core(|_| {});
    let first = prompt(&mut core, &Scope::default(), 0..8);
    run(&mut core, first, 0);
    let Some(Order::BackUp { id, .. }) = core.next_order() else {
        panic!("nothing is backed up");
    };
    let pages = Outcome::Pages(1);
    assert!(core.complete(Done { id, outcome: pages }).is_err());
    let nobody = OpId(id.0 + 7);
    assert!(
        core.complete(Done {
            id: nobody,
            outcome: pages
        })
        .is_err()
    );
    core.validate([]).unwrap();
    let outcome = Outcome::Copied(true);
    core.complete(Done { id, outcome }).unwrap();
    assert!(core.complete(Done { id, outcome }).is_err());
    settle(&mut core);
}

/// Answers the next order.
fn answer(core: &mut Core, outcome: Outcome) -> Order {
    let order = core.next_order().unwrap();
    let (Order::BackUp { id, .. }
    | Order::Load { id, .. }
    | Order::Put { id, .. }
    | Order::Exists { id, .. }
    | Order::Get { id, .. }) = &order
    else {
        panic!("{order:?} is not answered");
    };
    core.complete(Done { id: *id, outcome }).unwrap();
    order
}

#[test]
fn with_write_back_l2_first_drops_copies_of_pages_in_l1() {
    let mut core = core(|config| {
        config.write_policy = WritePolicy::WriteBack;
        config.l3_write = L3Write::Never;
        config.l2_pages = 6;
    });
    let scope = Scope::default();
    let (a, b) = (0..17, 100..117);
    for tokens in [a.clone(), 200..205] {
        let prompt = prompt(&mut core, &scope, tokens);
        run(&mut core, prompt, 0);
        core.evict(100);
        settle(&mut core);
    }
    // A returns to L1, so both tiers have it. The third prompt is in L2 only and was used before A.
    let again = prompt(&mut core, &scope, a.clone());
    let mut request = core.start(again, 0);
    core.load_back(&mut request, 100).unwrap();
    answer(&mut core, Outcome::Copied(true));
    let other = prompt(&mut core, &scope, b.clone());
    run(&mut core, other, 0);
    core.evict(4);
    answer(&mut core, Outcome::Copied(true));
    assert_eq!(matched(&mut core, &scope, a), (4, 0));
    assert_eq!(matched(&mut core, &scope, b), (0, 4));
    assert_eq!(matched(&mut core, &scope, 200..205), (0, 1));
    core.finish(request, false, Fence(0));
    settle(&mut core);
}

#[test]
fn a_failed_load_fails_the_loads_below_it_and_l2_keeps_everything() {
    for first_fails_first in [true, false] {
        fail_above(first_fails_first);
    }
}

/// Two loads, one below the other. The upper load fails before or after the lower one succeeds.
fn fail_above(first_fails_first: bool) {
    let mut core = core(|_| {});
    let scope = Scope::default();
    for tokens in [17, 33] {
        let prompt = prompt(&mut core, &scope, 0..tokens);
        run(&mut core, prompt, 0);
    }
    settle(&mut core);
    core.evict(100);
    let short = prompt(&mut core, &scope, 0..17);
    let mut short = core.start(short, 0);
    core.load_back(&mut short, 100).unwrap();
    let long = prompt(&mut core, &scope, 0..33);
    let mut long = core.start(long, 0);
    assert_eq!(
        long.row_and_loads().1.len(),
        1,
        "the first half is behind the first load"
    );
    core.load_back(&mut long, 100).unwrap();
    let (Some(Order::Load { id: first, .. }), Some(Order::Load { id: second, .. })) =
        (core.next_order(), core.next_order())
    else {
        panic!("two loads");
    };
    let (bad, good) = (Outcome::Copied(false), Outcome::Copied(true));
    let mut ends = [(first, bad), (second, good)].map(|(id, outcome)| Done { id, outcome });
    if !first_fails_first {
        // Pages below a load in flight are not readable.
        ends.reverse();
    }
    core.complete(ends[0]).unwrap();
    assert!(core.complete(ends[0]).is_err());
    core.validate([&short, &long]).unwrap();
    assert_eq!(core.is_broken(&long), first_fails_first);
    core.complete(ends[1]).unwrap();
    assert!(core.is_broken(&short) && core.is_broken(&long));
    core.validate([&short, &long]).unwrap();
    assert_eq!(
        core.free_pages().0,
        200 - 8,
        "requests still hold the destination pages"
    );
    core.finish(short, true, Fence(0));
    core.finish(long, true, Fence(0));
    assert_eq!(core.free_pages().0, 200);
    assert_eq!(matched(&mut core, &scope, 0..33), (0, 8));
    settle(&mut core);
}
