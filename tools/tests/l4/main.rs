//! `larder serve --l4`: nodes share pages through a directory while their stores are in use.

#![allow(clippy::unwrap_used, missing_docs)]

#[path = "../transfer/home.rs"]
#[allow(dead_code)]
mod home;
#[path = "../remote/names.rs"]
mod names;
#[allow(dead_code)]
mod node;
#[path = "../../../tests/support/mod.rs"]
mod support;

use std::fs;

use home::{EVEN, RAGGED};
use names::names;
use node::{Node, Shared};
use support::honest::eventually;
use support::{chain, fails, flip, report, text};

/// Pages of a run: of 16 tokens each.
const RUN_TOKENS: &str = "64";
const THROUGH: [&str; 2] = ["--l4-admission", "through"];

#[test]
fn a_node_that_never_saw_a_prompt_reads_its_pages_and_serves_them_from_its_own_disk() {
    let shared = Shared::new();
    let first = Node::serving(&shared, &THROUGH);
    let prompt = chain(1, 10);
    first.put(EVEN, &prompt);
    first.reaches("published_runs", 2);

    let second = Node::serving(&shared, &THROUGH);
    second.knows(EVEN, 2);
    // Two whole runs, without the two pages behind them. The first lookup counts them.
    assert_eq!(second.found(EVEN, &prompt), 8);
    let is_hit = second.read(EVEN, &prompt);
    assert_eq!(is_hit, [[true; 8].as_slice(), &[false; 2]].concat());
    assert_eq!(second.count("stored_pages"), 8);
    assert_eq!(second.count("fetched_runs"), 2);

    shared.remove();
    assert_eq!(second.found(EVEN, &prompt), 8);
    assert!(second.read(EVEN, &prompt[..8]).iter().all(|is_hit| *is_hit));
}

#[test]
fn nodes_with_the_same_pages_publish_a_run_once() {
    let shared = Shared::new();
    let nodes = [
        Node::serving(&shared, &THROUGH),
        Node::serving(&shared, &THROUGH),
    ];
    for node in &nodes {
        node.put(RAGGED, &chain(1, 8));
    }
    for node in &nodes {
        eventually("both runs to be there", || {
            node.count("published_runs") + node.count("present_runs") == 2
        });
    }
    let published = nodes.iter().map(|node| node.count("published_runs"));
    assert_eq!(published.sum::<u64>(), 2);
    assert_eq!(shared.objects().len(), 2);
}

#[test]
fn a_run_is_published_when_it_is_used_again() {
    let shared = Shared::new();
    let node = Node::serving(&shared, &[]);
    node.put(EVEN, &chain(1, 4));
    node.put(EVEN, &chain(2, 4));
    // As the next turn of a conversation finds it.
    assert_eq!(node.found(EVEN, &chain(2, 4)), 4);
    node.reaches("published_runs", 1);
    let name = names(&shared.key_file(), EVEN).name(&chain(2, 4)[3]);
    assert_eq!(shared.objects(), [shared.file_of(&name)]);
}

#[test]
fn a_flipped_byte_is_a_miss_of_its_page_alone() {
    let shared = Shared::new();
    let first = Node::serving(&shared, &THROUGH);
    let prompt = chain(1, 4);
    first.put(EVEN, &prompt);
    first.reaches("published_runs", 1);
    // In the third of four payloads of 64 KiB, behind three blocks.
    flip(&shared.objects()[0], 3 * 4096 + 2 * 65536 + 1234);
    let second = Node::serving(&shared, &THROUGH);
    second.knows(EVEN, 1);
    assert_eq!(second.found(EVEN, &prompt), 4);
    assert_eq!(second.read(EVEN, &prompt), [true, true, false, true]);
    assert_eq!(second.count("faulty_pages"), 1);
    // It is not fetched again.
    assert_eq!(second.found(EVEN, &prompt), 2);
    assert_eq!(second.count("fetched_runs"), 1);
}

