//! The decisions that a client asks its owner for, one exchange each. Lists of more keys than a
//! message may have go in several messages.

use std::sync::Arc;

use larder_base::ids::NamespaceId;
use larder_core::grants::{Extent, Finding};
use larder_core::hint::Hint;
use larder_core::index::ReadAs;
use larder_format::{Fingerprint, Namespace, PageKey};

use super::put::RemotePut;
use super::{Remote, file_lost};
use crate::api::Stats;
use crate::catalog::{Catalog, NamespaceShape, Pinned, Putting};
use crate::error::StoreError;
use crate::share::keys::blob;
use crate::share::wire::{Failure, KEYS_MAX, Reply, Request};
use crate::staging::{Area, SlotEnd};
use crate::store::staged::{Stage, Staged};

impl From<Failure> for StoreError {
    fn from(failure: Failure) -> StoreError {
        match failure {
            Failure::Sync => StoreError::SyncFailed,
            Failure::NoRoom => StoreError::NoRoom,
            Failure::TooManyNamespaces(limit) => StoreError::TooManyNamespaces(limit as usize),
            Failure::UnknownNamespace => StoreError::UnknownNamespace,
            Failure::Closed => StoreError::Closed,
            Failure::ReadOnlyService => StoreError::ReadOnlyService,
            Failure::Write(what) | Failure::Protocol(what) => StoreError::WriteFailed(what),
            Failure::Unsupported => StoreError::OwnerOlder,
            Failure::Recorded => StoreError::Recorded,
            Failure::Quotas(why) => StoreError::Quotas(why),
            Failure::Version { .. } | Failure::Denied(_) => StoreError::OwnerGone,
        }
    }
}

impl Catalog for Remote {
    fn namespace(&self, namespace: &Namespace) -> Result<NamespaceId, StoreError> {
        let request = Request::Namespace {
            record: namespace.encode(),
        };
        match self.ask_fast(&request) {
            Ok(Reply::Namespace(id, codec, name)) => {
                let id = NamespaceId(id);
                let named = namespace.named(Fingerprint::from_bytes(name));
                let mut shapes = self.shapes.lock();
                shapes
                    .entry(id)
                    .or_insert_with(|| NamespaceShape::of(&named, codec).for_tenant(self.tenant()));
                Ok(id)
            }
            Ok(Reply::Failed(failure)) => Err(failure.into()),
            _ => Err(StoreError::OwnerGone),
        }
    }

    fn shape(&self, namespace: NamespaceId) -> Option<NamespaceShape> {
        self.shapes.lock().get(&namespace).cloned()
    }

    fn longest_prefix(&self, namespace: NamespaceId, keys: &[PageKey]) -> usize {
        let mut found = 0;
        for some in keys.chunks(KEYS_MAX) {
            let request = Request::LongestPrefix {
                namespace: namespace.0,
                keys: blob(some),
            };
            let Ok(Reply::Count(count)) = self.ask_fast(&request) else {
                break;
            };
            let count = usize::try_from(count).unwrap_or(0).min(some.len());
            found += count;
            if count < some.len() {
                break;
            }
        }
        found
    }

    fn contains(&self, namespace: NamespaceId, keys: &[PageKey]) -> Vec<bool> {
        let mut found = Vec::with_capacity(keys.len());
        for some in keys.chunks(KEYS_MAX) {
            let request = Request::Contains {
                namespace: namespace.0,
                keys: blob(some),
            };
            match self.ask_fast(&request) {
                Ok(Reply::Flags(flags)) if flags.len() == some.len() => found.extend(flags),
                _ => found.extend(some.iter().map(|_| false)),
            }
        }
        found
    }

    fn touch(&self, namespace: NamespaceId, keys: &[PageKey], hint: Hint) {
        // From the tail, so that the order is that of one touch of the whole list.
        for some in keys.rchunks(KEYS_MAX) {
            let (namespace, keys) = (namespace.0, blob(some));
            self.send(&match self.hint_for_owner(hint) {
                None => Request::Touch { namespace, keys },
                Some(hint) => Request::TouchHinted {
                    namespace,
                    keys,
                    hint,
                },
            });
        }
    }

