//! The rules of a hand-over, one by one.

use std::os::unix::net::UnixListener;
use std::time::Duration;

use larder_kernels::{Promise, Ticket};
use larder_tiers::handover::{DATA_BYTES_MAX, Decode, HandoverError, Offer, Prefill, State, Taken};
use larder_tiers::prefix::{RowError, SequenceError};
use larder_tiers::ranks::threads;
use larder_tiers::{Ask, Model, PrefixOptions, Sequence};

use super::honest::eventually;
use super::{
    ANSWER, LAYERS, Node, PAGE, TIME, answered, ask, compute, forward, named, prefilled, prompt,
    shape, uncached,
};

const SHORT: Duration = Duration::from_millis(20);

/// A request of these tokens goes from one process to the other. Returns the tokens that the decode
/// process did not compute.
fn hand_over(node: &Node, prefill: &Prefill, decode: &Decode, tokens: &[u64]) -> usize {
    let mut sequence = node.here.begin(tokens).unwrap();
    let from = sequence.cached().tokens();
    let mut offer = prefill.offer("one", &sequence, from, TIME).unwrap();
    let taking = decode.take("one", &ask(tokens), TIME, TIME).unwrap();
    let word = prefilled(&mut sequence, &mut offer, tokens, 3);
    offer.end(word, b"data").unwrap();
    sequence.keep().unwrap();
    let taken = taking.wait().unwrap();
    assert_eq!(taken.data, b"data");
    let computed = taken.computed;
    let (sequence, words) = answered(taken, tokens).unwrap();
    assert_eq!(words, uncached(tokens));
    offer.wait().unwrap();
    assert_eq!(offer.state(), State::Success);
    node.audit(&[], &[&sequence]);
    sequence.keep().unwrap();
    computed
}

#[test]
fn a_prompt_of_each_length_is_handed_over_whole() {
    let node = Node::new();
    let (prefill, decode) = (node.prefill(10), node.decode());
    for tokens in 1..4 * PAGE {
        let computed = hand_over(
            &node,
            &prefill,
            &decode,
            &prompt(tokens, 100 + tokens as u64),
        );
        assert_eq!(computed, tokens);
        assert_eq!(prefill.free_pages(), 10);
    }
    node.is_empty();
}

#[test]
fn a_conversation_goes_on_with_the_pages_that_decode_has_stored() {
    let node = Node::new();
    // The memory has room for the new tokens of a turn alone.
    let (prefill, decode) = (node.prefill(4), node.decode());
    let mut tokens = prompt(2 * PAGE + 1, 7);
    for turn in 0..4 {
        let first = node.here.begin(&tokens).unwrap().cached().tokens();
        hand_over(&node, &prefill, &decode, &tokens);
        let whole = (tokens.len() + ANSWER - 1) / PAGE * PAGE;
        let pages = u64::try_from(whole / PAGE).unwrap();
        // The pages of the answer are in L3 by the decode process alone.
        eventually("all pages are in L3", || node.l3.len() as u64 >= pages);
        if turn > 0 {
            assert!(first >= tokens.len() - ANSWER - PAGE, "{turn}: {first}");
        }
        tokens = uncached(&tokens);
        tokens.extend(prompt(3, turn));
    }
    node.is_empty();
}

#[test]
fn a_request_is_taken_before_it_is_offered() {
    let node = Node::new();
    let (prefill, decode) = (node.prefill(4), node.decode());
    let tokens = prompt(7, 1);
    let taking = decode.take("early", &ask(&tokens), TIME, TIME).unwrap();
    assert_eq!(taking.state(), State::Waiting);
    let mut sequence = node.here.begin(&tokens).unwrap();
    let mut offer = prefill.offer("early", &sequence, 0, TIME).unwrap();
    eventually("the request is there", || {
        offer.state() == State::Transferring && taking.state() == State::Transferring
    });
    let word = prefilled(&mut sequence, &mut offer, &tokens, 7);
    offer.end(word, &[]).unwrap();
    let (_, words) = answered(taking.wait().unwrap(), &tokens).unwrap();
    assert_eq!(words, uncached(&tokens));
}

