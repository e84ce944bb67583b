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
//! A [`Device`] takes a [`Transfer`] (pairs of pages) and the [`Ticket`] of its prerequisite. It
//! returns the transfer behind one ticket per layer ([`Gated`]), so the pages of a copy in flight
//! cannot be accessed without the tickets. After a failed copy the pages also come back, once no
//! operation touches them. L1 is memory allocated by the device, or an engine's own tensors
//! ([`Tensors`]).
//!
//! This crate does not depend on trees, tokens or stores. The layers above decide the owner of each
//! page. The only guarantee required from them is stated in [`Transfer::new`]: no other access
//! touches pages in flight.
//!
//! A module imports only the modules below it.
//!
//! | module | owns |
//! |---|---|
//! | `cuda` | the device of machines with a GPU, with the feature `cuda` |
//! | [`host`] | the device of machines without a GPU |
//! | `device` | the [`Device`] trait |
//! | [`kernel`] | the launch argument of the copy kernel in `cu/kv_copy.cu` |
//! | `transfer` | checked pairs of pages, and the copies derived from them |
//! | `ticket` | completion of copies, and access to their pages |
//! | `pool` | the two pools and their memory |
//! | `error` | the errors of a device |
//! | `layout` | the tiers, and the location of rows in their pools: affine strides |
//! | `tensors` | an engine's own memory as an L1 pool |
//! | `shape` | the components of a page |

#![cfg_attr(
    not(feature = "cuda"),
    allow(dead_code, reason = "the CUDA device uses the rest")
)]

// Offsets and addresses are 64 bits wide.
#[cfg(not(target_pointer_width = "64"))]
compile_error!("pools are larger than a 32-bit address space");

#[cfg(feature = "cuda")]
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

#[cfg(feature = "cuda")]
pub use cuda::{CudaDevice, CudaOptions};
pub use device::{Device, ForeignStream, Refused};
pub use error::DeviceError;
pub use host::HostDevice;
pub use layout::{Layout, NoSuchLayout, Strides, Tier, pool_bytes};
pub use pool::{ChunkAt, HostMemory, L1Pool, L2Pool};
pub use shape::{Attention, KvCounts, KvShape, PAGE_BYTES_LIMIT, ShapeError};
pub use tensors::{Place, Tensor, Tensors, TensorsError};
pub use ticket::{Gated, LayerTickets, Promise, Ticket};
pub use transfer::{Copy2d, Direction, PagePair, RowCopy, Rows, Transfer};
