//! Page ownership: free pages of the L1 and L2 pools, and the rows of running requests.
//!
//! A module imports only the modules below it.
//!
//! | module | owns |
//! |---|---|
//! | `row` | the pages of one request, and the table of requests |
//! | `pages` | the free pages of a pool |
//!
//! This module handles page numbers only, no bytes.

mod pages;
mod row;

pub use pages::{PagePool, PoolError};
pub use row::{RequestId, RequestTable, Row, TableError};
