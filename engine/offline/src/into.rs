//! Copies the pages of one store into another, in order.
//!
//! A survey reads the source; nothing is written to it. The bytes of each page are verified before
//! they are put. The other store takes them like any put: with versions of its own, into its own
//! geometry. Every page that cannot be copied is counted.

use std::io::{self, IoSlice};
use std::time::Duration;

use larder_base::ids::NamespaceId;
use larder_base::memory::AlignedBuf;
use larder_core::status::PutStatus;
use larder_disk::DiskError;
use larder_disk::mailbox::{ReadAt, read_all};
use larder_format::{BLOCK_BYTES, Namespace, PageChecksum, PageKey, PageShape};
use larder_store::api::{PageStore, PutOptions, PutPage};
use larder_store::encoder::decode;
use larder_store::error::StoreError;
use larder_store::recovery::{Found, Whole};
use serde::Serialize;

use super::order::{Step, order};
use super::owner::{MOVE_BYTES, Progress};
use crate::survey::Survey;

/// How long a put may wait for room: the other store has enough of it.
const PATIENCE: Duration = Duration::from_secs(60);

/// The result of the copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Copied {
    /// Pages written.
    #[serde(rename = "pages_put")]
    pub pages: u64,
    /// Their bytes.
    #[serde(rename = "bytes_put")]
    pub bytes: u64,
    /// Pages of namespaces whose full records are lost: their content is unknown.
    pub nameless_pages: u64,
    /// Pages whose bytes do not match their checksum, or cannot be read.
    pub damaged_pages: u64,
    /// Pages whose writes the source's last crash had interrupted.
    pub unfinished_pages: u64,
    /// Pages that no key opens: another writer changed the records.
    pub sealed_pages: u64,
    /// Pages that the other store refused.
    pub refused_pages: u64,
    /// Pages that the other store evicted to make room for more.
    pub evicted_pages: u64,
    /// Whether `progress` ended it early.
    #[serde(skip)]
    pub interrupted: bool,
}

/// Puts every live page of the surveyed store into `store`, chain by chain, parents before
/// children.
///
/// # Errors
/// When the other store knows too many namespaces, or its last flush fails; or this process cannot
/// read.
pub fn copy_into(
    survey: &Survey,
    store: &dyn PageStore,
    progress: &mut Progress<'_>,
) -> Result<Copied, StoreError> {
    let pages = survey.live_found();
    let steps = order(&pages);
    let mut copied = Copied::default();
    let evicted = store.stats().evicted;
    let total = survey.live_bytes();
    let mut done = 0;
    for steps in steps.chunk_by(|a, b| pages[a.page].slot == pages[b.page].slot) {
        let slot = pages[steps[0].page].slot;
        let Some(namespace) = &survey.namespaces[usize::from(slot.0)].record else {
            copied.nameless_pages += steps.len() as u64;
            continue;
        };
        let batch = Batch {
            survey,
            store,
            pages: &pages,
            namespace,
            id: store.namespace(namespace)?,
        };
        for steps in steps.chunks(batch.pages_at_once()) {
            batch.copy(steps, &mut copied)?;
            done += batch.stored_bytes(steps);
            copied.interrupted = progress(done, total).is_break();
            if copied.interrupted {
                break;
            }
        }
        if copied.interrupted {
            break;
        }
    }
    store.flush()?;
    copied.evicted_pages = store.stats().evicted - evicted;
    Ok(copied)
}

/// Pages of one namespace.
struct Batch<'a> {
    survey: &'a Survey,
    store: &'a dyn PageStore,
    pages: &'a [Found<Whole>],
    namespace: &'a Namespace,
    id: NamespaceId,
}

