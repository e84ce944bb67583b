//! `larder compact` of a store that an owner serves, with processes of their own.

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};

use larder_engine::{OpenOptions, PageStore, Part, Store};
use larder_format::PageKey;
use nix::sys::signal::Signal;
use rand::{RngExt, SeedableRng};
use serde_json::Value;

use crate::copies::copied;
use crate::home::Pool;
use crate::kills::{Watch, kills, started, stop};
use crate::support::home::Home;
use crate::support::honest::{Process, eventually};
use crate::support::{chain, flip};

/// Chains whose pages were put in turns: they fill two segments and a part of a third.
fn chains() -> Vec<Vec<PageKey>> {
    (1..=9).map(|seed| chain(seed, 60)).collect()
}

fn scattered() -> Home {
    copied("beside", &[], |home| {
        home.with(|pool| pool.put_in_turns(&chains()));
    })
}

/// A process that serves the store.
pub fn serve(home: &Home) -> Process {
    let mut command = home.larder("serve", &[]);
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    assert!(!line.is_empty());
    Process(child)
}

/// Ends an owner in order.
pub fn end(mut owner: Process) {
    stop(&owner.0, Signal::SIGTERM);
    assert!(owner.0.wait().unwrap().success());
}

fn client(home: &Home) -> Store {
    Store::attach(&home.path, OpenOptions::default()).unwrap()
}

fn stat(home: &Home) -> Value {
    home.report("stat", &[], 0)
}

#[test]
fn an_owner_puts_the_pages_of_its_segments_in_order_while_all_of_them_are_read() {
    let home = scattered();
    let owner = serve(&home);
    let server = client(&home);
    let keys = chains().concat();
    let planned = home.report("compact", &["--dry-run"], 0);
    assert_eq!(
        (&planned["online"], &planned["after"]),
        (&true.into(), &Value::Null)
    );
    let planned = planned["in_place"]["planned_pages"].as_u64().unwrap();
    assert!(planned > 300, "{planned}");
    let is_over = AtomicBool::new(false);
    let document = std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let pool = Pool::new(&server);
            let mut rounds = 0;
            // Once more after the end.
            loop {
                let is_last = is_over.load(Ordering::SeqCst);
                assert_eq!(pool.hits(&keys), keys.len());
                rounds += 1;
                if is_last {
                    return rounds;
                }
            }
        });
        let document = home.report("compact", &[], 0);
        is_over.store(true, Ordering::SeqCst);
        assert!(reader.join().unwrap() > 0);
        document
    });
    let (before, after) = (&document["before"], &document["after"]);
    assert_eq!(
        (&before["pages"], &after["pages"]),
        (&540.into(), &540.into())
    );
    assert_eq!(document["in_place"]["pages_moved"], planned);
    assert_eq!(document["in_place"]["left_pages"], 0);
    let mean = |layout: &Value| layout["mean_run_pages"].as_f64().unwrap();
    assert!(mean(after) > 3.0 * mean(before), "{document:#}");
    let told = stat(&home);
    assert_eq!(
        (&told["evicted_pages"], &told["compactions"]),
        (&0.into(), &0.into())
    );
    assert_eq!(told["totals"]["pages_moved"], planned);
    // What is in order stays as it is.
    home.says("compact", &[], 0, &["0 pages moved"]);
    let checked = home.report("verify", &["--online"], 0);
    assert_eq!(checked["deep"]["good_pages"], 540);
    server.close().unwrap();
    end(owner);
    let document = home.json("verify", &["--deep"], 0);
    assert_eq!(
        (&document["condition"], &document["deep"]["good_pages"]),
        (&"clean".into(), &540.into())
    );
}

