//! The reply to each request, and the wait that must come before it.
//!
//! Has no threads and no connections. The driver of a [`Desk`] (the server, the simulation, the
//! fuzzer) does the waiting.

use std::time::Duration;

use larder_base::ids::{ClientId, NamespaceId};
use larder_base::planted;
use larder_core::grants::{Ask, Extent, Grant, SegmentMap};
use larder_core::hint::Hint;
use larder_core::status::{PutStatus, Refusal};
use larder_format::{BLOCK_BYTES, Namespace, PageKey, Proof};

use super::ledger::{Awaited, Ledger};
use crate::catalog::{Allocator, Landed};
use crate::error::StoreError;
use crate::protocol::{Agreed, Protocol};
use crate::share::keys::keys_of;
use crate::share::wire::{
    Failure, LandedPut, Link, MAGIC, PageProof, PlaceGrant, Reply, Request, parse_greeting,
};
use crate::volume::guard::Marks;

/// Longest wait for room that one request may ask for.
const ROOM_PATIENCE_MAX: Duration = Duration::from_secs(1);

/// How a connection begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Greeting {
    /// A client's first connection, with the agreed protocol.
    First(Agreed),
    /// A further connection of this client, with its secret.
    Further(ClientId, u64),
}

/// Parses the first message of a connection to an owner that speaks `ours`.
///
/// # Errors
/// When the connection must be closed; with the last reply before hanging up, if any.
pub fn greeting(frame: &[u8], ours: &Protocol) -> Result<Greeting, Option<Reply>> {
    match parse_greeting(frame).map_err(|_| None)? {
        Request::Hello { magic, protocol } if magic == MAGIC && protocol.is_valid() => {
            ours.agree(&protocol).map(Greeting::First).ok_or_else(|| {
                Some(Reply::Failed(Failure::Version {
                    ours: ours.nearest_to(&protocol),
                    release: ours.release.clone(),
                }))
            })
        }
        Request::Join {
            magic,
            client,
            secret,
        } if magic == MAGIC => Ok(Greeting::Further(client, secret)),
        _ => Err(None),
    }
}

/// How a request is answered.
#[derive(Debug)]
pub enum Answer {
    /// With this reply.
    Reply(Reply),
    /// Without a reply.
    Nothing,
    /// After a wait.
    Later(Later),
}

/// The wait, or the question to another component, that comes before a reply.
#[derive(Debug)]
pub enum Later {
    /// [`Allocator::wait`] for each put that the core knows, then [`settled`] with the results.
    Settled(Vec<Awaited>),
    /// [`Allocator::wait_for_room`], then [`Reply::Room`].
    Room {
        /// The room counter that the client has seen.
        seen: u64,
        /// Longest wait.
        patience: Duration,
    },
    /// [`Catalog::delete`](crate::catalog::Catalog::delete), then [`count`] with the result.
    Delete(NamespaceId, Vec<PageKey>),
    /// [`Catalog::clear_namespace`](crate::catalog::Catalog::clear_namespace), then [`count`] with
    /// the result.
    Clear(NamespaceId),
    /// [`Catalog::flush`](crate::catalog::Catalog::flush), then [`done`] with the result.
    Flush,
    /// [`Reply::Stats`].
    Report,
}

/// The dispatcher: answers the requests of an owner's clients.
pub struct Desk<'a, C: ?Sized> {
    /// The owner's catalog. Only methods that never wait are called.
    pub catalog: &'a C,
    /// Maps places to extents.
    pub map: &'a SegmentMap,
    /// Which clients may have writes in flight.
    pub marks: &'a dyn Marks,
    /// Bytes of puts in flight that one client may have.
    pub share_bytes: u64,
    /// The store is encrypted.
    pub is_sealed: bool,
}

