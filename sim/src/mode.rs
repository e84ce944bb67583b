//! The simulations: one process, several, and nodes with a remote.

use std::sync::Once;

use larder_sim_runtime::heap;

use crate::classes::Tally;
use crate::totals::Totals;
use crate::world::Journal;
use crate::{agents, processes, store};

/// Seeds played before the first one with memory of its own.
const FIRST_SEEDS: u64 = 8;

/// The users of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// The callers of one process.
    Store,
    /// An owner and its clients: several processes, each with the whole engine.
    Shared,
    /// Two nodes with a remote beneath their stores.
    Agents,
}

impl Mode {
    /// Plays a seed. Returns a digest of all events, and their counts.
    ///
    /// # Panics
    /// If a promise is broken.
    #[must_use]
    pub fn play(self, seed: u64, journal: Option<Journal>) -> (u64, Totals, Tally) {
        match self {
            Mode::Store => store::play(seed, journal),
            Mode::Shared => processes::play(seed, journal),
            Mode::Agents => agents::play(seed, journal),
        }
    }

    /// Plays a seed, and frees all its memory if the program's allocator is [`Heap`](heap::Heap).
    /// Returns as [`Mode::play`] does.
    ///
    /// # Panics
    /// If a promise is broken.
    #[must_use]
    pub fn play_apart(self, seed: u64) -> (u64, Totals, Tally) {
        self.apart(|| self.play(seed, None))
    }

    /// Plays something on this mode's store with memory of its own.
    pub(crate) fn apart<R: Copy + 'static>(self, play: impl FnOnce() -> R) -> R {
        static FIRST: [Once; 3] = [const { Once::new() }; 3];
        // By a thread without a planted bug, which no panic has made unfit.
        let play_first = || {
            for seed in 0..FIRST_SEEDS {
                let _ = self.play(seed, None);
            }
        };
        FIRST[self as usize].call_once(|| {
            let _ = std::thread::scope(|scope| scope.spawn(play_first).join());
        });
        // SAFETY: a run leaves nothing behind: its world and its machine are dropped at its end.
        // The statics of the engine and of its dependencies that are made at their first use have
        // been made above.
        unsafe { heap::scope(play) }
    }

    /// The command line of `larder-sim` that plays a seed again.
    #[must_use]
    pub fn command(self, seed: u64) -> String {
        let mode = match self {
            Mode::Store => "",
            Mode::Shared => "--shared ",
            Mode::Agents => "--agents ",
        };
        format!("larder-sim {mode}--seed {seed}")
    }
}
