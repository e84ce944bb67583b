//! The test of the tests: each mistake of a hand-over is noticed.

use std::time::Duration;

use larder_tiers::handover::{HandoverError, State};
use larder_tiers::planted::Bug;

use super::device::{
    copied_behind_the_forward, launched_behind_the_copies, memory_stays_lent, pages_stay,
};
use super::honest::eventually;
use super::random::play;
use super::rules::{dropped_while_rows_come, rows_do_not_come};
use super::{Node, TIME, all_are_noticed, ask, prompt};

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
    // The unit tests have the others: they need a process that is stopped at one instruction.
    let elsewhere = [Bug::TrustsReturnedMemory, Bug::SettlesAllLayers];
    let bugs = Bug::HANDOVER.iter().filter(|bug| !elsewhere.contains(bug));
    all_are_noticed(bugs.copied(), RUNS, |bug, run| match bug {
        Bug::ForgetsTheDead => the_dead(),
        Bug::FillsFreedPages => dropped_while_rows_come(),
        Bug::KeepsUnfilledRows => rows_do_not_come(),
        Bug::CopiesBeforeForward => copied_behind_the_forward(),
        Bug::TicketsBeforeCopy => launched_behind_the_copies(),
        Bug::FreesUnderCopy => pages_stay(),
        Bug::LendsUnderCopy => memory_stays_lent(),
        _ => drop(play(run, 700)),
    });
}
