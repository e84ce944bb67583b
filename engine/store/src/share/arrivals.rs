//! Reads of pages that are on their way from a place beneath the store (see [`crate::beneath`]).
//!
//! A client does not know which pages are on their way: if a read misses some, it asks the owner
//! to wait for them. An owner without such a place is asked once.

use std::sync::Arc;
use std::time::Duration;

use larder_base::ids::NamespaceId;
use larder_base::runtime::Instant;
use larder_core::index::ReadAs;
use larder_core::status::{GetStatus, MissReason};
use larder_format::PageKey;

use super::Store;
use super::remote::Remote;
use super::role::Decider;
use crate::api::GetPage;
use crate::store::LocalStore;

/// Longest wait for pages of a read without a deadline.
const PATIENCE: Duration = Duration::from_secs(10);

/// The process that waits.
enum Waiter {
    This(Arc<LocalStore>, NamespaceId),
    Owner(Arc<Remote>, NamespaceId),
}

impl Store {
    /// Reads once more the pages that a read missed and that have arrived since.
    pub(super) fn get_arrived(
        &self,
        namespace: NamespaceId,
        pages: &mut [GetPage<'_, '_>],
        statuses: &mut [GetStatus],
        deadline: Option<Instant>,
        read_as: ReadAs,
    ) {
        let is_absent = |status: &GetStatus| *status == GetStatus::Miss(MissReason::Absent);
        let absent = pages.iter().zip(&*statuses);
        let absent: Vec<PageKey> = absent
            .filter(|(_, status)| is_absent(status))
            .map(|(page, _)| page.key)
            .collect();
        if !self.arrive(namespace, &absent, deadline) {
            return;
        }
        let (mut left, mut of_left) = (Vec::new(), Vec::new());
        for (page, status) in pages.iter_mut().zip(statuses) {
            if is_absent(status) {
                let parts = &mut *page.parts;
                let key = page.key;
                left.push(GetPage { key, parts });
                of_left.push(status);
            }
        }
        let again = self.inner.with(namespace, |decider, space| {
            decider.get(space, &mut left, deadline, read_as)
        });
        for (status, again) in of_left.into_iter().zip(again.into_iter().flatten()) {
            *status = again;
        }
    }

    /// Waits until these pages have arrived, or until the deadline. Returns whether one is stored
    /// then.
    fn arrive(&self, namespace: NamespaceId, keys: &[PageKey], deadline: Option<Instant>) -> bool {
        if keys.is_empty() {
            return false;
        }
        // Found under the lock of the role, which a wait would hold.
        let waiter = self.inner.with(namespace, |decider, space| match decider {
            Decider::Owner(owner) => Some(Waiter::This(owner.store.clone(), space.id)),
            Decider::Client(client) => {
                let remote = client.remote.clone();
                let may = remote.may_have_beneath();
                may.then_some(Waiter::Owner(remote, space.id))
            }
        });
        let until = deadline.unwrap_or_else(|| Instant::now() + PATIENCE);
        match waiter.flatten() {
            Some(Waiter::This(store, id)) => store.local.arrive(id, keys, until) == Some(true),
            Some(Waiter::Owner(remote, id)) => remote.arrive(id, keys, until),
            None => false,
        }
    }
}
