//! Weights that are replaced while the cache runs.

use std::sync::Arc;
use std::time::Instant;

use larder_kernels::Ticket;
use larder_tiers::core::Broken;
use larder_tiers::prefix::SequenceError;
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
