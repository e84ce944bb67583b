//! The keys of an encrypted store, for clients.

use larder_base::ids::NamespaceId;
use larder_core::grants::Finding;

use super::session::Session;
use super::shared::Shared;
use crate::keys::KeyUse;
use crate::share::keys::keys_of;
use crate::share::wire::{Failure, LentSlots, Reply, Request};

impl Shared {
    /// Lends a client the keys of a namespace's tenant.
    pub(super) fn lend(&self, session: &Session, namespace: NamespaceId, use_of: KeyUse) -> Reply {
        if !self.store.is_sealed() || !session.ledger.is_marked() {
            let why = "keys are lent to clients of an encrypted store, once they hold their marks";
            return Reply::Failed(Failure::Protocol(why.to_owned()));
        }
        match self.store.slots_for(namespace, use_of) {
            Ok(slots) => Reply::Keys(LentSlots {
                has_current: slots.current.is_some(),
                slots: slots.all,
                erased_until: slots.erased_until,
            }),
            Err(why) => Reply::Keyless(why),
        }
    }

    /// In an encrypted store a client that cannot open a page gives a hint, and no finding: its key
    /// may be a wrong one. The owner reads the page itself. Returns all other requests.
    pub(super) fn follow_hints<'a>(
        &self,
        session: &Session,
        request: Request<'a>,
    ) -> Option<Request<'a>> {
        let (namespace, keys, findings) = match request {
            Request::Verified {
                namespace,
                keys,
                findings,
            } if self.store.is_sealed() => (NamespaceId(namespace), keys, findings),
            request => return Some(request),
        };
        let keys = keys_of(keys).unwrap_or_default();
        let (good, hints): (Vec<_>, Vec<_>) = keys
            .iter()
            .zip(findings)
            .partition(|(_, (_, finding))| *finding == Finding::Good);
        for (key, _) in hints {
            self.store.check_page(namespace, key);
        }
        let good = good.into_iter();
        let good = good.map(|(key, (place, finding))| (*key, self.map.extent(place), finding));
        let catalog = self.store.catalog();
        session.ledger.verified(catalog, namespace, good.collect());
        None
    }
}