#[test]
fn pages_that_are_sealed_with_another_key_are_not_taken() {
    let shared = Shared::new();
    let first = Node::serving(&shared, &THROUGH);
    first.put(EVEN, &chain(1, 4));
    first.reaches("published_runs", 1);
    shared.change_key();
    // A node without the first key does not know the run. So it lies where the node looks.
    let name = names(&shared.key_file(), EVEN).name(&chain(1, 4)[3]);
    let [object] = &shared.objects()[..] else {
        panic!("one object");
    };
    let place = shared.file_of(&name);
    fs::create_dir_all(place.parent().unwrap()).unwrap();
    fs::rename(object, place).unwrap();
    let second = Node::serving(&shared, &THROUGH);
    second.knows(EVEN, 1);
    assert_eq!(second.found(EVEN, &chain(1, 4)), 4);
    assert_eq!(second.read(EVEN, &chain(1, 4)), [false; 4]);
    assert_eq!(second.count("faulty_runs"), 1);
    assert_eq!(second.count("stored_pages"), 0);
}

#[test]
fn encrypted_stores_share_runs_and_take_none_of_a_tenant_that_they_erased() {
    let shared = Shared::new();
    let first = Node::encrypted(&shared, &THROUGH);
    let prompt = chain(1, 4);
    first.put(EVEN, &prompt);
    first.reaches("published_runs", 1);
    let second = Node::encrypted(&shared, &THROUGH);
    second.knows(EVEN, 1);
    assert_eq!(second.found(EVEN, &prompt), 4);
    assert_eq!(second.read(EVEN, &prompt), [true; 4]);
    assert_eq!(second.count("stored_pages"), 4);

    let erase = ["erase", text(&second.home.path), "--tenant", ""];
    assert_eq!(report(&erase, 0)["erased_pages"], 4);
    assert_eq!(second.read(EVEN, &prompt), [false; 4]);
    second.found(EVEN, &prompt);
    second.reaches("refused_pages", 4);
    // Nor are they taken when the tenant has a key again: they are from before it.
    second.put(EVEN, &chain(2, 4));
    second.reaches("published_runs", 1);
    eventually("another attempt", || {
        second.found(EVEN, &prompt);
        second.count("refused_pages") == 8
    });
    assert_eq!(second.read(EVEN, &prompt), [false; 4]);
    assert_eq!(second.read(EVEN, &chain(2, 4)), [true; 4]);

    // The file that remembers the puts shows no page.
    let home = second.end();
    let memory = fs::read(home.path.with_file_name("store.touched")).unwrap();
    let object = fs::read(&shared.objects()[0]).unwrap();
    for key in prompt.iter().chain(&chain(2, 4)) {
        let is_of = |window: &[u8]| window == &key.as_bytes()[..12];
        assert!(!memory.windows(12).chain(object.windows(12)).any(is_of));
    }
    // A remote without keys has pages in clear.
    let store = text(&home.path);
    let key = home.path.with_file_name("store-key");
    let serve = ["serve", store, "--key-file", text(&key), "--l4"];
    let url = shared.url();
    fails(
        &[&serve[..], &[&url, "--l4-unsigned"]].concat(),
        2,
        &["in clear"],
    );
}

#[test]
fn runs_of_a_former_owner_of_an_encrypted_store_are_published() {
    let shared = Shared::new();
    let first = Node::encrypted(&shared, &[]);
    first.put(EVEN, &chain(1, 4));
    let key = first.home.path.with_file_name("store-key");
    let key = ["--key-file", text(&key)];
    let second = first.restarted(&shared, &[&THROUGH[..], &key].concat());
    second.reaches("published_runs", 1);
    let name = names(&shared.key_file(), EVEN).name(&chain(1, 4)[3]);
    assert_eq!(shared.objects(), [shared.file_of(&name)]);
}

