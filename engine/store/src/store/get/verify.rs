//! From the bytes that were read of a page to the page in the caller's memory.

use std::io::IoSliceMut;

use larder_base::planted;
use larder_codec::Malformed;
use larder_core::grants::{Extent, Finding};
use larder_core::status::{GetStatus, MissReason};
use larder_disk::DiskError;
use larder_format::{BLOCK_BYTES, PageChecksum, PageKey};

use crate::api::GetPage;
use crate::catalog::{NamespaceShape, Pinned};
use crate::store::coding::Decoder;

pub(in crate::store) fn fits(shape: &NamespaceShape, parts: &[IoSliceMut<'_>]) -> bool {
    let sizes = shape.shape.part_sizes();
    parts.len() == sizes.len()
        && parts
            .iter()
            .zip(sizes)
            .all(|(part, &size)| part.len() == size as usize)
}

/// Whether the device can read straight into these parts.
pub(in crate::store) fn is_aligned(shape: &NamespaceShape, parts: &[IoSliceMut<'_>]) -> bool {
    shape.shape.is_aligned()
        && parts
            .iter()
            .all(|part| (part.as_ptr() as usize).is_multiple_of(BLOCK_BYTES))
}

fn copy_out(shape: &NamespaceShape, bytes: &[u8], parts: &mut [IoSliceMut<'_>]) {
    for (index, part) in parts.iter_mut().enumerate() {
        let start = usize::try_from(shape.shape.part_offset(index)).unwrap_or(usize::MAX);
        if let Some(from) = bytes.get(start..start.saturating_add(part.len())) {
            part.copy_from_slice(from);
        }
    }
}

/// Verifies the bytes that were read of a page, and leaves the page in the caller's memory.
/// `bounced` has the bytes that were not read straight into it.
pub(super) fn take(
    decoder: &Decoder,
    shape: &NamespaceShape,
    page: &mut GetPage<'_, '_>,
    pinned: &Pinned,
    bounced: Option<&[u8]>,
    findings: &mut Vec<(PageKey, Extent, Finding)>,
) -> GetStatus {
    let mut checksum = PageChecksum::new(shape.fingerprint, &page.key);
    if pinned.extent.place.saved > 0 {
        let stored = shape.stored_bytes(pinned.extent.place);
        match bounced {
            Some(bytes) => checksum.blocks(bytes),
            None => {
                for part in first(page.parts, stored) {
                    checksum.blocks(part);
                }
            }
        }
        return match judge(&page.key, pinned, checksum.finish(), findings) {
            GetStatus::Hit => decode(decoder, page, pinned, bounced, stored, findings),
            miss @ GetStatus::Miss(_) => miss,
        };
    }
    if let Some(bytes) = bounced {
        copy_out(shape, bytes, page.parts);
    }
    for part in page.parts.iter() {
        checksum.part(part);
    }
    judge(&page.key, pinned, checksum.finish(), findings)
}

/// The first bytes of all parts together.
pub(in crate::store) fn first<'a>(
    parts: &'a mut [IoSliceMut<'_>],
    mut bytes: usize,
) -> impl Iterator<Item = &'a mut [u8]> {
    parts.iter_mut().map(move |part| {
        let some = part.len().min(bytes);
        bytes -= some;
        &mut part[..some]
    })
}

/// Decodes a page from its verified bytes: `bounced`, or the first `stored` bytes of its parts.
pub(in crate::store) fn decode(
    decoder: &Decoder,
    page: &mut GetPage<'_, '_>,
    pinned: &Pinned,
    bounced: Option<&[u8]>,
    stored: usize,
    findings: &mut Vec<(PageKey, Extent, Finding)>,
) -> GetStatus {
    let _timed = decoder.times.timed();
    let mut parts: Vec<&mut [u8]> = page.parts.iter_mut().map(|part| &mut **part).collect();
    let codec = decoder.codec();
    let mut decode = || match bounced {
        Some(bytes) => codec.decode(bytes, &mut parts),
        None => codec.decode_in_parts(&mut parts, stored),
    };
    let mut decoded = decode();
    if planted!(DecodedTwice) {
        decoded = decoded.and_then(|()| decode());
    }
    match decoded {
        Ok(()) => GetStatus::Hit,
        Err(Malformed::Sum { .. }) if planted!(UncheckedSum) => GetStatus::Hit,
        Err(error) => {
            decoder.note(&error);
            findings.retain(|(_, extent, _)| *extent != pinned.extent);
            findings.push((page.key, pinned.extent, Finding::Undecodable));
            GetStatus::Miss(MissReason::Undecodable)
        }
    }
}

/// The status of a page by its checksum.
pub(in crate::store) fn judge(
    key: &PageKey,
    pinned: &Pinned,
    checksum: u64,
    findings: &mut Vec<(PageKey, Extent, Finding)>,
) -> GetStatus {
    if pinned.proof.has_checksum(checksum) || planted!(SkippedChecksum) {
        if pinned.unproven {
            findings.push((*key, pinned.extent, Finding::Good));
        }
        return GetStatus::Hit;
    }
    findings.push((*key, pinned.extent, Finding::Mismatch));
    GetStatus::Miss(if pinned.unproven {
        MissReason::Unfinished
    } else {
        MissReason::Damaged
    })
}

pub(in crate::store) fn failed(
    key: &PageKey,
    pinned: &Pinned,
    error: DiskError,
    findings: &mut Vec<(PageKey, Extent, Finding)>,
) -> GetStatus {
    GetStatus::Miss(match error {
        DiskError::Deadline => MissReason::Deadline,
        DiskError::Shutdown => MissReason::Closed,
        DiskError::Os(libc::ETIME) => MissReason::Hung,
        DiskError::Os(_) | DiskError::NoProgress => {
            if error.is_of_the_medium() {
                findings.push((*key, pinned.extent, Finding::Unreadable));
            }
            MissReason::ReadError
        }
    })
}
