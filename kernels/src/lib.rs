//! The device that holds L1, and the copies between it and the host memory of L2.
//!
//! ```text
//!            L2 (host)                                    L1 (device)
//!   +-------------------------+   load: a ticket     +----------------------+
//!   | layer_first, page_first |   for every layer    | layer_first          |
//!   | or page_first_direct    | -------------------> | MHA: K and V         |
//!   |                         | <------------------- | MLA: one part        |
//!   +-------------------------+   store: one ticket  +----------------------+
//! ```
//!
//! A [`Device`] takes a [`Transfer`] (pairs of pages) together with the [`Ticket`] that it has to come after, and gives it back
//! behind the tickets of its layers ([`Gated`]): what a copy in flight touches cannot be had without them. Pages that a failed
//! copy touched come back too, once nothing touches them any more. L1 is memory that the device allocates, or an engine's own
//! tensors ([`Tensors`]).
//!
//! This crate knows nothing of trees, tokens or stores. Which page belongs to whom is decided above; the one promise
//! that it asks for, in [`Transfer::new`], is that pages in flight are left alone.
//!
//! | module | owns |
//! |---|---|
//! | `shape` | what a page consists of |
//! | `layout` | where rows lie: affine strides |
//! | `pool` | the two pools and their memory |
//! | `tensors` | an engine's own memory as an L1 pool |
//! | `transfer` | pairs of pages, checked, and the copies that come of them |
//! | `ticket` | when a copy is done, and what may not be touched before |
//! | `device` | the [`Device`] trait |
//! | [`host`] | the device where there is none |
//! | [`kernel`] | what the copy kernel of `cu/kv_copy.cu` is launched with |
//! | [`cuda`] | the device where there is one |
//! | `error` | what can go wrong |

// Offsets are 64 bits wide, and so is every address.
#[cfg(not(target_pointer_width = "64"))]
compile_error!("pools are larger than a 32-bit address space");

pub mod cuda;
mod device;
mod error;
pub mod host;
pub mod kernel;
mod layout;
mod pool;
mod shape;
mod tensors;
mod ticket;
mod transfer;

pub use cuda::{CudaDevice, CudaOptions};
pub use device::{Device, ForeignStream, Refused};
pub use error::DeviceError;
pub use host::HostDevice;
pub use layout::{Layout, NoSuchLayout, Strides, pool_bytes};
pub use pool::{ChunkAt, HostMemory, L1Pool, L2Pool, Tier};
pub use shape::{Attention, KvShape, PAGE_BYTES_LIMIT, ShapeError};
pub use tensors::{Place, Tensor, Tensors, TensorsError};
pub use ticket::{Gated, LayerTickets, Promise, Ticket};
pub use transfer::{Copy2d, Direction, PagePair, Rows, Transfer};
