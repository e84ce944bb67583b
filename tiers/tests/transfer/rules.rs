//! Each promise of a transfer.

use std::net::SocketAddr;
use std::time::Duration;

use larder_kernels::Ticket;
use larder_tiers::transfer::{
    BootstrapPlace, Patience, Refusal, Room, State, TcpOptions, TcpTransport, Transfer,
    TransferError, Transport,
};
use larder_tiers::{PrefixOptions, Sequence};

use super::engine::PAGE;
use super::side::{Side, least, model, succeeded, text, uncached_of};

/// Never over in these tests, and without a sign while they run: a message that is not seen at once
/// is not seen at all.
pub const LONG: Patience = Patience {
    bootstrap: Duration::from_secs(3600),
    silence: Duration::from_secs(3600),
};

/// Over soon.
const SHORT: Patience = Patience {
    bootstrap: Duration::from_millis(200),
    silence: Duration::from_millis(200),
};

fn place() -> BootstrapPlace {
    BootstrapPlace::start(loopback()).unwrap()
}

fn loopback() -> SocketAddr {
    (std::net::Ipv4Addr::LOCALHOST, 0).into()
}

/// Prefill computes a prompt and sends it; decode receives and answers it.
fn serve(prefill: &Side, decode: &Side, place: SocketAddr, room: u64, prompt: &[u64]) {
    let senders = prefill.senders(room);
    let receivers = decode.receivers(room, place, decode.begin(prompt));
    let mut sequences = prefill.begin(prompt);
    let word = prefill.forward(&mut sequences, prompt);
    let sent = senders.into_iter().zip(sequences);
    let sent = sent.map(|(sender, sequence)| sender.send(sequence, &word.to_le_bytes()));
    let sent: Vec<Box<dyn Transfer>> = sent.collect();
    assert_eq!(
        least(&receivers),
        State::Success,
        "{:?}",
        failures(receivers)
    );
    assert_eq!(least(&sent), State::Success);
    for sequence in succeeded(sent).0 {
        sequence.keep().unwrap();
    }
    let (sequences, notes) = succeeded(receivers);
    assert!(notes.iter().all(|note| *note == word.to_le_bytes()));
    let sequences = decode.answer(sequences, prompt, word);
    for sequence in sequences {
        sequence.keep().unwrap();
    }
}

fn failures(transfers: Vec<Box<dyn Transfer>>) -> Vec<Option<TransferError>> {
    let error = |of: Box<dyn Transfer>| of.end().outcome.err();
    transfers.into_iter().map(error).collect()
}

#[test]
fn ranks_of_any_number_serve_ranks_of_any_other() {
    let place = place();
    for (prefill, decode) in [(1, 1), (4, 8), (4, 2), (4, 1), (1, 4), (2, 8), (8, 4)] {
        let prefill = Side::new(prefill, LONG, Some(place.address()));
        let decode = Side::new(decode, LONG, None);
        // Whole pages, and a last one with one token, all but one, and all.
        for (room, tokens) in (0..).zip([PAGE, PAGE + 1, 3 * PAGE - 1, 1]) {
            serve(
                &prefill,
                &decode,
                place.address(),
                room,
                &text(room, tokens),
            );
        }
        prefill.check_empty();
        decode.check_empty();
    }
}

#[test]
fn more_rows_than_a_connection_holds_arrive() {
    let place = place();
    let prefill = Side::new(1, LONG, Some(place.address()));
    let decode = Side::new(1, LONG, None);
    let prompt = text(1, 22 * PAGE);
    serve(&prefill, &decode, place.address(), 1, &prompt);
}

#[test]
fn received_pages_are_found_again_in_each_tier_of_decode() {
    let place = place();
    let prefill = Side::new(4, LONG, Some(place.address()));
    let decode = Side::new(2, LONG, None);
    let prompt = text(1, 3 * PAGE + 5);
    serve(&prefill, &decode, place.address(), 1, &prompt);
    let again = |evicts: bool, resets: bool| {
        decode.check_leaks();
        for cache in &decode.caches {
            if evicts {
                cache.evict(usize::MAX).unwrap();
            }
            if resets {
                cache.reset().unwrap();
            }
        }
        let mut sequences = decode.begin(&prompt);
        let of = |sequence: &Sequence| sequence.cached();
        let cached: Vec<_> = sequences.iter().map(of).collect();
        let word = decode.forward(&mut sequences, &prompt);
        let sequences = decode.answer(sequences, &prompt, word);
        sequences.into_iter().for_each(|sequence| {
            sequence.keep().unwrap();
        });
        cached
    };
    assert!(
        again(false, false)
            .iter()
            .all(|cached| cached.l1 == 3 * PAGE)
    );
    assert!(
        again(true, false)
            .iter()
            .all(|cached| cached.l2 == 3 * PAGE)
    );
    assert!(again(true, true).iter().all(|cached| cached.l3 == 3 * PAGE));
    for l3 in &decode.l3s {
        assert_eq!(l3.len(), 3);
    }
}

