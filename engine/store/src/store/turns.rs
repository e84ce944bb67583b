//! The volumes of a store in use, for one thread at a time.

use std::ops::{Deref, DerefMut};

use larder_base::runtime::{Condvar, Instant, Mutex, MutexGuard};

use crate::volume::Volumes;

/// The volumes. A thread that has them may wait for a device that hangs, so that another one may
/// give up waiting for them.
#[derive(Debug)]
pub(crate) struct Turns {
    is_taken: Mutex<bool>,
    freed: Condvar,
    volumes: Mutex<Volumes>,
}

/// The volumes, for one thread.
pub(crate) struct Turn<'a> {
    turns: &'a Turns,
    volumes: MutexGuard<'a, Volumes>,
}

impl Turns {
    pub(super) fn new(volumes: Volumes) -> Turns {
        Turns {
            is_taken: Mutex::new(false),
            freed: Condvar::new(),
            volumes: Mutex::new(volumes),
        }
    }

    pub(crate) fn lock(&self) -> Turn<'_> {
        let mut is_taken = self.is_taken.lock();
        while *is_taken {
            self.freed.wait(&mut is_taken);
        }
        self.take(is_taken)
    }

    pub(super) fn try_lock(&self) -> Option<Turn<'_>> {
        let is_taken = self.is_taken.lock();
        (!*is_taken).then(|| self.take(is_taken))
    }

    /// `None` if another thread has them until then.
    pub(super) fn lock_until(&self, until: Instant) -> Option<Turn<'_>> {
        let mut is_taken = self.is_taken.lock();
        while *is_taken {
            let waited = self.freed.wait_until(&mut is_taken, until);
            if waited.timed_out() && *is_taken {
                return None;
            }
        }
        Some(self.take(is_taken))
    }

    fn take(&self, mut is_taken: MutexGuard<'_, bool>) -> Turn<'_> {
        *is_taken = true;
        drop(is_taken);
        Turn {
            turns: self,
            volumes: self.volumes.lock(),
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        *self.turns.is_taken.lock() = false;
        self.turns.freed.notify_one();
    }
}

impl Deref for Turn<'_> {
    type Target = Volumes;

    fn deref(&self) -> &Volumes {
        &self.volumes
    }
}

impl DerefMut for Turn<'_> {
    fn deref_mut(&mut self) -> &mut Volumes {
        &mut self.volumes
    }
}