impl<C: Allocator + ?Sized> Desk<'_, C> {
    /// Answers a request of the client with this ledger.
    pub fn answer(&self, ledger: &Ledger, request: Request<'_>) -> Answer {
        let catalog = self.catalog;
        let nonsense =
            |what: &str| Answer::Reply(Reply::Failed(Failure::Protocol(what.to_owned())));
        let keys = match &request {
            Request::LongestPrefix { keys, .. }
            | Request::Contains { keys, .. }
            | Request::Peek { keys, .. }
            | Request::Touch { keys, .. }
            | Request::TouchHinted { keys, .. }
            | Request::Pin { keys, .. }
            | Request::Verified { keys, .. }
            | Request::Reserve { keys, .. }
            | Request::ReserveHinted { keys, .. }
            | Request::Delete { keys, .. } => match keys_of(keys) {
                Some(keys) => keys,
                None => return nonsense("keys are 32 bytes each, 131,072 at most"),
            },
            _ => &[],
        };
        Answer::Reply(match request {
            Request::Hello { .. } | Request::Join { .. } => return nonsense("a second greeting"),
            Request::Marked if ledger.marked(self.marks) => Reply::Done,
            Request::Marked => return nonsense("this client's mark is not on the volumes"),
            Request::Namespace { record } => match Namespace::decode(record) {
                Ok(namespace) => match catalog.namespace(&namespace) {
                    Ok(id) => match catalog.shape(id) {
                        Some(shape) => {
                            Reply::Namespace(id.0, shape.codec, *shape.fingerprint.as_bytes())
                        }
                        None => Reply::Failed(Failure::UnknownNamespace),
                    },
                    Err(error) => Reply::Failed(error.into()),
                },
                Err(error) => return nonsense(&error.to_string()),
            },
            Request::LongestPrefix { namespace, .. } => {
                Reply::Count(catalog.longest_prefix(NamespaceId(namespace), keys) as u64)
            }
            Request::Peek { namespace, .. } => {
                Reply::Flags(catalog.peek(NamespaceId(namespace), keys))
            }
            Request::Contains { namespace, .. } => {
                Reply::Flags(catalog.contains(NamespaceId(namespace), keys))
            }
            Request::Touch { namespace, .. } => {
                catalog.touch(NamespaceId(namespace), keys, Hint::default());
                return Answer::Nothing;
            }
            Request::TouchHinted {
                namespace, hint, ..
            } => {
                catalog.touch(NamespaceId(namespace), keys, hint);
                return Answer::Nothing;
            }
            Request::Pin {
                namespace, read_as, ..
            } => {
                let pages = ledger.pin(catalog, NamespaceId(namespace), keys, read_as);
                Reply::Pinned(pages.into_iter().map(|page| page.map(Into::into)).collect())
            }
            Request::Unpin { segments } => {
                ledger.unpin(catalog, self.map, &segments);
                return Answer::Nothing;
            }
            Request::Verified {
                namespace,
                findings,
                ..
            } => {
                let findings: Vec<_> = keys
                    .iter()
                    .zip(findings)
                    .map(|(key, (place, finding))| (*key, self.map.extent(place), finding))
                    .collect();
                ledger.verified(catalog, NamespaceId(namespace), findings);
                return Answer::Nothing;
            }
            Request::Reserve {
                namespace, links, ..
            } => self.reserve(ledger, (namespace, Hint::default()), keys, links),
            Request::ReserveHinted {
                namespace,
                links,
                hint,
                ..
            } => self.reserve(ledger, (namespace, hint), keys, links),
            Request::Commit {
                reservation,
                proofs,
            } => {
                if let Some(core) = ledger.commit(reservation) {
                    let proof = |proof: PageProof| match self.is_sealed {
                        true => Proof::from(proof),
                        false => proof.checksum.into(),
                    };
                    let proofs = proofs.into_iter().map(|sent| sent.map(proof));
                    let proofs: Vec<_> = proofs.collect();
                    catalog.commit(core, &proofs);
                }
                return Answer::Nothing;
            }
            Request::Landed { puts } => {
                let of_core =
                    |put: &LandedPut| ledger.landed(catalog, self.map, put.reservation, &put.pages);
                let mut landed: Vec<Landed> = puts.iter().filter_map(of_core).collect();
                if planted!(IgnoredLanding) {
                    let pages = landed.iter_mut().flat_map(|(_, pages)| pages);
                    pages.for_each(|(_, good)| *good = true);
                }
                catalog.landed(&landed);
                return Answer::Nothing;
            }
            Request::Wait { reservations } => match ledger.wait(&reservations) {
                Some(puts) => return Answer::Later(Later::Settled(puts)),
                None => return nonsense("puts to wait for, each once, 131,072 pages at most"),
            },
            Request::Room => Reply::Room {
                room: catalog.room(),
            },
            Request::WaitForRoom { seen, patience_ms } => {
                let patience = Duration::from_millis(patience_ms.into()).min(ROOM_PATIENCE_MAX);
                return Answer::Later(Later::Room { seen, patience });
            }
            Request::Delete { namespace, .. } => {
                return Answer::Later(Later::Delete(NamespaceId(namespace), keys.to_vec()));
            }
            Request::Clear { namespace } => {
                return Answer::Later(Later::Clear(NamespaceId(namespace)));
            }
            Request::Flush => return Answer::Later(Later::Flush),
            Request::Stats => return Answer::Later(Later::Report),
            Request::Area | Request::Stage { .. } | Request::Unstage { .. } => {
                return nonsense("reads are not shared here");
            }
            Request::Lease { .. }
            | Request::Unlease { .. }
            | Request::List { .. }
            | Request::Evictions { .. }
            | Request::Usage
            | Request::Keep { .. }
            | Request::KeptPages { .. }
            | Request::Records => return nonsense("no books are kept here"),
            Request::Counted { .. } | Request::Measured(_) => {
                return nonsense("no counters are kept here");
            }
            Request::Common => return nonsense("there is no memory to share here"),
            Request::Own => return nonsense("no ownership is given away here"),
            Request::Empty { .. } => return nonsense("no segments are emptied here"),
            Request::UseBeneath { .. } => return nonsense("nothing lies beneath here"),
            Request::Arrive { .. } => return nonsense("nothing arrives here"),
            Request::Quotas(_) | Request::Record { .. } => {
                return nonsense("nothing is recorded here");
            }
            Request::Keys { .. } | Request::Forgotten { .. } | Request::Erase { .. } => {
                return nonsense("no keys are lent here");
            }
        })
    }

    fn reserve(
        &self,
        ledger: &Ledger,
        (namespace, hint): (u16, Hint),
        keys: &[PageKey],
        links: Vec<Link>,
    ) -> Reply {
        if links.len() != keys.len() {
            return Reply::Failed(Failure::Protocol("a link for each key".to_owned()));
        }
        let namespace = NamespaceId(namespace);
        let Some(shape) = self.catalog.shape(namespace) else {
            return Reply::Failed(Failure::UnknownNamespace);
        };
        let page_blocks = shape.shape.page_blocks();
        if links.iter().any(|link| link.saved >= page_blocks) {
            return Reply::Failed(Failure::Protocol("a page of no blocks".to_owned()));
        }
        let pages = keys.iter().zip(links);
        let asks: Vec<Ask> = pages
            .map(|(key, link)| Ask {
                key: *key,
                parent: link.parent.map(PageKey::from_bytes),
                depth: link.depth,
                saved: link.saved,
            })
            .collect();
        let page_bytes = u64::from(page_blocks) * BLOCK_BYTES as u64;
        let reserved = ledger.reserve(
            self.catalog,
            (namespace, hint),
            &asks,
            page_bytes,
            self.share_bytes,
        );
        let Some((reservation, grants)) = reserved else {
            return Reply::Failed(Failure::Protocol("too many puts at once".to_owned()));
        };
        let grants = grants
            .into_iter()
            .map(|grant| match grant {
                Grant::Write(Extent { place, .. }) => PlaceGrant::Write(place),
                Grant::Settles => PlaceGrant::Settles,
                Grant::Refused(why) => PlaceGrant::Refused(why),
            })
            .collect();
        Reply::Reserved {
            reservation,
            grants,
        }
    }
}

