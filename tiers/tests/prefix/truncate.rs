//! Rejected speculation: sequences that lose their last tokens.

use std::time::Instant;

use larder_kernels::{DeviceError, ForeignStream, Ticket};
use larder_tiers::core::Broken;
use larder_tiers::prefix::SequenceError;
use larder_tiers::{Ask, PrefixCache, Sequence};

use super::engine::{PAGE, WORDS};
use super::loads::with_a_held_load;
use super::rules::{is_empty, options, prompt};
use super::{ANSWER, PATIENCE, serve, toy};

/// Computes tokens that are rejected, behind the first `kept` of a sequence.
fn speculate(sequence: &mut Sequence, tokens: &[u64], wrong: usize) {
    let toy = toy();
    let first = sequence.cached().tokens();
    for (position, token) in tokens.iter().enumerate().skip(first) {
        toy.forward(sequence, *token, position).unwrap();
    }
    for position in tokens.len()..tokens.len() + wrong {
        let token = position as u64 % WORDS;
        sequence.push(token).unwrap();
        toy.forward(sequence, token, position).unwrap();
    }
    sequence.computed(tokens.len() + wrong).unwrap();
}

/// Computes the answer behind the first `kept` tokens of a prompt, whose rows a sequence has.
fn go_on(sequence: &mut Sequence, prompt: &[u64], kept: usize) {
    let toy = toy();
    let all = toy.uncached(prompt, ANSWER);
    for (position, token) in all.iter().enumerate().skip(kept) {
        if position >= sequence.len() {
            sequence.push(*token).unwrap();
        }
        let word = toy.forward(sequence, *token, position).unwrap();
        if position + 1 >= prompt.len() && position + 1 < all.len() {
            assert_eq!(word, all[position + 1], "behind {kept} tokens");
        }
    }
    sequence.computed(all.len()).unwrap();
}

fn words_are_right(cache: &PrefixCache, prompt: &[u64]) {
    serve(cache, &toy(), prompt);
    is_empty(cache);
}

#[test]
fn rejected_tokens_leave_the_words_of_a_run_that_never_had_them() {
    for kept in [
        1,
        PAGE - 1,
        PAGE,
        PAGE + 5,
        2 * PAGE,
        3 * PAGE,
        3 * PAGE + 1,
    ] {
        for shares in [false, true] {
            let cache = options(20, 40).over(None).unwrap();
            let prompt = prompt(3);
            let mut sequence = cache.begin(&prompt).unwrap();
            speculate(&mut sequence, &prompt, PAGE + 3);
            if shares {
                sequence.share().unwrap();
            }
            let shared = sequence.slots().unwrap().pages().to_vec();
            sequence.truncate(kept).unwrap();
            assert_eq!(sequence.len(), kept);
            let pages = sequence.slots().unwrap().pages().to_vec();
            assert_eq!(pages[..kept / PAGE], shared[..kept / PAGE]);
            cache.audit([&sequence]).unwrap();
            go_on(&mut sequence, &prompt, kept);
            let tokens = sequence.len();
            assert_eq!(sequence.keep().unwrap(), tokens / PAGE * PAGE);
            words_are_right(&cache, &prompt);
        }
    }
}

#[test]
fn pages_of_the_tree_do_not_change_with_a_truncation() {
    let cache = options(20, 40).over(None).unwrap();
    let prompt = prompt(3);
    serve(&cache, &toy(), &prompt);
    let other = cache.begin(&prompt).unwrap();
    let row = |sequence: &Sequence, at| sequence.row(1, 1, at).unwrap().to_vec();
    let before: Vec<Vec<u8>> = (0..3 * PAGE).map(|at| row(&other, at)).collect();
    let mut sequence = cache.begin(&prompt).unwrap();
    assert_eq!(sequence.cached().l1, 3 * PAGE);
    sequence.truncate(2 * PAGE + 3).unwrap();
    assert_eq!(sequence.cached().l1, 2 * PAGE + 3);
    assert_eq!(row(&sequence, 2 * PAGE + 2), before[2 * PAGE + 2]);
    for at in 2 * PAGE..2 * PAGE + 3 {
        sequence.row_mut(1, 1, at).unwrap().fill(0x55);
    }
    let after: Vec<Vec<u8>> = (0..3 * PAGE).map(|at| row(&other, at)).collect();
    assert_eq!(before, after);
    drop((sequence, other));
    is_empty(&cache);
}

