//! Hand-over of a request from a prefill process to a decode process of one node.
//!
//! The prefill process computes the prompt, the decode process the answer. Both have a
//! [`PrefixCache`](crate::PrefixCache) over one store, with the same namespace.
//!
//! ```text
//!   prefill                                     decode
//!   L1 --rows--> lent memory ================> L1      rows that are not durable yet
//!    \--pages--> the store -------------------> L1      pages that both find in L3
//!   service --socket: layers, token, data----> thread   one for each request
//! ```
//!
//! Pages that the prefill process has found cached go through the store. Rows that it computes go
//! through memory that the decode process maps, layer by layer, with the partial last page: they
//! are not in L3 yet, and a read of L3 takes longer than two copies. [`Prefill::offer`] says where
//! the division is. Pages that the decode process finds nowhere in time are computed by it.
//!
//! ```text
//!   prefill   offer --> layer, layer, .. --> end --> wait: Success
//!   decode    take ------(sequence, thread copies)---> Taken (token, data) --> first step, behind
//!                                                                              its layers' tickets
//! ```
//!
//! Each side gives a time. A failure of either side is a failure of the other within its time:
//! [`State::Failed`], with the reason. Then nothing is lent, locked or held for the request any
//! more, in either process.
//!
//! Invariants:
//! - A block of the memory is lent to one request at a time. The loan ends with the answer of the
//!   decode process, its end, the time of the offer, or the drop of the [`Offer`].
//! - Rows that were copied out of memory that is not lent any more are not used: the decode process
//!   looks at the loan after each copy and before the ticket, or before the sequence is verified if
//!   a device copies. A stopped process finds that out when it goes on.
//! - A layer is announced when its rows are in the memory, and its tickets settle when they are in
//!   L1. The token comes after the last layer.
//! - With L1 on a device, the device copies: out of L1 behind the forward that computes a layer,
//!   and into L1 behind the forwards of former sequences. Pages that it copies from or to are not
//!   free before the end of the copies, and neither is the memory.
//! - A request is taken with the tokens, salt and weights that it was offered with.
//!
//! Does not defend against: a process of the same user that writes to the memory, or that lies.
//!
//! A module imports only the modules below it.
//!
//! | module | contents |
//! |---|---|
//! | `decode` | takes requests |
//! | `copies` | the copies of a request that is taken, and their tickets |
//! | `prefill` | offers requests |
//! | `serve` | the thread of the prefill process that talks to decode processes |
//! | `desk` | the offers and the loans of a prefill process |
//! | `wire` | the messages |
//! | `memory` | the memory that is lent |
//! | `device` | the memory as a pool of the device that has L1 |
//! | `error` | why a hand-over fails |

mod copies;
mod decode;
mod desk;
mod device;
mod error;
mod memory;
mod prefill;
mod serve;
mod wire;

use std::io;
use std::thread::JoinHandle;

pub use decode::{Decode, Taken, Taking};
pub use error::HandoverError;
pub use prefill::{Offer, Prefill};

/// Longest data of an engine beside the first token, in bytes.
pub const DATA_BYTES_MAX: usize = 64 << 10;

/// Where a hand-over is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// The other process has not come yet.
    Waiting,
    /// The other process is there.
    Transferring,
    /// The decode process has all rows, the token and the data.
    Success,
    /// It does not take place.
    Failed(HandoverError),
}

/// Starts a thread of a hand-over.
fn start(name: &str, body: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    // Bugs are planted for a thread.
    #[cfg(debug_assertions)]
    let bug = <crate::planted::Bug as larder_base::bugs::Plant>::active().get();
    let thread = std::thread::Builder::new().name(name.to_owned());
    thread.spawn(move || {
        #[cfg(debug_assertions)]
        crate::planted::plant(bug);
        body();
    })
}
