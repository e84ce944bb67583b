//! Which clients may have erased keys.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use larder_base::ids::ClientId;
use larder_base::runtime::Mutex;

use crate::share::wire::Keyholder;

/// Of all clients.
#[derive(Default)]
pub(super) struct Forgetting {
    /// The number of the last message.
    number: AtomicU64,
    /// Clients that have gone while their marks were there.
    pub(super) gone: Mutex<BTreeMap<ClientId, Keyholder>>,
}

/// The numbers of the messages to one client.
#[derive(Debug, Default)]
pub(super) struct Forgotten {
    asked: AtomicU64,
    answered: AtomicU64,
}

impl Forgetting {
    /// The number of the next message.
    pub(super) fn next(&self) -> u64 {
        self.number.fetch_add(1, Ordering::AcqRel) + 1
    }
}

impl Forgotten {
    pub(super) fn ask(&self, number: u64) {
        self.asked.store(number, Ordering::Release);
    }

    pub(super) fn answer(&self, number: u64) {
        self.answered.fetch_max(number, Ordering::AcqRel);
    }

    /// Whether the client has not answered the last message.
    pub(super) fn is_awaited(&self) -> bool {
        self.answered.load(Ordering::Acquire) < self.asked.load(Ordering::Acquire)
    }
}
