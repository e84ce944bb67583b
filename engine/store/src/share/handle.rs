//! The calls of a handle. Each goes to the store of this process, or to the owner over a
//! connection.

use larder_base::ids::NamespaceId;
use larder_base::runtime::{Instant, after};
use larder_core::hint::Hint;
use larder_core::index::ReadAs;
use larder_core::status::{GetStatus, MissReason, PutStatus};
use larder_format::{Namespace, PageKey};

use super::role::{Client, Decider, Role};
use super::{LEFT_UNDONE, Store};
use crate::api::{Count, GetPage, PageStore, PutOptions, PutPage, Recall, Stats};
use crate::catalog::Catalog;
use crate::error::StoreError;

impl Store {
    /// The pages of a get, not counted yet.
    fn read(
        &self,
        namespace: NamespaceId,
        pages: &mut [GetPage<'_, '_>],
        deadline: Option<Instant>,
        read_as: ReadAs,
    ) -> Vec<GetStatus> {
        let count = pages.len();
        let mut statuses = self
            .inner
            .with(namespace, |decider, space| {
                decider.get(space, pages, deadline, read_as)
            })
            .unwrap_or_else(|| vec![GetStatus::Miss(MissReason::Closed); count]);
        self.get_arrived(namespace, pages, &mut statuses, deadline, read_as);
        statuses
    }
}

impl PageStore for Store {
    fn namespace(&self, namespace: &Namespace) -> Result<NamespaceId, StoreError> {
        if self.inner.origin.is_inherited() {
            return Err(StoreError::Forked);
        }
        let id = self.inner.spaces.lock().id(namespace)?;
        let role = self.inner.role();
        let decider = role.as_deref().and_then(Role::decider);
        let is_alone = decider.is_some_and(Decider::is_alone);
        match decider.map(|decider| self.inner.resolve(decider, id)) {
            Some(Err(error)) if is_alone => Err(error),
            Some(Err(error @ StoreError::TooManyNamespaces(_))) => Err(error),
            // Without an owner, the namespace is registered as soon as there is one.
            _ => Ok(id),
        }
    }

