//! Segments that clients want emptied: one at a time in the whole store.

use std::sync::atomic::Ordering;

use larder_core::core::Emptying;
use larder_format::Serial;

use super::session::Session;
use super::shared::Shared;
use crate::share::wire::{Reply, Request};

impl Shared {
    /// Empties a segment for a client. Any other request is returned.
    pub(super) fn empty<'a>(
        &self,
        session: &Session,
        request: Request<'a>,
    ) -> Result<Option<Reply>, Request<'a>> {
        let Request::Empty {
            volume,
            segment,
            sequence,
            starts,
        } = request
        else {
            return Err(request);
        };
        session.compacts.store(true, Ordering::Relaxed);
        let wanted = Emptying {
            volume: volume.into(),
            number: segment,
            sequence: Serial::from_raw(sequence),
            starts,
        };
        let _turn = self.emptying.lock();
        let goes_on = || !self.stop.load(Ordering::SeqCst);
        Ok(Some(match self.store.empty(&wanted, goes_on) {
            Ok(moved) => Reply::Emptied(moved),
            Err(error) => Reply::Failed(error.into()),
        }))
    }
}