    fn pin(
        &self,
        namespace: NamespaceId,
        keys: &[PageKey],
        read_as: ReadAs,
    ) -> Vec<Option<Pinned>> {
        let mut pages = Vec::with_capacity(keys.len());
        for some in keys.chunks(KEYS_MAX) {
            let request = Request::Pin {
                namespace: namespace.0,
                keys: blob(some),
                read_as,
            };
            match self.ask_fast(&request) {
                Ok(Reply::Pinned(found)) if found.len() == some.len() => {
                    pages.extend(
                        found
                            .into_iter()
                            .map(|page| page.map(|page| page.on(&self.map))),
                    );
                }
                _ => pages.extend(some.iter().map(|_| None)),
            }
        }
        if self.is_sealed() {
            self.get_keys(namespace, &pages);
        }
        pages
    }

    fn unpin(&self, extents: &[Extent]) {
        for some in extents.chunks(KEYS_MAX) {
            let segments = some.iter().map(|extent| extent.place.segment).collect();
            self.send(&Request::Unpin { segments });
        }
    }

    fn verified(&self, namespace: NamespaceId, findings: &[(PageKey, Extent, Finding)]) {
        for some in findings.chunks(KEYS_MAX) {
            let keys: Vec<PageKey> = some.iter().map(|(key, ..)| *key).collect();
            self.send(&Request::Verified {
                namespace: namespace.0,
                keys: blob(&keys),
                findings: some
                    .iter()
                    .map(|(_, extent, finding)| (extent.place, *finding))
                    .collect(),
            });
        }
    }

    fn put(&self, namespace: NamespaceId, hint: Hint) -> Box<dyn Putting + '_> {
        Box::new(RemotePut::new(self, namespace, hint))
    }

    fn delete(&self, namespace: NamespaceId, keys: &[PageKey]) -> Result<u64, StoreError> {
        let mut deleted = 0;
        for some in keys.chunks(KEYS_MAX) {
            deleted += self.counted(&Request::Delete {
                namespace: namespace.0,
                keys: blob(some),
            })?;
        }
        Ok(deleted)
    }

    fn clear_namespace(&self, namespace: NamespaceId) -> Result<u64, StoreError> {
        self.counted(&Request::Clear {
            namespace: namespace.0,
        })
    }

    fn flush(&self) -> Result<(), StoreError> {
        match self.ask(&Request::Flush) {
            Ok(Reply::Done) => Ok(()),
            Ok(Reply::Failed(failure)) => Err(failure.into()),
            _ => Err(StoreError::OwnerGone),
        }
    }

    fn stats(&self) -> Stats {
        self.report().map(|report| report.stats).unwrap_or_default()
    }
}

impl Stage for Remote {
    fn stage(&self, namespace: NamespaceId, keys: &[PageKey]) -> (bool, Vec<Option<Staged>>) {
        let mut pages = Vec::with_capacity(keys.len());
        let mut is_shared = false;
        for some in keys.chunks(KEYS_MAX) {
            let request = Request::Stage {
                namespace: namespace.0,
                keys: blob(some),
            };
            match self.ask_fast(&request) {
                Ok(Reply::Staged {
                    shared,
                    pages: found,
                }) if found.len() == some.len() => {
                    is_shared |= shared;
                    pages.extend(found.into_iter().map(|page| {
                        page.map(|page| Staged {
                            pinned: page.page.on(&self.map),
                            slot: page.slot,
                        })
                    }));
                }
                _ => pages.extend(some.iter().map(|_| None)),
            }
        }
        if self.is_sealed() {
            let pinned = |staged: &Option<Staged>| staged.map(|staged| staged.pinned);
            let pinned: Vec<_> = pages.iter().map(pinned).collect();
            self.get_keys(namespace, &pinned);
        }
        (is_shared, pages)
    }

    fn unstage(&self, extents: &[Extent], slots: &[SlotEnd]) {
        if !extents.is_empty() {
            self.send(&Request::Unstage {
                segments: extents.iter().map(|extent| extent.place.segment).collect(),
                slots: slots.to_vec(),
            });
        }
    }

    fn area(&self, _namespace: NamespaceId) -> Option<Arc<Area>> {
        let area = self.area.get_or_init(|| {
            let (reply, file) = self
                .exchange(|line| line.ask_for_file(&Request::Area))
                .ok()?;
            if !matches!(reply, Reply::Area) {
                return None;
            }
            let area = file.ok_or_else(file_lost).and_then(Area::adopt);
            area.inspect_err(|error| {
                tracing::warn!(
                    %error,
                    "the owner's staging area cannot be used; every page is read from the device"
                );
            })
            .ok()
            .map(Arc::new)
        });
        area.clone()
    }
}
