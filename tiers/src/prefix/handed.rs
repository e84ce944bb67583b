//! Sequences that go to another process, or come from one: for [`handover`](crate::handover).

use std::ops::Range;
use std::sync::Arc;

use larder_format::PageKey;
use larder_kernels::{Device, DeviceError, KvShape, LayerTickets, Ticket};

use super::error::{BeginError, Closed, SequenceError};
use super::filling::{DeviceCopies, Filling, Rows, filling};
use super::sequence::Sequence;
use super::shared::Shared;
use super::waiting::{Ask, Waiting};
use crate::core::RequestId;

/// A cache whose sequences are handed over.
#[derive(Clone)]
pub(crate) struct Lender(Arc<Shared>);

impl Lender {
    pub(super) fn new(shared: Arc<Shared>) -> Lender {
        Lender(shared)
    }

    /// Why its sequences cannot be handed over.
    pub(crate) fn unsupported(&self) -> Option<&'static str> {
        let cache = &self.0;
        if cache.has_ranks() {
            return Some("a cache of several ranks");
        }
        if cache.component(0).is_some() {
            return Some("a model with components");
        }
        let what = "a model whose names are not valid";
        cache.namespace().is_none().then_some(what)
    }

    /// The device that copies its rows. `None`: L1 is in host memory, and the threads of a
    /// hand-over copy them.
    pub(crate) fn device(&self) -> Result<Option<Arc<dyn Device>>, Closed> {
        match self.0.is_on_host() {
            true => Ok(None),
            false => self.0.with(|cache| Some(cache.device())),
        }
    }

    /// The fingerprint of its namespace.
    pub(crate) fn namespace(&self) -> Vec<u8> {
        let namespace = self.0.namespace();
        namespace.map_or_else(Vec::new, |of| of.as_bytes().to_vec())
    }

    pub(crate) fn shape(&self) -> &KvShape {
        self.0.l1().shape()
    }

    /// A digest of a prompt, with its scope and the weights. `None` if the tokens cannot all be
    /// numbered.
    pub(crate) fn digest(&self, ask: &Ask<'_>) -> Result<Option<PageKey>, Closed> {
        self.0.with(|cache| {
            let mut prompt = cache.core().prompt(ask.scope());
            cache.extend_or_cut(&mut prompt, ask.tokens());
            cache.core().digest_of(&prompt, ask.tokens().len())
        })
    }

    /// Asks for a prompt.
    pub(crate) fn ask(&self, ask: &Ask<'_>) -> Result<Waiting, BeginError> {
        Waiting::new(self.0.clone(), ask)
    }

    /// A ticket that settles when all forwards that were reported so far have ended.
    pub(crate) fn forwards(&self) -> Result<Ticket, Closed> {
        self.0.with(|cache| cache.all_forwards())
    }
}

impl Sequence {
    /// Whether it belongs to this cache.
    pub(crate) fn is_of(&self, lender: &Lender) -> bool {
        Arc::ptr_eq(&self.shared, &lender.0)
    }

    /// The number of its request, and the digest of its tokens.
    pub(crate) fn identity(&self) -> Result<(RequestId, Option<PageKey>), SequenceError> {
        let request = self.unbroken()?;
        let (prompt, tokens) = (request.prompt(), self.len());
        let digest = self
            .shared
            .with(|cache| cache.core().digest_of(prompt, tokens));
        Ok((request.id(), digest?))
    }

    /// The number of its request.
    pub(crate) fn number(&self) -> Option<RequestId> {
        self.request().map(crate::core::Request::id)
    }

    /// Calls `copy` with its rows, behind the loads that fill a layer of its cached tokens.
    pub(crate) fn with_rows<R>(
        &self,
        layer: u32,
        from: usize,
        copy: impl FnOnce(&Rows) -> R,
    ) -> Result<R, DeviceError> {
        if from < self.waits_until() {
            for gate in &self.gates {
                gate.layer(layer).wait()?;
            }
        }
        Ok(copy(&self.rows()))
    }

    fn rows(&self) -> Rows {
        let pages = self.request().map(|request| request.row_and_loads().0);
        let pages = pages.map_or_else(Vec::new, |row| row.pages().to_vec());
        Rows::new(self.shared.l1().clone(), pages)
    }

    /// Calls `copy` with its rows, for copies of a device, which `copy` adds: its pages stay its
    /// own until they have ended.
    pub(crate) fn copied_by<R>(&self, copy: impl FnOnce(&Rows, &DeviceCopies) -> R) -> R {
        copy(&self.rows(), &self.copies)
    }

    /// The tickets behind which these layers of its cached tokens are there.
    pub(crate) fn filled_by(&self, layers: Range<u32>) -> Vec<Ticket> {
        let layers = layers.flat_map(|layer| self.gates.iter().map(move |gate| gate.layer(layer)));
        layers.collect()
    }

    /// Copies of a device fill some of its rows: no layer is used before its ticket.
    pub(crate) fn comes_behind(&mut self, tickets: impl IntoIterator<Item = LayerTickets>) {
        self.gates.extend(tickets);
    }

    /// The rows of its first `tokens` tokens come from another process, each layer before its
    /// ticket. `stop` is called at its end, if they are not complete then.
    pub(crate) fn fill(
        &mut self,
        tokens: usize,
        tickets: Option<LayerTickets>,
        stop: impl Fn() + Send + Sync + 'static,
    ) -> Result<Filling, SequenceError> {
        let request = self.unbroken()?;
        let (number, pages) = (request.id(), request.row_and_loads().0.pages().to_vec());
        let rows = Rows::new(self.shared.l1().clone(), pages);
        let rows = (rows, self.copies.clone());
        let (filling, handed) = filling(self.shared.clone(), number, rows, tokens, stop);
        self.gates.extend(tickets);
        self.reported(tokens);
        self.handed = Some(handed);
        Ok(filling)
    }
}
