//! The owner's answers to its clients' questions about the books: see
//! [`Inventory`](crate::inventory::Inventory).

use larder_base::ids::NamespaceId;
use larder_core::core::Evictions;
use larder_format::PageKey;

use super::session::Session;
use super::shared::Shared;
use crate::error::StoreError;
use crate::inventory::{Cursor, KeptPage, Listing};
use crate::share::keys::keys_of;
use crate::share::wire::{DigestBytes, Failure, Reply, Request};

/// Most bytes of records in one reply, below the limit of a frame: of more than ten thousand
/// namespaces.
const RECORDS_BYTES_MAX: usize = 4 << 20;

impl Shared {
    /// Answers a request about the books. Any other request is returned.
    pub(super) fn answer_books<'a>(
        &self,
        session: &Session,
        request: Request<'a>,
    ) -> Result<Option<Reply>, Request<'a>> {
        let books = self.store.books();
        Ok(match request {
            Request::Lease { namespace, keys } => Some(with_keys(keys, |keys| {
                Reply::Leased(session.leases.lease(books, NamespaceId(namespace), keys))
            })),
            Request::Unlease { namespace, keys } => Some(with_keys(keys, |keys| {
                session.leases.unlease(books, NamespaceId(namespace), keys);
                Reply::Done
            })),
            Request::Keep {
                namespace,
                keys,
                until_unix_s,
            } => Some(with_keys(keys, |keys| {
                let kept = books.keep(NamespaceId(namespace), keys, until_unix_s);
                answered(kept, Reply::Kept)
            })),
            Request::KeptPages { from } => Some(answered(books.kept(from), |pages| {
                let row = |page: KeptPage| {
                    let (digest, key) = (*page.namespace.as_bytes(), *page.key.as_bytes());
                    (digest, key, page.until_unix_s, page.bytes)
                };
                Reply::KeptPages(pages.into_iter().map(row).collect())
            })),
            Request::List { namespace, cursor } => Some(answered(
                books.list(NamespaceId(namespace), Cursor(cursor)),
                listed,
            )),
            Request::Evictions { since } => Some(answered(books.evictions(since), evicted)),
            Request::Usage => Some(answered(books.usage(), |rows| {
                let row = |row: crate::inventory::Usage| {
                    let digest = *row.namespace.as_bytes();
                    (digest, row.pages, row.bytes, row.plain_bytes)
                };
                Reply::Usage(rows.into_iter().map(row).collect())
            })),
            Request::Records => Some(answered(books.records(), |records| {
                let mut bytes = 0;
                let fitting = records.iter().take_while(|of| {
                    bytes += of.encode().len();
                    bytes <= RECORDS_BYTES_MAX
                });
                let named = fitting.map(|of| {
                    let name = *of.fingerprint().as_bytes();
                    (name, of.encode().to_vec().into())
                });
                Reply::Records(named.collect())
            })),
            other => return Err(other),
        })
    }
}

fn with_keys(keys: &[u8], answer: impl FnOnce(&[PageKey]) -> Reply) -> Reply {
    let nonsense = || Reply::Failed(Failure::Protocol("keys are 32 bytes each".to_owned()));
    keys_of(keys).map_or_else(nonsense, answer)
}

fn answered<T>(outcome: Result<T, StoreError>, reply: impl FnOnce(T) -> Reply) -> Reply {
    match outcome {
        Ok(answer) => reply(answer),
        Err(error) => Reply::Failed(error.into()),
    }
}

fn listed(listing: Listing) -> Reply {
    Reply::Listed {
        keys: listing
            .keys
            .into_iter()
            .map(|key| *key.as_bytes())
            .collect(),
        next: listing.next.map(|Cursor(next)| next),
    }
}

fn evicted(evictions: Evictions) -> Reply {
    let page = |(namespace, key): (larder_format::Fingerprint, PageKey)| {
        let namespace: DigestBytes = *namespace.as_bytes();
        (namespace, *key.as_bytes())
    };
    Reply::Evicted {
        next: evictions.next,
        missed: evictions.missed,
        pages: evictions.pages.into_iter().map(page).collect(),
    }
}
