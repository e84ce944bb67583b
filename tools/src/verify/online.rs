//! Checks of a store while servers use it: at a limited rate, and with the owner's help.
//!
//! The check reads the volumes without a lock. A page with wrong bytes counts as damaged if a
//! second survey still has it at the same place. It is then read once more through the owner, as
//! any client reads: the owner forgets it, and the next put stores it again.

use std::io::IoSliceMut;
use std::time::{Duration, Instant};

use larder_engine::format::{PageKey, PageShape};
use larder_engine::{GetPage, GetStatus, MissReason, NamespaceId, OpenOptions, PageStore};
use larder_offline::survey::{BadPage, Survey};

use crate::findings::StoreArgs;
use crate::interrupt::Interrupt;
use crate::open;
use crate::program::complain;

/// Longest wait between two looks for a signal.
const LOOK: Duration = Duration::from_millis(200);

/// Limits the rate of a check.
pub(super) struct Pace {
    begun: Instant,
    bytes_per_second: Option<u64>,
}

impl Pace {
    /// Without a rate there is no limit.
    pub(super) fn new(bytes_per_second: Option<u64>) -> Pace {
        Pace {
            begun: Instant::now(),
            bytes_per_second,
        }
    }

    /// Waits until so many bytes may have been read. Returns whether the check must end.
    pub(super) fn wait(&self, bytes: u64, interrupt: &Interrupt) -> bool {
        let Some(rate) = self.bytes_per_second else {
            return interrupt.is_raised();
        };
        let due = Duration::from_secs_f64(bytes as f64 / rate.max(1) as f64);
        loop {
            let left = due.saturating_sub(self.begun.elapsed());
            if left.is_zero() || interrupt.wait(left.min(LOOK)) {
                return interrupt.is_raised();
            }
        }
    }
}

/// The fate of pages with wrong bytes on the volumes.
#[derive(Default)]
pub(super) struct Judged {
    /// Damaged pages.
    pub lost: Vec<BadPage>,
    /// Of these, pages that the owner dropped now.
    pub dropped: u64,
    /// Pages that the owner does not have at this place: moved, put again, or dropped earlier.
    /// Their records stay on disk until reclaim.
    pub departed: u64,
}

/// Reads pages through the owner, which then drops damaged ones. Without an owner, or if this
/// process may not attach, all of them count as damaged; after an interrupt, all others.
pub(super) fn judge(
    store: &StoreArgs,
    survey: &Survey,
    bad: Vec<BadPage>,
    interrupt: &Interrupt,
) -> Judged {
    if bad.is_empty() || larder_engine::report(&store.path).is_err() {
        return Judged {
            lost: bad,
            ..Judged::default()
        };
    }
    let options = OpenOptions::default().with(|o| o.volumes = store.volumes.clone());
    let judged = open::with_any(&store.path, options, |owner| {
        let mut judged = Judged::default();
        for bad in &bad {
            let facts = &survey.namespaces[bad.page.namespace];
            let Some(namespace) = facts.record.as_ref().filter(|_| !interrupt.is_raised()) else {
                judged.lost.push(*bad);
                continue;
            };
            let id = owner.namespace(namespace)?;
            match read(owner, id, namespace.shape(), bad.page.key) {
                GetStatus::Hit | GetStatus::Miss(MissReason::Absent) => judged.departed += 1,
                GetStatus::Miss(MissReason::Damaged | MissReason::ReadError) => {
                    judged.dropped += 1;
                    judged.lost.push(*bad);
                }
                GetStatus::Miss(_) => judged.lost.push(*bad),
            }
        }
        Ok(judged)
    });
    judged.unwrap_or_else(|failure| {
        complain(&format_args!(
            "the owner was not told of the damage: {failure}"
        ));
        Judged {
            lost: bad,
            ..Judged::default()
        }
    })
}

fn read(store: &dyn PageStore, id: NamespaceId, shape: &PageShape, key: PageKey) -> GetStatus {
    let sizes = shape.part_sizes().iter();
    let mut memory: Vec<Vec<u8>> = sizes.map(|bytes| vec![0; *bytes as usize]).collect();
    let mut parts: Vec<IoSliceMut<'_>> = memory
        .iter_mut()
        .map(|part| IoSliceMut::new(part))
        .collect();
    let parts = &mut parts[..];
    store.get_uncounted(id, &mut [GetPage { key, parts }], None)[0]
}
