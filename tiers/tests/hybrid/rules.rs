//! Rules of hybrid models, one by one.

use std::sync::Arc;
use std::time::Instant;

use larder_kernels::{Attention, KvShape};
use larder_tiers::config::TailConfig;
use larder_tiers::l3::L3;
use larder_tiers::prefix::{OpenError, RowError, SequenceError};
use larder_tiers::{Component, Model, PrefixCache, PrefixOptions, Role, RowAt, Sequence};

use super::memory::Memory as Pages;
use super::toy::{self, PAGE, STATE, WORDS};
use super::{ANSWER, PATIENCE};

fn options(tails: [(u32, u32); 2]) -> PrefixOptions {
    PrefixOptions::new(&toy::model().unwrap(), 60, 60).with(|o| {
        let sizes = o.config.tails.iter_mut().zip(tails);
        sizes.for_each(|(tail, (l1, l2))| (tail.l1_pages, tail.l2_pages) = (l1, l2));
    })
}

fn prompt(tokens: usize) -> Vec<u64> {
    (0..tokens as u64).map(|at| at * 7 % WORDS).collect()
}

/// Answers a prompt. Returns the cached tokens.
fn served(cache: &PrefixCache, prompt: &[u64]) -> usize {
    let (words, cached) = toy::serve(cache, prompt, ANSWER).unwrap();
    assert_eq!(words, toy::uncached(prompt, ANSWER));
    cached.tokens()
}

fn rest(cache: &PrefixCache) {
    assert!(cache.settle(Instant::now() + PATIENCE).unwrap());
}

#[test]
fn a_window_holds_no_more_pages_than_it_needs_however_long_the_prompt_is() {
    let cache = options([(6, 6), (40, 40)]).over_each(Vec::new()).unwrap();
    let mut sequence = cache.begin(&prompt(50 * PAGE)).unwrap();
    let tokens = prompt(50 * PAGE);
    for page in 0..50 {
        let (from, until) = (page * PAGE, (page + 1) * PAGE);
        toy::compute(&mut sequence, &tokens, from, until).unwrap();
        let (first, pages) = sequence.window_pages(toy::SLIDING).unwrap();
        assert_eq!(first, (page + 1_usize).saturating_sub(2));
        assert!(pages.len() <= 2, "{}", pages.len());
    }
    cache.audit([&sequence]).unwrap();
    let at = RowAt {
        component: toy::SLIDING,
        ..RowAt::default()
    };
    let gone = sequence.component_row(at, 0);
    assert!(matches!(gone, Err(RowError::NoSlot { position: 0, .. })));
}

#[test]
fn sequences_that_branch_off_one_state_work_on_copies_of_their_own() {
    let cache = options([(30, 30), (20, 20)]).over_each(Vec::new()).unwrap();
    let document = prompt(5 * PAGE);
    served(&cache, &document);
    let mut begun = Vec::new();
    for last in 0..3 {
        let mut own = document.clone();
        own.push(last);
        let sequence = cache.begin(&own).unwrap();
        assert_eq!(sequence.cached().tokens(), 5 * PAGE);
        begun.push((own, sequence));
    }
    for (own, sequence) in &mut begun {
        let computed = sequence.cached().tokens();
        let word = toy::compute(sequence, own, computed, own.len()).unwrap();
        assert_eq!(toy::uncached(own, 1).last(), Some(&word));
    }
    cache
        .audit(begun.iter().map(|(_, sequence)| sequence))
        .unwrap();
}

#[test]
fn a_state_is_not_read_before_it_is_prepared() {
    let cache = options([(30, 30), (20, 20)]).over_each(Vec::new()).unwrap();
    let document = prompt(3 * PAGE + 1);
    served(&cache, &document);
    let mut sequence = cache.begin(&document).unwrap();
    let at = RowAt {
        component: STATE,
        ..RowAt::default()
    };
    assert!(matches!(sequence.state(at), Err(RowError::NotPrepared)));
    sequence.prepare(document.len()).unwrap();
    assert_eq!(sequence.state(at).unwrap().len(), 16);
}

#[test]
fn a_truncation_goes_back_to_a_kept_state_or_is_refused() {
    let cache = options([(30, 30), (20, 20)]).over_each(Vec::new()).unwrap();
    let tokens = prompt(6 * PAGE + 3);
    let mut sequence = cache.begin(&tokens).unwrap();
    for page in 0..6 {
        toy::compute(&mut sequence, &tokens, page * PAGE, (page + 1) * PAGE).unwrap();
    }
    toy::compute(&mut sequence, &tokens, 6 * PAGE, tokens.len()).unwrap();
    // Tokens that were not computed are always taken back.
    sequence.push(1).unwrap();
    sequence.truncate(tokens.len()).unwrap();
    let refused = sequence.truncate(6 * PAGE + 1);
    assert_eq!(refused, Err(SequenceError::NoState { kept: 6 * PAGE }));
    sequence.truncate(6 * PAGE).unwrap();
    // The words after other tokens are those of a sequence that never had the former ones.
    let other = [&tokens[..6 * PAGE], &[3, 3]].concat();
    for token in [3, 3] {
        sequence.push(token).unwrap();
    }
    let word = toy::compute(&mut sequence, &other, 6 * PAGE, other.len()).unwrap();
    assert_eq!(toy::uncached(&other, 1).last(), Some(&word));
    // Windows behind were freed, and nothing of them is cached.
    let refused = sequence.truncate(PAGE);
    assert_eq!(refused, Err(SequenceError::NoState { kept: 0 }));
    cache.audit([&sequence]).unwrap();
    sequence.keep().unwrap();
    cache.audit([]).unwrap();
}

