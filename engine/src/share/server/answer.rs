//! What each request is answered with.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use larder_format::{BLOCK_BYTES, Namespace};

use super::Shared;
use super::session::{Put, Session};
use crate::api::{NamespaceId, PageStore, PutStatus, Refusal};
use crate::catalog::{Ask, Extent, Grant};
use crate::error::StoreError;
use crate::index::{Place, SegmentId};
use crate::share::guard;
use crate::share::keys::keys_of;
use crate::share::wire::{Failure, PinnedPage, PlaceGrant, Reply, Request};

/// Pages that one client reads at once.
const PINS_MAX: u64 = 1 << 20;

/// Puts of one client whose outcome it has not asked for.
const PUTS_MAX: usize = 1 << 16;

/// Most pages that one message reserves: how long the core is kept from others. As many as a client's window has at least 4 KiB of
/// each.
const RESERVED_PAGES_MAX: usize = (WINDOW_BYTES / BLOCK_BYTES as u64) as usize;

/// Bytes that a client with nothing under way is given in any case: what it reserves together.
const WINDOW_BYTES: u64 = 8 << 20;

/// Longest wait for room that one request may ask for.
const ROOM_PATIENCE_MAX: Duration = Duration::from_secs(1);

impl Shared {
    /// `None` for what is told and not asked. Whatever is about shared reads is not for here ([`Shared::answer_reads`]).
    pub(super) fn answer(&self, session: &Session, request: Request<'_>) -> Option<Reply> {
        let catalog = self.store.catalog();
        let nonsense = |what: &str| Some(Reply::Failed(Failure::Protocol(what.to_owned())));
        let keys = match &request {
            Request::LongestPrefix { keys, .. }
            | Request::Contains { keys, .. }
            | Request::Touch { keys, .. }
            | Request::Pin { keys, .. }
            | Request::Verified { keys, .. }
            | Request::Reserve { keys, .. }
            | Request::Delete { keys, .. } => match keys_of(keys) {
                Some(keys) => keys,
                None => return nonsense("keys are 32 bytes each, 131,072 at most"),
            },
            _ => &[],
        };
        Some(match request {
            Request::Hello { .. } | Request::Join { .. } => return nonsense("a second greeting"),
            Request::Marked => self.marked(session),
            Request::Namespace { record } => match Namespace::decode(record) {
                Ok(namespace) => match self.store.namespace(&namespace) {
                    Ok(id) => Reply::Namespace(id.0),
                    Err(error) => Reply::Failed(error.into()),
                },
                Err(error) => return nonsense(&error.to_string()),
            },
            Request::LongestPrefix { namespace, .. } => {
                Reply::Count(catalog.longest_prefix(NamespaceId(namespace), keys) as u64)
            }
            Request::Contains { namespace, .. } => {
                Reply::Flags(catalog.contains(NamespaceId(namespace), keys))
            }
            Request::Touch { namespace, .. } => {
                catalog.touch(NamespaceId(namespace), keys);
                return None;
            }
            Request::Pin { namespace, .. } => {
                Reply::Pinned(self.pin(session, NamespaceId(namespace), keys))
            }
            Request::Unpin { segments } => {
                self.unpin(session, &segments);
                return None;
            }
            Request::Verified {
                namespace,
                findings,
                ..
            } => {
                let findings: Vec<_> = keys
                    .iter()
                    .zip(findings)
                    .map(|(key, (place, finding))| (*key, self.store.extent(place), finding))
                    .collect();
                catalog.verified(NamespaceId(namespace), &findings);
                return None;
            }
            Request::Reserve {
                namespace, links, ..
            } => {
                if links.len() != keys.len() {
                    return nonsense("a link for each key");
                }
                let asks: Vec<Ask> = keys
                    .iter()
                    .zip(links)
                    .map(|(key, (parent, depth))| Ask {
                        key: *key,
                        parent: parent.map(larder_format::PageKey::from_bytes),
                        depth,
                    })
                    .collect();
                self.reserve(session, NamespaceId(namespace), &asks)
            }
            Request::Commit {
                reservation,
                checksums,
            } => {
                if let Some(core) = session.commit(reservation) {
                    catalog.commit(core, &checksums);
                }
                return None;
            }
            Request::Landed { reservation, pages } => {
                if let Some((core, pages)) = session.landed(reservation, &pages) {
                    catalog.landed(core, &pages);
                }
                return None;
            }
            Request::Wait { reservation } => match session.await_put(reservation) {
                Some(put) => {
                    let mut statuses = match put.reservation {
                        Some(core) => catalog.wait(core),
                        None => vec![PutStatus::Refused(Refusal::Busy); put.asks],
                    };
                    let beyond = PutStatus::Refused(Refusal::Busy);
                    statuses.resize(statuses.len() + put.beyond, beyond);
                    session.end_put(reservation);
                    Reply::Settled(statuses)
                }
                None => return nonsense("no such put"),
            },
            Request::Room => Reply::Room {
                room: catalog.room(),
            },
            Request::WaitForRoom { seen, patience_ms } => {
                let patience = Duration::from_millis(patience_ms.into()).min(ROOM_PATIENCE_MAX);
                catalog.wait_for_room(seen, Instant::now() + patience);
                Reply::Room {
                    room: catalog.room(),
                }
            }
            Request::Delete { namespace, .. } => {
                count(catalog.delete(NamespaceId(namespace), keys))
            }
            Request::Clear { namespace } => count(catalog.clear_namespace(NamespaceId(namespace))),
            Request::Flush => match catalog.flush() {
                Ok(()) => Reply::Done,
                Err(error) => Reply::Failed(error.into()),
            },
            Request::Stats => Reply::Stats(Box::new(self.report())),
            Request::Area | Request::Stage { .. } | Request::Unstage { .. } => {
                return nonsense("reads are not shared here");
            }
        })
    }

