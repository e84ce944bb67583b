//! The test of the tests: each mistake of a hand-over is noticed.

use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::thread;
use std::time::Duration;

use larder_tiers::handover::{HandoverError, State};
use larder_tiers::planted::{Bug, plant};

use super::honest::eventually;
use super::random::play;
use super::rules::{dropped_while_rows_come, rows_do_not_come};
use super::{Node, TIME, ask, prompt};

/// Runs in which a mistake is noticed at the latest.
const RUNS: u64 = 100;

/// A decode process that ends fails the offer at once, not after its time.
fn the_dead() {
    let node = Node::new();
    let (prefill, decode) = (node.prefill(4), node.decode());
    let tokens = prompt(7, 1);
    let sequence = node.here.begin(&tokens).unwrap();
    let time = Duration::from_secs(2);
    let offer = prefill.offer("one", &sequence, 0, time).unwrap();
    let taking = decode.take("one", &ask(&tokens), TIME, TIME).unwrap();
    eventually("it is taken", || offer.state() != State::Waiting);
    drop(taking);
    assert_eq!(offer.wait(), Err(HandoverError::Gone));
}

#[test]
fn every_planted_bug_is_noticed() {
    // Every detection is a panic, so only the final report is useful. Panics of other tests are
    // still printed.
    let (here, hook) = (thread::current().id(), take_hook());
    set_hook(Box::new(move |panic| {
        if thread::current().id() != here {
            hook(panic);
        }
    }));
    let mut missed = Vec::new();
    // The unit tests have the others: they need a process that is stopped at one instruction.
    let elsewhere = [Bug::TrustsReturnedMemory, Bug::SettlesAllLayers];
    for &bug in Bug::HANDOVER.iter().filter(|bug| !elsewhere.contains(bug)) {
        plant(Some(bug));
        let caught = (0..RUNS).find_map(|run| {
            let run_it = || match bug {
                Bug::ForgetsTheDead => the_dead(),
                Bug::FillsFreedPages => dropped_while_rows_come(),
                Bug::KeepsUnfilledRows => rows_do_not_come(),
                _ => drop(play(run, 700)),
            };
            let panic = catch_unwind(AssertUnwindSafe(run_it)).err()?;
            let said = panic.downcast_ref::<String>().cloned();
            let said = said.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
            Some((run, said.unwrap_or_default()))
        });
        plant::<Bug>(None);
        match caught {
            None => missed.push(bug),
            Some((run, said)) => {
                let said = said.lines().next().unwrap_or_default();
                let said: String = said.chars().take(80).collect();
                println!("{:20} {:3} runs: {said}", format!("{bug:?}"), run + 1);
            }
        }
    }
    let _ = take_hook();
    assert!(missed.is_empty(), "not detected: {missed:?}");
}
