//! The state of a simulated machine: its files, volumes and sockets, its faults, and its journal.
//! A thread has at most one.

use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::path::PathBuf;
use std::time::Duration;

use crate::connections::Sockets;
use crate::dice::Dice;
use crate::task::{self, Process};
use crate::time::Clocks;
use crate::volumes::Storage;

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
    /// The contents of small files, the present one of each last.
    pub(crate) sides: BTreeMap<PathBuf, Vec<Vec<u8>>>,
    next_number: u64,
    pub(crate) counts: BTreeMap<Event, u64>,
    pub(crate) journal: Option<VecDeque<String>>,
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

/// Gives this thread a machine without files.
///
/// # Panics
/// If it has one.
pub(crate) fn begin(dice: Dice, odds: Odds, has_journal: bool) {
    KERNEL.with_borrow_mut(|kernel| {
        assert!(kernel.is_none(), "two machines on one thread");
        Clocks::NEW.set();
        *kernel = Some(Kernel {
            dice,
            odds,
            names: BTreeMap::new(),
            storage: Storage::default(),
            sockets: Sockets::default(),
            sides: BTreeMap::new(),
            next_number: 0,
            counts: BTreeMap::new(),
            journal: has_journal.then(VecDeque::new),
        });
    });
}

/// Takes the machine from this thread.
pub(crate) fn end() {
    // Taken out first: a descriptor in a message is closed when it is dropped.
    let kernel = KERNEL.with_borrow_mut(Option::take);
    drop(kernel);
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
            let at = task::elapsed().as_micros();
            let process = Process::current().map_or(0, Process::id);
            journal.push_back(format!(
                "{:>9}.{:03} ms  process {process}: {}",
                at / 1000,
                at % 1000,
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