#[test]
fn the_longest_prefix_with_a_state_is_found_in_each_tier() {
    let stores: [Arc<Pages>; 4] = Default::default();
    let l3s = || {
        stores
            .iter()
            .map(|pages| pages.clone() as Arc<dyn L3>)
            .collect()
    };
    let tokens = prompt(8 * PAGE + 1);
    let cache = options([(30, 30), (30, 30)]).over_each(l3s()).unwrap();
    assert_eq!(served(&cache, &tokens), 0);
    assert_eq!(served(&cache, &tokens), 8 * PAGE);
    rest(&cache);
    cache.evict(usize::MAX).unwrap();
    assert_eq!(served(&cache, &tokens), 8 * PAGE);
    rest(&cache);
    cache.reset().unwrap();
    assert_eq!(served(&cache, &tokens), 8 * PAGE);
    rest(&cache);
    // Without states, no page is of use.
    cache.reset().unwrap();
    stores[3].evict(|_| true);
    assert_eq!(served(&cache, &tokens), 0);
    rest(&cache);
    cache.audit([]).unwrap();
    cache.close().unwrap();
}

#[test]
fn a_remote_beneath_a_window_or_state_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    let options = options([(30, 30), (20, 20)]).with(|o| {
        o.l4.urls = vec![format!("file://{}", directory.path().display())];
        o.l4.is_unsigned = true;
    });
    let opened = options.open(&directory.path().join("kv.store"), 128 << 20);
    let refused = matches!(&opened, Err(OpenError::RemoteBeneath { name }) if name == "sliding");
    assert!(refused, "{:?}", opened.err());
}

#[test]
fn components_that_do_not_fit_are_errors() {
    let row = |tokens| KvShape::of_rows(Attention::Mla, 1, 8, tokens).unwrap();
    let model = || toy::model().unwrap();
    let state = |name, tokens| Component::new(name, "u64", Role::State, &[row(tokens)]);
    assert!(model().with(state("another", 1)).is_ok());
    for wrong in [
        state("another", 4),
        state("state", 1),
        state("", 1),
        Component::new("none", "u64", Role::Follower, &[]),
        Component::new("empty", "u64", Role::Window { tokens: 0 }, &[row(4)]),
    ] {
        assert!(model().with(wrong).is_err());
    }
    let small: fn(&mut TailConfig) = |tail| tail.l1_pages = 2;
    let options = options([(30, 30), (20, 20)]).with(|o| small(&mut o.config.tails[0]));
    let error = options.over_each(Vec::new()).err().unwrap().to_string();
    assert!(error.contains("tails.l1_pages"), "{error}");
}

#[test]
fn namespaces_of_components_differ_in_all_that_decides_their_bytes() {
    let model = toy::model().unwrap();
    let layout = larder_kernels::Layout::PageFirstDirect;
    let of = |component: &Component| model.namespace_of(component, layout).unwrap();
    let mut all = vec![model.namespace(layout).unwrap()];
    all.extend(model.components().iter().map(of));
    let window = &model.components()[1];
    let mut longer = window.clone();
    longer.role = Role::Window { tokens: 7 };
    let mut part = window.clone();
    part.part = "layers 0..4 of 8".to_owned();
    all.extend([of(&longer), of(&part)]);
    for (at, one) in all.iter().enumerate() {
        assert!(!all[..at].contains(one), "{one}");
    }
}

#[test]
fn a_window_without_states_is_cut_within_the_pages_that_the_sequence_owns() {
    let row = KvShape::of_rows(Attention::Mla, 1, 8, PAGE as u32).unwrap();
    let window = Role::Window {
        tokens: toy::WINDOW as u32,
    };
    let model = Model::new("windows", "1", "u64", row)
        .with(Component::new("sliding", "u64", window, &[row]))
        .unwrap();
    let cache = PrefixOptions::new(&model, 20, 20)
        .over_each(Vec::new())
        .unwrap();
    let at = RowAt::default();
    let compute = |sequence: &mut Sequence, from: usize, until: usize| {
        sequence.prepare(until).unwrap();
        for position in from..until {
            let bytes = [position as u8; 8];
            sequence
                .row_mut(0, 0, position)
                .unwrap()
                .copy_from_slice(&bytes);
            let row = sequence.component_row_mut(at, position).unwrap();
            row.copy_from_slice(&bytes);
        }
        sequence.computed(until).unwrap();
    };
    let all = 3 * PAGE + 3;
    let mut sequence = cache.begin(&prompt(all)).unwrap();
    compute(&mut sequence, 0, all);
    sequence.truncate(all - 2).unwrap();
    assert_eq!(
        sequence.component_row(at, all - 3).unwrap(),
        [(all - 3) as u8; 8]
    );
    sequence.push(1).unwrap();
    compute(&mut sequence, all - 2, all - 1);
    sequence.share().unwrap();
    // The page belongs to the pool now, and the window before it is gone.
    let refused = sequence.truncate(3 * PAGE - 1);
    assert_eq!(refused, Err(SequenceError::NoState { kept: 0 }));
    sequence.truncate(3 * PAGE).unwrap();
    assert_eq!(sequence.component_row(at, 3 * PAGE - 1).unwrap(), [11; 8]);
    cache.audit([&sequence]).unwrap();
    drop(sequence);
    // Another sequence has the window of the prefix.
    let sequence = cache.begin(&prompt(all)).unwrap();
    assert_eq!(sequence.cached().tokens(), 3 * PAGE);
    assert_eq!(sequence.component_row(at, 3 * PAGE - 5).unwrap(), [7; 8]);
    drop(sequence);
    cache.audit([]).unwrap();
}
