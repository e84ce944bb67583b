//! Weights that are replaced while the cache runs.

use std::sync::Arc;
use std::time::Instant;

use larder_format::{TokenUnits, namespace_seed, page_keys};
use larder_kernels::Ticket;
use larder_tiers::core::{Broken, Event};
use larder_tiers::prefix::SequenceError;
use larder_tiers::prompt::seed_under;
use larder_tiers::{Ask, PrefixCache};

use super::engine::PAGE;
use super::memory::Memory;
use super::rules::{filled, is_empty, options, prompt};
use super::{PATIENCE, serve, toy};

fn over(l3: &Arc<Memory>) -> PrefixCache {
    options(20, 40).over(Some(l3.clone())).unwrap()
}

#[test]
fn nothing_of_former_weights_is_matched_in_any_tier() {
    let l3 = filled(3);
    let cache = over(&l3);
    let cached = |cache: &PrefixCache| serve(cache, &toy(), &prompt(3)).tokens();
    assert_eq!(cached(&cache), 3 * PAGE);
    let (mut first, mut second) = (
        cache.begin(&prompt(3)).unwrap(),
        cache.begin(&[9; 5]).unwrap(),
    );
    let (promise, ticket) = Ticket::promised();
    first.computed_by(first.len(), &ticket).unwrap();
    let asked = cache.ask(&Ask::new(&prompt(3))).unwrap();
    cache.new_weights("v2").unwrap();
    let broken = Err(SequenceError::Broken(Broken));
    assert_eq!(
        (first.push(1), second.push(1)),
        (broken.clone(), broken.clone())
    );
    assert_eq!(first.share().map(drop), broken);
    assert_eq!(first.verify().map(drop), broken);
    assert_eq!(
        (first.computed(5), second.computed(5)),
        (broken.clone(), broken.clone())
    );
    assert_eq!(second.computed_by(5, &Ticket::done()), broken);
    assert_eq!(second.slots().map(drop), broken);
    assert!(second.keep().is_err());
    // A request that has waited since before goes on under the new weights.
    let again = asked.begin_within(PATIENCE).unwrap();
    assert_eq!(again.cached().tokens(), 0);
    promise.settle(Ok(()));
    drop((first, again));
    assert_eq!(cached(&cache), 0);
    assert_eq!(cached(&cache), 3 * PAGE);
    cache.new_weights("v3").unwrap();
    assert_eq!(cached(&cache), 0);
    is_empty(&cache);
    cache.close().unwrap();
    // Pages of each tag are in L3, under that tag.
    assert_eq!(l3.len(), 9);
    let cache = over(&l3);
    assert_eq!(serve(&cache, &toy(), &prompt(3)).l3, 3 * PAGE);
    cache.new_weights("v2").unwrap();
    assert_eq!(serve(&cache, &toy(), &prompt(3)).l3, 3 * PAGE);
    is_empty(&cache);
}

#[test]
fn a_put_in_flight_ends_under_the_former_tag() {
    let l3 = Arc::<Memory>::default();
    let cache = over(&l3);
    serve(&cache, &toy(), &prompt(3));
    cache.new_weights("v2").unwrap();
    assert!(cache.settle(Instant::now() + PATIENCE).unwrap());
    let put = cache.stats().unwrap().put as usize;
    assert_eq!(l3.len(), put);
    cache.close().unwrap();
    let former = over(&l3);
    assert_eq!(serve(&former, &toy(), &prompt(3)).l3, put * PAGE);
    former.close().unwrap();
    let other = over(&l3);
    other.new_weights("v2").unwrap();
    assert_eq!(serve(&other, &toy(), &prompt(3)).tokens(), 0);
}

#[test]
fn the_weights_of_the_model_are_the_first_tag() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("kv.store");
    let open = |weights: &str| {
        let options = options(20, 40).with(|o| o.model.weights = weights.to_owned());
        options.open(&path, 256 << 20).unwrap()
    };
    let serve = |cache: &PrefixCache| {
        let cached = serve(cache, &toy(), &prompt(3));
        assert!(cache.settle(Instant::now() + PATIENCE).unwrap());
        cached.l3
    };
    let cache = open("step 0");
    assert_eq!(serve(&cache), 0);
    cache.new_weights("step 1").unwrap();
    assert_eq!(serve(&cache), 0);
    cache.new_weights("step 0").unwrap();
    assert_eq!(serve(&cache), 3 * PAGE);
    cache.close().unwrap();
    for (weights, cached) in [("step 1", 3 * PAGE), ("", 0), ("step 0", 3 * PAGE)] {
        let cache = open(weights);
        assert_eq!(serve(&cache), cached, "{weights}");
        cache.close().unwrap();
    }
}

#[test]
fn a_router_computes_the_keys_of_a_prompt() {
    let cache = options(20, 40).with(|o| o.config.events = true);
    let cache = cache.over(None).unwrap();
    for (tag, extra_key) in [("seed 42", Some("tenant")), ("v2", None)] {
        cache.new_weights(tag).unwrap();
        cache.take_events().unwrap();
        let of_scope = namespace_seed(extra_key, None);
        let tokens = prompt(3);
        let ask = Ask::new(&tokens);
        let ask = extra_key.iter().fold(ask, |ask, key| ask.extra_key(key));
        let mut sequence = cache.ask(&ask).unwrap().begin_within(PATIENCE).unwrap();
        sequence.computed(3 * PAGE).unwrap();
        sequence.keep().unwrap();
        let seed = seed_under(tag, of_scope);
        let page_tokens = PAGE.try_into().unwrap();
        let expected = page_keys(&tokens, page_tokens, seed, TokenUnits::Single);
        let stored = cache
            .take_events()
            .unwrap()
            .into_iter()
            .find_map(|event| match event {
                Event::Stored { keys, .. } => Some(keys),
                Event::Removed { .. } => None,
            });
        assert_eq!(stored.unwrap(), expected);
        assert!(cache.settle(Instant::now() + PATIENCE).unwrap());
    }
}
