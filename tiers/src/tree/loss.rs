//! One loss of L1 pages.

use super::node::NodeId;
use crate::runs::{L1, Runs};

/// One loss, while locks from before it are held.
#[derive(Debug)]
pub(super) struct Loss {
    /// The number of the loss, counted from 1.
    pub(super) number: u64,
    /// The topmost node that lost its pages.
    pub(super) top: NodeId,
    /// Number of locks on the node from before the loss.
    pub(super) holders: u32,
    /// The pages.
    pub(super) l1: Runs<L1>,
}
