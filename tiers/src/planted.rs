//! Bugs that can be switched on, to see that the model test notices them: the test of the tests.
//!
//! Owns the list of them (`Bug`) and which one is on (`plant`): at most one, for the calling thread. The places that hold a bug
//! ask `planted!`. In a build without debug assertions that is the word `false`, and nothing else of this module exists.

#[cfg(debug_assertions)]
pub use switch::{Bug, is_planted, plant};

/// Whether this bug is on.
#[cfg(debug_assertions)]
macro_rules! planted {
    ($bug:ident) => {
        $crate::planted::is_planted($crate::planted::Bug::$bug)
    };
}

/// Whether this bug is on: never, in this build.
#[cfg(not(debug_assertions))]
macro_rules! planted {
    ($bug:ident) => {
        false
    };
}

pub(crate) use planted;

#[cfg(debug_assertions)]
mod switch {
    use std::cell::Cell;

    thread_local! {
        static PLANTED: Cell<Option<Bug>> = const { Cell::new(None) };
    }

    /// Switches a bug on for this thread, or (`None`) whichever is on off.
    pub fn plant(bug: Option<Bug>) {
        PLANTED.set(bug);
    }

    /// Whether this bug is on in this thread.
    #[must_use]
    pub fn is_planted(bug: Bug) -> bool {
        PLANTED.get() == Some(bug)
    }

    macro_rules! bugs {
        ($($(#[doc = $doc:literal])* $bug:ident,)*) => {
            /// A mistake that somebody could make.
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            pub enum Bug {
                $($(#[doc = $doc])* $bug,)*
            }

            impl Bug {
                /// All of them.
                pub const ALL: &[Bug] = &[$(Bug::$bug,)*];
            }
        };
    }

    bugs! {
        /// Giving a lock back leaves the root's end of the path locked.
        LockLeak,
        /// A split leaves the front part without the L2 pages that are its own.
        SplitForgetsHostRun,
        /// A split leaves the front part without the locks of the whole.
        SplitForgetsLocks,
        /// Eviction takes nodes that somebody has locked.
        EvictsLocked,
        /// A node whose last child has left is not offered to eviction.
        StaleLeafSet,
        /// Requests with different salts share nodes.
        SaltIgnored,
        /// An insert gives back the tree's pages, not the request's, where it finds the tokens already there.
        FreesTheTreesPages,
        /// An insert forgets to give back the pages of tokens that were already there.
        KeepsDuplicates,
        /// A match says nothing of loads in flight on its path.
        HitOnUnfinishedLoad,
        /// A backup does not wait for the forward that writes its pages.
        BackupBeforeForward,
        /// A failed forward changes nothing.
        IgnoresFailedForward,
        /// A request goes on after a forward of its own has failed that filled no whole page.
        RequestOutlivesItsForward,
        /// What a request inserts after a failed forward of its own stays, though it begins in a
        /// page which that has filled.
        FailureSparesLaterInserts,
        /// An insert whose pages were lost with another's has the pages copied that take their
        /// place.
        LostInsertsWaitOn,
        /// A loss reaches only the last of the parts that its node was split into.
        LossReachesOneFragment,
        /// Requests that hold lost pages are not broken.
        HidesLosses,
        /// A match goes on through nodes whose pages were lost.
        MatchesLostPages,
        /// A node whose pages were lost stays when nothing needs it any more.
        KeepsBareNodes,
        /// A load does not wait for the forwards that still use the pages it fills.
        LoadBeforeForward,
        /// Lost pages are given back though requests and loads hold them.
        FreesLostPagesAtOnce,
        /// The end of a backup reaches only the last of the parts that its node was split into.
        AckCoversOneFragment,
        /// A load that failed leaves its pages in the tree.
        KeepsFailedLoad,
        /// A cancelled prefetch gives back pages that a read still writes into.
        SlotFreedUnderRead,
        /// A prefetch takes a batch for whole of which L3 gave only the front.
        TrustsShortRead,
        /// A prefetched part is put below a parent that has left L2.
        InsertsBelowLostParent,
        /// Pages that L3 has are written to it again.
        WritesTwice,
        /// A backup that failed counts as one that succeeded.
        TrustsFailedBackup,
        /// Hits are counted each time a request is inserted.
        CountsHitsTwice,
    }
}
