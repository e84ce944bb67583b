//! Fetches: a run, out of the remote and into the store.

use std::sync::atomic::Ordering;
use std::time::Duration;

use larder_base::runtime::Instant;
use larder_engine::{PageStore, PutOptions};

use super::Agent;
use super::counts::Count;
use super::desk::{End, Fetch};
use super::speed::arrived;
use crate::buffer::Buffer;
use crate::keys::Trust;
use crate::local;
use crate::planted::planted;
use crate::run::{self, RunName};

/// Longest wait of a put for room.
const PUT_WAIT: Duration = Duration::from_secs(1);

impl Agent {
    /// Fetches a run into the store, and notes the end.
    pub(super) fn bring(&self, fetch: &Fetch, store: &dyn PageStore) {
        let end = match self.fetch(fetch) {
            Ok(object) => self.take(&fetch.run.name, &object, store),
            Err(end) => end,
        };
        self.desk.lock().ended(fetch, end);
        // There may be room for others.
        self.work.notify_all();
        self.changed.notify_all();
    }

    fn fetch(&self, fetch: &Fetch) -> Result<Buffer, End> {
        let run = &fetch.run;
        let bytes_max = usize::try_from(run.flight.bytes).unwrap_or(usize::MAX);
        let fetched = self.remote.fetch(&run.name, bytes_max, self.deadline());
        let bytes = arrived(&fetched);
        self.desk.lock().answered(fetch, bytes, Instant::now());
        // The next request, while this object is stored.
        self.work.notify_all();
        let object = match fetched {
            Ok(Some(object)) => object,
            Ok(None) => {
                self.succeeded();
                self.count(Count::RunsGone, 1);
                return Err(End::Gone);
            }
            Err(error) => {
                self.count(Count::FetchesFailed, 1);
                if !self.is_of_object(&error) {
                    return Err(End::GivenUp);
                }
                self.left_out(&run.name, &error);
                return Err(End::Unreadable);
            }
        };
        self.succeeded();
        self.count(Count::RunsFetched, 1);
        self.count(Count::BytesFetched, object.len() as u64);
        Ok(object)
    }

    /// Puts the good pages of an object into the store.
    fn take(&self, name: &RunName, object: &[u8], store: &dyn PageStore) -> End {
        let trust = match planted!(UnsealedPage) {
            true => &Trust::Unsigned,
            false => &self.options.trust,
        };
        let opened = run::open(object, name, trust);
        let (good, faulty): (Vec<_>, Vec<_>) =
            opened.pages.iter().partition(|page| page.payload.is_ok());
        let is_faulty = opened.fault.is_some() || !faulty.is_empty();
        self.count(Count::RunsFaulty, u64::from(opened.fault.is_some()));
        self.count(Count::PagesFaulty, faulty.len() as u64);
        if is_faulty && !self.threads.has_warned.swap(true, Ordering::Relaxed) {
            let page = faulty.iter().find_map(|page| page.payload.err());
            let fault = opened.fault.as_ref().map(ToString::to_string);
            let reason = fault.or(page.map(|page| page.to_string()));
            tracing::warn!(
                run = %name,
                "pages of the remote are not taken: {}; `larder remote verify` lists all (logged \
                 once)",
                reason.unwrap_or_default()
            );
        }
        if let Some(namespace) = &opened.namespace
            && let Ok(id) = store.namespace(namespace)
        {
            let options = PutOptions::waiting(PUT_WAIT);
            let statuses = local::put(store, id, namespace.shape(), &good, options);
            let stored = statuses.iter().filter(|status| status.is_present()).count();
            self.count(Count::PagesStored, stored as u64);
            self.count(Count::PagesRefused, (statuses.len() - stored) as u64);
        }
        if is_faulty { End::Faulty } else { End::Stored }
    }
}
