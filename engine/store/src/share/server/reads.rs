//! Reads that clients share: which process reads which page into the staging area, and which
//! processes hold which slot.
//!
//! The area is made when it is first needed: when a client asks for it, or for pages of a namespace
//! that another process has registered too. Each process reads by itself the pages of a namespace
//! that no other process has registered, and all pages if the area cannot be made.

use std::collections::BTreeMap;
use std::sync::Arc;

use larder_base::ids::NamespaceId;
use larder_base::runtime::{Mutex, OnceLock};
use larder_core::grants::Extent;
use larder_core::index::{ReadAs, SegmentId};
use larder_format::PageKey;

use super::session::Session;
use super::shared::Shared;
use crate::api::SharedReads;
use crate::share::keys::keys_of;
use crate::share::wire::{Failure, Reply, Request, StagedPage};
use crate::staging::{Area, Served, SlotEnd, Staging, StagingReport};
use crate::store::staged::{Stage, Staged};

/// The owner's staging area, and the processes that may use it.
pub(super) struct Reads {
    mode: SharedReads,
    bytes: u64,
    staging: OnceLock<Option<Staging>>,
    /// By namespace: how many processes have registered it.
    parties: Mutex<BTreeMap<u16, u32>>,
}

impl Reads {
    pub(super) fn new(mode: SharedReads, bytes: u64) -> Reads {
        Reads {
            mode,
            bytes,
            staging: OnceLock::new(),
            parties: Mutex::default(),
        }
    }

    /// The area; made here if necessary. `None` when reads are not shared.
    pub(super) fn staging(&self) -> Option<&Staging> {
        if self.mode == SharedReads::Off {
            return None;
        }
        let make = || match Area::create(self.bytes) {
            Ok(area) => Some(Staging::new(area)),
            Err(error) => {
                tracing::warn!(
                    %error,
                    "no memory to share reads through; each process reads for itself"
                );
                None
            }
        };
        self.staging.get_or_init(make).as_ref()
    }

    fn joined(&self, namespace: NamespaceId) {
        *self.parties.lock().entry(namespace.0).or_default() += 1;
    }

    fn left(&self, namespace: u16) {
        let mut parties = self.parties.lock();
        if let Some(count) = parties.get_mut(&namespace) {
            *count = count.saturating_sub(1);
        }
    }

    /// The area, for a namespace that several processes use.
    fn shared(&self, namespace: NamespaceId) -> Option<&Staging> {
        let parties = self.parties.lock().get(&namespace.0).copied();
        (parties.unwrap_or(0) > 1).then(|| self.staging()).flatten()
    }

    /// The area, if it has been made.
    pub(super) fn made(&self) -> Option<&Staging> {
        self.staging.get().and_then(Option::as_ref)
    }

    pub(super) fn report(&self) -> StagingReport {
        self.made().map(Staging::report).unwrap_or_default()
    }
}

