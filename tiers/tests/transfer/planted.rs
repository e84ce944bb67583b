//! Planted mistakes. The tests notice each of them.
#![cfg(debug_assertions)]

use larder_tiers::planted::Bug;

use super::noticed::all_are_noticed;
use super::random::{Seen, play};
use super::rules::{
    other_namespaces_are_refused_by_name, other_prompts_are_refused,
    rows_are_copied_behind_forwards,
};

#[test]
fn each_planted_bug_is_noticed() {
    all_are_noticed(Bug::TRANSFER.iter().copied(), 60, |bug, run| match bug {
        Bug::NamespaceNotCompared => other_namespaces_are_refused_by_name(),
        Bug::PromptNotCompared => other_prompts_are_refused(),
        Bug::ReceivedBeforeCopy => rows_are_copied_behind_forwards(),
        _ => play(run, &mut Seen::default()),
    });
}
