//! Memory of an engine's own, as an L1 pool: a tensor for each layer of each part.
//!
//! Invariants of what [`Tensors::bases`] lets through: there are as many tensors as the shape has layers and parts, each is exactly the
//! pages of its layer, none is at address 0 or passes the end of the address space, and no two share a byte.

use std::any::Any;
use std::fmt;

use crate::error::DeviceError;
use crate::shape::KvShape;

/// A run of bytes, by address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Tensor {
    /// Of its first byte, as the device knows it.
    pub address: u64,
    /// How many.
    pub bytes: u64,
}

/// The memory that an L1 pool is to lie in, with whatever keeps it alive.
pub struct Tensors {
    tensors: Vec<Tensor>,
    _owner: Box<dyn Any + Send + Sync>,
}

impl Tensors {
    /// K of all layers, then V of all layers; or the latent rows of all layers. Each is `[slots, ...]` without gaps: page `p` is the
    /// slots from `p * page_tokens` on.
    ///
    /// # Safety
    /// The bytes are initialised, readable and writable by the device for as long as `owner` lives, and from here on nobody touches
    /// those of a page except in its turn, as [`Transfer::new`](crate::Transfer::new) says.
    pub unsafe fn new(tensors: Vec<Tensor>, owner: Box<dyn Any + Send + Sync>) -> Tensors {
        Tensors {
            tensors,
            _owner: owner,
        }
    }

    /// Each tensor, with the part and the layer that it is.
    pub(crate) fn each(&self, shape: &KvShape) -> impl Iterator<Item = (Place, Tensor)> + '_ {
        let layers = shape.layers();
        (0..).zip(&self.tensors).map(move |(index, tensor)| {
            let (part, layer) = (index / layers, index % layers);
            (Place { part, layer }, *tensor)
        })
    }

    /// The address of each, if they make a pool of that many pages.
    ///
    /// # Errors
    /// [`TensorsError`].
    pub(crate) fn bases(&self, shape: &KvShape, pages: u32) -> Result<Box<[u64]>, DeviceError> {
        let expected = u64::from(shape.parts()) * u64::from(shape.layers());
        if self.tensors.len() as u64 != expected {
            return Err(TensorsError::Count {
                found: self.tensors.len(),
                expected,
            }
            .into());
        }
        let needed = u64::from(shape.chunk_bytes()) * u64::from(pages);
        for (place, tensor) in self.each(shape) {
            if tensor.bytes != needed {
                return Err(TensorsError::Size {
                    place,
                    found: tensor.bytes,
                    needed,
                    pages,
                }
                .into());
            }
            if tensor.address == 0 || tensor.address.checked_add(tensor.bytes).is_none() {
                return Err(TensorsError::Nowhere { place }.into());
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

/// Which tensor.
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

/// Why tensors make no L1 pool.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TensorsError {
    /// Not one for each layer of each part.
    #[error("{found} tensors, but the KV shape has {expected} layers in all its parts")]
    Count {
        /// Tensors.
        found: usize,
        /// Layers of all parts.
        expected: u64,
    },
    /// A tensor that is not the pages of its layer.
    #[error("the tensor of {place} has {found} bytes, {pages} pages need {needed}")]
    Size {
        /// Which one.
        place: Place,
        /// Its bytes.
        found: u64,
        /// Bytes that there should be.
        needed: u64,
        /// Pages of the pool.
        pages: u32,
    },
    /// An address at which nothing can be.
    #[error("the tensor of {place} is not in memory: it was freed, or never allocated")]
    Nowhere {
        /// Which one.
        place: Place,
    },
    /// Two that share bytes.
    #[error("the tensors of {one} and of {other} overlap")]
    Overlap {
        /// One.
        one: Place,
        /// The other.
        other: Place,
    },
    /// Memory that the device does not copy to.
    #[error("the tensor of {place} is not in this device's memory: {why}")]
    Elsewhere {
        /// Which one.
        place: Place,
        /// Where it is, or what the driver said.
        why: String,
    },
}