impl Shared {
    /// Answers requests about shared reads; `None` for those without a reply. Returns other
    /// requests.
    pub(super) fn answer_reads<'a>(
        &self,
        session: &Session,
        request: Request<'a>,
    ) -> Result<Option<Reply>, Request<'a>> {
        match request {
            Request::Area => Ok(Some(match self.reads.staging() {
                Some(_) => Reply::Area,
                None => Reply::Done,
            })),
            Request::Stage { namespace, keys } => Ok(Some(match keys_of(keys) {
                Some(keys) => {
                    let (shared, pages) = self.stage(session, NamespaceId(namespace), keys);
                    Reply::Staged { shared, pages }
                }
                None => Reply::Failed(Failure::Protocol("keys are 32 bytes each".to_owned())),
            })),
            Request::Unstage { segments, slots } => {
                self.unstage(session, &segments, &slots);
                Ok(None)
            }
            other => Err(other),
        }
    }

    /// A process has registered a namespace.
    pub(super) fn named(&self, session: &Session, namespace: NamespaceId) {
        let mut held = session.reads.lock();
        if !held.gone && held.spaces.insert(namespace.0) {
            self.reads.joined(namespace);
        }
    }

    /// Pins pages. If other processes use the namespace too, gives each page a slot where there is
    /// room. Returns whether they do.
    fn stage(
        &self,
        session: &Session,
        namespace: NamespaceId,
        keys: &[PageKey],
    ) -> (bool, Vec<Option<StagedPage>>) {
        let pages = session
            .ledger
            .pin(self.store.catalog(), namespace, keys, ReadAs::Use);
        self.watch.call();
        let staging = self.reads.shared(namespace);
        let shape = self.store.catalog().shape(namespace);
        let bytes = |place| shape.as_ref().map_or(0, |shape| shape.stored_bytes(place));
        let mut held = session.reads.lock();
        let pages = keys
            .iter()
            .zip(pages)
            .map(|(key, page)| {
                let page = page?;
                let bytes = bytes(page.extent.place);
                let slot = staging.and_then(|staging| {
                    held.take(staging, namespace, key, page.proof.checksum, bytes)
                });
                Some(StagedPage {
                    page: page.into(),
                    slot,
                })
            })
            .collect();
        (staging.is_some(), pages)
    }

    /// Releases pins and slots given by `stage`, as far as the client has them.
    fn unstage(&self, session: &Session, segments: &[SegmentId], slots: &[SlotEnd]) {
        let catalog = self.store.catalog();
        session.ledger.unpin(catalog, &self.map, segments);
        let Some(staging) = self.reads.made() else {
            return;
        };
        let mut held = session.reads.lock();
        for end in slots {
            if held.let_go(end) {
                staging.give_back(end.unit, end.filled, end.served);
            }
        }
    }

    /// A client has gone. Releases the slots that it copied from. The slots that it was reading
    /// into have no waiters any more, and stay held until its reads are over
    /// ([`Shared::end_fills`]). Returns whether there are any.
    pub(super) fn leave_slots(&self, session: &Session) -> bool {
        let mut held = session.reads.lock();
        held.gone = true;
        for namespace in std::mem::take(&mut held.spaces) {
            self.reads.left(namespace);
        }
        let Some(staging) = self.reads.made() else {
            return false;
        };
        for (&unit, hold) in &mut held.slots {
            for _ in 0..std::mem::take(&mut hold.copies) {
                staging.give_back(unit, false, Served::Well);
            }
            if hold.fills {
                staging.abandon(unit);
            }
        }
        held.slots.retain(|_, hold| hold.fills);
        !held.slots.is_empty()
    }

    /// The reads of a client that has gone are over.
    pub(super) fn end_fills(&self, session: &Session) {
        let slots = std::mem::take(&mut session.reads.lock().slots);
        if let Some(staging) = self.reads.made() {
            for unit in slots.into_keys() {
                staging.give_back(unit, true, Served::Well);
            }
        }
    }
}

/// The owner's own part in shared reads: like a client's, without the socket.
pub(in crate::share) struct OwnReads {
    pub(super) shared: Arc<Shared>,
    pub(super) session: Session,
}

impl OwnReads {
    /// The owner itself has registered a namespace.
    pub(in crate::share) fn named(&self, namespace: NamespaceId) {
        self.shared.named(&self.session, namespace);
    }
}

impl Stage for OwnReads {
    fn stage(&self, namespace: NamespaceId, keys: &[PageKey]) -> (bool, Vec<Option<Staged>>) {
        let (shared, pages) = self.shared.stage(&self.session, namespace, keys);
        let pages = pages.into_iter().map(|page| {
            page.map(|StagedPage { page, slot }| Staged {
                pinned: page.on(&self.shared.map),
                slot,
            })
        });
        (shared, pages.collect())
    }

    fn unstage(&self, extents: &[Extent], slots: &[SlotEnd]) {
        let segments: Vec<SegmentId> = extents.iter().map(|extent| extent.place.segment).collect();
        self.shared.unstage(&self.session, &segments, slots);
    }

    fn area(&self, namespace: NamespaceId) -> Option<Arc<Area>> {
        self.shared
            .reads
            .shared(namespace)
            .map(|staging| staging.area.clone())
    }
}
