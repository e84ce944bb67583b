//! `larder serve --l4` against a cluster, a server with https, another vendor's server, a server
//! that is stopped for a minute, and kills of the owner. `tests/run --remote` runs it.
//!
//! Tests whose programs are missing are skipped.

#![allow(clippy::unwrap_used, missing_docs)]

mod ceph;
#[path = "../transfer/home.rs"]
#[allow(dead_code)]
mod home;
mod load;
#[path = "../l4/node.rs"]
#[allow(dead_code)]
mod node;
#[path = "../s3/ports.rs"]
mod ports;
#[path = "../s3/server.rs"]
#[allow(dead_code)]
mod server;
#[path = "../../../tests/support/mod.rs"]
mod support;
#[path = "../s3/weed.rs"]
mod weed;

use std::io::Write;
use std::time::{Duration, Instant};

use home::EVEN;
use load::{Load, PAIRS, paired};
use node::Node;
use server::{Identity, Server};
use support::home::{Home, SEGMENT_BYTES};
use support::honest::{eventually, skipped};
use support::{chain, directory};

/// Tokens of a run: four pages of 16 tokens.
const RUN_TOKENS: &str = "64";
const THROUGH: [&str; 2] = ["--l4-admission", "through"];

/// A node that shares pages through a server.
fn serving(server: &Server, home: Home, options: &[&str]) -> Node {
    let l4 = server.l4();
    let l4: Vec<&str> = l4.iter().map(String::as_str).collect();
    Node::with(
        home,
        &[&l4[..], options].concat(),
        &Identity::Writer.variables(),
    )
}

fn weed(started: Option<Server>) -> Option<Server> {
    if started.is_none() {
        skipped("SeaweedFS", "there is no `weed`: tests/run installs it");
    }
    started
}

/// Two nodes with the same pages publish them once, a third one reads them and has them then.
fn nodes_share_pages(server: &Server) {
    let nodes = [(); 2].map(|()| serving(server, Home::new(), &THROUGH));
    for node in &nodes {
        node.put(EVEN, &chain(1, 8));
    }
    let sum = |names: &[&str]| -> u64 {
        let counts = nodes
            .iter()
            .flat_map(|node| names.iter().map(|name| node.count(name)));
        counts.sum()
    };
    eventually("both runs of both nodes", || {
        sum(&["published_runs", "present_runs"]) == 4
    });
    assert_eq!(sum(&["published_runs"]), 2);
    assert_eq!(server.verify()["good_pages"], 8);
    let third = serving(server, Home::new(), &THROUGH);
    third.knows(EVEN, 2);
    assert_eq!(third.found(EVEN, &chain(1, 10)), 8);
    assert_eq!(third.read(EVEN, &chain(1, 8)), [true; 8]);
    assert_eq!(third.kill().having(EVEN, &chain(1, 8)), 8);
}

#[test]
fn a_cluster_loses_a_volume_server_and_no_page() {
    let Some(mut server) = weed(weed::cluster()) else {
        return;
    };
    nodes_share_pages(&server);
    let first = serving(&server, Home::new(), &THROUGH);
    (10..18).for_each(|seed| first.put(EVEN, &chain(seed, 4)));
    first.reaches("published_runs", 8);

    // The master has started first.
    server.processes[weed::VOLUME_SERVERS].0.kill().unwrap();
    let second = serving(&server, Home::new(), &THROUGH);
    second.knows(EVEN, 10);
    for seed in 10..18 {
        assert_eq!(second.found(EVEN, &chain(seed, 4)), 4);
        assert_eq!(second.read(EVEN, &chain(seed, 4)), [true; 4]);
    }
    (20..28).for_each(|seed| second.put(EVEN, &chain(seed, 4)));
    second.reaches("published_runs", 8);
    assert_eq!(server.verify()["good_pages"], 18 * 4);
}

#[test]
fn https_with_a_private_authority() {
    let place = directory();
    let [ours, other] = ["ours", "other"].map(|name| weed::certificate(place.path(), name));
    let (Some(ours), Some(other)) = (ours, other) else {
        skipped("https with a private authority", "there is no `openssl`");
        return;
    };
    let Some(mut server) = weed(weed::secured(&ours)) else {
        return;
    };
    nodes_share_pages(&server);
    for authority in [None, Some(other.authority)] {
        server.ca_file = authority;
        let said = server.fails(&["ls"], &["--timeout", "20s"], Identity::Writer);
        assert!(said.contains("UnknownIssuer"), "{said}");
    }
}

