//! The curves, as an owner reports them.

use serde::{Deserialize, Serialize};

use super::FACTORS;

/// The curves of a store.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct CurveReport {
    /// The present size: the most bytes that pages may take.
    pub size_bytes: u64,
    /// The time that the counters cover.
    pub seconds: f64,
    /// The part of all pages that is sampled.
    pub sampled: f64,
    /// One for each namespace that was looked up, those with the most lookups first.
    pub spaces: Vec<SpaceCurve>,
}

/// The curve of a namespace.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SpaceCurve {
    /// Its fingerprint; `other` for all further namespaces.
    pub fingerprint: String,
    /// Pages that lookups asked for.
    pub pages_requested: u64,
    /// For each of [`FACTORS`] the part of these pages that an LRU store would have.
    pub hit_rates: Vec<f64>,
    /// The same in the order in which the store evicts, adjusted to the hit rate of the store.
    /// Empty if that is LRU.
    pub own_hit_rates: Vec<f64>,
    /// What the miniature of the present size had, before the adjustment. `None` if the order is
    /// LRU.
    pub miniature_hit_rate: Option<f64>,
    /// The bytes of the pages that it would have in that order.
    pub read_bytes: Vec<u64>,
    /// Too few pages were looked up for a good estimate.
    pub is_rough: bool,
}

impl CurveReport {
    /// All namespaces together.
    #[must_use]
    pub fn total(&self) -> SpaceCurve {
        let asked: u64 = self.spaces.iter().map(|of| of.pages_requested).sum();
        // An owner of another release may have other sizes.
        let sizes = |rates: fn(&SpaceCurve) -> &[f64]| -> Vec<f64> {
            let hits = |at: usize| {
                let of = self.spaces.iter();
                let hits = of.filter_map(|of| Some(rates(of).get(at)? * of.pages_requested as f64));
                hits.sum::<f64>() / asked.max(1) as f64
            };
            (0..FACTORS.len()).map(hits).collect()
        };
        let has_own = self.spaces.iter().any(|of| !of.own_hit_rates.is_empty());
        let bytes = |at: usize| {
            let of = self.spaces.iter();
            of.filter_map(|of| of.read_bytes.get(at)).sum()
        };
        SpaceCurve {
            fingerprint: String::new(),
            pages_requested: asked,
            hit_rates: sizes(|of| &of.hit_rates),
            own_hit_rates: match has_own {
                true => sizes(|of| &of.own_hit_rates),
                false => Vec::new(),
            },
            read_bytes: (0..FACTORS.len()).map(bytes).collect(),
            miniature_hit_rate: has_own.then(|| {
                let of = self.spaces.iter();
                let hits =
                    of.filter_map(|of| Some(of.miniature_hit_rate? * of.pages_requested as f64));
                hits.sum::<f64>() / asked.max(1) as f64
            }),
            is_rough: false,
        }
    }
}

impl SpaceCurve {
    /// The hit rates in the order in which the store evicts.
    #[must_use]
    pub fn as_evicted(&self) -> &[f64] {
        match self.own_hit_rates.is_empty() {
            true => &self.hit_rates,
            false => &self.own_hit_rates,
        }
    }
}
