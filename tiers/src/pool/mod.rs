//! Page ownership: free pages of the L1 and L2 pools, and the rows of running requests.
//!
//! | module | owns |
//! |---|---|
//! | `pages` | the free pages of a pool |
//! | `row` | the pages of one request, and the table of requests |
//!
//! This module handles page numbers only, no bytes.

mod pages;
mod row;

pub use pages::{PagePool, PoolError};
pub use row::{RequestId, RequestTable, Row, TableError};
