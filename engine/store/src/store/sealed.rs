//! The keys of an encrypted store: for new tenants, and for clients.

use std::io::IoSliceMut;
use std::num::NonZeroU16;
use std::os::fd::OwnedFd;

use larder_base::ids::NamespaceId;
use larder_base::planted;
use larder_base::system::processes;
use larder_core::index::ReadAs;
use larder_core::status::Refusal;
use larder_format::PageKey;
use larder_seal::KeyringError;

use super::LocalStore;
use crate::api::GetPage;
use crate::catalog::Catalog;
use crate::keys::Slots;
use crate::volume::Volumes;

impl LocalStore {
    /// Whether the store is encrypted.
    pub(crate) fn is_sealed(&self) -> bool {
        self.local.keys.is_some()
    }

    /// In an encrypted store: gives the tenant of a namespace a key, if it has none. Its first page
    /// is written after the key is durable on all volumes.
    pub(super) fn give_key(&self, namespace: NamespaceId) -> Result<(), Refusal> {
        let Some(keys) = &self.local.keys else {
            return Ok(());
        };
        let tenant = self.local.shape(namespace).and_then(|shape| shape.tenant);
        let Some(tenant) = tenant.filter(|tenant| !tenant.has_key()) else {
            return Ok(());
        };
        let mut volumes = self.volumes.try_lock().ok_or(Refusal::Busy)?;
        if tenant.has_key() {
            return Ok(());
        }
        let refused = |error: &dyn std::error::Error, why| {
            self.data.notices.keyless(error);
            why
        };
        let Some(next) = tenant.added(processes::unix_ms() / 1000) else {
            return Ok(());
        };
        let next = next.map_err(|error| match error {
            KeyringError::Full => refused(&error, Refusal::KeyringFull),
            error => refused(&error, Refusal::ReadOnlyService),
        })?;
        let sync = |_: &Volumes, volume| match planted!(KeyAfterPage) {
            true => Ok(()),
            false => self.local.sync_beside(volume),
        };
        let written = volumes.set_keyring(self.data.disk.as_ref(), next.copy(), sync);
        if let Err(error) = written {
            keys.skip_generation();
            return Err(refused(&error, Refusal::ReadOnlyService));
        }
        keys.settle(next);
        Ok(())
    }

    /// The slots of the keys that a client of a namespace gets. A new tenant gets one `for_put`.
    pub(crate) fn slots_for(
        &self,
        namespace: NamespaceId,
        for_put: bool,
    ) -> Result<Slots, Refusal> {
        let _gate = self.enter().ok_or(Refusal::Closed)?;
        if for_put {
            self.give_key(namespace)?;
        }
        let tenant = self.local.shape(namespace).and_then(|shape| shape.tenant);
        let slots = tenant.map(|tenant| tenant.slots()).transpose();
        slots.map(Option::unwrap_or_default).map_err(|error| {
            self.data.notices.keyless(&error);
            Refusal::ReadOnlyService
        })
    }

    /// The keys of these slots, in a pipe.
    pub(crate) fn pass_keys(&self, slots: &[NonZeroU16]) -> Option<OwnedFd> {
        let passed = self.local.keys.as_ref()?.pass(slots);
        passed
            .inspect_err(|error| self.data.notices.keyless(error))
            .ok()
    }

    /// Reads and verifies a page. If it is damaged it is forgotten.
    pub(crate) fn check_page(&self, namespace: NamespaceId, key: &PageKey) {
        let Some(shape) = self.local.shape(namespace) else {
            return;
        };
        let sizes = shape.shape.part_sizes().iter();
        let mut memory: Vec<Vec<u8>> = sizes.map(|bytes| vec![0; *bytes as usize]).collect();
        let mut parts: Vec<_> = memory
            .iter_mut()
            .map(|part| IoSliceMut::new(part))
            .collect();
        let page = GetPage {
            key: *key,
            parts: &mut parts,
        };
        self.read(namespace, &mut [page], None, ReadAs::Check);
    }
}