#[test]
fn pages_that_the_store_does_not_have_in_time_are_computed() {
    let node = Node::new();
    let (prefill, decode) = (node.prefill(4), node.decode());
    let tokens = prompt(3 * PAGE + 2, 2);
    let mut sequence = node.here.begin(&tokens).unwrap();
    let word = forward(&mut sequence, &tokens, 0).unwrap();
    let mut offer = prefill.offer("late", &sequence, 2 * PAGE, TIME).unwrap();
    offer.layers(&sequence, tokens.len()).unwrap();
    offer.end(word, &[]).unwrap();
    // Nothing is shared, so L3 has no page.
    let taken = decode.take("late", &ask(&tokens), SHORT, TIME).unwrap();
    let taken = taken.wait().unwrap();
    assert_eq!(taken.computed, 0);
    let (_, words) = answered(taken, &tokens).unwrap();
    assert_eq!(words, uncached(&tokens));
    offer.wait().unwrap();
    assert_eq!(prefill.free_pages(), 4);
}

#[test]
fn pages_that_come_into_the_store_meanwhile_are_waited_for() {
    let node = Node::new();
    let (prefill, decode) = (node.prefill(4), node.decode());
    let tokens = prompt(3 * PAGE + 2, 3);
    let mut sequence = node.here.begin(&tokens).unwrap();
    let word = forward(&mut sequence, &tokens, 0).unwrap();
    let mut offer = prefill.offer("soon", &sequence, 2 * PAGE, TIME).unwrap();
    offer.layers(&sequence, tokens.len()).unwrap();
    offer.end(word, &[]).unwrap();
    let taking = decode.take("soon", &ask(&tokens), TIME, TIME).unwrap();
    eventually("it looks", || node.there.stats().unwrap().prefetches > 2);
    sequence.keep().unwrap();
    let taken = taking.wait().unwrap();
    assert_eq!(taken.computed, tokens.len());
    assert!(taken.sequence.cached().tokens() >= 2 * PAGE);
    let (_, words) = answered(taken, &tokens).unwrap();
    assert_eq!(words, uncached(&tokens));
}

/// A request that is offered whole, and a forward of the decode process: no row is copied before it
/// has ended.
struct Held {
    node: Node,
    prefill: Prefill,
    tokens: Vec<u64>,
    running: Sequence,
    promise: Promise,
    sequence: Sequence,
    offer: Offer,
    taken: Taken,
}

impl Held {
    fn new() -> Held {
        let node = Node::new();
        let (prefill, decode) = (node.prefill(4), node.decode());
        let other = prompt(2, 9);
        let mut running = node.there.begin(&other).unwrap();
        let (promise, ticket) = Ticket::promised();
        running.computed_by(other.len(), &ticket).unwrap();
        let tokens = prompt(7, 1);
        let mut sequence = node.here.begin(&tokens).unwrap();
        let mut offer = prefill.offer("one", &sequence, 0, TIME).unwrap();
        let word = prefilled(&mut sequence, &mut offer, &tokens, 7);
        offer.end(word, &[]).unwrap();
        let taking = decode.take("one", &ask(&tokens), TIME, TIME).unwrap();
        Held {
            taken: taking.wait().unwrap(),
            node,
            prefill,
            tokens,
            running,
            promise,
            sequence,
            offer,
        }
    }
}

#[test]
fn the_first_step_is_launched_behind_the_tickets_of_its_layers() {
    let held = Held::new();
    let mut taken = held.taken;
    let slots = taken.sequence.slots().unwrap();
    let layer = |layer| slots.tickets(layer).collect::<Vec<_>>();
    let tickets: Vec<Ticket> = (0..LAYERS).flat_map(layer).collect();
    assert_eq!(tickets.len(), LAYERS as usize);
    assert!(!tickets.iter().any(Ticket::is_settled));
    assert!(!taken.sequence.is_loaded() && !taken.sequence.verify().unwrap());
    assert_eq!(taken.sequence.share().unwrap(), []);
    assert_eq!(taken.sequence.truncate(2), Err(SequenceError::Unsettled));
    let refused = taken.sequence.row_mut(0, 0, 6).unwrap_err();
    assert!(matches!(refused, RowError::Cached { first: 7, .. }));
    held.promise.settle(Ok(()));
    tickets.iter().for_each(|ticket| ticket.wait().unwrap());
    let (mut sequence, words) = answered(taken, &held.tokens).unwrap();
    assert_eq!(words, uncached(&held.tokens));
    assert!(sequence.verify().unwrap());
}

