//! The keys of an encrypted store that its owner lends to this client.
//!
//! Invariant: a key whose slot the owner had this client forget is not kept, even if it arrives
//! later. An owner gives no slot again.

use std::collections::BTreeSet;
use std::num::NonZeroU16;
use std::sync::Arc;

use larder_base::ids::NamespaceId;
use larder_base::planted;
use larder_base::runtime::Mutex;
use larder_core::status::Refusal;
use larder_format::Proof;
use larder_seal::Vault;

use super::{Gone, Remote};
use crate::api::PutOptions;
use crate::catalog::{Catalog, Pinned};
use crate::keys::{KeyUse, Lent, LentKeys, Slots, Tenant};
use crate::share::wire::{LentSlots, Reply, Request};

/// See the module.
pub(super) struct Lending {
    vault: Vault,
    /// The slots of erased keys. Held while keys arrive.
    forgotten: Mutex<BTreeSet<NonZeroU16>>,
}

impl Lending {
    pub(super) fn new() -> Lending {
        let vault = match cfg!(feature = "simulated") {
            true => Vault::plain(),
            false => Vault::new(),
        };
        Lending {
            vault,
            forgotten: Mutex::default(),
        }
    }
}

impl Remote {
    /// Whether the owner's store is encrypted.
    pub(in crate::share) fn is_sealed(&self) -> bool {
        self.lending.is_some()
    }

    /// The tenant of a namespace that is registered, in an encrypted store.
    pub(super) fn tenant(&self) -> Option<Tenant> {
        self.is_sealed().then(|| Tenant::lent(Arc::default()))
    }

    /// Before a put: gets the key for its pages.
    pub(in crate::share) fn give_key(
        &self,
        namespace: NamespaceId,
        options: PutOptions,
    ) -> Result<(), Refusal> {
        let Some(lending) = &self.lending else {
            return Ok(());
        };
        let Some(tenant) = self.shape(namespace).and_then(|shape| shape.tenant) else {
            return Ok(());
        };
        if let Some(lent) = tenant.as_lent().filter(|_| !tenant.has_key()) {
            self.borrow(
                lending,
                namespace,
                lent,
                KeyUse::of_put(options.made_unix_s, options.wait),
            )?;
        }
        match tenant.takes(options.made_unix_s) {
            true => Ok(()),
            false => Err(Refusal::Erased),
        }
    }

    /// Gets the keys of these pages, as far as the owner has them and this client has not.
    pub(super) fn get_keys(&self, namespace: NamespaceId, pages: &[Option<Pinned>]) {
        let Some(lending) = &self.lending else {
            return;
        };
        let tenant = self.shape(namespace).and_then(|shape| shape.tenant);
        let Some(lent) = tenant.as_ref().and_then(|tenant| tenant.as_lent()) else {
            return;
        };
        let is_new = |proof: &Proof| proof.seal.is_some_and(|seal| !lent.keys().has(seal.slot));
        if pages.iter().flatten().any(|page| is_new(&page.proof)) {
            let _ = self.borrow(lending, namespace, lent, KeyUse::Get);
        }
    }

    /// The slots of the keys that this client has. `None` while they change.
    #[cfg(any(test, feature = "simulated"))]
    pub(in crate::share) fn lent(&self) -> Option<Vec<NonZeroU16>> {
        let shapes = self.shapes.try_lock()?;
        let mut slots = Vec::new();
        for shape in shapes.values() {
            if let Some(lent) = shape.tenant.as_ref().and_then(|tenant| tenant.as_lent()) {
                slots.extend(lent.slots()?);
            }
        }
        Some(slots)
    }

    fn borrow(
        &self,
        lending: &Lending,
        namespace: NamespaceId,
        lent: &Lent,
        use_of: KeyUse,
    ) -> Result<(), Refusal> {
        let request = Request::Keys {
            namespace: namespace.0,
            use_of,
        };
        let forgotten = lending.forgotten.lock();
        let answer = self.exchange(|line| {
            line.send(&request)?;
            self.receive_slow_with_file(line)
        });
        let (keys, pipe) = match answer {
            Ok((Reply::Keys(keys), Some(pipe))) => (keys, pipe),
            Ok((Reply::Keyless(why), _)) => return Err(why),
            Ok(_) | Err(Gone) => return Err(Refusal::Closed),
        };
        let LentSlots {
            has_current,
            slots: all,
            erased_until,
        } = keys;
        let current = all.first().copied().filter(|_| has_current);
        let slots = Slots {
            current,
            all,
            erased_until,
        };
        match LentKeys::take(&slots, pipe, &lending.vault) {
            Ok(keys) => {
                let erased: Vec<NonZeroU16> = forgotten.iter().copied().collect();
                lent.set(keys.without(&erased));
                Ok(())
            }
            Err(error) => {
                tracing::debug!(%error, "keys of the store were not taken");
                Err(Refusal::Busy)
            }
        }
    }

    /// Wipes the keys of these slots. No call uses one any more when this returns.
    pub(super) fn forget(&self, slots: &[NonZeroU16]) {
        let Some(lending) = &self.lending else {
            return;
        };
        let mut forgotten = lending.forgotten.lock();
        if planted!(KeptLentKey) {
            return;
        }
        forgotten.extend(slots);
        for shape in self.shapes.lock().values() {
            if let Some(lent) = shape.tenant.as_ref().and_then(|tenant| tenant.as_lent()) {
                lent.forget(slots);
            }
        }
    }
}