#[test]
fn a_missing_remote_is_named_and_the_store_works() {
    let shared = Shared::new();
    shared.remove();
    let node = Node::serving(&shared, &[]);
    eventually("a word about it", || {
        node.state().contains("does not exist")
    });
    node.put(EVEN, &chain(1, 4));
    assert_eq!(node.read(EVEN, &chain(1, 4)), [true; 4]);
}

#[test]
fn pages_that_are_computed_faster_than_they_arrive_are_not_fetched() {
    let shared = Shared::new();
    let first = Node::serving(&shared, &THROUGH);
    first.put(EVEN, &chain(1, 4));
    first.reaches("published_runs", 1);
    let fast = ["--l4-prefill-rate", "1e15"];
    let second = Node::serving(&shared, &fast);
    second.knows(EVEN, 1);
    assert_eq!(second.found(EVEN, &chain(1, 4)), 0);
    assert_eq!(second.count("too_slow_runs"), 1);
    assert_eq!(second.count("fetched_runs"), 0);
}

#[test]
fn a_budget_bounds_the_published_bytes() {
    let shared = Shared::new();
    // Room for one run of four pages of 64 KiB.
    let budget = [&THROUGH[..], &["--l4-bytes-per-day", "400KiB"]].concat();
    let node = Node::serving(&shared, &budget);
    node.put(EVEN, &chain(1, 12));
    node.reaches("dropped_budget_runs", 2);
    // Both were dropped while the first one was on its way.
    node.reaches("published_runs", 1);
    assert_eq!(shared.objects().len(), 1);
}

#[test]
fn an_owner_that_is_killed_leaves_whole_objects_and_the_next_one_publishes_the_rest() {
    let shared = Shared::new();
    // One run in four seconds.
    let slow = [&THROUGH[..], &["--l4-bytes-per-second", "64KiB"]].concat();
    let node = Node::serving(&shared, &slow);
    node.put(EVEN, &chain(1, 24));
    eventually("an object", || !shared.objects().is_empty());
    let node = node.killed(&shared, &THROUGH);
    eventually("the other runs", || shared.verify()["good_pages"] == 24);
    assert_eq!(node.found(EVEN, &chain(1, 24)), 24);
    assert!(node.count("published_runs") > 0);
}

/// A listing in an hour, so that only the one at the start.
const UNLISTED: [&str; 2] = ["--l4-refresh", "1h"];

#[test]
fn a_prefix_that_was_not_listed_is_searched_for_and_found_by_the_next_lookup() {
    let shared = Shared::new();
    let second = Node::serving(&shared, &UNLISTED);
    second.knows_nothing(EVEN);
    let first = Node::serving(&shared, &THROUGH);
    let prompt = chain(1, 30);
    first.put(EVEN, &prompt);
    first.reaches("published_runs", 7);
    assert_eq!(second.found(EVEN, &prompt), 0);
    second.reaches("searched_runs", 7);
    // By fewer questions than runs and one, and none of them for the next lookup.
    assert!(second.count("search_requests") <= 7);
    // The first fetch measures the speed.
    eventually("all pages", || second.found(EVEN, &prompt) == 28);
    assert_eq!(second.read(EVEN, &prompt[..28]), [true; 28]);
    // Behind the stored pages, and not again for the same chain.
    let asked = second.count("search_requests");
    let longer = [&prompt[..28], &chain(2, 40)[28..]].concat();
    assert_eq!(second.found(EVEN, &longer), 28);
    second.reaches("search_requests", asked + 1);
    assert_eq!(second.found(EVEN, &longer), 28);
    assert_eq!(second.found(EVEN, &prompt), 28);
    assert_eq!(second.count("search_requests"), asked + 1);
    let metric = |name: &str| second.metric(&format!("larder_l4_{name}_total"));
    assert_eq!(metric("search_requests"), (asked + 1) as f64);
    assert_eq!(metric("searched_runs"), 7.0);
}

