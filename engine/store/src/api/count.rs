//! Counts that only callers can make.

/// A count of a request, for [`PageStore::count`](super::PageStore::count). The store cannot tell
/// requests apart.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Count {
    /// The tokens that a request asked for, and how many of them, from the first, the store had.
    Asked {
        /// Tokens that it asked for.
        tokens: u64,
        /// Tokens that the store had.
        found: u64,
        /// Whether this is the first count of the request.
        is_first: bool,
    },
    /// Tokens whose pages were read from the store for a request, instead of computed.
    Served {
        /// The tokens.
        tokens: u64,
        /// Tokens that the engine computes in a second, if known.
        prefill_rate: Option<f64>,
    },
    /// Pages that the process found and decided not to read.
    Unread {
        /// Computing them is faster.
        slow: u64,
        /// The time of a read was not known yet.
        unmeasured: u64,
    },
}
