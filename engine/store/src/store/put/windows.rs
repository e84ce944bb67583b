//! The windows of a put that are in flight.

use std::sync::Arc;
use std::time::Duration;

use larder_base::memory::AlignedBuf;
use larder_base::planted;
use larder_core::grants::ReservationId;
use larder_disk::mailbox::Mailbox;

use super::encoded::Encoded;
use crate::api::Recall;

/// Longest single wait for the device's answers. Between two waits the put sends its heartbeat.
const PATIENCE: Duration = Duration::from_millis(500);

/// Some pages of a call, between their reservation and their statuses.
pub(super) struct Window {
    /// Positions among the pages of the call, by position in the asks.
    pub(super) members: Vec<usize>,
    pub(super) reservation: ReservationId,
    /// By operation: positions in the asks.
    pub(super) groups: Vec<Vec<usize>>,
    /// Operations in flight.
    pub(super) left: usize,
    pub(super) bytes: usize,
    pub(super) landed: Vec<(usize, bool)>,
    /// Aligned copies of pages with unaligned memory.
    pub(super) bounced: Vec<AlignedBuf>,
    pub(super) encoded: Encoded,
}

/// The windows of a call that are in flight. Dropping them waits for the disk: the memory is the
/// caller's.
#[derive(Default)]
pub(super) struct Windows {
    /// By launch number; `None` once landed.
    list: Vec<Option<Window>>,
    pub(super) mailbox: Arc<Mailbox>,
    /// Operations in flight.
    pub(super) left: usize,
    /// Bytes in flight.
    pub(super) bytes: usize,
    /// Bytes of memory for encoded pages.
    pub(super) encoded: usize,
}

impl Windows {
    /// Adds a window whose operations are about to begin. Returns its number.
    pub(super) fn add(&mut self, window: Window) -> usize {
        self.bytes += window.bytes;
        self.encoded += window.encoded.memory_bytes();
        self.list.push(Some(window));
        self.list.len() - 1
    }

    /// Counts `ops` more operations of a window as in flight.
    pub(super) fn begin(&mut self, number: usize, ops: usize) {
        self.left += ops;
        if let Some(Some(window)) = self.list.get_mut(number) {
            window.left += ops;
        }
    }

    /// Waits for answers. Returns the windows that have landed.
    pub(super) fn wait(&mut self, recall: Option<&Recall>) -> Vec<Window> {
        let mut landed = Vec::new();
        let answers = self.mailbox.take(PATIENCE);
        let counts = !recall.is_some_and(Recall::is_recalled) || planted!(RecalledWrite);
        for done in answers {
            self.left -= 1;
            let (number, group) = untag(done.tag);
            let Some(slot) = self.list.get_mut(number) else {
                continue;
            };
            let Some(window) = slot else { continue };
            window.left -= 1;
            let pages = window.groups.get(group).into_iter().flatten();
            let is_good = counts && done.result.is_ok() || planted!(IgnoredFailure);
            window.landed.extend(pages.map(|&ask| (ask, is_good)));
            if window.left == 0 {
                self.bytes -= window.bytes;
                self.encoded -= window.encoded.memory_bytes();
                landed.extend(slot.take());
            }
        }
        landed
    }
}

impl Drop for Windows {
    fn drop(&mut self) {
        while self.left > 0 {
            self.wait(None);
        }
    }
}

/// An operation's tag: its window's number and its own within the window.
pub(super) fn tag(window: usize, group: usize) -> u64 {
    (window as u64) << 32 | group as u64
}

fn untag(tag: u64) -> (usize, usize) {
    let part = |part: u64| usize::try_from(part).unwrap_or(usize::MAX);
    (part(tag >> 32), part(tag & u64::from(u32::MAX)))
}
