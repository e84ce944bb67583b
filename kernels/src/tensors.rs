//! An engine's own memory as an L1 pool: one tensor for each layer of each part.
//!
//! Invariants after [`Tensors::bases`] succeeds: the number of tensors is the number of layers in
//! all parts. Each tensor has exactly the size of the pages of its layer. No tensor is at address 0
//! or exceeds the address space, and no two tensors overlap.

use std::any::Any;
use std::fmt;

use crate::shape::KvShape;

/// A byte range, by address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Address of the first byte, as seen by the device.
    pub address: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// The memory of a future L1 pool, with the owner that keeps it alive.
pub struct Tensors {
    tensors: Vec<Tensor>,
    _owner: Box<dyn Any + Send + Sync>,
}

impl Tensors {
    /// K of all layers, then V of all layers; or the latent rows of all layers. Each tensor is
    /// `[slots, ...]` without gaps: page `p` starts at slot `p * page_tokens`.
    ///
    /// # Safety
    /// The bytes are initialised, readable and writable by the device while `owner` lives. From now
    /// on, accesses to a page follow the rules of [`Transfer::new`](crate::Transfer::new).
    pub unsafe fn new(tensors: Vec<Tensor>, owner: Box<dyn Any + Send + Sync>) -> Tensors {
        Tensors {
            tensors,
            _owner: owner,
        }
    }

    /// Each tensor, with its part and layer.
    pub(crate) fn each(&self, shape: &KvShape) -> impl Iterator<Item = (Place, Tensor)> + '_ {
        let layers = shape.layers();
        (0..).zip(&self.tensors).map(move |(index, tensor)| {
            let (part, layer) = (index / layers, index % layers);
            (Place { part, layer }, *tensor)
        })
    }

    /// The address of each tensor, if they form a pool of `pages` pages.
    ///
    /// # Errors
    /// [`TensorsError`].
    pub(crate) fn bases(&self, shape: &KvShape, pages: u32) -> Result<Box<[u64]>, TensorsError> {
        let expected = u64::from(shape.parts()) * u64::from(shape.layers());
        if self.tensors.len() as u64 != expected {
            return Err(TensorsError::Count {
                found: self.tensors.len(),
                expected,
            });
        }
        let needed = u64::from(shape.chunk_bytes()) * u64::from(pages);
        for (place, tensor) in self.each(shape) {
            if tensor.bytes != needed {
                return Err(TensorsError::Size {
                    place,
                    found: tensor.bytes,
                    needed,
                    pages,
                });
            }
            if tensor.address == 0 || tensor.address.checked_add(tensor.bytes).is_none() {
                return Err(TensorsError::Nowhere { place });
            }
        }
        self.apart(shape)?;
        Ok(self.tensors.iter().map(|tensor| tensor.address).collect())
    }

    fn apart(&self, shape: &KvShape) -> Result<(), TensorsError> {
        let mut sorted: Vec<_> = self.each(shape).collect();
        sorted.sort_unstable_by_key(|(_, tensor)| tensor.address);
        let overlap = sorted
            .iter()
            .zip(sorted.iter().skip(1))
            .find(|((_, one), (_, next))| one.address + one.bytes > next.address);
        match overlap {
            Some(((one, _), (other, _))) => Err(TensorsError::Overlap {
                one: *one,
                other: *other,
            }),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Tensors {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tensors")
            .field("tensors", &self.tensors)
            .finish_non_exhaustive()
    }
}

/// Identifies a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// 0 is K or the latent, 1 is V.
    pub part: u32,
    /// Layer number.
    pub layer: u32,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "layer {} of part {}", self.layer, self.part)
    }
}

/// Why tensors are not valid as an L1 pool.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TensorsError {
    /// The number of tensors is not the number of layers in all parts.
    #[error("{found} tensors, but the KV shape has {expected} layers in all its parts")]
    Count {
        /// Number of tensors.
        found: usize,
        /// Layers of all parts.
        expected: u64,
    },
    /// A tensor does not have the size of the pages of its layer.
    #[error("the tensor of {place} has {found} bytes, {pages} pages need {needed}")]
    Size {
        /// The tensor.
        place: Place,
        /// Its size in bytes.
        found: u64,
        /// Required bytes.
        needed: u64,
        /// Pages of the pool.
        pages: u32,
    },
    /// The address is impossible.
    #[error("the tensor of {place} is not in memory: it was freed, or never allocated")]
    Nowhere {
        /// The tensor.
        place: Place,
    },
    /// Two tensors overlap.
    #[error("the tensors of {one} and of {other} overlap")]
    Overlap {
        /// One tensor.
        one: Place,
        /// The other tensor.
        other: Place,
    },
    /// The device cannot copy to this memory.
    #[error("the tensor of {place} is not in this device's memory: {why}")]
    Elsewhere {
        /// The tensor.
        place: Place,
        /// The location of the memory, or the driver's error.
        why: String,
    },
}
