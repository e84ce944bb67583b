//! The forwards whose ends are not known yet, in the order in which they were given, by their
//! tickets.
//!
//! Tickets may settle in any order. A forward counts as ended for the core when it and all before
//! it are over; one that failed is reported at once.

use std::collections::VecDeque;

use larder_kernels::{DeviceError, Ticket};

use crate::core::Fence;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Its ticket has not settled.
    Running,
    /// Its ticket has settled. With other ranks that is not agreed on yet.
    Settled,
    /// It is over, and one before it is not.
    Over,
}

struct Forward {
    fence: Fence,
    ticket: Ticket,
    state: State,
}

/// See the module.
#[derive(Default)]
pub(super) struct Forwards {
    given: VecDeque<Forward>,
    newest: Fence,
}

impl Forwards {
    /// The number of the newest forward.
    pub(super) fn newest(&self) -> Fence {
        self.newest
    }

    /// The number of the forward with this ticket, where that is the newest and has not settled:
    /// several requests of one batch share a forward.
    pub(super) fn known(&self, ticket: &Ticket) -> Option<Fence> {
        let newest = self.given.back()?;
        let is_it = newest.state == State::Running && newest.ticket.is_same(ticket);
        is_it.then_some(newest.fence)
    }

    /// Whether no forward is out, and this ticket has passed: then there is nothing to wait for.
    pub(super) fn is_past(&self, ticket: &Ticket) -> bool {
        self.given.is_empty() && ticket.poll() == Ok(true)
    }

    /// A further forward: its number.
    pub(super) fn push(&mut self, ticket: &Ticket) -> Fence {
        self.newest.0 += 1;
        self.given.push_back(Forward {
            fence: self.newest,
            ticket: ticket.clone(),
            state: State::Running,
        });
        self.newest
    }

    /// The forwards whose tickets have settled since the last call, and how.
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

    /// A forward is over: the newest of which that is true with all before it, if there is one.
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

    /// The moment at which all that were given are over.
    pub(super) fn all_over(&self) -> Ticket {
        let running = self.given.iter().filter(|given| !given.ticket.is_settled());
        Ticket::all_over(running.map(|given| given.ticket.clone()))
    }
}
