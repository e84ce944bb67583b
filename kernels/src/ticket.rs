//! Completion of copies: tickets, and values that are accessible only through tickets.
//!
//! A [`Ticket`] settles once, as done or failed, and does not change afterwards. A [`Gated`] value
//! is the only access to the pages of a transfer in flight: it opens layer by layer, and the whole
//! value is returned when no operation touches it.
//!
//! Faults covered: a [`Promise`] that is dropped fails its ticket, so no waiter hangs.

use std::any::Any;
use std::fmt::Debug;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use larder_sync::{Condvar, Mutex};

use crate::error::DeviceError;

/// An event to wait for: the end of a copy, or of a prerequisite of a copy. Clones refer to the
/// same event.
#[derive(Clone, Debug)]
pub struct Ticket(Kind);

/// An event in a stream of a device, such as a CUDA event. It wakes no waker on the host.
pub(crate) trait StreamEvent: Any + Debug + Send + Sync {
    /// Whether the event has happened. Never waits.
    fn poll(&self) -> Result<bool, DeviceError>;

    /// Waits until the event has happened.
    fn wait(&self) -> Result<(), DeviceError>;
}

#[derive(Clone, Debug)]
enum Kind {
    Done,
    Promised(Arc<Moment>),
    Event(Arc<dyn StreamEvent>),
    /// The end of all these tickets, whether successful or failed.
    AllOver(Arc<[Ticket]>),
}

#[derive(Debug)]
struct Moment {
    state: Mutex<State>,
    settled: Condvar,
}

#[derive(Debug)]
enum State {
    /// Not settled. Holds the wakers to notify.
    Pending(Vec<Waker>),
    Settled(Result<(), DeviceError>),
}

/// The obligation to settle a [`Ticket`]. If dropped, the ticket fails.
#[derive(Debug)]
pub struct Promise(Option<Arc<Moment>>);

impl Ticket {
    /// A ticket that is already done, for operations without a prerequisite.
    #[must_use]
    pub fn done() -> Ticket {
        Ticket(Kind::Done)
    }

    /// A ticket that settles together with the promise.
    #[must_use]
    pub fn promised() -> (Promise, Ticket) {
        let moment = Arc::new(Moment {
            state: Mutex::new(State::Pending(Vec::new())),
            settled: Condvar::new(),
        });
        (
            Promise(Some(moment.clone())),
            Ticket(Kind::Promised(moment)),
        )
    }

    /// A ticket that has already failed. For a forward whose failure is known before its ticket is
    /// handed over.
    #[must_use]
    pub fn failed(error: DeviceError) -> Ticket {
        let (promise, ticket) = Ticket::promised();
        promise.settle(Err(error));
        ticket
    }

    /// A ticket that settles when all these have settled. It succeeds even if some of them failed:
    /// it defines an order only, and does not guarantee the bytes.
    #[must_use]
    pub fn all_over(tickets: impl IntoIterator<Item = Ticket>) -> Ticket {
        Ticket(Kind::AllOver(tickets.into_iter().collect()))
    }

    /// Whether both tickets refer to the same event, by identity. Clones of a ticket do, and all
    /// [`Ticket::done`].
    #[must_use]
    pub fn is_same(&self, other: &Ticket) -> bool {
        match (&self.0, &other.0) {
            (Kind::Done, Kind::Done) => true,
            (Kind::Promised(one), Kind::Promised(other)) => Arc::ptr_eq(one, other),
            (Kind::Event(one), Kind::Event(other)) => Arc::ptr_eq(one, other),
            (Kind::AllOver(one), Kind::AllOver(other)) => Arc::ptr_eq(one, other),
            _ => false,
        }
    }

    /// Whether the event has happened. Never waits.
    ///
    /// # Errors
    /// The operation failed.
    pub fn poll(&self) -> Result<bool, DeviceError> {
        match &self.0 {
            Kind::Done => Ok(true),
            Kind::Event(event) => event.poll(),
            Kind::AllOver(tickets) => Ok(tickets.iter().all(Ticket::is_settled)),
            Kind::Promised(moment) => match &*moment.state.lock() {
                State::Pending(_) => Ok(false),
                State::Settled(outcome) => outcome.clone().map(|()| true),
            },
        }
    }

