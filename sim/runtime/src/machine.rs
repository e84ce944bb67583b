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

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::dice::Dice;
use crate::medium::Medium;
use crate::sockets::Sockets;
use crate::storage::Storage;
use crate::task::{self, Process};
use crate::time::Instant;

/// Events kept for the report of a failure.
const EVENTS_KEPT: usize = 400;

/// Probabilities of the faults of the machine, for each operation, and the time that one takes.
#[derive(Clone, Copy, Debug)]
pub struct Odds {
    /// A transfer is interrupted, deferred or cancelled, and has to be tried again.
    pub interrupted: f64,
    /// A transfer comes back short.
    pub short: f64,
    /// A transfer takes up to a hundred times as long as usual.
    pub slow: f64,
    /// A read of a medium fails.
    pub read_error: f64,
    /// A write fails, after a part of it has arrived.
    pub write_error: f64,
    /// A sync fails, and drops a part of the writes that it covers.
    pub sync_error: f64,
    /// A read or write of a socket moves fewer bytes than it could.
    pub socket_short: f64,
    /// A wait for a socket is interrupted by a signal.
    pub signal: f64,
    /// Usual longest time of a transfer.
    pub transfer: Duration,
    /// Bytes that a connection keeps for a reader that does not read.
    pub socket_bytes: usize,
}

impl Default for Odds {
    fn default() -> Odds {
        Odds {
            interrupted: 0.0,
            short: 0.0,
            slow: 0.0,
            read_error: 0.0,
            write_error: 0.0,
            sync_error: 0.0,
            socket_short: 0.0,
            signal: 0.0,
            transfer: Duration::from_micros(200),
            socket_bytes: 64 << 10,
        }
    }
}

/// Happenings that the machine counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Event {
    /// A transfer was interrupted, deferred or cancelled.
    Interrupted,
    /// A read moved fewer bytes than requested.
    ShortRead,
    /// A write moved fewer bytes than requested.
    ShortWrite,
    /// A transfer took long.
    Slow,
    /// A read failed.
    ReadError,
    /// A write failed.
    WriteError,
    /// A sync failed.
    SyncError,
    /// A write was carried out after its process had been killed.
    OrphanWrite,
    /// A write of a killed process never happened.
    UnstartedWrite,
    /// A write was carried out while its process was stopped.
    WriteOfStopped,
    /// A power loss tore a write, or kept a part of the unsynced ones.
    TornByPowerLoss,
    /// A lock outlived its process, because of transfers in flight.
    LockKeptByTransfer,
    /// A read or write of a socket moved fewer bytes than it could.
    SocketShort,
    /// A wait was interrupted by a signal.
    Signal,
    /// A connection ended with its process.
    ConnectionOfKilled,
    /// A connection was refused because no process listens.
    ConnectionRefused,
    /// A wait for a socket reached its limit.
    SocketTimeout,
    /// A connection was cut, both its ends alive.
    ConnectionCut,
    /// A process wrote to blocks that a write of another process, not over yet, goes to.
    WritesCollide,
}

pub(crate) struct Kernel {
    pub(crate) dice: Dice,
    pub(crate) odds: Odds,
    pub(crate) names: BTreeMap<PathBuf, Node>,
    pub(crate) storage: Storage,
    pub(crate) sockets: Sockets,
    next_number: u64,
    counts: BTreeMap<Event, u64>,
    journal: Option<VecDeque<String>>,
}

/// The file behind a name.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Node {
    pub(crate) id: u64,
    pub(crate) content: Content,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Content {
    /// Number of the medium.
    Volume(usize),
    /// Number of the listening socket that was bound to the file.
    Socket(u64),
}

thread_local! {
    static KERNEL: RefCell<Option<Kernel>> = const { RefCell::new(None) };
}

/// Calls `f` with the machine of this thread.
///
/// # Panics
/// Without a machine.
pub(crate) fn with<R>(f: impl FnOnce(&mut Kernel) -> R) -> R {
    KERNEL.with_borrow_mut(|kernel| f(kernel.as_mut().expect("there is no machine")))
}

/// The same; `None` without a machine, and while the machine is in use.
pub(crate) fn with_if_there<R>(f: impl FnOnce(&mut Kernel) -> R) -> Option<R> {
    KERNEL.with(|kernel| {
        let mut kernel = kernel.try_borrow_mut().ok()?;
        kernel.as_mut().map(f)
    })
}

impl Kernel {
    /// A number that the machine gives out once.
    pub(crate) fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    pub(crate) fn count(&mut self, event: Event) {
        *self.counts.entry(event).or_default() += 1;
    }

    /// Whether a fault happens, with this probability. Counts it.
    pub(crate) fn strikes(&mut self, event: Event, probability: f64) -> bool {
        let strikes = self.dice.chance(probability);
        if strikes {
            self.count(event);
        }
        strikes
    }

    pub(crate) fn note(&mut self, what: impl FnOnce() -> String) {
        if let Some(journal) = &mut self.journal {
            if journal.len() == EVENTS_KEPT {
                journal.pop_front();
            }
            let at = task::now().0.saturating_sub(1 << 50);
            let process = Process::current().map_or(0, Process::id);
            journal.push_back(format!(
                "{:>9}.{:03} ms  process {process}: {}",
                at / 1_000_000,
                at / 1000 % 1000,
                what()
            ));
        }
    }

    /// The time that a transfer takes.
    pub(crate) fn draw_time(&mut self) -> Duration {
        let usual = u64::try_from(self.odds.transfer.as_nanos()).unwrap_or(u64::MAX / 200);
        let most = if self.strikes(Event::Slow, self.odds.slow) {
            usual.saturating_mul(100)
        } else {
            usual
        };
        Duration::from_nanos(self.dice.between(0, most))
    }
}

/// Adds an event to the journal of the machine, if it has one.
pub fn note(what: impl FnOnce() -> String) {
    let is_kept = with_if_there(|kernel| kernel.journal.is_some());
    if is_kept == Some(true) {
        // Outside the machine: `what` may take locks.
        let text = what();
        with_if_there(|kernel| kernel.note(|| text));
    }
}

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
        KERNEL.with_borrow_mut(|kernel| {
            assert!(kernel.is_none(), "two machines on one thread");
            *kernel = Some(Kernel {
                dice,
                odds,
                names: BTreeMap::new(),
                storage: Storage::default(),
                sockets: Sockets::default(),
                next_number: 0,
                counts: BTreeMap::new(),
                journal: has_journal.then(VecDeque::new),
            });
        });
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
        // Taken out first: a descriptor in a message is closed when it is dropped.
        let kernel = KERNEL.with_borrow_mut(Option::take);
        drop(kernel);
    }
}