#[test]
fn only_rows_that_decode_does_not_have_are_transferred() {
    let place = place();
    let prefill = Side::new(2, LONG, Some(place.address()));
    let decode = Side::new(4, LONG, None);
    let first = text(1, 2 * PAGE + 3);
    serve(&prefill, &decode, place.address(), 1, &first);
    let longer = [&first[..], &text(2, 2 * PAGE)].concat();
    let cached = decode.begin(&longer);
    assert!(cached.iter().all(|of| of.cached().tokens() == 2 * PAGE));
    drop(cached);
    serve(&prefill, &decode, place.address(), 2, &longer);
    // All whole pages are cached, but for the last token.
    serve(&prefill, &decode, place.address(), 3, &longer);
    prefill.check_empty();
    decode.check_empty();
}

#[test]
fn the_states_follow_both_sides() {
    let place = place();
    let prefill = Side::new(2, LONG, Some(place.address()));
    let decode = Side::new(2, LONG, None);
    let prompt = text(1, PAGE + 2);
    let receivers = decode.receivers(1, place.address(), decode.begin(&prompt));
    let senders = prefill.senders(1);
    let until = |is_so: &dyn Fn() -> bool| {
        while !is_so() {
            std::thread::yield_now();
        }
    };
    let waits = |state| matches!(state, State::WaitingForInput);
    until(&|| receivers.iter().all(|of| waits(of.state())));
    until(&|| senders.iter().all(|of| waits(of.state())));
    let mut sequences = prefill.begin(&prompt);
    let word = prefill.forward(&mut sequences, &prompt);
    let mut sent = Vec::new();
    for (sender, sequence) in senders.into_iter().zip(sequences) {
        assert!(receivers.iter().all(|of| !of.state().is_final()));
        sent.push(sender.send(sequence, &word.to_le_bytes()));
    }
    assert_eq!(
        (least(&receivers), least(&sent)),
        (State::Success, State::Success)
    );
}

#[test]
pub fn rows_are_copied_behind_forwards() {
    let place = place();
    let prefill = Side::new(1, LONG, Some(place.address()));
    let options = |_| TcpOptions::default().with(|o| o.patience = LONG);
    let decode = Side::on(true, 1, options);
    // A forward of decode that may still write to pages that are free.
    let mut running = decode.begin(&text(5, 3));
    let (promise, ticket) = Ticket::promised();
    running[0].computed_by(3, &ticket).unwrap();
    drop(running);
    let prompt = text(1, 2 * PAGE + 3);
    let receivers = decode.receivers(1, place.address(), decode.begin(&prompt));
    let senders = prefill.senders(1);
    let mut sequences = prefill.begin(&prompt);
    let word = prefill.forward(&mut sequences, &prompt);
    let sent = senders.into_iter().zip(sequences);
    let sent = sent.map(|(sender, sequence)| sender.send(sequence, &[]));
    let sent: Vec<Box<dyn Transfer>> = sent.collect();
    let state = receivers[0].wait(Duration::from_millis(100));
    assert!(
        !state.is_final(),
        "no row is copied yet, and it is {state:?}"
    );
    promise.settle(Ok(()));
    assert_eq!(
        (least(&receivers), least(&sent)),
        (State::Success, State::Success)
    );
    let sequences = decode.answer(succeeded(receivers).0, &prompt, word);
    drop((sequences, sent));
    prefill.check_empty();
    decode.check_empty();
}

/// The errors of a request between these two sides, which fails.
fn refused(prefill: &Side, decode: &Side, place: SocketAddr) -> [Vec<Option<TransferError>>; 2] {
    let prompt = text(1, PAGE);
    let senders = prefill.senders(1);
    let receivers = decode.receivers(1, place, decode.begin(&prompt));
    assert_eq!(
        (least(&senders), least(&receivers)),
        (State::Failed, State::Failed)
    );
    let senders = senders
        .into_iter()
        .map(|of| of.end().outcome.err())
        .collect();
    let receivers = failures(receivers);
    prefill.check_empty();
    decode.check_empty();
    [senders, receivers]
}