    /// [`Ticket::poll`] that also registers the caller's waker. A GPU event wakes no waker; the
    /// host device accepts no GPU tickets.
    pub(crate) fn poll_settled(&self, context: &Context<'_>) -> Poll<Result<(), DeviceError>> {
        if let Kind::AllOver(tickets) = &self.0 {
            // The first pending ticket wakes the caller, which then polls the next one.
            let is_pending = |ticket: &Ticket| ticket.poll_settled(context).is_pending();
            return match tickets.iter().any(is_pending) {
                true => Poll::Pending,
                false => Poll::Ready(Ok(())),
            };
        }
        if let Kind::Promised(moment) = &self.0
            && let State::Pending(wakers) = &mut *moment.state.lock()
        {
            if !wakers.iter().any(|waker| waker.will_wake(context.waker())) {
                wakers.push(context.waker().clone());
            }
            return Poll::Pending;
        }
        match self.poll() {
            Ok(false) => Poll::Pending,
            Ok(true) => Poll::Ready(Ok(())),
            Err(error) => Poll::Ready(Err(error)),
        }
    }

    pub(crate) fn of_event(event: impl StreamEvent) -> Ticket {
        Ticket(Kind::Event(Arc::new(event)))
    }

    /// The event, if this is a ticket of a device with events of this type.
    pub(crate) fn event<E: StreamEvent>(&self) -> Option<&E> {
        match &self.0 {
            Kind::Event(event) => (&**event as &dyn Any).downcast_ref(),
            Kind::Done | Kind::Promised(_) | Kind::AllOver(_) => None,
        }
    }

    /// The tickets of [`Ticket::all_over`].
    pub(crate) fn members(&self) -> Option<&[Ticket]> {
        match &self.0 {
            Kind::AllOver(tickets) => Some(tickets),
            Kind::Done | Kind::Promised(_) | Kind::Event(_) => None,
        }
    }

    /// Whether it depends on a GPU event, which wakes no waker on the host.
    pub(crate) fn waits_for_gpu(&self) -> bool {
        match &self.0 {
            Kind::Done | Kind::Promised(_) => false,
            Kind::Event(_) => !self.is_settled(),
            Kind::AllOver(tickets) => tickets.iter().any(Ticket::waits_for_gpu),
        }
    }

    /// Waits until the ticket settles. For shutdown, and for engines that compute on the CPU. A
    /// scheduler polls instead.
    ///
    /// # Errors
    /// The operation failed.
    pub fn wait(&self) -> Result<(), DeviceError> {
        let moment = match &self.0 {
            Kind::Done => return Ok(()),
            Kind::Event(event) => return event.wait(),
            Kind::AllOver(tickets) => {
                // Waits for the end of each; the outcome does not matter.
                tickets.iter().for_each(|ticket| drop(ticket.wait()));
                return Ok(());
            }
            Kind::Promised(moment) => moment,
        };
        let mut state = moment.state.lock();
        loop {
            match &*state {
                State::Settled(outcome) => return outcome.clone(),
                State::Pending(_) => moment.settled.wait(&mut state),
            }
        }
    }

    /// Whether it has succeeded or failed. Never waits.
    #[must_use]
    pub fn is_settled(&self) -> bool {
        !matches!(self.poll(), Ok(false))
    }
}

impl Promise {
    /// Settles the ticket with the outcome.
    pub fn settle(mut self, outcome: Result<(), DeviceError>) {
        self.settle_once(outcome);
    }

    fn settle_once(&mut self, outcome: Result<(), DeviceError>) {
        let Some(moment) = self.0.take() else { return };
        let before = std::mem::replace(&mut *moment.state.lock(), State::Settled(outcome));
        moment.settled.notify_all();
        // Outside the lock, because a waker may poll the ticket at once.
        if let State::Pending(wakers) = before {
            wakers.into_iter().for_each(Waker::wake);
        }
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        self.settle_once(Err(DeviceError::Abandoned));
    }
}

