//! Layers and heads that ranks hold, and the comparison of namespaces.
//!
//! ```text
//!   8 heads            | 0 1 | 2 3 | 4 5 | 6 7 |
//!   prefill, 4 ranks   |  0  |  1  |  2  |  3  |
//!   decode, 2 ranks    |     0     |     1     |    rank 1 takes from ranks 2 and 3
//! ```
//!
//! Invariant: what a receiver takes from all its senders together is its own part, each layer of
//! each head once. Ranks that hold copies of the same part serve the receivers in turn.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use larder_format::Namespace;
use larder_kernels::{KvCounts, KvShape, Layout};
use serde::{Deserialize, Serialize};

use super::{Refusal, TransferError};
use crate::model::Model;
use crate::planted::planted;

/// Layers and heads of a model.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Held {
    /// Its layers.
    pub layers: Range<u32>,
    /// Its KV heads.
    pub heads: Range<u32>,
}

impl Held {
    /// The layers and heads that both have, if there are any.
    #[must_use]
    pub fn overlap(&self, other: &Held) -> Option<Held> {
        let both = |a: &Range<u32>, b: &Range<u32>| a.start.max(b.start)..a.end.min(b.end);
        let held = Held {
            layers: both(&self.layers, &other.layers),
            heads: both(&self.heads, &other.heads),
        };
        (!held.is_empty()).then_some(held)
    }

    fn is_empty(&self) -> bool {
        self.layers.is_empty() || self.heads.is_empty()
    }

    /// Whether all of `other` is in it.
    pub(super) fn has(&self, other: &Held) -> bool {
        self.overlap(other).as_ref() == Some(other)
    }

    fn size(&self) -> u64 {
        self.layers.len() as u64 * self.heads.len() as u64
    }
}

/// A rank of an engine, and its part of the model.
#[derive(Clone, Debug)]
pub(super) struct Identity {
    /// Of the whole model, equal on all ranks of both engines.
    pub(super) namespace: Namespace,
    /// The pages of this rank.
    pub(super) shape: KvShape,
    pub(super) held: Held,
    pub(super) rank: u32,
    pub(super) ranks: u32,
}

impl Identity {
    /// # Errors
    /// The model has components, a part of the positions of a page, or names that are not valid; or
    /// there is no such rank.
    pub(super) fn new(model: &Model, rank: u32, ranks: u32) -> Result<Identity, TransferError> {
        if rank >= ranks {
            let what = format!("rank {rank} of {ranks} does not exist");
            return Err(Refusal::Ranks(what).into());
        }
        if let Some(component) = model.components().first() {
            return Err(TransferError::Model(format!(
                "it has the component {:?}, and only pages of full attention are transferred",
                component.name
            )));
        }
        if model.shape().page_tokens() != model.page_tokens() {
            let what = "the rank holds a part of the positions of a page";
            return Err(TransferError::Model(what.to_owned()));
        }
        let (layers, heads) = model.held();
        Ok(Identity {
            namespace: model.whole().namespace(Layout::PageHead)?,
            shape: model.shape(),
            held: Held { layers, heads },
            rank,
            ranks,
        })
    }

    /// # Errors
    /// The namespace is not this one: the error names the fields that differ.
    pub(super) fn agree(&self, encoded: &[u8]) -> Result<(), TransferError> {
        if self.namespace.encode() == encoded || planted!(NamespaceNotCompared) {
            return Ok(());
        }
        let other = Namespace::decode(encoded);
        let why = other.map_or_else(
            |error| format!("the other namespace is not valid: {error}"),
            |other| differences(&self.namespace, &other),
        );
        Err(Refusal::Namespace(why).into())
    }
}

/// The fields of two namespaces that differ, by name.
fn differences(own: &Namespace, other: &Namespace) -> String {
    let (own, other) = (fields(own), fields(other));
    let names = own
        .keys()
        .chain(other.keys().filter(|name| !own.contains_key(*name)));
    let text = |fields: &BTreeMap<String, String>, name: &String| {
        let value = fields.get(name);
        value.map_or_else(|| "absent".to_owned(), |value| format!("{value:?}"))
    };
    let differing = names.filter(|name| own.get(*name) != other.get(*name));
    let each = differing.map(|name| {
        let (own, other) = (text(&own, name), text(&other, name));
        format!("{name} is {own} on one side and {other} on the other")
    });
    each.collect::<Vec<_>>().join(", ")
}

fn fields(namespace: &Namespace) -> BTreeMap<String, String> {
    let fields = namespace.fields();
    let named = [
        ("model", fields.model.clone()),
        ("weights", fields.weights.clone()),
        ("dtype", fields.dtype.clone()),
        ("layout", fields.layout.clone()),
        ("page_tokens", fields.page_tokens.to_string()),
        ("page_bytes", fields.shape.page_bytes().to_string()),
        ("pool", fields.pool.clone()),
    ];
    let named = named.map(|(name, value)| (name.to_owned(), value));
    named.into_iter().chain(fields.extra.clone()).collect()
}

/// A prefill rank in the bootstrap place.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    pub(super) rank: u32,
    pub(super) ranks: u32,
    /// Where its transport is reached, in the form of the transport.
    pub(super) address: String,
    pub(super) held: Held,
}