#[test]
pub fn other_namespaces_are_refused_by_name() {
    let place = place();
    let prefill = Side::new(1, LONG, Some(place.address()));
    let mut decode = Side::new(1, LONG, None);
    let other = model("other", 0, 1);
    decode.transports = vec![TcpTransport::new(&other, 0, 1, &TcpOptions::default()).unwrap()];
    for errors in refused(&prefill, &decode, place.address()) {
        let Some(TransferError::Refused(Refusal::Namespace(why))) = &errors[0] else {
            panic!("{errors:?}");
        };
        assert!(
            why.contains("model is \"toy\" on one side and \"other\""),
            "{why}"
        );
    }
}

#[test]
pub fn other_prompts_are_refused() {
    for is_weights in [false, true] {
        let place = place();
        let prefill = Side::new(2, LONG, Some(place.address()));
        let decode = Side::new(1, LONG, None);
        let (mut asked, prompt) = (text(1, PAGE + 4), text(1, PAGE + 4));
        if is_weights {
            decode.caches[0].new_weights("others").unwrap();
        } else {
            asked[PAGE + 2] += 1;
        }
        let senders = prefill.senders(7);
        let receivers = decode.receivers(7, place.address(), decode.begin(&asked));
        let mut sequences = prefill.begin(&prompt);
        prefill.forward(&mut sequences, &prompt);
        let sent = senders.into_iter().zip(sequences);
        let sent: Vec<_> = sent
            .map(|(sender, sequence)| sender.send(sequence, &[]))
            .collect();
        assert_eq!(
            (least(&sent), least(&receivers)),
            (State::Failed, State::Failed)
        );
        let refused = Some(TransferError::Refused(Refusal::Prompt(7)));
        assert!(failures(sent).contains(&refused));
        assert!(failures(receivers).contains(&refused));
        prefill.check_empty();
        decode.check_empty();
    }
}

#[test]
fn a_side_that_never_comes_fails_the_other_in_time() {
    let place = place();
    let prefill = Side::new(2, SHORT, Some(place.address()));
    let senders = prefill.senders(1);
    assert_eq!(least(&senders), State::Failed);
    for sender in senders {
        let said = sender.end().outcome.unwrap_err().to_string();
        assert!(said.contains("no decode rank has come"), "{said}");
    }
    // The ranks of prefill run, and do not begin the request.
    let decode = Side::new(1, SHORT, None);
    let receivers = decode.receivers(2, place.address(), decode.begin(&text(1, 4)));
    assert_eq!(least(&receivers), State::Failed);
    let said = format!("{:?}", failures(receivers));
    assert!(said.contains("has not agreed"), "{said}");
    // No rank of prefill, and no place.
    let empty = BootstrapPlace::start(loopback()).unwrap();
    let gone = BootstrapPlace::start(loopback()).unwrap().address();
    for (at, why) in [
        (empty.address(), "have not registered"),
        (gone, "does not answer"),
    ] {
        let receivers = decode.receivers(2, at, decode.begin(&text(1, 4)));
        assert_eq!(least(&receivers), State::Failed);
        let said = format!("{:?}", failures(receivers));
        assert!(said.contains(why), "{said}");
    }
    decode.check_empty();
}

#[test]
fn a_missing_rank_of_decode_is_named() {
    let place = place();
    let prefill = Side::new(1, SHORT, Some(place.address()));
    let mut decode = Side::new(4, LONG, None);
    decode.transports.truncate(3);
    let senders = prefill.senders(1);
    let receivers = decode.receivers(1, place.address(), decode.begin(&text(1, 4)));
    assert_eq!(
        (least(&senders), least(&receivers)),
        (State::Failed, State::Failed)
    );
    let said = senders
        .into_iter()
        .map(|of| of.end().outcome.unwrap_err().to_string());
    let said: Vec<String> = said.collect();
    assert!(
        said[0].contains("decode ranks [3] have not come"),
        "{said:?}"
    );
    // The others have the reason.
    let said = format!("{:?}", failures(receivers));
    assert!(said.contains("[3] have not come"), "{said}");
    decode.check_empty();
}