#[test]
fn the_gateway_of_ceph() {
    match ceph::gateway() {
        Ok(server) => nodes_share_pages(&server),
        Err(missing) => skipped(
            "Ceph's radosgw",
            format!("there is no `{missing}`: apt-get install radosgw ceph-mon ceph-osd curl"),
        ),
    }
}

/// Time of a read's deadline, and what a loaded machine may take to notice its end.
const DEADLINE: Duration = Duration::from_millis(300);
const LATE: Duration = Duration::from_secs(2);

#[test]
fn a_server_that_is_stopped_for_a_minute_slows_no_local_call() {
    let Some(server) = weed(weed::single()) else {
        return;
    };
    let first = serving(&server, Home::new(), &THROUGH);
    (1..25).for_each(|seed| first.put(EVEN, &chain(seed, 4)));
    first.reaches("published_runs", 24);

    // 2 GiB: more than the load puts. Its publications never end.
    let home = Home::shaped(&[], 128, SEGMENT_BYTES);
    let second = serving(
        &server,
        home,
        &[&THROUGH[..], &["--l4-timeout", "1s"]].concat(),
    );
    second.knows(EVEN, 24);
    let mut load = Load::new(&second);
    let mut running = load.slices(PAIRS / 2, || {});
    assert!(second.count("published_runs") > 0);
    // A busy machine may have been too slow for the requests.
    eventually("the server", || second.state() == "in use");
    let (mut seed, mut promised, mut slowest) = (0, 0, Duration::ZERO);
    let mut miss = || {
        seed += 1;
        // A promise of the lookup, until the breaker opens.
        promised += second.found(EVEN, &chain(seed, 4));
        let begin = Instant::now();
        let hits = second.read_until(EVEN, &chain(seed, 4), begin + DEADLINE);
        assert_eq!(hits, [false; 4]);
        slowest = slowest.max(begin.elapsed());
    };
    let stopped = server.stopped(|| {
        miss();
        load.slices(PAIRS, miss)
    });
    assert!(promised > 0);
    assert!(slowest < DEADLINE + LATE, "a miss took {slowest:?}");
    eventually("the server again", || {
        second.found(EVEN, &chain(24, 4)) == 4
    });
    assert_eq!(second.read(EVEN, &chain(24, 4)), [true; 4]);
    running.extend(load.slices(PAIRS / 2, || {}));

    let put = paired(&running, &stopped, |slice| slice.put);
    let get = paired(&running, &stopped, |slice| slice.get);
    let mut said = std::io::stderr();
    for (what, paired) in [("put", put), ("get", get)] {
        let line = format!(
            "median time of a {what} while the server is stopped, of that while it runs: {:.2} \
             ({:.2} to {:.2}, {PAIRS} pairs)\n",
            paired.median, paired.from, paired.to
        );
        said.write_all(line.as_bytes()).unwrap();
    }
    let slowest = format!("slowest miss {slowest:?}, with a deadline of {DEADLINE:?}\n");
    said.write_all(slowest.as_bytes()).unwrap();
    // Surely slower, by more than a tenth.
    assert!(put.from < 1.1 && get.from < 1.1, "{put:?}, {get:?}");
}

#[test]
fn an_owner_that_is_killed_leaves_no_wrong_object_and_the_next_one_publishes_the_rest() {
    const ROUNDS: u64 = 6;
    const CHAINS: u64 = 3;
    // Runs of 4 MiB.
    const PAGES: u64 = 64;
    let long = [&THROUGH[..], &["--l4-run-tokens", "1024"]].concat();
    let Some(server) = weed(weed::single()) else {
        return;
    };
    let mut home = Home::new();
    for round in 0..ROUNDS {
        let node = serving(&server, home, &long);
        for seed in 0..CHAINS {
            node.put(EVEN, &chain(1 + round * CHAINS + seed, PAGES));
        }
        eventually("a publication", || node.count("published_runs") > 0);
        // At another moment of the next one.
        std::thread::sleep(Duration::from_millis(9 * round));
        home = node.kill();
        let verified = server.verify();
        assert_eq!(verified["good_pages"].as_u64().unwrap() % PAGES, 0);
    }
    let node = serving(&server, home, &long);
    let all = ROUNDS * CHAINS * PAGES;
    eventually("the rest", || server.verify()["good_pages"] == all);
    assert!(node.count("published_runs") > 0);
}
