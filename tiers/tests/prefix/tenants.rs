//! Rows of other tenants in the memory of L1.

use larder_tiers::{Ask, PrefixCache, Sequence};

use super::PATIENCE;
use super::engine::PAGE;
use super::rules::{is_empty, options};

fn ask(cache: &PrefixCache, salt: Option<&str>, tokens: &[u64]) -> Sequence {
    let mut ask = Ask::new(tokens);
    if let Some(salt) = salt {
        ask = ask.cache_salt(salt);
    }
    cache.ask(&ask).unwrap().begin_within(PATIENCE).unwrap()
}

fn places(pages: usize) -> impl Iterator<Item = (u32, u32, usize)> {
    (0..pages * PAGE).flat_map(|at| [(0, 0, at), (0, 1, at), (1, 0, at), (1, 1, at)])
}

#[test]
fn no_row_of_another_tenant_is_read_before_it_is_written() {
    const PAGES: usize = 4;
    let cache = options(PAGES as u32, 20).over(None).unwrap();
    let tokens = |first: u64| (first..first + (PAGES * PAGE) as u64).collect::<Vec<u64>>();
    for (turn, salt) in [Some("a"), Some("b"), None, Some("a")]
        .into_iter()
        .enumerate()
    {
        let tokens = tokens(turn as u64);
        let mut sequence = ask(&cache, salt, &tokens);
        assert_eq!(sequence.cached().tokens(), 0);
        for (part, layer, at) in places(PAGES) {
            let row = sequence.row(part, layer, at).unwrap();
            assert!(row.iter().all(|byte| *byte == 0), "{salt:?} reads {row:?}");
            sequence.row_mut(part, layer, at).unwrap().fill(0x77);
        }
        sequence.computed(tokens.len()).unwrap();
        match turn {
            1 => drop(sequence),
            _ => assert_eq!(sequence.keep().unwrap(), PAGES * PAGE),
        }
    }
    // Pages that a load has filled.
    assert!(cache.settle(std::time::Instant::now() + PATIENCE).unwrap());
    cache.evict(PAGES).unwrap();
    let mut again = tokens(0);
    again.truncate(2 * PAGE + 1);
    let loaded = ask(&cache, Some("a"), &again);
    assert_eq!(loaded.cached().l2, 2 * PAGE);
    drop(loaded);
    let other = ask(&cache, Some("b"), &tokens(9));
    for (part, layer, at) in places(PAGES) {
        let row = other.row(part, layer, at).unwrap();
        assert!(row.iter().all(|byte| *byte == 0), "{at} {row:?}");
    }
    drop(other);
    is_empty(&cache);
}