#[test]
fn an_end_or_a_drop_fails_the_other_side_and_gives_the_pages_back() {
    let place = place();
    let prefill = Side::new(2, LONG, Some(place.address()));
    let decode = Side::new(2, LONG, None);
    for room in 0..8 {
        let prompt = text(room, 2 * PAGE);
        let mut senders = prefill.senders(room);
        let mut receivers = decode.receivers(room, place.address(), decode.begin(&prompt));
        let (of_prefill, is_drop) = (room & 1 == 0, room & 2 == 0);
        if room & 4 == 0 {
            while receivers
                .iter()
                .any(|of| of.state() == State::Bootstrapping)
            {
                std::thread::yield_now();
            }
        }
        match (of_prefill, is_drop) {
            (true, true) => drop(senders.remove(1)),
            (true, false) => {
                let ended = senders.remove(1).end();
                assert!(ended.sequence.is_none());
                assert_eq!(ended.outcome, Err(TransferError::Ended));
            }
            (false, true) => drop(receivers.remove(0)),
            (false, false) => {
                let ended = receivers.remove(0).end();
                assert!(ended.sequence.is_some());
                assert_eq!(ended.outcome, Err(TransferError::Ended));
            }
        }
        if room & 4 == 0 {
            assert_eq!(least(&receivers), State::Failed);
            let other = if of_prefill { 0 } else { senders.len() };
            assert_eq!(least(&senders[..1]), State::Failed, "{other}");
        }
        drop((senders, receivers));
        prefill.check_empty();
        decode.check_empty();
    }
}

#[test]
fn a_sequence_that_cannot_be_sent_fails_both_sides() {
    let place = place();
    let prefill = Side::new(1, LONG, Some(place.address()));
    let decode = Side::new(1, LONG, None);
    let prompt = text(1, PAGE + 1);
    let senders = prefill.senders(1);
    let receivers = decode.receivers(1, place.address(), decode.begin(&prompt));
    // Nothing is computed.
    let sequences = prefill.begin(&prompt);
    let sent = senders.into_iter().zip(sequences);
    let sent: Vec<_> = sent
        .map(|(sender, sequence)| sender.send(sequence, &[]))
        .collect();
    assert_eq!(
        (least(&sent), least(&receivers)),
        (State::Failed, State::Failed)
    );
    let said = format!("{:?}", failures(sent));
    assert!(said.contains("0 tokens are computed"), "{said}");
    drop(receivers);
    let refused = prefill.transports[0].receiver(Room(1), "nowhere", {
        let mut sequences = prefill.begin(&prompt);
        sequences.remove(0)
    });
    let said = refused.err().unwrap().error.to_string();
    assert!(said.contains("\"nowhere\""), "{said}");
    assert!(decode.transports[0].sender(Room(1)).is_err());
    let _first = prefill.transports[0].sender(Room(1)).unwrap();
    let taken = prefill.transports[0].sender(Room(1)).err();
    assert_eq!(taken, Some(TransferError::Taken(1)));
}

#[test]
fn a_cache_of_another_shape_and_components_are_refused() {
    let place = place();
    let decode = Side::new(1, LONG, None);
    let half = PrefixOptions::new(&model("toy", 0, 2), 8, 8)
        .over(None)
        .unwrap();
    let sequence = half.begin(&text(1, 4)).unwrap();
    let refused = decode.transports[0].receiver(Room(1), &place.address().to_string(), sequence);
    let refused = refused.err().unwrap();
    assert!(
        refused.error.to_string().contains("another model"),
        "{refused:?}"
    );
    drop(refused);
    half.audit([]).unwrap();
    let state = larder_kernels::KvShape::mha(1, 1, 8, 4, 1).unwrap();
    let state = larder_tiers::Component::new("s", "f32", larder_tiers::Role::State, &[state]);
    let hybrid = model("toy", 0, 1).with(state).unwrap();
    let refused = TcpTransport::new(&hybrid, 0, 1, &TcpOptions::default()).err();
    assert!(
        matches!(refused, Some(TransferError::Model(_))),
        "{refused:?}"
    );
}

#[test]
fn a_place_that_starts_anew_knows_the_ranks_again() {
    let first = place();
    let address = first.address();
    let prefill = Side::new(2, LONG, Some(address));
    let decode = Side::new(1, LONG, None);
    serve(&prefill, &decode, address, 1, &text(1, 5));
    drop(first);
    let again = loop {
        if let Ok(place) = BootstrapPlace::start(address) {
            break place;
        }
        std::thread::yield_now();
    };
    serve(&prefill, &decode, again.address(), 2, &text(2, 5));
    assert_eq!(uncached_of(&text(2, 5)).len(), 5 + super::side::ANSWER);
}