#[test]
fn a_run_that_is_gone_is_a_miss_and_its_name_goes() {
    let shared = Shared::new();
    let first = Node::serving(&shared, &THROUGH);
    first.put(EVEN, &chain(1, 4));
    first.reaches("published_runs", 1);
    let second = Node::serving(&shared, &UNLISTED);
    second.knows(EVEN, 1);
    fs::remove_file(&shared.objects()[0]).unwrap();
    assert_eq!(second.found(EVEN, &chain(1, 4)), 4);
    assert_eq!(second.read(EVEN, &chain(1, 4)), [false; 4]);
    assert_eq!(second.count("gone_runs"), 1);
    assert_eq!(second.count("known_runs"), 0);
    assert_eq!(second.found(EVEN, &chain(1, 4)), 0);
}

#[test]
fn a_second_remote_has_the_pages_that_the_first_lacks() {
    let (near, far) = (Shared::new(), Shared::new());
    far.take_key_of(&near);
    let of_far = Node::serving(&far, &THROUGH);
    of_far.put(EVEN, &chain(1, 12));
    of_far.reaches("published_runs", 3);
    let of_near = Node::serving(&near, &THROUGH);
    of_near.put(EVEN, &chain(1, 4));
    of_near.reaches("published_runs", 1);

    let both = Node::serving(&near, &[&THROUGH[..], &["--l4", &far.url()]].concat());
    // Listed by both levels, and measured: the counters of a level are added.
    both.knows(EVEN, 4);
    eventually("two speeds", || both.found(EVEN, &chain(1, 12)) == 12);
    assert_eq!(both.read(EVEN, &chain(1, 12)), [true; 12]);
    assert_eq!(both.count("stored_pages"), 12);
    // The first level gets the runs that it lacked; the second has them all.
    eventually("the runs in the first remote", || near.objects().len() == 3);
    assert_eq!(far.objects().len(), 3);
    assert!(both.state().contains(&far.url()), "{}", both.state());
}

#[test]
fn an_operator_switches_the_remote_off_and_on_without_a_restart() {
    let shared = Shared::new();
    let first = Node::serving(&shared, &THROUGH);
    first.put(EVEN, &chain(1, 8));
    first.reaches("published_runs", 2);
    let second = Node::serving(&shared, &THROUGH);
    second.knows(EVEN, 2);
    second.switch("off");
    assert!(
        second.state().contains("switched off"),
        "{}",
        second.state()
    );
    assert_eq!(second.found(EVEN, &chain(1, 8)), 0);
    second.put(EVEN, &chain(2, 4));
    assert_eq!(second.read(EVEN, &chain(2, 4)), [true; 4]);
    assert_eq!(shared.objects().len(), 2);
    second.switch("on");
    second.reaches("published_runs", 1);
    assert_eq!(second.found(EVEN, &chain(1, 8)), 8);
    assert_eq!(second.read(EVEN, &chain(1, 8)), [true; 8]);
    // A store without a remote.
    let alone = Node::without_l4();
    assert!(alone.switch_fails("off").contains("no L4"));
}

#[test]
fn a_run_of_a_former_owner_is_published_when_it_is_used_again() {
    let shared = Shared::new();
    let node = Node::serving(&shared, &[]);
    node.put(EVEN, &chain(1, 4));
    let node = node.restarted(&shared, &[]);
    assert_eq!(node.found(EVEN, &chain(1, 4)), 4);
    node.reaches("published_runs", 1);
    // A torn memory is ignored.
    node.put(EVEN, &chain(2, 4));
    let node = node.restarted_with(&shared, &[], |memory| flip(memory, 50));
    assert_eq!(node.found(EVEN, &chain(2, 4)), 4);
    assert_eq!(node.count("waiting_runs"), 0);
    node.put(EVEN, &chain(3, 4));
    assert_eq!(node.found(EVEN, &chain(3, 4)), 4);
    node.reaches("published_runs", 1);
    assert_eq!(shared.objects().len(), 2);
}