/// Shared pages do not change, so the sequence has one page less for later tokens.
#[test]
fn a_cut_of_a_shared_page_takes_one_of_the_reserved_pages() {
    let cache = options(4, 40).over(None).unwrap();
    let prompt = prompt(2);
    let ask = Ask::new(&prompt).reserved(2 * PAGE - 1);
    let mut sequence = cache.ask(&ask).unwrap().begin_within(PATIENCE).unwrap();
    speculate(&mut sequence, &prompt, PAGE - 1);
    sequence.share().unwrap();
    let slots = |sequence: &Sequence| sequence.slots().unwrap().tokens();
    assert_eq!((sequence.len(), slots(&sequence)), (3 * PAGE, 4 * PAGE));
    sequence.truncate(3 * PAGE - 1).unwrap();
    assert_eq!(slots(&sequence), 3 * PAGE);
    // The page that was cut is free when its copy to L2 has ended.
    for token in 0..=PAGE as u64 {
        sequence.push_within(token, PATIENCE).unwrap();
    }
    assert_eq!(slots(&sequence), 4 * PAGE);
    drop(sequence);
    is_empty(&cache);
}

#[test]
fn a_sequence_that_keeps_more_tokens_than_it_has_is_unchanged() {
    let cache = options(20, 40).over(None).unwrap();
    let mut sequence = cache.begin(&prompt(2)).unwrap();
    sequence.truncate(1000).unwrap();
    assert_eq!(sequence.len(), prompt(2).len());
    // SAFETY: the stream is not used.
    let stream = unsafe { ForeignStream::new(0) };
    let refused = sequence.truncate_on(1, stream);
    assert_eq!(refused, Err(SequenceError::Device(DeviceError::NoStreams)));
    assert_eq!(sequence.len(), prompt(2).len());
}

#[test]
fn shared_pages_are_cut_when_their_forwards_and_loads_have_ended() {
    let cache = options(20, 40).over(None).unwrap();
    let prompt = prompt(3);
    let mut sequence = cache.begin(&prompt).unwrap();
    let (promise, ticket) = Ticket::promised();
    sequence.computed_by(prompt.len(), &ticket).unwrap();
    sequence.share().unwrap();
    let unsettled = Err(SequenceError::Unsettled);
    assert_eq!(sequence.truncate(PAGE + 1), unsettled);
    assert_eq!(sequence.len(), prompt.len());
    // Own pages are not shared.
    sequence.truncate(3 * PAGE).unwrap();
    promise.settle(Ok(()));
    sequence.truncate(PAGE + 1).unwrap();
    drop(sequence);
    is_empty(&cache);

    let (cache, may_load) = with_a_held_load(Ok(()));
    let mut sequence = cache.begin(&prompt).unwrap();
    assert!(!sequence.is_loaded());
    assert_eq!(sequence.truncate(PAGE + 1), unsettled);
    may_load.store(true, std::sync::atomic::Ordering::Release);
    sequence.row(0, 1, 0).unwrap();
    super::honest::eventually("the load is over", || {
        sequence.truncate(PAGE + 1) != unsettled
    });
    assert_eq!(sequence.len(), PAGE + 1);
}

#[test]
fn a_failed_forward_breaks_a_sequence_whose_pages_of_then_were_given_up_and_lost() {
    let cache = options(20, 40).with(|o| o.config.load_threshold_tokens = 1000);
    let cache = cache.over(None).unwrap();
    let all = prompt(3);
    let mut first = cache.begin(&all).unwrap();
    first.computed(all.len()).unwrap();
    first.keep().unwrap();
    assert!(cache.settle(Instant::now() + PATIENCE).unwrap());
    // The forward is reported with the third page, which the sequence then gives up.
    let mut cut = cache.begin(&all).unwrap();
    let (failing, ticket) = Ticket::promised();
    cut.computed_by(all.len(), &ticket).unwrap();
    cut.truncate(2 * PAGE).unwrap();
    // Another sequence computes that page again, and its forward fails first.
    assert_eq!(cache.evict(1), Ok(1));
    let mut other = cache.begin(&all).unwrap();
    assert_eq!(other.cached().tokens(), 2 * PAGE);
    let (lost, ticket) = Ticket::promised();
    other.computed_by(all.len(), &ticket).unwrap();
    other.share().unwrap();
    lost.settle(Err(DeviceError::Closed));
    assert_eq!(other.verify(), Err(SequenceError::Broken(Broken)));
    failing.settle(Err(DeviceError::Closed));
    assert_eq!(cut.verify(), Err(SequenceError::Broken(Broken)));
    drop((cut, other));
    is_empty(&cache);
}
