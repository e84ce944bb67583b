//! Faults of a server, set for a while and taken away: then pages arrive again, without a new
//! start, and no wrong byte was read.
//!
//! The pauses are short here. With `LARDER_HEAL=10` they are those of an owner, and each fault
//! lasts so many seconds. The times are printed, and not asserted.
#![cfg(feature = "s3")]
#![allow(clippy::unwrap_used)]

mod common;

use std::env;
use std::ops::ControlFlow;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use common::member::{PATIENCE, RUN_PAGES};
use common::node::Node;
use common::server::{Asks, Fault, Server, place, with_credentials};
use common::*;
use larder_format::PageKey;
use larder_remote::RemoteError;
use larder_remote::agent::AgentOptions;
use larder_store::beneath::Beneath;

const PAGES: usize = 2 * RUN_PAGES;

/// The seconds of a fault, with the pauses of an owner.
const SECONDS: &str = "LARDER_HEAL";

/// Faults of any request.
const OF_ALL: [Fault; 20] = [
    Fault::Status(200, ""),
    Fault::Status(204, ""),
    Fault::Status(304, ""),
    Fault::Status(400, "BadRequest"),
    Fault::Status(403, "AccessDenied"),
    Fault::Status(403, "RequestTimeTooSkewed"),
    Fault::Status(404, "NoSuchKey"),
    Fault::Status(404, "NoSuchBucket"),
    Fault::Status(412, "PreconditionFailed"),
    Fault::Status(429, "TooManyRequests"),
    Fault::Status(500, "InternalError"),
    Fault::Status(503, "SlowDown"),
    Fault::Status(507, "InsufficientStorage"),
    Fault::Html(200),
    Fault::Html(404),
    Fault::Moved,
    Fault::Hang,
    Fault::Close,
    Fault::Garbage,
    Fault::Delay,
];

const OF_GET: [Fault; 14] = [
    Fault::Swap,
    Fault::Claim,
    Fault::Half(200),
    Fault::Half(206),
    Fault::Zero,
    Fault::Flip(true),
    Fault::Flip(false),
    Fault::Longer,
    Fault::ETag("other"),
    Fault::ETag(""),
    Fault::Chunked,
    Fault::MidClose,
    Fault::Slow,
    Fault::Status(206, ""),
];

const OF_LIST: [Fault; 8] = [
    Fault::EndlessForeign,
    Fault::EndlessRuns,
    Fault::SamePart,
    Fault::Name("p/v1/foreign"),
    Fault::Name("elsewhere"),
    Fault::Name("p/v1//empty"),
    Fault::Sizes(10 << 30),
    Fault::Sizes(0),
];

fn faults() -> Vec<(Asks, Fault)> {
    let all = [Asks::Get, Asks::Head, Asks::Put, Asks::List, Asks::All];
    let of_all = all
        .into_iter()
        .flat_map(|asks| OF_ALL.map(|fault| (asks, fault)));
    of_all
        .chain(OF_GET.map(|fault| (Asks::Get, fault)))
        .chain(OF_LIST.map(|fault| (Asks::List, fault)))
        .chain([(Asks::Head, Fault::Claim), (Asks::Put, Fault::Stored)])
        .collect()
}

/// Whether a server says so that an object is there that is not. Only a listing shows the truth.
fn is_lie((asks, fault): (Asks, Fault)) -> bool {
    let is_success = matches!(fault, Fault::Status(200 | 204, _) | Fault::Html(200));
    let lies = match asks {
        Asks::Put | Asks::All => is_success || matches!(fault, Fault::Status(304 | 412, _)),
        Asks::Head => is_success || fault == Fault::Claim,
        Asks::Get | Asks::List => false,
    };
    lies && seconds().is_some()
}

fn seconds() -> Option<Duration> {
    let seconds = env::var(SECONDS).ok()?;
    Some(Duration::from_secs(seconds.parse().unwrap()))
}

/// How long a fault lasts.
fn lasts() -> Duration {
    seconds().unwrap_or(Duration::from_millis(100))
}