/// What a receiver takes from each of the senders.
///
/// # Errors
/// The senders together do not hold its part.
pub(super) fn taken_from(
    own: &Identity,
    senders: &[Entry],
) -> Result<Vec<Option<Held>>, TransferError> {
    let mut copies: HashMap<&Held, Vec<usize>> = HashMap::new();
    for (at, sender) in senders.iter().enumerate() {
        copies.entry(&sender.held).or_default().push(at);
    }
    let mut taken = vec![None; senders.len()];
    for (held, copies) in copies {
        let at = copies[own.rank as usize % copies.len()];
        taken[at] = own.held.overlap(held);
    }
    let parts = || taken.iter().flatten();
    let is_apart = |(at, part): (usize, &Held)| {
        let mut others = parts().skip(at + 1);
        others.all(|other| part.overlap(other).is_none())
    };
    let all: u64 = parts().map(Held::size).sum();
    if all == own.held.size() && parts().enumerate().all(is_apart) {
        return Ok(taken);
    }
    let Held { layers, heads } = &own.held;
    let why = format!(
        "decode rank {} holds heads {heads:?} of layers {layers:?}, which the {} prefill ranks do \
         not have once each",
        own.rank,
        senders.len()
    );
    Err(Refusal::Ranks(why).into())
}

/// The head that is sent in place of a head.
pub(super) fn sent(head: u32, held: &Held) -> u32 {
    if planted!(HeadsShifted) && head + 1 < held.heads.end {
        head + 1
    } else {
        head
    }
}

/// The most bytes of a chunk of this model: one head of one part of a page.
pub(super) fn chunk_bytes_max(shape: &KvShape) -> usize {
    let KvCounts {
        layers,
        page_tokens,
        ..
    } = shape.counts();
    shape.head_bytes() as usize * layers as usize * page_tokens as usize
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn identity(ranks: u32, rank: u32, heads: u32) -> Identity {
        let shape = KvShape::mha(4, heads, 2, 2, 4).unwrap();
        let mut model = Model::new("m", "", "bf16", shape);
        // More ranks than heads: neighbours hold copies.
        let (each, copies) = ((heads / ranks).max(1), (ranks / heads).max(1));
        let first = rank / copies * each;
        model = model.heads(first..first + each).unwrap();
        Identity::new(&model, rank, ranks).unwrap()
    }

    fn senders(ranks: u32, heads: u32) -> Vec<Entry> {
        let entry = |rank| Entry {
            rank,
            ranks,
            address: String::new(),
            held: identity(ranks, rank, heads).held,
        };
        (0..ranks).map(entry).collect()
    }

    #[test]
    fn receivers_of_any_number_take_each_head_once() {
        for heads in [1, 2, 8] {
            for (prefill, decode) in [1, 2, 4, 8]
                .into_iter()
                .flat_map(|p| [(p, 1), (p, 2), (p, 8)])
            {
                let senders = senders(prefill, heads);
                for rank in 0..decode {
                    let own = identity(decode, rank, heads);
                    let taken = taken_from(&own, &senders).unwrap();
                    let all = taken.iter().flatten().flat_map(|held| held.heads.clone());
                    let mut all: Vec<u32> = all.collect();
                    all.sort_unstable();
                    assert_eq!(all, own.held.heads.clone().collect::<Vec<_>>());
                    let owned = |(held, of): (&Option<Held>, &Entry)| {
                        held.as_ref().is_none_or(|held| of.held.has(held))
                    };
                    assert!(taken.iter().zip(&senders).all(owned));
                }
            }
        }
    }

    #[test]
    fn stages_of_a_pipeline_serve_another_number_of_stages() {
        let shape = KvShape::mha(6, 2, 2, 2, 4).unwrap();
        let stage = |layers, rank, ranks| {
            let model = Model::new("m", "", "bf16", shape).layers(layers).unwrap();
            Identity::new(&model, rank, ranks).unwrap()
        };
        let entry = |rank: u32| Entry {
            rank,
            ranks: 3,
            address: String::new(),
            held: stage(rank * 2..rank * 2 + 2, rank, 3).held,
        };
        let senders: Vec<Entry> = (0..3).map(entry).collect();
        let taken = taken_from(&stage(3..6, 1, 2), &senders).unwrap();
        let layers: Vec<_> = taken
            .into_iter()
            .map(|of| of.map(|held| held.layers))
            .collect();
        assert_eq!(layers, [None, Some(3..4), Some(4..6)]);
    }

    #[test]
    fn senders_without_a_part_of_the_receiver_are_refused() {
        let mut missing = senders(4, 8);
        missing.remove(2);
        let refused = taken_from(&identity(2, 1, 8), &missing).unwrap_err();
        assert!(
            refused.to_string().contains("heads 4..8 of layers 0..4"),
            "{refused}"
        );
        assert!(taken_from(&identity(2, 0, 8), &missing).is_ok());
        let mut twice = senders(4, 8);
        twice[1].held.heads = 1..4;
        assert!(taken_from(&identity(2, 0, 8), &twice).is_err());
    }

    #[test]
    fn namespaces_that_differ_are_refused_by_name() {
        let model = |name, dtype| {
            let shape = KvShape::mha(4, 8, 2, 2, 4).unwrap();
            Model::new(name, "", dtype, shape)
        };
        let own = Identity::new(&model("a", "bf16"), 0, 1).unwrap();
        let part = model("a", "bf16").heads(2..4).unwrap();
        let other = Identity::new(&part, 0, 1).unwrap();
        assert_eq!(own.agree(other.namespace.encode()), Ok(()));
        let other = Identity::new(&model("b", "f16"), 0, 1).unwrap();
        let refused = own.agree(other.namespace.encode()).unwrap_err().to_string();
        for said in [
            "model is \"a\" on one side and \"b\"",
            "dtype is \"bf16\" on one side and",
        ] {
            assert!(refused.contains(said), "{refused}");
        }
    }
}
