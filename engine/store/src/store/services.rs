//! Log lines about volumes: their damaged pages, and their read-only service. A volume has at most
//! one pair of lines a minute about its service.

use std::path::PathBuf;
use std::time::Duration;

use larder_base::runtime::{Instant, Mutex};
use larder_core::core::{DAMAGED_TOLD_MAX, DamagedPage};
use larder_core::grants::Finding;
use larder_disk::DiskError;

/// Least time between two reports of a volume in read-only service.
const PAUSE: Duration = Duration::from_secs(60);

/// The reports on each volume.
pub struct Services(Vec<Volume>);

struct Volume {
    path: PathBuf,
    reported: Mutex<Reported>,
}

#[derive(Default)]
struct Reported {
    /// When read-only service was reported last.
    at: Option<Instant>,
    /// Whether read-only service is the last state in the log.
    is_read_only: bool,
    /// Changes that were not reported.
    unreported: u64,
}

impl Services {
    pub(crate) fn new(paths: Vec<PathBuf>) -> Services {
        let volume = |path| Volume {
            path,
            reported: Mutex::default(),
        };
        Services(paths.into_iter().map(volume).collect())
    }

    /// The path of a volume.
    pub(super) fn path(&self, volume: usize) -> PathBuf {
        let known = self.0.get(volume).map(|volume| volume.path.clone());
        known.unwrap_or_default()
    }

    /// A volume has entered read-only service.
    pub(super) fn begin_read_only(&self, volume: usize, error: &DiskError) {
        let Some(Volume { path, reported }) = self.0.get(volume) else {
            return;
        };
        let mut reported = reported.lock();
        if reported.at.is_some_and(|at| at.elapsed() < PAUSE) {
            reported.unreported += 1;
            return;
        }
        tracing::warn!(
            volume,
            unreported = reported.unreported,
            "{}: in read-only service: the volume refuses writes ({error}){}. Its pages are \
             served, puts are refused, and it is probed every second",
            path.display(),
            remedy(error),
        );
        *reported = Reported {
            at: Some(Instant::now()),
            is_read_only: true,
            unreported: 0,
        };
    }

    /// A page of a volume was dropped as damaged.
    pub(super) fn tell_damaged(&self, page: &DamagedPage) {
        let fault = match page.finding {
            Finding::Unreadable => "the device does not return it",
            Finding::Undecodable => "the codec cannot decode it",
            Finding::Mismatch | Finding::Good => "its bytes do not match its checksum",
        };
        tracing::warn!(
            volume = page.at.volume,
            segment = page.segment,
            offset = page.at.offset,
            namespace = %page.namespace,
            key = %page.key,
            "{}: a page does not read back as it was written, and is forgotten: {fault}. Another \
             program wrote to the volume, or the drive fails: `smartctl -a` shows its errors. \
             `larder verify --online` finds the other damaged pages (counted in damaged_pages; \
             the first {DAMAGED_TOLD_MAX} are logged)",
            self.path(page.at.volume).display(),
        );
    }

    /// A volume takes writes again.
    pub(super) fn end_read_only(&self, volume: usize) {
        let Some(Volume { path, reported }) = self.0.get(volume) else {
            return;
        };
        let mut reported = reported.lock();
        if std::mem::take(&mut reported.is_read_only) {
            let path = path.display();
            tracing::warn!(
                volume,
                "{path}: takes writes again; read-only service ended"
            );
        } else {
            reported.unreported += 1;
        }
    }
}

/// Advice for an error.
fn remedy(error: &DiskError) -> &'static str {
    match error {
        DiskError::Os(libc::ENOSPC | libc::EDQUOT) => {
            "; the volume's file has holes and its file system or quota is full: free some space, \
             then fill the holes with fallocate"
        }
        DiskError::Os(libc::EROFS) => "; remount the file system writable",
        _ => "; look for errors of the device in the kernel's log (dmesg), and check its health",
    }
}