/// The reply to a wait, from the statuses of the pages that were passed to the core. Ends the puts.
pub fn settled(ledger: &Ledger, outcomes: Vec<(Awaited, Vec<PutStatus>)>) -> Reply {
    let mut statuses = Vec::new();
    for (put, of_core) in outcomes {
        ledger.settled(put.number);
        let end = statuses.len() + put.asks + put.beyond;
        statuses.extend(of_core);
        // The pages that were not passed to the core were refused here.
        statuses.resize(end, PutStatus::Refused(Refusal::Busy));
    }
    Reply::Settled(statuses)
}

/// A reply as a client without the feature of policies knows it.
pub(super) fn without_policies(reply: Reply) -> Reply {
    let known = |why: Refusal| match why {
        Refusal::NotAdmitted | Refusal::Budget | Refusal::Quota => Refusal::Unreachable,
        other => other,
    };
    match reply {
        Reply::Reserved {
            reservation,
            mut grants,
        } => {
            for grant in &mut grants {
                if let PlaceGrant::Refused(why) = grant {
                    *why = known(*why);
                }
            }
            Reply::Reserved {
                reservation,
                grants,
            }
        }
        Reply::Settled(mut statuses) => {
            for status in &mut statuses {
                if let PutStatus::Refused(why) = status {
                    *why = known(*why);
                }
            }
            Reply::Settled(statuses)
        }
        other => other,
    }
}

/// The reply to a deletion.
pub fn count(outcome: Result<u64, StoreError>) -> Reply {
    match outcome {
        Ok(count) => Reply::Count(count),
        Err(error) => Reply::Failed(error.into()),
    }
}

/// The reply to a flush.
pub fn done(outcome: Result<(), StoreError>) -> Reply {
    match outcome {
        Ok(()) => Reply::Done,
        Err(error) => Reply::Failed(error.into()),
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Failure {
        match error {
            StoreError::SyncFailed => Failure::Sync,
            StoreError::NoRoom => Failure::NoRoom,
            StoreError::TooManyNamespaces(limit) => {
                Failure::TooManyNamespaces(u32::try_from(limit).unwrap_or(u32::MAX))
            }
            StoreError::UnknownNamespace => Failure::UnknownNamespace,
            StoreError::Closed => Failure::Closed,
            StoreError::ReadOnlyService => Failure::ReadOnlyService,
            StoreError::Quotas(why) => Failure::Quotas(why),
            other => Failure::Write(other.to_string()),
        }
    }
}
