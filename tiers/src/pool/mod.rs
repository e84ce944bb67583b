//! Who may write where: pages of the L1 and L2 pools, and the rows of running requests.
//!
//! | module | owns |
//! |---|---|
//! | `pages` | which pages of a pool are free |
//! | `row` | the pages of one request, and the table of requests |
//!
//! No bytes live here: page numbers only.

mod pages;
mod row;

pub use pages::{PagePool, PoolError};
pub use row::{RequestId, RequestTable, Row, TableError};
