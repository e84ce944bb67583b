//! A lossless codec for KV pages in bf16, faster than a disk. No I/O.
//!
//! The KV of a model carries about three bits of information in the eight bits of an exponent, and
//! almost eight in sign and mantissa. So a block of [`BLOCK_VALUES`] values keeps sign and mantissa
//! as bytes, and codes its exponents in four bits each: their distance from the base of the block,
//! the first of the 15 neighbouring exponents that most values have. The code 15 is an escape: the
//! exponent follows as a byte. The ratio is at most 4 : 3.
//!
//! ```text
//!  stream   | block 0 | block 1 | ... | block n | zeros | entry 0 | entry 1 | ... | entry n |
//!           0                                                        whole units from 0 to here
//!
//!  block    | sign and mantissa: a byte a value | codes: half a byte a value | escapes |
//!           or the plain bytes, if these are not more
//!
//!  entry    | sum of the plain values: 4 bytes | escapes: 2 | base: 1 | zero: 1 |
//! ```
//!
//! The entries stand at the end, and blocks are decoded from the last one to the first one. A stored
//! block is never longer than its plain bytes. So a stream that lies at the start of the buffer of
//! its plain bytes is decoded in place ([`Codec::decode_in_place`]): no output reaches the input of
//! an earlier block. A block whose output reaches its own input is first copied.
//!
//! A stream has no checksum of its bytes: its owner verifies these before they are decoded. The sum
//! of the plain values is the check on the decoder.
//!
//! All forms of the code ([`Form`]) give the same bytes.
//!
//! | module | owns |
//! |---|---|
//! | `stream` | a page as blocks and entries |
//! | `forms` | the form for a processor |
//! | `avx2`, `neon`, `portable` | one form each |
//! | `block` | the layout of a block and of its entry, the choice of the base |

mod block;
mod forms;
mod portable;
mod stream;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "aarch64")]
mod neon;

pub use block::{BLOCK_BYTES, BLOCK_VALUES};
pub use forms::Form;
pub use stream::{Codec, Malformed};