#[test]
fn another_prompt_salt_or_namespace_is_refused_and_the_offer_stays() {
    let node = Node::new();
    let (prefill, decode) = (node.prefill(4), node.decode());
    let (tokens, other) = (prompt(7, 1), prompt(7, 2));
    let mut sequence = node.here.begin(&tokens).unwrap();
    let mut offer = prefill.offer("one", &sequence, 0, TIME).unwrap();
    let word = prefilled(&mut sequence, &mut offer, &tokens, 7);
    offer.end(word, &[]).unwrap();
    let id = "one".to_owned();
    let salted = ask(&tokens).cache_salt("secret");
    for ask in [ask(&other), ask(&tokens[..6]), salted] {
        let refused = decode.take("one", &ask, TIME, TIME).unwrap().wait();
        assert_eq!(
            refused.err(),
            Some(HandoverError::Prompt { id: id.clone() })
        );
    }
    let others = PrefixOptions::new(&Model::new("rows", "mixed", "f64", shape()), 40, 60);
    let others = others.over(Some(node.l3.clone())).unwrap();
    let foreign = Decode::new(&node.socket, &others).unwrap();
    let refused = foreign
        .take("one", &ask(&tokens), TIME, TIME)
        .unwrap()
        .wait();
    assert_eq!(refused.err(), Some(HandoverError::Namespace));
    assert_eq!(offer.state(), State::Waiting);
    let taking = decode.take("one", &ask(&tokens), TIME, TIME).unwrap();
    let (_, words) = answered(taking.wait().unwrap(), &tokens).unwrap();
    assert_eq!(words, uncached(&tokens));
}

#[test]
fn a_request_is_offered_and_taken_once() {
    let node = Node::new();
    let (prefill, decode) = (node.prefill(4), node.decode());
    let tokens = prompt(7, 1);
    let sequence = node.here.begin(&tokens).unwrap();
    let offer = prefill.offer("one", &sequence, 0, TIME).unwrap();
    let twice = HandoverError::Twice {
        id: "one".to_owned(),
    };
    let again = prefill.offer("one", &sequence, 0, TIME).err();
    assert_eq!(again.as_ref(), Some(&twice));
    let first = decode.take("one", &ask(&tokens), TIME, TIME).unwrap();
    eventually("it is taken", || offer.state() == State::Transferring);
    let second = decode.take("one", &ask(&tokens), TIME, TIME).unwrap();
    assert_eq!(second.wait().err(), Some(twice));
    drop(first);
    assert_eq!(offer.wait(), Err(HandoverError::Gone));
    assert_eq!(prefill.free_pages(), 4);
    // The name is free again.
    let _again = prefill.offer("one", &sequence, 0, TIME).unwrap();
}

#[test]
fn memory_is_lent_to_one_request_at_a_time() {
    let node = Node::new();
    let prefill = node.prefill(5);
    let tokens = prompt(3 * PAGE, 1);
    let sequence = node.here.begin(&tokens).unwrap();
    let one = prefill.offer("one", &sequence, 0, TIME).unwrap();
    assert_eq!(prefill.free_pages(), 2);
    let (needed, free, all) = (3, 2, 5);
    let refused = prefill.offer("two", &sequence, 0, TIME).err();
    assert_eq!(refused, Some(HandoverError::NoRoom { needed, free, all }));
    let two = prefill.offer("two", &sequence, PAGE, TIME).unwrap();
    // The last page goes through the memory in any case.
    let three = prefill.offer("three", &sequence, 9 * PAGE, TIME).err();
    let (needed, free) = (1, 0);
    assert_eq!(three, Some(HandoverError::NoRoom { needed, free, all }));
    drop((one, two));
    assert_eq!(prefill.free_pages(), 5);
}

#[test]
fn an_offer_that_is_not_taken_ends_with_its_time() {
    let node = Node::new();
    let prefill = node.prefill(4);
    let tokens = prompt(7, 1);
    let sequence = node.here.begin(&tokens).unwrap();
    let mut offer = prefill.offer("one", &sequence, 0, SHORT).unwrap();
    // The thread ends it: nothing here looks.
    eventually("the memory is back", || prefill.free_pages() == 4);
    let late = HandoverError::Late {
        what: "a decode process",
        timeout: SHORT,
    };
    assert_eq!(offer.state(), State::Failed(late.clone()));
    assert_eq!(offer.layer(&sequence, 0, 7), Err(late.clone()));
    assert_eq!(offer.wait(), Err(late));
}

#[test]
fn a_request_that_is_not_offered_ends_with_its_time() {
    let node = Node::new();
    let (_prefill, decode) = (node.prefill(4), node.decode());
    let taking = decode.take("one", &ask(&[1, 2]), TIME, SHORT).unwrap();
    assert!(matches!(taking.wait(), Err(HandoverError::Late { .. })));
    node.is_empty();
}