#[test]
fn dead_space_of_a_full_store_is_won_back_and_no_page_is_evicted_for_that() {
    let home = Home::new();
    let owner = serve(&home);
    let server = client(&home);
    let pool = Pool::new(&server);
    // More than fits, so that reclaim has been at work, then some pages of each chain go.
    for seed in 1..40 {
        pool.put(&chain(seed, 60));
    }
    for seed in 30..40 {
        for key in &chain(seed, 60)[40..] {
            pool.delete(*key);
        }
    }
    let kept: Vec<PageKey> = (30..40).flat_map(|seed| chain(seed, 40)).collect();
    server.flush().unwrap();
    let (hits, before) = (pool.hits(&kept), stat(&home));
    assert!(before["evicted_pages"].as_u64().unwrap() > 0, "{before:#}");
    let document = home.report("compact", &[], 0);
    assert!(
        document["in_place"]["freed_segments"].as_u64().unwrap() > 0,
        "{document:#}"
    );
    let after = stat(&home);
    assert_eq!(before["evicted_pages"], after["evicted_pages"]);
    let free = |told: &Value| told["free_segments"].as_u64().unwrap();
    assert!(free(&after) > free(&before), "{before:#} {after:#}");
    assert_eq!(pool.hits(&kept), hits);
    server.close().unwrap();
    end(owner);
}

#[test]
fn a_compaction_is_shown_and_ends_at_a_signal_and_the_owner_goes_on() {
    // On a busy machine a compaction may end before it is stopped.
    let mut codes = Vec::new();
    while !codes.contains(&Some(130)) {
        assert!(codes.len() < 20, "{codes:?}");
        codes.push(interrupted());
    }
}

/// Interrupts a compaction; its exit code.
fn interrupted() -> Option<i32> {
    let home = scattered();
    let owner = serve(&home);
    let watch = Watch::on(&home);
    let mut compact = started(&home, &["compact"]);
    watch.await_writes(&compact.0, 1);
    stop(&compact.0, Signal::SIGSTOP);
    let shown = stat(&home)["compactions"].as_u64();
    stop(&compact.0, Signal::SIGINT);
    stop(&compact.0, Signal::SIGCONT);
    let code = compact.0.wait().unwrap().code();
    assert!(matches!(
        (shown, code),
        (Some(1), Some(130 | 0)) | (Some(0), Some(0))
    ));
    eventually("the owner sees the end", || stat(&home)["compactions"] == 0);
    home.says("compact", &[], 0, &["540 pages"]);
    let server = client(&home);
    assert_eq!(Pool::new(&server).hits(&chains().concat()), 540);
    server.close().unwrap();
    end(owner);
    code
}

#[test]
fn two_compactions_at_once_end_and_move_each_page_once() {
    let home = scattered();
    let owner = serve(&home);
    let planned = home.report("compact", &["--dry-run"], 0);
    let both = [started(&home, &["compact"]), started(&home, &["compact"])];
    for mut process in both {
        assert_eq!(process.0.wait().unwrap().code(), Some(0));
    }
    let moved = &stat(&home)["totals"]["pages_moved"];
    assert_eq!(*moved, planned["in_place"]["planned_pages"]);
    end(owner);
    assert_eq!(
        home.json("verify", &["--deep"], 0)["deep"]["good_pages"],
        540
    );
}

#[test]
fn kills_of_the_compaction_and_of_the_owner_cost_no_page() {
    let mut random = rand_pcg::Pcg64Mcg::seed_from_u64(9);
    let writes = {
        let home = scattered();
        let owner = serve(&home);
        let watch = Watch::on(&home);
        let compact = started(&home, &["compact"]);
        let writes = watch.await_writes(&compact.0, usize::MAX);
        end(owner);
        writes
    };
    // Each round makes a store.
    for round in 0..kills() / 4 {
        let home = scattered();
        let mut owner = serve(&home);
        let watch = Watch::on(&home);
        let mut compact = started(&home, &["compact"]);
        let after = random.random_range(1..=writes);
        watch.await_writes(&compact.0, after);
        if round % 2 == 0 {
            stop(&compact.0, Signal::SIGKILL);
            compact.0.wait().unwrap();
            home.says("compact", &[], 0, &["540 pages"]);
            end(owner);
        } else {
            stop(&owner.0, Signal::SIGKILL);
            owner.0.wait().unwrap();
            let code = compact.0.wait().unwrap().code();
            assert!(matches!(code, Some(3 | 0)), "round {round}: {code:?}");
        }
        let document = home.json("verify", &["--deep"], 0);
        assert_eq!(
            document["deep"]["good_pages"], 540,
            "round {round}, {after}"
        );
        home.with(|pool| assert_eq!(pool.hits(&chains().concat()), 540));
        home.says("compact", &[], 0, &["540 pages"]);
    }
}