    /// A client says that it holds its marks; it may write when that is so.
    fn marked(&self, session: &Session) -> Reply {
        let all = self
            .probes
            .iter()
            .all(|volume| guard::is_marked(volume, session.id.0));
        if all {
            session.held.lock().may_write = true;
            Reply::Done
        } else {
            Reply::Failed(Failure::Protocol(
                "the volumes do not carry this client's mark".to_owned(),
            ))
        }
    }

    pub(super) fn pin(
        &self,
        session: &Session,
        namespace: NamespaceId,
        keys: &[larder_format::PageKey],
    ) -> Vec<Option<PinnedPage>> {
        let mut held = session.held.lock();
        if held.gone || held.pinned + keys.len() as u64 > PINS_MAX {
            return vec![None; keys.len()];
        }
        let pages = self.store.catalog().pin(namespace, keys);
        for page in pages.iter().flatten() {
            *held.pins.entry(page.extent.place.segment).or_default() += 1;
            held.pinned += 1;
        }
        drop(held);
        pages
            .into_iter()
            .map(|page| {
                page.map(|page| PinnedPage {
                    place: page.extent.place,
                    checksum: page.checksum,
                    unproven: page.unproven,
                })
            })
            .collect()
    }

    /// Gives pins back: those that the client has.
    pub(super) fn unpin(&self, session: &Session, segments: &[SegmentId]) {
        let mut extents = Vec::with_capacity(segments.len());
        let mut held = session.held.lock();
        for &segment in segments {
            let Some(count) = held.pins.get_mut(&segment) else {
                continue;
            };
            *count -= 1;
            if *count == 0 {
                held.pins.remove(&segment);
            }
            held.pinned -= 1;
            extents.push(self.store.extent(Place { segment, start: 0 }));
        }
        drop(held);
        self.store.catalog().unpin(&extents);
    }

    fn reserve(&self, session: &Session, namespace: NamespaceId, asks: &[Ask]) -> Reply {
        let catalog = self.store.catalog();
        let Some(shape) = catalog.shape(namespace) else {
            return Reply::Failed(Failure::UnknownNamespace);
        };
        let page_bytes = u64::from(shape.shape.page_blocks()) * BLOCK_BYTES as u64;
        let share_bytes = self.share_bytes();
        let mut held = session.held.lock();
        if held.puts.len() >= PUTS_MAX {
            return Reply::Failed(Failure::Protocol("too many puts at once".to_owned()));
        }
        let fitting = fitting(held.put_bytes, page_bytes, share_bytes).min(asks.len());
        let (asks, beyond) = asks.split_at(fitting);
        if held.gone || !held.may_write || asks.is_empty() && !beyond.is_empty() {
            let put = Put {
                reservation: None,
                asks: asks.len() + beyond.len(),
                beyond: 0,
                committed: true,
                awaited: false,
                unlanded: BTreeSet::new(),
                page_bytes,
                bytes: 0,
            };
            let grants = vec![PlaceGrant::Refused(Refusal::Busy); put.asks];
            let reservation = held.add(put);
            return Reply::Reserved {
                reservation,
                grants,
            };
        }
        let (core, mut grants) = catalog.reserve(namespace, asks);
        let unlanded: BTreeSet<usize> = grants
            .iter()
            .enumerate()
            .filter(|(_, grant)| matches!(grant, Grant::Write(_)))
            .map(|(index, _)| index)
            .collect();
        let bytes = page_bytes * unlanded.len() as u64;
        let reservation = held.add(Put {
            reservation: Some(core),
            asks: asks.len(),
            beyond: beyond.len(),
            committed: false,
            awaited: false,
            unlanded,
            page_bytes,
            bytes,
        });
        grants.extend(beyond.iter().map(|_| Grant::Refused(Refusal::Busy)));
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

/// How many pages a client may reserve that has `put_bytes` under way. One page always goes through, however large.
fn fitting(put_bytes: u64, page_bytes: u64, share_bytes: u64) -> usize {
    let bytes = match put_bytes {
        0 => share_bytes.max(WINDOW_BYTES).max(page_bytes),
        _ => share_bytes.saturating_sub(put_bytes),
    };
    let pages = usize::try_from(bytes / page_bytes.max(1)).unwrap_or(usize::MAX);
    pages.min(RESERVED_PAGES_MAX)
}

fn count(outcome: Result<u64, StoreError>) -> Reply {
    match outcome {
        Ok(count) => Reply::Count(count),
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
            other => Failure::Write(other.to_string()),
        }
    }
}
