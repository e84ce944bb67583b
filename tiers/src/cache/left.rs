//! Requests that have ended while a device copies rows of theirs from or to another process. They
//! are finished when these copies have ended: their pages are free from then on.

use std::sync::Arc;

use larder_kernels::{Device, Ticket};

use super::Cache;
use crate::core::Request;

/// A request that has ended.
pub(super) struct Left {
    request: Request,
    /// Its last forward.
    forward: Ticket,
    copies: Vec<Ticket>,
}

impl Cache {
    /// As [`Cache::finish`] without `keep`, when these copies have ended.
    pub(crate) fn finish_behind(
        &mut self,
        request: Request,
        forward: &Ticket,
        copies: Vec<Ticket>,
    ) {
        self.left.push(Left {
            request,
            forward: forward.clone(),
            copies,
        });
        self.finish_left();
    }

    /// Finishes the requests whose copies have ended. Returns their number.
    pub(super) fn finish_left(&mut self) -> usize {
        let is_over = |left: &mut Left| left.copies.iter().all(Ticket::is_settled);
        let over: Vec<Left> = self.left.extract_if(.., is_over).collect();
        let count = over.len();
        for left in over {
            self.finish(left.request, false, &left.forward);
        }
        count
    }

    /// The device of its pools.
    pub(crate) fn device(&self) -> Arc<dyn Device> {
        self.device.clone()
    }
}