/// The tickets of a transfer: one per layer of a load, in order, or one for all layers of a store.
#[derive(Clone, Debug)]
pub struct LayerTickets(Arc<[Ticket]>);

impl LayerTickets {
    /// One ticket per layer, first layer first.
    #[must_use]
    pub fn by_layer(tickets: Vec<Ticket>) -> LayerTickets {
        LayerTickets(tickets.into())
    }

    /// One ticket for all layers.
    #[must_use]
    pub fn whole(ticket: Ticket) -> LayerTickets {
        LayerTickets([ticket].into())
    }

    /// The ticket after which a layer may be used. Past the last layer: the ticket of the last
    /// layer.
    #[must_use]
    pub fn layer(&self, layer: u32) -> Ticket {
        let last = self.0.len().checked_sub(1);
        let index = last.map(|last| last.min(usize::try_from(layer).unwrap_or(last)));
        index
            .and_then(|index| self.0.get(index))
            .cloned()
            .unwrap_or_else(Ticket::done)
    }

    /// The tickets, first layer first.
    pub fn tickets(&self) -> impl Iterator<Item = Ticket> + '_ {
        self.0.iter().cloned()
    }

    /// `None` while any layer is in flight. Afterwards the outcome: the error of the first layer
    /// that failed.
    #[must_use]
    pub fn outcome(&self) -> Option<Result<(), DeviceError>> {
        // Layers settle in order, so the last one is the most likely to be pending.
        if !self.0.iter().rev().all(Ticket::is_settled) {
            return None;
        }
        Some(self.0.iter().try_for_each(|ticket| ticket.poll().map(drop)))
    }
}

/// A value guarded by transfers in flight. It is usable layer by layer as the tickets settle, and
/// can be taken out when all have settled.
///
/// Loads return the destination pages in this form. Values derived from such pages (the runs
/// returned by a match) are guarded in the same way, by the tickets of every load on their path.
///
/// ```
/// use larder_kernels::{Gated, LayerTickets, Ticket};
///
/// let (copied, ticket) = Ticket::promised();
/// let pages = Gated::free(vec![3, 4]).behind(LayerTickets::by_layer(vec![ticket]));
/// assert!(pages.layer(0)?.is_none());
/// copied.settle(Ok(()));
/// assert_eq!(pages.layer(0)?, Some(&vec![3, 4]));
/// # Ok::<(), larder_kernels::DeviceError>(())
/// ```
///
/// There is no other access:
///
/// ```compile_fail
/// # use larder_kernels::Gated;
/// let pages = Gated::free(vec![3, 4]);
/// let first = pages.value[0];
/// ```
///
/// Dropping a `Gated` with transfers in flight leaks the guarded value on purpose: pages that are
/// never handed back cannot be reused too early.
#[derive(Debug)]
#[must_use = "the guarded value is returned only through `open`"]
pub struct Gated<T> {
    value: T,
    gates: Vec<LayerTickets>,
}

impl<T> Gated<T> {
    /// A value without any guard.
    pub fn free(value: T) -> Gated<T> {
        Gated {
            value,
            gates: Vec::new(),
        }
    }

    /// Adds the tickets of another transfer as a guard.
    pub fn behind(mut self, tickets: LayerTickets) -> Gated<T> {
        self.gates.push(tickets);
        self
    }

    /// The guards, for use with other values.
    pub fn gates(&self) -> &[LayerTickets] {
        &self.gates
    }

    /// The value for use in this layer, if the layer may be used. Never waits.
    ///
    /// # Errors
    /// A transfer failed: the bytes of this layer are undefined.
    pub fn layer(&self, layer: u32) -> Result<Option<&T>, DeviceError> {
        for gate in &self.gates {
            if !gate.layer(layer).poll()? {
                return Ok(None);
            }
        }
        Ok(Some(&self.value))
    }

