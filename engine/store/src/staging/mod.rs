//! The staging area of a shared store: pages that one process reads, and others copy.
//!
//! | module | content |
//! |---|---|
//! | `slots` | the owner's directory: which page is staged, and where |
//! | `area` | the memory that all processes map |

mod area;
mod slots;

pub use area::*;
pub use slots::*;
