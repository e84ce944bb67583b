//! The client of the object store alone, for a comparison: it moves bytes between the server and
//! memory, without runs, seals and a store.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::{Either, select};
use futures_util::{StreamExt, TryStreamExt, stream};
use object_store::{ObjectStoreExt, PutPayload};

use super::S3;
use crate::error::RemoteError;

/// Interval at which requests are looked at to be stopped.
const LOOK: Duration = Duration::from_millis(50);

impl S3 {
    /// Puts objects with this content, so many at once. `None` when it was stopped.
    ///
    /// # Errors
    /// [`RemoteError`].
    pub fn put_alone(
        &self,
        names: &[String],
        content: Vec<u8>,
        at_once: usize,
        deadline: Instant,
        is_stopped: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Result<Option<()>, RemoteError> {
        let store = Arc::clone(&self.store);
        let paths: Vec<_> = names.iter().map(|name| self.path(name)).collect();
        let content = PutPayload::from(content);
        let puts = async move {
            stream::iter(paths)
                .map(|path| {
                    let (store, content) = (Arc::clone(&store), content.clone());
                    async move { store.put(&path, content).await }
                })
                .buffer_unordered(at_once)
                .try_for_each(|_| std::future::ready(Ok(())))
                .await
        };
        self.call(deadline, unless(is_stopped, puts))
    }

    /// Gets objects, so many at once. Returns their bytes in all, or `None` when it was stopped.
    ///
    /// # Errors
    /// [`RemoteError`].
    pub fn get_alone(
        &self,
        names: &[String],
        at_once: usize,
        deadline: Instant,
        is_stopped: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Result<Option<u64>, RemoteError> {
        let store = Arc::clone(&self.store);
        let paths: Vec<_> = names.iter().map(|name| self.path(name)).collect();
        let gets = async move {
            stream::iter(paths)
                .map(|path| {
                    let store = Arc::clone(&store);
                    async move { store.get(&path).await?.bytes().await }
                })
                .buffer_unordered(at_once)
                .try_fold(0, |sum, content| {
                    std::future::ready(Ok(sum + content.len() as u64))
                })
                .await
        };
        self.call(deadline, unless(is_stopped, gets))
    }

    /// Removes objects that [`S3::put_alone`] made.
    ///
    /// # Errors
    /// [`RemoteError`].
    pub fn remove_alone(&self, names: &[String], deadline: Instant) -> Result<(), RemoteError> {
        let store = Arc::clone(&self.store);
        let paths: Vec<_> = names.iter().map(|name| self.path(name)).collect();
        self.call(deadline, async move {
            for path in &paths {
                super::absent(store.delete(path).await)?;
            }
            Ok(())
        })
    }
}

/// The outcome of requests, or `None` when they were stopped.
async fn unless<T>(
    is_stopped: impl Fn() -> bool,
    requests: impl Future<Output = object_store::Result<T>>,
) -> object_store::Result<Option<T>> {
    let stop = async {
        while !is_stopped() {
            tokio::time::sleep(LOOK).await;
        }
    };
    match select(pin!(requests), pin!(stop)).await {
        Either::Left((outcome, _)) => outcome.map(Some),
        Either::Right(_) => Ok(None),
    }
}
