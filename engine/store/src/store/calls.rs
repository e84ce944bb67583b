//! The calls that move the bytes of pages, with their times.

use larder_base::ids::NamespaceId;
use larder_base::runtime::Instant;
use larder_core::index::ReadAs;
use larder_core::status::{GetStatus, PutStatus};

use super::data::DataPath;
use super::staged::{self, Stage};
use super::{get, put};
use crate::api::{GetPage, PutOptions, PutPage, Recall};
use crate::catalog::Catalog;

impl DataPath {
    /// See `PageStore::put`.
    pub(crate) fn put<C: Catalog + ?Sized>(
        &self,
        catalog: &C,
        namespace: NamespaceId,
        pages: &[PutPage<'_>],
        options: PutOptions,
        recall: Option<&Recall>,
    ) -> Vec<PutStatus> {
        let _timed = self.counters.puts.timed();
        put::put(catalog, self, namespace, pages, options, recall)
    }

    /// See `PageStore::get`, and for a check `PageStore::get_uncounted`.
    pub(crate) fn get<C: Catalog + ?Sized>(
        &self,
        catalog: &C,
        namespace: NamespaceId,
        pages: &mut [GetPage<'_, '_>],
        deadline: Option<Instant>,
        read_as: ReadAs,
    ) -> Vec<GetStatus> {
        let _timed = self.counters.gets.timed();
        get::get(catalog, self, namespace, pages, deadline, read_as)
    }

    /// See `PageStore::get`: shared with other processes.
    pub(crate) fn get_staged(
        &self,
        catalog: &dyn Catalog,
        stage: &dyn Stage,
        namespace: NamespaceId,
        pages: &mut [GetPage<'_, '_>],
        deadline: Option<Instant>,
    ) -> Vec<GetStatus> {
        let _timed = self.counters.gets.timed();
        staged::get(catalog, stage, self, namespace, pages, deadline)
            .unwrap_or_else(|| get::get(catalog, self, namespace, pages, deadline, ReadAs::Use))
    }
}
