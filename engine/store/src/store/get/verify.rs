//! From the bytes that were read of a page to the page in the caller's memory.

use std::io::IoSliceMut;

use larder_base::planted;
use larder_codec::Malformed;
use larder_core::grants::{Extent, Finding};
use larder_core::status::{GetStatus, MissReason};
use larder_disk::DiskError;
use larder_format::{BLOCK_BYTES, PageChecksum, PageKey, Seal};
use larder_seal::TenantKey;

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
/// `bounced` has the bytes that were not read straight into it. `None`: an encrypted page did not
/// open, and has to be read once more, for [`judge_sealed`].
pub(in crate::store) fn take(
    decoder: &Decoder,
    shape: &NamespaceShape,
    page: &mut GetPage<'_, '_>,
    pinned: &Pinned,
    bounced: Option<&mut [u8]>,
    findings: &mut Vec<(PageKey, Extent, Finding)>,
) -> Option<GetStatus> {
    match (&shape.tenant, &pinned.proof.seal) {
        (None, None) => {
            let bounced = bounced.map(|bytes| &*bytes);
            Some(take_plain(decoder, shape, page, pinned, bounced, findings))
        }
        (Some(tenant), Some(seal)) => {
            let page = (page, pinned);
            let opened = tenant.with_key(seal.slot, |key| {
                open(decoder, shape, (key, seal), page, bounced, findings)
            });
            opened.unwrap_or(Some(GetStatus::Miss(MissReason::Sealed)))
        }
        // Another writer's.
        _ => Some(GetStatus::Miss(MissReason::Sealed)),
    }
}

/// Decrypts a page where its bytes are, once: the bytes are no longer the stored ones then.
fn open(
    decoder: &Decoder,
    shape: &NamespaceShape,
    (key, seal): (&TenantKey, &Seal),
    (page, pinned): (&mut GetPage<'_, '_>, &Pinned),
    mut bounced: Option<&mut [u8]>,
    findings: &mut Vec<(PageKey, Extent, Finding)>,
) -> Option<GetStatus> {
    let stored = shape.stored_bytes(pinned.extent.place);
    let name = shape.name_of(&page.key, stored);
    let opened = match &mut bounced {
        Some(bytes) => key.open(&name, seal, &mut [bytes]),
        None => {
            let mut parts: Vec<&mut [u8]> = first(page.parts, stored).collect();
            key.open(&name, seal, &mut parts)
        }
    };
    if opened.is_err() && !planted!(TagSkipped) {
        return None;
    }
    if pinned.unproven {
        findings.push((page.key, pinned.extent, Finding::Good));
    }
    let bounced = bounced.map(|bytes| &*bytes);
    if pinned.extent.place.saved > 0 {
        return Some(decode(decoder, page, pinned, bounced, stored, findings));
    }
    if let Some(bytes) = bounced {
        copy_out(shape, bytes, page.parts);
    }
    Some(GetStatus::Hit)
}

/// The status of an encrypted page that did not open, by its bytes as they were read once more.
/// Only bytes that are not the stored ones are damage. Else the key is wrong, or a writer without
/// it changed the record: nothing is forgotten.
pub(super) fn judge_sealed(
    decoder: &Decoder,
    shape: &NamespaceShape,
    (page, pinned, bytes): (&mut GetPage<'_, '_>, &Pinned, &mut [u8]),
    findings: &mut Vec<(PageKey, Extent, Finding)>,
) -> GetStatus {
    let mut checksum = PageChecksum::new(shape.fingerprint, &page.key);
    checksum.blocks(bytes);
    let checksum = checksum.finish();
    if !pinned.proof.has_checksum(checksum) {
        return judge(&page.key, pinned, checksum, findings);
    }
    let opened = take(decoder, shape, page, pinned, Some(bytes), findings);
    opened.unwrap_or_else(|| {
        if planted!(FindingDropsSealed) {
            findings.push((page.key, pinned.extent, Finding::Mismatch));
        }
        GetStatus::Miss(MissReason::Sealed)
    })
}

fn take_plain(
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