impl Batch<'_> {
    fn page_bytes(&self) -> u64 {
        u64::from(self.namespace.shape().page_blocks()) * BLOCK_BYTES as u64
    }

    fn stored_bytes(&self, steps: &[Step]) -> u64 {
        let places = steps
            .iter()
            .map(|step| self.survey.place_of(&self.pages[step.page]));
        places.map(|place| place.bytes as u64).sum()
    }

    fn pages_at_once(&self) -> usize {
        usize::try_from(MOVE_BYTES / self.page_bytes().max(1)).map_or(1, |pages| pages.max(1))
    }

    fn copy(&self, steps: &[Step], copied: &mut Copied) -> Result<(), StoreError> {
        let found: Vec<&Found<Whole>> = steps.iter().map(|step| &self.pages[step.page]).collect();
        let reads: Vec<ReadAt> = found
            .iter()
            .map(|page| self.survey.place_of(page))
            .collect();
        let results = read_all(self.survey.disk(), &reads);
        let mut good = Vec::with_capacity(found.len());
        for (page, bytes) in found.into_iter().zip(results) {
            match bytes {
                Ok(mut bytes) if self.is_whole(page, &bytes) => {
                    if self.survey.open_found(page, &mut bytes).is_err() {
                        copied.sealed_pages += 1;
                    } else if let Some(bytes) = self.plain(page, bytes)? {
                        good.push((page, bytes));
                    } else {
                        copied.damaged_pages += 1;
                    }
                }
                Ok(_) if !page.proven => copied.unfinished_pages += 1,
                Err(source) if source.is_of_this_process() => {
                    let path = self.survey.volumes[0].path.clone();
                    return Err(StoreError::NotRead { path, source });
                }
                Ok(_) | Err(_) => copied.damaged_pages += 1,
            }
        }
        for status in self.put(&good) {
            if status.is_present() {
                copied.pages += 1;
                copied.bytes += self.page_bytes();
            } else {
                copied.refused_pages += 1;
            }
        }
        Ok(())
    }

    fn is_whole(&self, page: &Found<Whole>, bytes: &[u8]) -> bool {
        let mut checksum = PageChecksum::new(self.namespace.fingerprint(), &page.extra.key);
        checksum.blocks(bytes);
        checksum.finish() == page.checksum
    }

    /// A page as it was put. `None` if it cannot be decoded.
    fn plain(
        &self,
        page: &Found<Whole>,
        bytes: AlignedBuf,
    ) -> Result<Option<AlignedBuf>, StoreError> {
        if page.place.saved == 0 {
            return Ok(Some(bytes));
        }
        let page_bytes = usize::try_from(self.page_bytes()).unwrap_or(usize::MAX);
        let no_memory = |error: io::Error| StoreError::NotRead {
            path: self.survey.volumes[0].path.clone(),
            source: DiskError::Os(error.raw_os_error().unwrap_or_default()),
        };
        let mut plain = AlignedBuf::zeroed(page_bytes).map_err(no_memory)?;
        let decoded = decode(self.namespace.shape(), &bytes, &mut plain);
        Ok(decoded.ok().map(|()| plain))
    }

    fn put(&self, pages: &[(&Found<Whole>, AlignedBuf)]) -> Vec<PutStatus> {
        let shape = self.namespace.shape();
        let parts: Vec<Vec<IoSlice<'_>>> = pages
            .iter()
            .map(|(_, bytes)| parts_of(shape, bytes))
            .collect();
        let puts: Vec<PutPage<'_>> = pages
            .iter()
            .zip(&parts)
            .map(|((page, _), parts)| PutPage {
                key: page.extra.key,
                parent: page.parent.map(whole_key),
                depth: page.extra.depth,
                parts,
            })
            .collect();
        self.store
            .put(self.id, &puts, PutOptions::waiting(PATIENCE))
    }
}

fn parts_of<'a>(shape: &PageShape, bytes: &'a [u8]) -> Vec<IoSlice<'a>> {
    let part = |index: usize| {
        let start = usize::try_from(shape.part_offset(index)).ok()?;
        let length = usize::try_from(shape.part_bytes(index)).ok()?;
        bytes.get(start..start.checked_add(length)?)
    };
    (0..shape.parts())
        .map(|index| IoSlice::new(part(index).unwrap_or_default()))
        .collect()
}

/// A key of which only the prefix is known: a store keeps only the prefix of a parent's key.
fn whole_key(prefix: larder_format::KeyPrefix) -> PageKey {
    let mut bytes = [0; 32];
    let known = prefix.as_bytes();
    bytes[..known.len()].copy_from_slice(known);
    PageKey::from_bytes(bytes)
}