#[test]
fn an_offer_that_is_dropped_fails_the_request() {
    let node = Node::new();
    let (prefill, decode) = (node.prefill(4), node.decode());
    let tokens = prompt(7, 1);
    let sequence = node.here.begin(&tokens).unwrap();
    let offer = prefill.offer("one", &sequence, 0, TIME).unwrap();
    let taking = decode.take("one", &ask(&tokens), TIME, TIME).unwrap();
    eventually("it is taken", || offer.state() == State::Transferring);
    drop(offer);
    assert_eq!(taking.wait().err(), Some(HandoverError::Cancelled));
    assert_eq!(prefill.free_pages(), 4);
    drop(sequence);
    node.is_empty();
}

#[test]
fn the_end_of_a_prefill_process_fails_all_requests() {
    let node = Node::new();
    let (prefill, decode) = (node.prefill(4), node.decode());
    let tokens = prompt(7, 1);
    let sequence = node.here.begin(&tokens).unwrap();
    let offer = prefill.offer("one", &sequence, 0, TIME).unwrap();
    let one = decode.take("one", &ask(&tokens), TIME, TIME).unwrap();
    let two = decode.take("two", &ask(&tokens), TIME, TIME).unwrap();
    eventually("it is taken", || offer.state() == State::Transferring);
    drop(prefill);
    assert_eq!(offer.state(), State::Failed(HandoverError::Closed));
    assert!(one.wait().is_err() && two.wait().is_err());
    assert!(!node.socket.exists());
    let three = decode.take("three", &ask(&tokens), TIME, TIME).unwrap();
    assert!(matches!(three.wait(), Err(HandoverError::Socket { .. })));
    drop(sequence);
    node.is_empty();
}

/// A sequence is dropped while its rows come, and another one gets its pages.
pub fn dropped_while_rows_come() {
    let held = Held::new();
    let (node, offer) = (&held.node, &held.offer);
    drop(held.taken);
    // All pages of L1 but that of the running forward.
    let long = prompt(39 * PAGE - ANSWER, 3);
    let mut next = node
        .there
        .ask(&ask(&long))
        .unwrap()
        .begin_within(TIME)
        .unwrap();
    for layer in 0..LAYERS {
        compute(&mut next, &long, layer, 0..long.len()).unwrap();
    }
    held.promise.settle(Ok(()));
    let outcome = offer.wait();
    let from = long.len() - 1;
    let word = forward(&mut next, &long, from).unwrap();
    assert_eq!(
        word,
        uncached(&long)[long.len()],
        "rows came into pages of another sequence"
    );
    assert_eq!(outcome, Err(HandoverError::Gone));
    drop((held.running, held.sequence, next));
    assert_eq!(held.prefill.free_pages(), 4);
    node.is_empty();
}

#[test]
fn a_sequence_that_is_dropped_while_rows_come_gets_no_more_of_them() {
    dropped_while_rows_come();
}

#[test]
fn a_sequence_whose_rows_do_not_come_is_broken() {
    rows_do_not_come();
}

/// An offer is dropped while the decode process copies its rows.
pub fn rows_do_not_come() {
    let held = Held::new();
    let mut taken = held.taken;
    drop(held.offer);
    assert!(matches!(
        taken.sequence.row(0, 0, 3),
        Err(RowError::Load(_))
    ));
    assert!(matches!(
        taken.sequence.verify(),
        Err(SequenceError::Broken(_))
    ));
    assert!(matches!(
        taken.sequence.keep(),
        Err(SequenceError::Broken(_))
    ));
    held.promise.settle(Ok(()));
    drop((held.running, held.sequence));
    held.node.is_empty();
}

#[test]
fn an_offer_takes_the_rows_of_its_own_sequence_alone_and_all_of_them() {
    let node = Node::new();
    let prefill = node.prefill(4);
    let tokens = prompt(7, 1);
    let mut sequence = node.here.begin(&tokens).unwrap();
    let other = node.here.begin(&tokens).unwrap();
    let foreign = node.there.begin(&tokens).unwrap();
    let no_rows = |outcome| matches!(outcome, Err(HandoverError::NoSuchRows { .. }));
    assert!(no_rows(prefill.offer("one", &foreign, 0, TIME).map(drop)));
    let mut offer = prefill.offer("one", &sequence, 0, TIME).unwrap();
    assert!(no_rows(offer.layer(&other, 0, 7)) && no_rows(offer.layer(&foreign, 0, 7)));
    assert!(no_rows(offer.layer(&sequence, LAYERS, 7)) && no_rows(offer.layer(&sequence, 0, 8)));
    compute(&mut sequence, &tokens, 0, 0..5).unwrap();
    offer.layer(&sequence, 0, 5).unwrap();
    let (layer, tokens, all) = (0, 5, 7);
    let missing = HandoverError::NotComputed { layer, tokens, all };
    assert_eq!(offer.end(0, &[]), Err(missing));
    let long = vec![0; DATA_BYTES_MAX + 1];
    assert!(matches!(
        offer.end(0, &long),
        Err(HandoverError::TooLong { .. })
    ));
}