    /// Waits until this layer may be used, and returns the value.
    ///
    /// # Errors
    /// A transfer failed: the bytes of this layer are undefined.
    pub fn wait_layer(&self, layer: u32) -> Result<&T, DeviceError> {
        for gate in &self.gates {
            gate.layer(layer).wait()?;
        }
        Ok(&self.value)
    }

    /// Takes out the value and the outcome of the transfers, once no operation touches it. After a
    /// failure too, when all operations that had begun have ended.
    ///
    /// # Errors
    /// Returns itself while a transfer is in flight.
    pub fn open(self) -> Result<(T, Result<(), DeviceError>), Gated<T>> {
        let mut outcome = Ok(());
        for gate in &self.gates {
            match gate.outcome() {
                None => return Err(self),
                Some(one) => outcome = outcome.and(one),
            }
        }
        Ok((self.value, outcome))
    }

    /// [`Gated::open`], after waiting for the transfers in flight.
    pub fn wait(self) -> (T, Result<(), DeviceError>) {
        let mut outcome = Ok(());
        for ticket in self.gates.iter().flat_map(|gate| gate.0.iter()) {
            let one = ticket.wait();
            outcome = outcome.and(one);
        }
        (self.value, outcome)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn a_dropped_promise_fails_its_ticket() {
        let (promise, ticket) = Ticket::promised();
        assert_eq!(ticket.poll(), Ok(false));
        drop(promise);
        assert_eq!(ticket.poll(), Err(DeviceError::Abandoned));
        assert_eq!(ticket.wait(), Err(DeviceError::Abandoned));
    }

    #[test]
    fn all_over_settles_with_the_last_ticket_and_does_not_fail() {
        let (first, a) = Ticket::promised();
        let (second, b) = Ticket::promised();
        let over = Ticket::all_over([a.clone(), b, Ticket::done()]);
        second.settle(Err(DeviceError::Closed));
        assert_eq!(over.poll(), Ok(false));
        first.settle(Ok(()));
        assert_eq!(over.poll(), Ok(true));
        assert_eq!(over.wait(), Ok(()));
        assert!(Ticket::all_over([]).is_settled());
        assert!(a.is_same(&a.clone()) && !a.is_same(&over) && !a.is_same(&Ticket::done()));
    }

    #[test]
    fn a_gated_value_opens_layer_by_layer_and_comes_out_last() {
        let (first, a) = Ticket::promised();
        let (second, b) = Ticket::promised();
        let gated = Gated::free(7).behind(LayerTickets::by_layer(vec![a, b]));
        assert_eq!(gated.layer(0), Ok(None));
        first.settle(Ok(()));
        assert_eq!(gated.layer(0), Ok(Some(&7)));
        assert_eq!(gated.layer(1), Ok(None));
        let gated = gated.open().unwrap_err();
        second.settle(Ok(()));
        assert_eq!(gated.layer(1), Ok(Some(&7)));
        assert_eq!(gated.open().unwrap(), (7, Ok(())));
    }

    #[test]
    fn a_failed_layer_does_not_free_pages_that_later_layers_still_touch() {
        let (first, a) = Ticket::promised();
        let (second, b) = Ticket::promised();
        let gated = Gated::free(()).behind(LayerTickets::by_layer(vec![a, b]));
        first.settle(Err(DeviceError::Closed));
        let gated = gated.open().unwrap_err();
        second.settle(Ok(()));
        assert_eq!(gated.open().unwrap().1, Err(DeviceError::Closed));
    }

    #[test]
    fn a_value_behind_two_transfers_waits_for_both() {
        let (first, a) = Ticket::promised();
        let (second, b) = Ticket::promised();
        let gated = Gated::free(())
            .behind(LayerTickets::whole(a))
            .behind(LayerTickets::whole(b));
        second.settle(Ok(()));
        assert_eq!(gated.layer(3), Ok(None));
        first.settle(Ok(()));
        assert_eq!(gated.layer(3), Ok(Some(&())));
    }
}
