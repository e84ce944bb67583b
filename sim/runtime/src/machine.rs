//! The simulated machine under the processes of a [`World`](crate::World): files on media that can
//! lose and tear writes, descriptors, locks, sockets, pids.
//!
//! The driver makes a [`Machine`] beside the world, and ends processes through it
//! ([`Machine::kill`]). The machine does then what the kernel does: it closes the descriptors of
//! the process, its connections end, and its locks stay until its last transfer is over.
//!
//! Input and output take time. A transfer is carried out at the moment when it is due, whether its
//! process runs, is stopped, or has been killed meanwhile. A killed process may not have handed a
//! transfer to its device yet: then it never happens. The bytes of a write are read from the memory
//! of the process when the write is carried out, or when the process is killed.

use std::collections::BTreeMap;
use std::marker::PhantomData;
use std::path::Path;

use crate::dice::Dice;
use crate::kernel::{self, Content, Event, Kernel, Node, Odds, with};
use crate::medium::Medium;
use crate::task::Process;
use crate::time::Instant;

/// A machine. There is one on a thread at a time.
#[derive(Debug)]
pub struct Machine {
    /// It belongs to its thread.
    _thread: PhantomData<*const ()>,
}

impl Machine {
    /// A machine without files. With `has_journal` it keeps its last events.
    ///
    /// # Panics
    /// If the thread has a machine.
    #[must_use]
    pub fn new(dice: Dice, odds: Odds, has_journal: bool) -> Machine {
        kernel::begin(dice, odds, has_journal);
        Machine {
            _thread: PhantomData,
        }
    }

    /// Adds a file of zeros.
    pub fn add_volume(&self, path: &Path, blocks: usize) {
        with(|kernel| {
            let id = kernel.number();
            let content = Content::Volume(kernel.storage.add(Medium::new(blocks), id));
            kernel.names.insert(path.to_owned(), Node { id, content });
        });
    }

    /// States a length of a volume that is larger than its medium, in bytes: nothing uses the rest.
    ///
    /// # Panics
    /// If there is no such volume.
    pub fn state_length(&self, path: &Path, bytes: u64) {
        with(|kernel| match kernel.names.get(path) {
            Some(Node {
                content: Content::Volume(number),
                ..
            }) => kernel.storage.state_length(*number, bytes),
            other => panic!("{}: no volume: {other:?}", path.display()),
        });
    }

    /// Cuts a connection, if there is one: its ends find it closed. Returns whether there was one.
    pub fn cut_connection(&self) -> bool {
        with(Kernel::cut_connection)
    }

    /// Calls `f` with the medium of a volume.
    ///
    /// # Panics
    /// If there is no such volume.
    pub fn with_medium<R>(&self, path: &Path, f: impl FnOnce(&mut Medium) -> R) -> R {
        with(|kernel| match kernel.names.get(path) {
            Some(Node {
                content: Content::Volume(number),
                ..
            }) => f(kernel.storage.medium(*number)),
            other => panic!("{}: no volume: {other:?}", path.display()),
        })
    }

    /// Removes a name, as a cleaner of temporary files does. Returns whether there was one.
    pub fn remove(&self, path: &Path) -> bool {
        with(|kernel| kernel.names.remove(path).is_some())
    }

    /// Whether a name is there.
    #[must_use]
    pub fn has(&self, path: &Path) -> bool {
        with(|kernel| kernel.names.contains_key(path))
    }

    /// Changes the probabilities.
    pub fn set_odds(&self, odds: Odds) {
        with(|kernel| kernel.odds = odds);
    }

    /// Kills a process: closes its descriptors, and ends its connections.
    pub fn kill(&self, process: Process) {
        with(|kernel| {
            kernel.note(|| format!("process {} is killed", process.id()));
            // First: the writes in flight are read from its memory.
            kernel.end_transfers(process);
        });
        process.kill();
        with(|kernel| {
            kernel.close_files_of(process);
            kernel.close_sockets_of(process);
        });
    }

    /// Carries out the transfers that are due. To be called between two steps of the world.
    pub fn settle(&self) {
        with(Kernel::settle);
    }

    /// Whether a process other than `but` has a write in flight, from byte `from` of a volume on.
    #[must_use]
    pub fn has_writes(&self, but: Process, from: u64) -> bool {
        with(|kernel| {
            let mut writes = kernel.storage.writes();
            writes.any(|(offset, process)| process != but && offset >= from)
        })
    }

    /// The moment when the next transfer of a killed process is due.
    #[must_use]
    pub fn next_orphan(&self) -> Option<Instant> {
        with(|kernel| kernel.storage.next_orphan())
    }

    /// Number of transfers of killed processes that are still in flight.
    #[must_use]
    pub fn orphans(&self) -> usize {
        with(|kernel| kernel.storage.orphans())
    }

    /// The power fails, after all processes were killed. Unsynced writes may be lost.
    ///
    /// # Panics
    /// If a process still has files open.
    pub fn lose_power(&self) {
        with(|kernel| {
            kernel.note(|| "the power fails".to_owned());
            kernel.lose_power();
        });
    }

    /// The power fails, for the files beside stores alone.
    pub fn lose_sides(&self) {
        with(Kernel::lose_sides);
    }

    /// How often an event happened.
    #[must_use]
    pub fn count_of(&self, event: Event) -> u64 {
        with(|kernel| kernel.counts.get(&event).copied().unwrap_or(0))
    }

    /// How often each event happened.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<Event, u64> {
        with(|kernel| kernel.counts.clone())
    }

    /// The last events, oldest first.
    #[must_use]
    pub fn events(&self) -> Vec<String> {
        with(|kernel| kernel.journal.iter().flatten().cloned().collect())
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        kernel::end();
    }
}