#[test]
fn the_longest_data_arrive() {
    let node = Node::new();
    let (prefill, decode) = (node.prefill(4), node.decode());
    let tokens = prompt(2, 1);
    let mut sequence = node.here.begin(&tokens).unwrap();
    let mut offer = prefill.offer("one", &sequence, 0, TIME).unwrap();
    let word = prefilled(&mut sequence, &mut offer, &tokens, 7);
    let data: Vec<u8> = (0..DATA_BYTES_MAX).map(|at| (at % 251) as u8).collect();
    offer.end(word, &data).unwrap();
    let taken = decode.take("one", &ask(&tokens), TIME, TIME).unwrap();
    assert_eq!(taken.wait().unwrap().data, data);
}

#[test]
fn a_socket_that_was_left_behind_is_replaced_and_another_file_is_not() {
    let node = Node::new();
    drop(UnixListener::bind(&node.socket).unwrap());
    let prefill = node.prefill(1);
    let second = Prefill::bind(&node.socket, &node.here, 1);
    assert!(matches!(second, Err(HandoverError::Socket { .. })));
    drop(prefill);
    std::fs::write(&node.socket, "mine").unwrap();
    let third = Prefill::bind(&node.socket, &node.here, 1);
    assert!(matches!(third, Err(HandoverError::Socket { .. })));
    assert_eq!(std::fs::read(&node.socket).unwrap(), b"mine");
}

#[test]
fn processes_that_send_nonsense_disturb_no_other() {
    use std::io::{Read, Write};
    let node = Node::new();
    let (prefill, decode) = (node.prefill(4), node.decode());
    for bytes in [&b"\x05\0\0\0hello"[..], &[255; 64], &[], &[1, 0, 0, 0, 1]] {
        let mut stream = std::os::unix::net::UnixStream::connect(&node.socket).unwrap();
        stream.write_all(bytes).unwrap();
        stream.shutdown(std::net::Shutdown::Write).unwrap();
        let mut rest = Vec::new();
        let _reset = stream.read_to_end(&mut rest);
        assert!(rest.is_empty());
    }
    hand_over(&node, &prefill, &decode, &prompt(6, 1));
}

#[test]
fn caches_that_cannot_hand_over_say_why() {
    let node = Node::new();
    let rank = threads(1, TIME).unwrap().remove(0);
    let options = PrefixOptions::new(&named(), 40, 60).with(|o| o.ranks = Some(Box::new(rank)));
    let cache = options.over(None).unwrap();
    let refused = Prefill::bind(&node.socket, &cache, 1).err();
    assert!(matches!(refused, Some(HandoverError::Unsupported { .. })));
    let refused = Decode::new(&node.socket, &cache).err();
    assert!(matches!(refused, Some(HandoverError::Unsupported { .. })));
}

/// A cached prefix of the prefill process goes through the store, and the rows behind it through
/// the memory, with the begin of the decode process in L1.
#[test]
fn rows_that_the_decode_process_has_are_not_copied() {
    let node = Node::new();
    let (prefill, decode) = (node.prefill(6), node.decode());
    let tokens = prompt(4 * PAGE + 1, 5);
    let mut own = node.there.begin(&tokens).unwrap();
    forward(&mut own, &tokens, 0).unwrap();
    own.keep().unwrap();
    let mut sequence = node.here.begin(&tokens).unwrap();
    let mut offer = prefill.offer("one", &sequence, 0, TIME).unwrap();
    let from = sequence.cached().tokens();
    let word = forward(&mut sequence, &tokens, from).unwrap();
    offer.layers(&sequence, tokens.len()).unwrap();
    offer.end(word, &[]).unwrap();
    let taken = decode
        .take("one", &Ask::new(&tokens).reserved(ANSWER), TIME, TIME)
        .unwrap();
    let taken = taken.wait().unwrap();
    assert_eq!(taken.sequence.cached().l1, 4 * PAGE);
    let (_, words) = answered(taken, &tokens).unwrap();
    assert_eq!(words, uncached(&tokens));
}
