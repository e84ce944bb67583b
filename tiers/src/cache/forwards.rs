//! Forwards that have not ended, in submission order, with their tickets.
//!
//! Tickets may settle in any order. For the core, a forward has ended when it and all earlier
//! forwards are over. A failed forward is reported at once.

use std::collections::VecDeque;

use larder_kernels::{DeviceError, Ticket};

use super::Cache;
use crate::core::{Fence, RequestId};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Its ticket has not settled.
    Running,
    /// Its ticket has settled. With other ranks, the end is not agreed yet.
    Settled,
    /// It is over, but an earlier forward is not.
    Over,
}

struct Forward {
    fence: Fence,
    ticket: Ticket,
    state: State,
}

/// See the module documentation.
#[derive(Default)]
pub(super) struct Forwards {
    given: VecDeque<Forward>,
    newest: Fence,
    /// Whether each report of a ticket counts as a forward.
    is_each_new: bool,
}

impl Cache {
    /// Numbers each report of a forward, also under the same ticket. For ranks whose tickets
    /// differ: a forward may run on one of them, and have ended or failed on another.
    pub(crate) fn number_each_report(&mut self) {
        self.forwards.is_each_new = true;
    }

    /// A ticket that settles when all forwards that were reported so far are over.
    pub(crate) fn all_forwards(&self) -> Ticket {
        self.forwards.over_until(self.forwards.newest)
    }

    /// Rows of a running request will not come: it is broken.
    pub(crate) fn rows_missing(&mut self, request: RequestId) {
        self.core.rows_missing(request);
    }
}

impl Forwards {
    /// The number of the newest forward.
    pub(super) fn newest(&self) -> Fence {
        self.newest
    }

    /// The number of the forward with this ticket, if it is the newest and is not over. Several
    /// requests of a batch share a forward. Whether its ticket has settled does not matter, because
    /// other ranks may see this at another call.
    pub(super) fn known(&self, ticket: &Ticket) -> Option<Fence> {
        let newest = self.given.back()?;
        let is_it =
            !self.is_each_new && newest.state != State::Over && newest.ticket.is_same(ticket);
        is_it.then_some(newest.fence)
    }

    /// Adds a forward and returns its number.
    pub(super) fn push(&mut self, ticket: &Ticket) -> Fence {
        self.newest.0 += 1;
        self.given.push_back(Forward {
            fence: self.newest,
            ticket: ticket.clone(),
            state: State::Running,
        });
        self.newest
    }

    /// The forwards whose tickets have settled since the last call, with their outcomes.
    pub(super) fn settled(&mut self) -> Vec<(Fence, Result<(), DeviceError>)> {
        let mut settled = Vec::new();
        for forward in &mut self.given {
            if forward.state != State::Running {
                continue;
            }
            let outcome = match forward.ticket.poll() {
                Ok(false) => continue,
                Ok(true) => Ok(()),
                Err(error) => Err(error),
            };
            forward.state = State::Settled;
            settled.push((forward.fence, outcome));
        }
        settled
    }

    /// Marks a forward as over. Returns the newest forward for which it and all earlier forwards
    /// are over, if this advances.
    pub(super) fn over(&mut self, fence: Fence) -> Option<Fence> {
        let forward = self.given.iter_mut().find(|given| given.fence == fence);
        forward?.state = State::Over;
        let mut ended = None;
        while let Some(first) = self.given.front()
            && first.state == State::Over
        {
            ended = Some(first.fence);
            self.given.pop_front();
        }
        ended
    }

    /// A ticket that settles when all forwards up to this one are over.
    pub(super) fn over_until(&self, fence: Fence) -> Ticket {
        let given = self.given.iter().take_while(|given| given.fence <= fence);
        let running = given.filter(|given| !given.ticket.is_settled());
        Ticket::all_over(running.map(|given| given.ticket.clone()))
    }
}
