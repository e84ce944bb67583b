//! Runs on their way to the remote.

use larder_base::runtime::Instant;
use larder_format::{Fingerprint, KeyPrefix, PageKey};

use super::{Desk, Noted};
use crate::run::{RunName, RunPage};

/// A run that is to be published.
pub(in crate::agent) struct Outgoing {
    pub(in crate::agent) namespace: Fingerprint,
    pub(in crate::agent) pages: Vec<RunPage>,
    /// Not before this moment.
    pub(in crate::agent) due: Instant,
    /// Failed attempts.
    pub(in crate::agent) tries: u32,
}

impl Outgoing {
    fn last(&self) -> PageKey {
        // A run has pages.
        let last = self.pages.last().map(|page| page.key);
        last.unwrap_or(PageKey::from_bytes([0; 32]))
    }

    /// Its namespace and the key of its last page: in the remote it may have other names.
    pub(super) fn id(&self) -> (Fingerprint, KeyPrefix) {
        (self.namespace, self.last().prefix())
    }
}

impl Desk {
    /// Queues the run that ends in a page, if it is whole and not in the remote.
    pub(super) fn note(
        &mut self,
        namespace: Fingerprint,
        last: &PageKey,
        due: Instant,
        noted: &mut Noted,
    ) {
        let Some(space) = self.spaces.get(&namespace) else {
            return;
        };
        let (run_pages, id) = (space.run_pages.get(), (namespace, last.prefix()));
        let pages = self
            .chains
            .depth(&id)
            .and_then(|depth| depth.checked_add(1));
        let is_end = pages.is_some_and(|pages| pages.is_multiple_of(run_pages));
        let run = space.names.name(last);
        // A lookup finds many runs that the remote has: their pages are not collected.
        if !is_end || self.note_there(run, due, noted) {
            return;
        }
        if let Some(pages) = self.chains.run(&id, run_pages) {
            self.note_run(namespace, pages, due, noted);
        }
    }

    /// Queues a run of stored pages.
    pub(in crate::agent) fn offer(
        &mut self,
        namespace: Fingerprint,
        pages: Vec<RunPage>,
        now: Instant,
    ) -> Noted {
        let mut noted = Noted::default();
        self.note_run(namespace, pages, now, &mut noted);
        noted
    }

    fn note_run(
        &mut self,
        namespace: Fingerprint,
        pages: Vec<RunPage>,
        due: Instant,
        noted: &mut Noted,
    ) {
        let run = Outgoing {
            namespace,
            pages,
            due,
            tries: 0,
        };
        let Some(name) = self.name_of(&run) else {
            return;
        };
        if self.is_closed || self.note_there(name, due, noted) || !self.queued.insert(run.id()) {
            return;
        }
        noted.queued += 1;
        noted.dropped += self.queue(run);
    }

    /// The name of the object of a run; `None` if its namespace is not in use any more.
    pub(super) fn name_of(&self, run: &Outgoing) -> Option<RunName> {
        let space = self.spaces.get(&run.namespace)?;
        Some(space.names.name(&run.last()))
    }

    /// Whether the remote has a run. Its use is noted then.
    fn note_there(&mut self, run: RunName, now: Instant, noted: &mut Noted) -> bool {
        let id = run.id();
        let is_there = self.names.has(id, now);
        if is_there && self.names.knows(id) && self.touch(run, now) {
            noted.touched += 1;
        }
        is_there
    }

    /// A run that the remote has is used. Returns whether that is to be marked.
    pub(super) fn touch(&mut self, run: RunName, now: Instant) -> bool {
        // Without a budget for objects the remote is only read.
        self.day.is_any() && self.touches.note(run, now)
    }
}