#[test]
fn a_stopped_owner_is_not_waited_for() {
    let home = scattered();
    let owner = serve(&home);
    stop(&owner.0, Signal::SIGSTOP);
    home.says("compact", &[], 3, &["has not answered"]);
    stop(&owner.0, Signal::SIGCONT);
    home.says("compact", &[], 0, &["540 pages"]);
    end(owner);
}

#[test]
fn puts_and_a_takeover_beside_compactions_lose_nothing_that_was_just_stored() {
    const BATCHES: u64 = 14;
    let home = Home::new();
    let mut owner = serve(&home);
    let server = client(&home);
    let pool = Pool::new(&server);
    let batch = |at: u64| -> Vec<Vec<PageKey>> {
        (0..4).map(|seed| chain(1 + at * 4 + seed, 40)).collect()
    };
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let compactions = scope.spawn(|| {
            let mut codes = Vec::new();
            while !is_over.load(Ordering::SeqCst) {
                let mut compact = started(&home, &["compact"]);
                codes.push(compact.0.wait().unwrap().code());
            }
            codes
        });
        for at in 0..BATCHES {
            pool.put_in_turns(&batch(at));
            // The store keeps six batches. The latest three are the warmest.
            for recent in at.saturating_sub(2)..=at {
                assert_eq!(pool.hits(&batch(recent).concat()), 160, "{recent} of {at}");
            }
            if at == BATCHES / 2 {
                eventually("pages are moved", || {
                    stat(&home)["totals"]["pages_moved"].as_u64() > Some(0)
                });
                stop(&owner.0, Signal::SIGKILL);
                owner.0.wait().unwrap();
                eventually("another process owns the store", || {
                    server.part() == Part::Owner
                });
            }
        }
        is_over.store(true, Ordering::SeqCst);
        let codes = compactions.join().unwrap();
        let known = [Some(0), Some(1), Some(3)];
        assert!(codes.iter().all(|code| known.contains(code)), "{codes:?}");
        assert!(codes.contains(&Some(0)), "{codes:?}");
    });
    server.close().unwrap();
    home.json("verify", &["--deep"], 0);
}

#[test]
fn a_page_found_damaged_on_the_way_is_dropped_and_told() {
    let home = scattered();
    let owner = serve(&home);
    flip(&home.path, home.offset_of(&chains()[3][3]) + 99);
    let document = home.report("compact", &[], 1);
    assert_eq!(document["in_place"]["damaged_pages"], 1, "{document:#}");
    assert_eq!(document["in_place"]["left_pages"], 0);
    assert_eq!(stat(&home)["pages"], 539);
    end(owner);
    assert_eq!(
        home.json("verify", &["--deep"], 0)["deep"]["good_pages"],
        539
    );
}

#[test]
fn a_hand_over_in_the_middle_of_a_compaction_is_in_order() {
    let home = scattered();
    let server = client(&home);
    let watch = Watch::on(&home);
    let mut compact = started(&home, &["compact"]);
    watch.await_writes(&compact.0, 1);
    let owner = serve(&home);
    eventually("the service owns the store", || {
        server.part() == Part::Client
    });
    let code = compact.0.wait().unwrap().code();
    assert!(matches!(code, Some(3 | 0)), "{code:?}");
    let told = stat(&home);
    assert_eq!(
        (&told["pages"], &told["unproven_pages"]),
        (&540.into(), &0.into())
    );
    home.says("compact", &[], 0, &["540 pages"]);
    assert_eq!(Pool::new(&server).hits(&chains().concat()), 540);
    server.close().unwrap();
    end(owner);
}
