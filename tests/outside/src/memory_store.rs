//! A page store in a map.

use std::collections::HashMap;
use std::io::{IoSlice, IoSliceMut};
use std::sync::Mutex;
use std::time::Instant;

use larder_engine::format::{Namespace, PageKey, PageShape};
use larder_engine::{
    GetPage, GetStatus, Hint, MissReason, NamespaceId, PageStore, PutFailure, PutOptions, PutPage,
    PutStatus, Recall, Refusal, Stats, StoreError,
};

pub struct MemoryStore {
    pages_max: usize,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    namespaces: Vec<Namespace>,
    pages: HashMap<(NamespaceId, PageKey), Vec<Vec<u8>>>,
    is_closed: bool,
}

impl MemoryStore {
    pub fn new(pages_max: usize) -> MemoryStore {
        MemoryStore {
            pages_max,
            inner: Mutex::default(),
        }
    }

    fn with<T>(&self, work: impl FnOnce(&mut Inner) -> T) -> T {
        work(&mut self.inner.lock().expect("no call panics"))
    }
}

impl Inner {
    fn shape(&self, namespace: NamespaceId) -> Option<PageShape> {
        let namespace = self.namespaces.get(usize::from(namespace.0))?;
        Some(*namespace.shape())
    }
}

fn fits<'a>(shape: &PageShape, lengths: impl Iterator<Item = &'a usize>) -> bool {
    let sizes = shape.part_sizes().iter().map(|bytes| *bytes as usize);
    lengths.copied().eq(sizes)
}

fn read(from: &[Vec<u8>], to: &mut [IoSliceMut<'_>]) {
    for (part, destination) in from.iter().zip(to) {
        destination.copy_from_slice(part);
    }
}

impl PageStore for MemoryStore {
    fn namespace(&self, namespace: &Namespace) -> Result<NamespaceId, StoreError> {
        self.with(|inner| {
            let known = inner.namespaces.iter().position(|one| one == namespace);
            let at = known.unwrap_or_else(|| {
                inner.namespaces.push(namespace.clone());
                inner.namespaces.len() - 1
            });
            let number = u16::try_from(at).map_err(|_| StoreError::TooManyNamespaces(at))?;
            Ok(NamespaceId(number))
        })
    }

    /// A recall comes too late: no put waits.
    fn put_recallable(
        &self,
        id: NamespaceId,
        pages: &[PutPage<'_>],
        _: PutOptions,
        recall: Option<&Recall>,
    ) -> Vec<PutStatus> {
        let reading = recall.map(Recall::read);
        if matches!(reading, Some(None)) {
            return vec![PutStatus::Failed(PutFailure::Write); pages.len()];
        }
        let put = |inner: &mut Inner, page: &PutPage<'_>| {
            let lengths: Vec<usize> = page.parts.iter().map(|part| part.len()).collect();
            let fits = inner
                .shape(id)
                .is_some_and(|shape| fits(&shape, lengths.iter()));
            if inner.is_closed {
                PutStatus::Refused(Refusal::Closed)
            } else if !fits {
                PutStatus::Refused(Refusal::WrongShape)
            } else if inner.pages.contains_key(&(id, page.key)) {
                PutStatus::Duplicate
            } else if inner.pages.len() == self.pages_max {
                PutStatus::Refused(Refusal::NoSpace)
            } else {
                let parts = page.parts.iter().map(|part: &IoSlice<'_>| part.to_vec());
                inner.pages.insert((id, page.key), parts.collect());
                PutStatus::Stored
            }
        };
        self.with(|inner| pages.iter().map(|page| put(inner, page)).collect())
    }

    fn get(
        &self,
        id: NamespaceId,
        pages: &mut [GetPage<'_, '_>],
        _: Option<Instant>,
    ) -> Vec<GetStatus> {
        let get = |inner: &mut Inner, page: &mut GetPage<'_, '_>| {
            let Some(parts) = inner.pages.get(&(id, page.key)) else {
                return GetStatus::Miss(MissReason::Absent);
            };
            read(parts, page.parts);
            GetStatus::Hit
        };
        self.with(|inner| pages.iter_mut().map(|page| get(inner, page)).collect())
    }

    fn longest_prefix(&self, id: NamespaceId, keys: &[PageKey]) -> usize {
        let stored = self.contains(id, keys);
        stored.iter().take_while(|stored| **stored).count()
    }

    fn contains(&self, id: NamespaceId, keys: &[PageKey]) -> Vec<bool> {
        let has = |inner: &mut Inner, key: &PageKey| inner.pages.contains_key(&(id, *key));
        self.with(|inner| keys.iter().map(|key| has(inner, key)).collect())
    }

    fn touch(&self, _: NamespaceId, _: &[PageKey], _: Hint) {}

    fn delete(&self, id: NamespaceId, keys: &[PageKey]) -> Result<u64, StoreError> {
        let delete = |inner: &mut Inner, key: &PageKey| inner.pages.remove(&(id, *key)).is_some();
        let deleted = self.with(|inner| keys.iter().filter(|key| delete(inner, key)).count());
        Ok(deleted as u64)
    }

    fn clear_namespace(&self, id: NamespaceId) -> Result<u64, StoreError> {
        self.with(|inner| {
            let before = inner.pages.len();
            inner.pages.retain(|(of, _), _| *of != id);
            Ok((before - inner.pages.len()) as u64)
        })
    }

    fn flush(&self) -> Result<(), StoreError> {
        Ok(())
    }

    fn register(&self, memory: &'static mut [u8]) -> (&'static mut [u8], String) {
        (memory, "memory needs no registration".to_owned())
    }

    fn stats(&self) -> Stats {
        let mut stats = Stats::default();
        stats.pages = self.with(|inner| inner.pages.len() as u64);
        stats
    }

    fn close(&self) -> Result<(), StoreError> {
        self.with(|inner| inner.is_closed = true);
        Ok(())
    }
}
