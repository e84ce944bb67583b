//! The order in which runs are pulled into a store that may be too small for all.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

use larder_engine::format::{Fingerprint, KeyPrefix};
use larder_remote::run::Outline;
use larder_remote::{Listed, RunId, RunNames, Trust};

/// A page of a namespace, which has its name in the remote.
type PageId = (Fingerprint, KeyPrefix);

/// The runs, chain by chain, each from its head on, the newest chain first. Runs without all those
/// before them come last: no lookup finds their pages. `is_stored` says it of a page of the store.
pub fn chains(
    runs: &[(Listed, Option<Outline>)],
    trust: &Trust,
    is_stored: impl Fn(PageId) -> bool,
) -> Vec<Listed> {
    let by_name: HashMap<RunId, usize> = (0..)
        .zip(runs)
        .map(|(at, (object, _))| (object.run.id(), at))
        .collect();
    // The run that ends in a page of the namespace of this run.
    let ends_in = |at: usize, page: KeyPrefix| {
        let outline = runs[at].1.as_ref()?;
        let names = RunNames::of(trust, outline.namespace.fingerprint());
        let mut ids = names.ids(page).into_iter();
        ids.find_map(|id| by_name.get(&id).copied())
    };
    // The first page of a run: the page before it, if it is no head. `None` if it is not known.
    let before = |at: usize| {
        let first = runs[at].1.as_ref()?.pages.first()?;
        Some(first.parent)
    };
    let parents = (0..runs.len()).filter_map(|at| ends_in(at, before(at)??));
    let parents: HashSet<usize> = parents.collect();
    let mut tails: Vec<usize> = (0..runs.len()).filter(|at| !parents.contains(at)).collect();
    tails.sort_by_key(|&at| (Reverse(runs[at].0.created_unix_s), runs[at].0.run));
    // Runs with a place, and whether those before them are there.
    let mut placed: HashMap<usize, bool> = HashMap::new();
    let (mut ordered, mut rest) = (Vec::new(), Vec::new());
    for tail in tails {
        let (mut chain, mut at, mut seen) = (Vec::new(), tail, HashSet::new());
        let is_whole = loop {
            if let Some(is_whole) = placed.get(&at) {
                break *is_whole;
            }
            // A writer without the key may have made a circle.
            if !seen.insert(at) {
                break false;
            }
            chain.push(at);
            match before(at) {
                None => break false,
                Some(None) => break true,
                Some(Some(parent)) => match ends_in(at, parent) {
                    Some(next) => at = next,
                    None => break is_stored((runs[at].0.run.namespace, parent)),
                },
            }
        };
        placed.extend(chain.iter().map(|at| (*at, is_whole)));
        let place = if is_whole { &mut ordered } else { &mut rest };
        place.extend(chain.into_iter().rev());
    }
    // Circles have no tail.
    rest.extend((0..runs.len()).filter(|at| !placed.contains_key(at)));
    let in_order = ordered.into_iter().chain(rest);
    in_order.map(|at| runs[at].0).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use larder_engine::format::{ArchivedPage, Namespace, PageKey, PageShape};
    use larder_remote::RunName;

    use super::*;

    fn namespace() -> Namespace {
        let shape = PageShape::new(&[300]).unwrap();
        Namespace::builder("model", "", 16, shape).build().unwrap()
    }

    fn key(number: u8) -> PageKey {
        PageKey::from_bytes([number; 32])
    }

    /// A run of one page behind another one, made at this time.
    fn run(last: u8, parent: Option<u8>, created_unix_s: u64) -> (Listed, Option<Outline>) {
        let listed = Listed {
            run: RunName {
                namespace: namespace().fingerprint(),
                last: key(last),
            },
            bytes: 1,
            created_unix_s,
        };
        let page = ArchivedPage {
            key: key(last),
            parent: parent.map(|parent| key(parent).prefix()),
            depth: u32::from(parent.is_some()),
            checksum: 0,
            saved: 0,
            seal: None,
        };
        let outline = Outline {
            namespace: namespace(),
            pages: vec![page],
            is_whole: true,
        };
        (listed, Some(outline))
    }

    fn order(runs: &[(Listed, Option<Outline>)], stored: &[u8]) -> Vec<u8> {
        let is_stored = |(_, page)| stored.iter().any(|number| key(*number).prefix() == page);
        let ordered = chains(runs, &Trust::Unsigned, is_stored);
        let number = |object: &Listed| object.run.last.as_bytes()[0];
        ordered.iter().map(number).collect()
    }

    #[test]
    fn chains_come_whole_and_from_their_heads_on() {
        let old = [run(3, Some(2), 3), run(1, None, 1), run(2, Some(1), 2)];
        let new = [run(12, Some(11), 5), run(11, None, 4)];
        // A branch of the old chain, and a run whose head is gone.
        let others = [run(4, Some(2), 4), run(22, Some(21), 9)];
        let runs: Vec<_> = old.into_iter().chain(new).chain(others).collect();
        assert_eq!(order(&runs, &[]), [11, 12, 1, 2, 4, 3, 22]);
    }

    #[test]
    fn a_chain_goes_on_where_the_store_ends() {
        let runs = || vec![run(22, Some(21), 1), run(1, None, 0)];
        assert_eq!(order(&runs(), &[21]), [22, 1]);
        assert_eq!(order(&runs(), &[]), [1, 22]);
    }

    #[test]
    fn runs_that_lie_about_their_place_come_last() {
        let mut runs = vec![run(5, Some(6), 9), run(6, Some(5), 9), run(7, Some(6), 9)];
        runs.push((run(8, None, 9).0, None));
        runs.push(run(1, None, 0));
        let mut ordered = order(&runs, &[]);
        assert_eq!(ordered.remove(0), 1);
        ordered.sort_unstable();
        assert_eq!(ordered, [5, 6, 7, 8]);
    }
}
