//! The calls of clients, for a recording: a request, and what its reply says.

use larder_base::ids::NamespaceId;
use larder_core::index::ReadAs;
use larder_format::PageKey;

use super::session::Session;
use super::shared::Shared;
use crate::share::keys::keys_of;
use crate::share::wire::{Failure, PageKeyBytes, PlaceGrant, Reply, Request};
use crate::traffic::{Chain, Kind, Salt, chains};

/// A request that a recording has.
pub(super) struct Noted<'a> {
    kind: Kind,
    namespace: NamespaceId,
    keys: &'a [PageKey],
    /// Of a put: one for each key.
    parents: Vec<Option<PageKeyBytes>>,
}

impl<'a> Noted<'a> {
    fn of(request: &Request<'a>) -> Option<Noted<'a>> {
        let (kind, namespace, keys, links) = match request {
            Request::LongestPrefix { namespace, keys } | Request::Contains { namespace, keys } => {
                (Kind::Lookup, namespace, keys, None)
            }
            Request::Pin {
                namespace,
                keys,
                read_as: ReadAs::Use,
            }
            | Request::Stage { namespace, keys } => (Kind::Get, namespace, keys, None),
            Request::Reserve {
                namespace,
                keys,
                links,
            }
            | Request::ReserveHinted {
                namespace,
                keys,
                links,
                ..
            } => (Kind::Put, namespace, keys, Some(links)),
            _ => return None,
        };
        let links = links.into_iter().flatten();
        Some(Noted {
            kind,
            namespace: NamespaceId(*namespace),
            keys: keys_of(keys)?,
            parents: links.map(|link| link.parent).collect(),
        })
    }
}

impl Shared {
    /// The request, if it is recorded.
    pub(super) fn noted<'a>(&self, request: &Request<'a>) -> Option<Noted<'a>> {
        let is_recorded = self.store.local.traffic.is_recorded();
        is_recorded.then(|| Noted::of(request)).flatten()
    }

    /// Records a request with its reply.
    pub(super) fn note(&self, session: &Session, noted: &Noted<'_>, reply: Option<&Reply>) {
        let Some(shape) = self.store.catalog().shape(noted.namespace) else {
            return;
        };
        let note = |keys, found, parent: Option<&PageKey>| {
            self.store.local.traffic.note(Chain {
                kind: noted.kind,
                by: Some(session.id),
                namespace: shape.fingerprint,
                parent,
                keys,
                found,
            });
        };
        let leading = |flags: &mut dyn Iterator<Item = bool>| flags.take_while(|is| *is).count();
        match reply {
            Some(Reply::Count(found)) => {
                note(noted.keys, usize::try_from(*found).unwrap_or(0), None);
            }
            Some(Reply::Flags(flags)) => {
                note(noted.keys, leading(&mut flags.iter().copied()), None);
            }
            Some(Reply::Pinned(pages)) => note(noted.keys, pages.iter().flatten().count(), None),
            Some(Reply::Staged { pages, .. }) => {
                note(noted.keys, pages.iter().flatten().count(), None);
            }
            Some(Reply::Reserved { grants, .. }) => {
                let parents = noted.parents.iter();
                let parents: Vec<_> = parents.map(|of| of.map(PageKey::from_bytes)).collect();
                let is_added = |grant: &PlaceGrant| match grant {
                    PlaceGrant::Write(_) => Some(true),
                    PlaceGrant::Settles => Some(false),
                    PlaceGrant::Refused(_) => None,
                };
                // A refused page, and all behind it, are asked for again, or not stored.
                let added: Vec<bool> = grants.iter().map_while(is_added).collect();
                chains(noted.keys, &parents, &added, note);
            }
            _ => {}
        }
    }

    /// Answers a process that records.
    pub(super) fn record(&self, session: &Session, salt: Salt) -> Reply {
        match self.store.local.traffic.take(session.id, salt) {
            Ok(taken) => Reply::Recorded(taken),
            Err(_) => Reply::Failed(Failure::Recorded),
        }
    }
}
