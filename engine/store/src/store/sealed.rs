//! The keys of an encrypted store: for new tenants, and for clients.

use std::io::IoSliceMut;
use std::num::NonZeroU16;
use std::os::fd::OwnedFd;
use std::time::Duration;

use larder_base::ids::NamespaceId;
use larder_base::planted;
use larder_base::runtime::Instant;
use larder_base::system::processes;
use larder_core::index::ReadAs;
use larder_core::status::Refusal;
use larder_format::PageKey;
#[cfg(feature = "simulated")]
use larder_seal::WrappingKey;
use larder_seal::{Keyring, KeyringError};

use super::LocalStore;
use crate::api::{GetPage, PutOptions};
use crate::catalog::Catalog;
use crate::error::StoreError;
use crate::keys::{KeyUse, Slots};
use crate::volume::Volumes;

impl LocalStore {
    /// Whether the store is encrypted.
    pub(crate) fn is_sealed(&self) -> bool {
        self.local.keys.is_some()
    }

    /// Before a put: see `give_key`.
    pub(super) fn give_key_for(
        &self,
        namespace: NamespaceId,
        options: PutOptions,
    ) -> Result<(), Refusal> {
        self.give_key(namespace, options.made_unix_s, options.wait)
    }

    /// In an encrypted store: gives the tenant of a namespace a key for pages that were made at
    /// this time, if it has none. Its first page is written after the key is durable on all
    /// volumes. It waits so long, at most, for another thread that has the volumes; longer is
    /// [`Refusal::Busy`]. For the device it waits as for each write.
    fn give_key(
        &self,
        namespace: NamespaceId,
        made_unix_s: Option<u64>,
        wait: Duration,
    ) -> Result<(), Refusal> {
        let Some(keys) = &self.local.keys else {
            return Ok(());
        };
        let Some(tenant) = self.local.shape(namespace).and_then(|shape| shape.tenant) else {
            return Ok(());
        };
        if !tenant.takes(made_unix_s) {
            return Err(Refusal::Erased);
        }
        if tenant.has_key() {
            return Ok(());
        }
        if tenant.is_erasing() {
            return Err(Refusal::Erased);
        }
        let until = Instant::now().checked_add(wait);
        let volumes = match until {
            Some(until) => self.volumes.lock_until(until),
            None => Some(self.volumes.lock()),
        };
        let mut volumes = volumes.ok_or(Refusal::Busy)?;
        // Erased, or given a key, since.
        if !tenant.takes(made_unix_s) {
            return Err(Refusal::Erased);
        }
        if tenant.has_key() {
            return Ok(());
        }
        let refused = |error: &dyn std::error::Error, why| {
            self.data.notices.keyless(error);
            why
        };
        let oldest = self.local.with_core_in_turn(|core| core.generation_floor());
        let Some(next) = tenant.added(oldest, processes::unix_ms() / 1000) else {
            return Ok(());
        };
        let next = next.map_err(|error| match error {
            KeyringError::Full => refused(&error, Refusal::KeyringFull),
            error => refused(&error, Refusal::ReadOnlyService),
        })?;
        self.write_keyring(&mut volumes, &next, planted!(KeyAfterPage))
            .map_err(|error| refused(&error, Refusal::ReadOnlyService))?;
        keys.settle(next);
        Ok(())
    }

    /// Makes the next keyring durable on all volumes, unless it `hurries`.
    fn write_keyring(
        &self,
        volumes: &mut Volumes,
        next: &Keyring,
        hurries: bool,
    ) -> Result<(), StoreError> {
        let sync = |_: &Volumes, volume| match hurries {
            true => Ok(()),
            false => self.local.sync_beside(volume),
        };
        let written = volumes.set_keyring(self.data.disk.as_ref(), next.copy(), sync);
        if let (Err(_), Some(keys)) = (&written, &self.local.keys) {
            keys.skip_past(next);
        }
        written
    }

    /// Replaces the key that wraps the master key.
    #[cfg(feature = "simulated")]
    pub(super) fn replace_wrap(
        &self,
        former: &WrappingKey,
        wrapping: &WrappingKey,
    ) -> Result<(), StoreError> {
        let _gate = self.enter_to_write()?;
        let Some(keys) = &self.local.keys else {
            return Ok(());
        };
        let mut volumes = self.volumes.lock();
        let next = keys.rewrapped(former, wrapping);
        let next = next.map_err(|error| StoreError::Keyring {
            path: volumes.first_path(),
            reason: error.to_string(),
        })?;
        self.write_keyring(&mut volumes, &next, false)?;
        keys.settle(next);
        Ok(())
    }

    /// Erases a tenant: its keys, and with them its pages. Returns the slots of the keys, and how
    /// many pages they had. Before it returns, the keyring without the keys is durable on all
    /// volumes, and no call of this process has them. A crash leaves the tenant erased or whole.
    pub(crate) fn erase(&self, tenant: &str) -> Result<(Vec<NonZeroU16>, u64), StoreError> {
        let _gate = self.enter_to_write()?;
        let Some(keys) = &self.local.keys else {
            return Err(StoreError::Usage(
                "the store is not encrypted, and has no tenants to erase".to_owned(),
            ));
        };
        // No key is added meanwhile.
        let mut volumes = self.volumes.lock();
        let run = volumes.superblock().run;
        let erasing = keys
            .erase(tenant, run)
            .map_err(|error| StoreError::Keyring {
                path: volumes.first_path(),
                reason: error.to_string(),
            })?;
        if erasing.slots.is_empty() {
            return Ok((Vec::new(), 0));
        }
        self.write_keyring(&mut volumes, &erasing.next, planted!(HastyErasure))?;
        let (mut pages, mut step) = (0, Some(0));
        while let Some(from) = step {
            let (some, next) = self
                .local
                .with_core_by_turns(|core| core.erase_some(&erasing.slots, from));
            pages += some;
            step = next;
        }
        keys.settle(erasing.next.clone());
        Ok((erasing.slots.clone(), pages))
    }

    /// The slots of the keys that a client of a namespace gets. A new tenant gets one for a put.
    pub(crate) fn slots_for(
        &self,
        namespace: NamespaceId,
        use_of: KeyUse,
    ) -> Result<Slots, Refusal> {
        let _gate = self.enter().ok_or(Refusal::Closed)?;
        match use_of {
            KeyUse::Get => {}
            KeyUse::Put {
                made_unix_s,
                wait_ms,
            } => self.give_key(namespace, made_unix_s, Duration::from_millis(wait_ms))?,
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
