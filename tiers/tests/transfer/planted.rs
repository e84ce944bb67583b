//! Planted mistakes, each of which the tests notice.
#![cfg(debug_assertions)]

use std::panic::AssertUnwindSafe;

use larder_tiers::planted::{Bug, plant};

use super::random::{Seen, play};

/// Whether a test notices a bug.
fn notices(bug: Bug, test: impl Fn()) -> bool {
    // Threads that begin here have the bug, too.
    plant(Some(bug));
    let result = std::panic::catch_unwind(AssertUnwindSafe(&test));
    plant::<Bug>(None);
    result.is_err()
}

#[test]
fn each_planted_bug_is_noticed() {
    let runs = || (0..60).for_each(|run| play(run, &mut Seen::default()));
    let noticed = Bug::TRANSFER.iter().map(|bug| {
        let is_noticed = match bug {
            Bug::NamespaceNotCompared => {
                notices(*bug, super::rules::other_namespaces_are_refused_by_name)
            }
            Bug::PromptNotCompared => notices(*bug, super::rules::other_prompts_are_refused),
            _ => notices(*bug, runs),
        };
        (*bug, is_noticed)
    });
    let missed: Vec<Bug> = noticed.filter(|of| !of.1).map(|of| of.0).collect();
    assert_eq!(missed, []);
}
