//! The pools of the components of a hybrid model.

use std::sync::Arc;

use larder_kernels::{Gated, L1Pool, L2Pool, PagePair, Transfer};

use super::l3s::L3s;
use crate::core::OpId;
use crate::l3::L3;

/// The pools of one section of a component, under common page numbers.
#[derive(Clone, Debug)]
pub struct Section {
    /// The device pool.
    pub l1: L1Pool,
    /// The host pool.
    pub l2: L2Pool,
}

/// The pools of a component.
#[derive(Clone)]
pub struct ComponentPools {
    /// One for each section.
    pub sections: Vec<Section>,
    /// The tier below L2, with the namespace of the component: exactly if the cache has an L3.
    pub l3: Option<Arc<dyn L3>>,
}

/// The components of a hybrid model besides its pages of full attention. Default: none.
#[derive(Clone, Default)]
pub struct Components {
    /// Components under the page numbers of the model.
    pub followers: Vec<ComponentPools>,
    /// Windows and states, one for each of [`Config::tails`](crate::Config::tails).
    pub tails: Vec<ComponentPools>,
}

impl Components {
    /// All of them.
    pub(super) fn all(&self) -> impl Iterator<Item = &ComponentPools> {
        self.followers.iter().chain(&self.tails)
    }

    /// The L3 of each, and that of the model.
    pub(super) fn l3s(&self, of_model: Arc<dyn L3>) -> L3s {
        let l3s = |of: &[ComponentPools]| -> Vec<Arc<dyn L3>> {
            of.iter().filter_map(|of| of.l3.clone()).collect()
        };
        let mut main = l3s(&self.followers);
        main.insert(0, of_model);
        L3s {
            main,
            tails: l3s(&self.tails),
        }
    }

    /// The sections under the page numbers of the model, its own first; and those of each window
    /// and state.
    pub(super) fn sections(self, of_model: Section) -> (Vec<Vec<Section>>, Vec<Vec<Section>>) {
        let of = |all: Vec<ComponentPools>| all.into_iter().map(|of| of.sections);
        let main = std::iter::once(vec![of_model]).chain(of(self.followers));
        (main.collect(), of(self.tails).collect())
    }
}

/// The copies of one order, or of several that were merged.
pub(super) struct Copy {
    pub(super) ids: Vec<OpId>,
    /// The prerequisite of the copies.
    pub(super) after: larder_kernels::Ticket,
    /// Those in flight.
    pub(super) transfers: Vec<Gated<Transfer>>,
    /// None has failed.
    pub(super) is_good: bool,
}

/// Pairs of pages, by the section to which they belong.
pub(super) type Plan = Vec<(Section, Vec<PagePair>)>;

impl Copy {
    /// Takes out the transfers that have ended. Returns whether none is left.
    pub(super) fn is_over(&mut self) -> bool {
        for transfer in std::mem::take(&mut self.transfers) {
            match transfer.open() {
                Err(transfer) => self.transfers.push(transfer),
                Ok((_, outcome)) => {
                    if let Err(error) = outcome {
                        tracing::warn!("a copy between L1 and L2 failed: {error}");
                        self.is_good = false;
                    }
                }
            }
        }
        self.transfers.is_empty()
    }
}
