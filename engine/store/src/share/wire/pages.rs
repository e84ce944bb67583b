//! Pages inside messages.

use std::num::NonZeroU16;

use larder_core::grants::SegmentMap;
use larder_core::index::Place;
use larder_format::{Proof, Seal};
use serde::{Deserialize, Serialize};

use crate::catalog::Pinned;
use crate::staging::Slot;

/// A [`Proof`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PageProof {
    pub checksum: u64,
    /// Slot, salt and tag of an encrypted page.
    pub seal: Option<(NonZeroU16, [u8; 12], [u8; 16])>,
}

impl From<Proof> for PageProof {
    fn from(Proof { checksum, seal }: Proof) -> PageProof {
        let seal = seal.map(|Seal { slot, salt, tag }| (slot, salt, tag));
        PageProof { checksum, seal }
    }
}

impl From<PageProof> for Proof {
    fn from(PageProof { checksum, seal }: PageProof) -> Proof {
        let seal = seal.map(|(slot, salt, tag)| Seal { slot, salt, tag });
        Proof { checksum, seal }
    }
}

/// A page that may be read.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct PinnedPage {
    pub place: Place,
    pub proof: PageProof,
    pub unproven: bool,
}

impl From<Pinned> for PinnedPage {
    fn from(pinned: Pinned) -> PinnedPage {
        PinnedPage {
            place: pinned.extent.place,
            proof: pinned.proof.into(),
            unproven: pinned.unproven,
        }
    }
}

impl PinnedPage {
    /// The page, with its extent from `map`.
    pub(crate) fn on(self, map: &SegmentMap) -> Pinned {
        Pinned {
            extent: map.extent(self.place),
            proof: self.proof.into(),
            unproven: self.unproven,
        }
    }
}

/// A page that may be read, and its slot where it is shared.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct StagedPage {
    pub page: PinnedPage,
    pub slot: Option<Slot>,
}
