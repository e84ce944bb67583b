//! Several remotes beneath one store, in order: the nearest first.
//!
//! A lookup asks each level for the pages that those before it do not bring. Puts are reported to
//! all. Pages that a level brings are stored like others, and so they reach the levels before it by
//! their own admission.

use std::fmt;
use std::sync::Arc;

use larder_base::runtime::Instant;
use larder_core::grants::Ask;
use larder_format::{Fingerprint, Namespace, PageKey};
use larder_store::beneath::{Beneath, BeneathReport};

use super::Agent;

/// The remotes of an owner, in the order in which a page is looked for.
pub struct Levels(pub Vec<Arc<Agent>>);

impl fmt::Debug for Levels {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl Beneath for Levels {
    fn encrypts(&self) -> bool {
        self.0.iter().all(|level| level.encrypts())
    }

    fn began(&self) {
        self.0.iter().for_each(|level| level.began());
    }

    fn ended(&self) {
        self.0.iter().for_each(|level| level.ended());
    }

    fn opened(&self, namespace: &Namespace) {
        self.0.iter().for_each(|level| level.opened(namespace));
    }

    fn asked(&self, namespace: Fingerprint, pages: &[Ask]) {
        self.0
            .iter()
            .for_each(|level| level.asked(namespace, pages));
    }

    fn used(&self, namespace: Fingerprint, keys: &[PageKey]) {
        self.0.iter().for_each(|level| level.used(namespace, keys));
    }

    fn missed(&self, namespace: Fingerprint, keys: &[PageKey], found: usize) -> usize {
        let mut reached = found;
        loop {
            let before = reached;
            for level in &self.0 {
                if reached < keys.len() {
                    reached += level.missed(namespace, keys, reached);
                }
            }
            // A level may have runs behind those of the next one.
            if reached == before || reached >= keys.len() {
                return reached - found;
            }
        }
    }

    /// One patience is for all levels.
    fn wait(&self, namespace: Fingerprint, keys: &[PageKey], until: Instant) {
        let patience = self.0.iter().map(|level| level.options.patience).max();
        let until = until.min(Instant::now() + patience.unwrap_or_default());
        let wait = |level: &Arc<Agent>| level.wait(namespace, keys, until);
        self.0.iter().for_each(wait);
    }

    fn use_it(&self, is_used: bool) {
        self.0.iter().for_each(|level| level.use_it(is_used));
    }

    /// Counters are sums, sentences and names are joined.
    fn report(&self) -> BeneathReport {
        let levels: Vec<BeneathReport> = self.0.iter().map(|level| level.report()).collect();
        if let [level] = levels.as_slice() {
            return level.clone();
        }
        let joined = |texts: Vec<String>| texts.join(", ");
        let mut report = BeneathReport {
            place: joined(levels.iter().map(|level| level.place.clone()).collect()),
            state: joined(
                levels
                    .iter()
                    .map(|level| format!("{}: {}", level.place, level.state))
                    .collect(),
            ),
            works: levels.iter().any(|level| level.works),
            ..BeneathReport::default()
        };
        for (name, count) in levels.iter().flat_map(|level| &level.counts) {
            *report.counts.entry(name.clone()).or_default() += count;
        }
        report
    }
}
