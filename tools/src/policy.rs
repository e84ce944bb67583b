//! The policies of eviction by name, and the default of all processes that serve pages.

use std::str::FromStr;

use clap::ValueEnum;
use larder_core::policy::order::EvictionOrder;
use larder_engine::policy::{self, PolicyMaker};

/// Which pages go first when a store is full; see docs/retention.md.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Policy {
    /// The least recently used leaf goes first
    Lru,
    /// Learns which pages are used again; follows LRU while that has more hits
    #[default]
    Learned,
}

impl Policy {
    /// The engine's option.
    pub fn maker(self) -> Option<PolicyMaker<dyn EvictionOrder>> {
        (self == Policy::Learned).then(policy::learned)
    }

    /// Its name.
    pub fn word(self) -> &'static str {
        match self {
            Policy::Lru => "lru",
            Policy::Learned => "learned",
        }
    }
}

/// A word that names no policy.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a policy: use lru or learned")]
pub struct UnknownPolicy(String);

impl FromStr for Policy {
    type Err = UnknownPolicy;

    fn from_str(word: &str) -> Result<Self, UnknownPolicy> {
        let all = Policy::value_variants().iter();
        let named = all.copied().find(|policy| policy.word() == word);
        named.ok_or_else(|| UnknownPolicy(word.to_owned()))
    }
}
