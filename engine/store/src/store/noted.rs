//! The calls of the owner itself, for a recording.

use larder_base::ids::NamespaceId;
use larder_core::status::{GetStatus, PutStatus};
use larder_format::PageKey;

use super::LocalStore;
use crate::api::{GetPage, PutPage};
use crate::catalog::Catalog;
use crate::traffic::{Chain, Kind, chains};

impl LocalStore {
    fn note(
        &self,
        kind: Kind,
        namespace: NamespaceId,
        (keys, found): (&[PageKey], usize),
        parent: Option<&PageKey>,
    ) {
        if let Some(shape) = self.local.shape(namespace) {
            self.local.traffic.note(Chain {
                kind,
                by: None,
                namespace: shape.fingerprint,
                parent,
                keys,
                found,
            });
        }
    }

    pub(super) fn note_lookup(&self, namespace: NamespaceId, keys: &[PageKey], found: usize) {
        if self.local.traffic.is_recorded() {
            self.note(Kind::Lookup, namespace, (keys, found), None);
        }
    }

    pub(super) fn note_get(
        &self,
        namespace: NamespaceId,
        pages: &[GetPage<'_, '_>],
        statuses: &[GetStatus],
    ) {
        if self.local.traffic.is_recorded() {
            let keys: Vec<PageKey> = pages.iter().map(|page| page.key).collect();
            let found = statuses.iter().filter(|status| status.is_hit()).count();
            self.note(Kind::Get, namespace, (&keys, found), None);
        }
    }

    pub(super) fn note_put(
        &self,
        namespace: NamespaceId,
        pages: &[PutPage<'_>],
        statuses: &[PutStatus],
    ) {
        if self.local.traffic.is_recorded() {
            let keys: Vec<PageKey> = pages.iter().map(|page| page.key).collect();
            let parents: Vec<Option<PageKey>> = pages.iter().map(|page| page.parent).collect();
            let present = statuses.iter().take_while(|status| status.is_present());
            let added: Vec<bool> = present.map(|status| *status == PutStatus::Stored).collect();
            chains(&keys, &parents, &added, |keys, found, parent| {
                self.note(Kind::Put, namespace, (keys, found), parent);
            });
        }
    }
}
