//! Fetches: a run, out of the remote and into the store.

use std::sync::atomic::Ordering;
use std::time::Duration;

use larder_base::runtime::Instant;
use larder_engine::{PageStore, PutOptions};
use larder_format::PageKey;

use super::Agent;
use super::counts::Count;
use super::desk::{End, Fetch, Incoming};
use super::speed::arrived;
use crate::buffer::Buffer;
use crate::local::{self, Put};
use crate::run;

/// The fault of a run that lacks pages of its lookup.
const OTHER_TOKENS: &str =
    "it has fewer pages than the runs of this node: `l4_run_tokens` must be the same on all nodes";

/// Longest wait of a put for room.
const PUT_WAIT: Duration = Duration::from_secs(1);

impl Agent {
    /// Fetches a run into the store, and notes the end.
    pub(super) fn bring(&self, fetch: &Fetch, store: &dyn PageStore) {
        let end = match self.fetch(fetch) {
            Ok(mut object) => self.take(&fetch.run, &mut object, store),
            Err(end) => end,
        };
        self.desk.lock().ended(fetch, end, Instant::now());
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
                return Err(End::Failed);
            }
        };
        self.succeeded();
        self.count(Count::RunsFetched, 1);
        self.count(Count::BytesFetched, object.len() as u64);
        Ok(object)
    }

    /// Puts the good pages of an object into the store.
    fn take(&self, run: &Incoming, object: &mut [u8], store: &dyn PageStore) -> End {
        let opened = run::open(object, &run.name, &self.options.trust);
        let mut fault = opened.fault.as_ref().map(ToString::to_string);
        let has = |key: &PageKey| opened.pages.iter().any(|opened| opened.page.key == *key);
        if fault.is_none() && !run.pages.iter().all(has) {
            fault = Some(OTHER_TOKENS.to_owned());
        }
        let put = opened.namespace.as_ref().and_then(|namespace| {
            let id = store.namespace(namespace).ok()?;
            let options = PutOptions::waiting(PUT_WAIT).made_at(opened.created_unix_s);
            local::put(store, id, namespace.shape(), &opened.pages, options).ok()
        });
        let Put { statuses, faulty } = put.unwrap_or_default();
        let is_faulty = fault.is_some() || !faulty.is_empty();
        self.count(Count::RunsFaulty, u64::from(fault.is_some()));
        self.count(Count::PagesFaulty, faulty.len() as u64);
        if is_faulty && !self.threads.has_warned.swap(true, Ordering::Relaxed) {
            let reason = fault.or(faulty.first().map(ToString::to_string));
            tracing::warn!(
                run = %run.name,
                "pages of the remote are not taken: {}; `larder remote verify` lists all (logged \
                 once)",
                reason.unwrap_or_default()
            );
        }
        let stored = statuses.iter().filter(|status| status.is_present()).count();
        let refused = opened.pages.len() - faulty.len() - stored;
        self.count(Count::PagesStored, stored as u64);
        self.count(Count::PagesRefused, refused as u64);
        if refused > 0 && !self.threads.has_refused.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                run = %run.name,
                "the store refused {refused} pages of the remote: it has no room for them, or its \
                 disk is too slow; the run is fetched again after a pause (logged once)"
            );
        }
        match is_faulty || refused > 0 {
            true => End::Failed,
            false => End::Stored,
        }
    }
}