    /// Pages that an owner left undone when it went are put once more with the next owner, if there
    /// is one within `options.wait`.
    fn put_recallable(
        &self,
        namespace: NamespaceId,
        pages: &[PutPage<'_>],
        options: PutOptions,
        recall: Option<&Recall>,
    ) -> Vec<PutStatus> {
        let until = after(options.wait);
        let is_undone = |status: &PutStatus| *status == LEFT_UNDONE;
        self.steadily(
            until,
            |statuses: &Vec<PutStatus>| statuses.iter().any(is_undone),
            |former| {
                let mut statuses = former.unwrap_or_else(|| vec![LEFT_UNDONE; pages.len()]);
                let first = statuses.iter().position(is_undone).unwrap_or(0);
                let wait = until.saturating_duration_since(Instant::now());
                let options = PutOptions { wait, ..options };
                let again = self.inner.put(namespace, &pages[first..], options, recall);
                for (status, again) in statuses[first..].iter_mut().zip(again) {
                    if !status.is_present() {
                        *status = again;
                    }
                }
                statuses
            },
        )
    }

    fn get(
        &self,
        namespace: NamespaceId,
        pages: &mut [GetPage<'_, '_>],
        deadline: Option<Instant>,
    ) -> Vec<GetStatus> {
        let statuses = self.read(namespace, pages, deadline, ReadAs::Use);
        self.inner.with(namespace, |decider, space| match decider {
            Decider::Owner(own) => own.store.count_read(space.id, &statuses),
            Decider::Client(client) => client.counted(|remote, data| {
                data.count_read(&**remote, space.id, &statuses);
            }),
        });
        statuses
    }

    fn get_uncounted(
        &self,
        namespace: NamespaceId,
        pages: &mut [GetPage<'_, '_>],
        deadline: Option<Instant>,
    ) -> Vec<GetStatus> {
        self.read(namespace, pages, deadline, ReadAs::Check)
    }

    /// A client sends the owner its counts with those of its next get or put, and once a second.
    fn count(&self, namespace: NamespaceId, count: Count) {
        self.inner.with(namespace, |decider, space| match decider {
            Decider::Owner(own) => own.store.count(space.id, count),
            Decider::Client(Client { remote, data, .. }) => data.count(&**remote, space.id, count),
        });
    }

    fn longest_prefix(&self, namespace: NamespaceId, keys: &[PageKey]) -> usize {
        self.inner
            .with(namespace, |decider, space| match decider {
                Decider::Owner(own) => own.store.longest_prefix(space.id, keys),
                Decider::Client(Client { remote, data, .. }) => {
                    data.longest_prefix(&**remote, space.id, keys)
                }
            })
            .unwrap_or(0)
    }

    fn contains(&self, namespace: NamespaceId, keys: &[PageKey]) -> Vec<bool> {
        self.inner
            .with(namespace, |decider, space| match decider {
                Decider::Owner(own) => own.store.contains(space.id, keys),
                Decider::Client(Client { remote, data, .. }) => {
                    data.contains(&**remote, space.id, keys)
                }
            })
            .unwrap_or_else(|| vec![false; keys.len()])
    }

    fn touch(&self, namespace: NamespaceId, keys: &[PageKey], hint: Hint) {
        self.inner.with(namespace, |decider, space| match decider {
            Decider::Owner(own) => own.store.touch(space.id, keys, hint),
            Decider::Client(client) => client.remote.touch(space.id, keys, hint),
        });
    }

    fn delete(&self, namespace: NamespaceId, keys: &[PageKey]) -> Result<u64, StoreError> {
        self.inner
            .with(namespace, |decider, space| match decider {
                Decider::Owner(own) => own.store.delete(space.id, keys),
                Decider::Client(client) => client.remote.delete(space.id, keys),
            })
            .unwrap_or_else(|| Err(self.inner.unavailable()))
    }

    fn clear_namespace(&self, namespace: NamespaceId) -> Result<u64, StoreError> {
        self.inner
            .with(namespace, |decider, space| match decider {
                Decider::Owner(own) => own.store.clear_namespace(space.id),
                Decider::Client(client) => client.remote.clear_namespace(space.id),
            })
            .unwrap_or_else(|| Err(self.inner.unavailable()))
    }

    fn flush(&self) -> Result<(), StoreError> {
        match self.inner.role().as_deref() {
            Some(Role::Owner(owner)) => owner.store.flush(),
            Some(Role::Client(client)) => client.data.flush(&*client.remote),
            Some(Role::Nobody | Role::Closed) | None => Err(self.inner.unavailable()),
        }
    }

    /// Registers with the present disk of this process. After a change of owner, memory registered
    /// before may be used as plain memory.
    fn register(&self, memory: &'static mut [u8]) -> (&'static mut [u8], String) {
        match self.inner.role().as_deref() {
            Some(Role::Owner(owner)) => owner.store.register(memory),
            Some(Role::Client(client)) => client.data.register(memory),
            Some(Role::Nobody | Role::Closed) | None => {
                let why = self.inner.unavailable();
                (memory, format!("not registered: {why}"))
            }
        }
    }

    /// The owner's counters, with this process's own hits, misses, bytes read and latencies.
    fn stats(&self) -> Stats {
        match self.inner.role().as_deref() {
            Some(Role::Owner(owner)) => owner.store.stats(),
            Some(Role::Client(client)) => {
                let mut stats = client.remote.stats();
                client.data.count_into(&mut stats);
                stats
            }
            Some(Role::Nobody | Role::Closed) | None => Stats::default(),
        }
    }

    /// A client flushes and leaves. An owner that serves others disconnects its clients and closes
    /// the store. A client whose owner has gone has nothing to flush: an owner that ends makes its
    /// pages durable, and the next owner recovers the pages of an owner that was killed.
    fn close(&self) -> Result<(), StoreError> {
        if self.inner.origin.is_inherited() {
            return Err(StoreError::Forked);
        }
        self.inner.bell.stop();
        if let Some(store) = self.inner.store_of_its_own() {
            return store.close();
        }
        // If the role is changing, there is no connection to close.
        let flushed = match self.inner.role().as_deref() {
            Some(Role::Client(client)) if !client.remote.is_lost() => {
                client.send_measures();
                let flushed = client.remote.flush();
                client.remote.hang_up();
                match flushed {
                    Err(StoreError::OwnerGone) => Ok(()),
                    flushed => flushed,
                }
            }
            _ => Ok(()),
        };
        if let Some(monitor) = self.monitor.lock().take() {
            let _ = monitor.join();
        }
        let role = std::mem::replace(&mut *self.inner.role.write(), Role::Closed);
        match role {
            Role::Owner(owner) => owner.end(&self.inner.path),
            _ => flushed,
        }
    }
}

impl Drop for Store {
    fn drop(&mut self) {
        if self.inner.origin.is_inherited() {
            // The thread and all that it holds belong to the parent.
            std::mem::forget((self.inner.clone(), self.monitor.get_mut().take()));
            return;
        }
        self.inner.bell.stop();
        if let Some(Role::Client(client)) = self.inner.role().as_deref() {
            client.remote.hang_up();
        }
        if let Some(monitor) = self.monitor.lock().take() {
            let _ = monitor.join();
        }
    }
}