fn of_an_owner(options: &mut AgentOptions) {
    options.timeout = Duration::from_millis(400);
    options.refresh = Duration::from_millis(200);
    if seconds().is_some() {
        options.timeout = Duration::from_secs(5);
        options.pause = Duration::from_secs(5);
        options.delay = Duration::from_secs(1);
        options.refresh = Duration::from_mins(5);
        options.patience = Duration::from_millis(500);
    }
}

/// Uses pages of others, and publishes some, while the server has a fault and afterwards. Returns
/// the time from the end of the fault until all are there.
fn survive(node: &Node, server: &Server, fault: (Asks, Fault), seed: u64) -> Duration {
    let (of_others, own) = (chain(seed, PAGES), chain(seed + 10, PAGES));
    let name = |pages: &[PageKey]| {
        let (name, _) = object(&namespace("model"), &run_of(pages, 1, RUN_PAGES), &trust(1));
        format!("p/{name}")
    };
    let own_name = name(&own);
    server.set(Some(fault));
    let end = Instant::now() + lasts();
    let step = || {
        node.put(&own);
        node.read(&of_others) == PAGES
    };
    while Instant::now() < end {
        step();
        thread::sleep(Duration::from_millis(5));
    }
    server.set(None);
    let begin = Instant::now();
    while !step() || !(server.has(&own_name) || is_lie(fault)) {
        let report = node.agent.report();
        assert!(begin.elapsed() < PATIENCE, "{fault:?}: {report:?}");
        thread::sleep(Duration::from_millis(5));
    }
    begin.elapsed()
}

/// From the start of a node on, and when it knows the remote.
fn play(fault: (Asks, Fault)) -> [Duration; 2] {
    let server = Server::start();
    server.put("p/v1/mark", b"a mark".to_vec());
    for seed in [1, 2] {
        for run in 0..PAGES / RUN_PAGES {
            let pages = run_of(&chain(seed, PAGES), run, RUN_PAGES);
            let (name, object) = object(&namespace("model"), &pages, &trust(1));
            server.put(&format!("p/{name}"), object);
        }
    }
    server.set(Some(fault));
    let node = Node::with(place(&server).connect().unwrap(), of_an_owner);
    let took = [1, 2].map(|seed| survive(&node, &server, fault, seed));
    node.close();
    took
}

#[test]
fn pages_arrive_again_after_each_fault_without_a_new_start() {
    if !with_credentials("pages_arrive_again_after_each_fault_without_a_new_start") {
        return;
    }
    // All nodes wait most of the time.
    let at_once = if seconds().is_some() { 40 } else { 12 };
    let left = Mutex::new(faults());
    thread::scope(|scope| {
        for _ in 0..at_once {
            scope.spawn(|| {
                loop {
                    let Some(fault) = left.lock().unwrap().pop() else {
                        return;
                    };
                    let [first, second] = play(fault);
                    println!("{fault:?}: {first:.1?} from the start, {second:.1?} in use");
                }
            });
        }
    });
}

#[test]
fn a_listing_that_does_not_end_is_given_up() {
    if !with_credentials("a_listing_that_does_not_end_is_given_up") {
        return;
    }
    let server = Server::start();
    server.put("p/v1/mark", b"a mark".to_vec());
    let remote = place(&server).connect().unwrap();
    for fault in [Fault::SamePart, Fault::EndlessForeign] {
        server.set(Some((Asks::List, fault)));
        let mut part = || ControlFlow::Continue(());
        let mut each = |_| ControlFlow::Continue(());
        let listed = remote.list(None, &mut part, &mut each, LATE);
        let is_given_up = matches!(listed, Err(RemoteError::Endless(_)));
        assert!(is_given_up, "{fault:?}: {listed:?}");
    }
    // Its caller may leave it before each part.
    let (before, mut parts) = (server.listings(), 0);
    let mut part = || {
        parts += 1;
        match parts {
            3 => ControlFlow::Break(()),
            _ => ControlFlow::Continue(()),
        }
    };
    let mut each = |_| ControlFlow::Continue(());
    remote.list(None, &mut part, &mut each, LATE).unwrap();
    assert_eq!(server.listings() - before, 2);
}
