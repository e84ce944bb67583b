//! Bugs that can be switched on, to see that the simulation notices them: the test of the tests.
//!
//! Owns the list of them (`Bug`) and which one is on (`plant`): at most one, for the calling thread, which is all that a
//! simulated store runs on. The places that hold a bug ask `planted!`. In a build without debug assertions, such as a release,
//! that is the word `false`, and nothing else of this module exists.

#[cfg(debug_assertions)]
pub use switch::{Bug, is_planted, plant};

/// Whether this bug is on.
#[cfg(debug_assertions)]
#[doc(hidden)]
#[macro_export]
macro_rules! planted {
    ($bug:ident) => {
        $crate::planted::is_planted($crate::planted::Bug::$bug)
    };
}

/// Whether this bug is on: never, in this build.
#[cfg(not(debug_assertions))]
#[doc(hidden)]
#[macro_export]
macro_rules! planted {
    ($bug:ident) => {
        false
    };
}

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
        ($($(#[doc = $list_doc:literal])* $list:ident: { $($(#[doc = $doc:literal])* $bug:ident,)* })*) => {
            /// A mistake that somebody could make.
            #[derive(Clone, Copy, Debug, PartialEq, Eq)]
            pub enum Bug {
                $($($(#[doc = $doc])* $bug,)*)*
            }

            impl Bug {
                $(
                    $(#[doc = $list_doc])*
                    pub const $list: &[Bug] = &[$(Bug::$bug,)*];
                )*
            }
        };
    }

    bugs! {
        /// Those that show in a store that one process uses.
        ALONE: {
            /// A get hands out what it read without looking at its checksum.
            SkippedChecksum,
            /// A get returns, and its caller uses the memory again, while the device still reads into it.
            LateRead,
            /// A page becomes visible, and its put returns, when its descriptor is written, whether or not its bytes are.
            EarlyPublish,
            /// Pages are acknowledged in a segment whose first header is still being written.
            UnopenedSegment,
            /// A put that a deletion overtook becomes visible all the same.
            UndeadPut,
            /// A flush returns before anything has been synced.
            EarlyFlush,
            /// A put of a page that is there returns before the first copy is as durable as the policy asks.
            EarlyDuplicate,
            /// Writes to any volume but the first do not make it one to be synced.
            ForgottenVolume,
            /// A segment is sealed, and vouches for all in it, before a sync has covered it.
            EarlySeal,
            /// A failed sync is repeated, and the second answer believed.
            RetriedSync,
            /// Deletions and namespaces that a failed sync may have lost are not written again.
            ForgottenNotes,
            /// A segment goes on after a write into it has failed.
            UnpoisonedSegment,
            /// The group of a page whose bytes failed after its descriptor was written counts as complete.
            UnheldGroup,
            /// A segment is given back while readers are in it.
            MissingPin,
            /// A segment is given back before what was carried out of it is durable.
            EarlyRelease,
            /// A segment is written again before the header that says it is free is durable.
            EarlyReuse,
            /// Reclaim drops a deletion though an older life that may hold the page is still on disk.
            DroppedDeletion,
            /// Evictions are not written down.
            UnwrittenEviction,
            /// Pages are evicted for a page that no volume takes.
            EvictionInVain,
            /// Recovery takes descriptor blocks of a segment's earlier lives.
            StaleSequence,
            /// Recovery stops at the first block that is not what it looks for.
            FirstGapEnds,
            /// Of several records of a key, deletions too, recovery takes the one that was born first.
            LowerBirthWins,
            /// Recovery calls every page proven.
            UnprovenProven,
            /// Opening does not begin a new run, so that its numbers are used twice.
            RunNotBumped,
        }
        /// Those that show among an owner and its clients.
        SHARED: {
            /// A client that has gone keeps its pins.
            KeptPins,
            /// A client that has gone keeps what it was given to write to, for good.
            KeptPuts,
            /// What a client that has gone was given to write to is given to others while its writes are under way.
            EarlyExtents,
            /// What a client that says nothing more of its put was given to write to is given to others, though it may go on.
            UnkeptExtents,
            /// A client that does not hold its marks yet is given something to write to.
            UnmarkedPut,
            /// A pin that a client gives back stays on its account, to be given back again when it goes.
            DoubleUnpin,
            /// What a client says of a page counts after it has given back its pin.
            UnpinnedFinding,
            /// A number that is none of a client's puts is taken for the core's.
            ForeignPut,
            /// The number of a put that a former owner granted is taken for that of one of this owner's.
            FormerPut,
            /// Whoever takes a store over does not wait for the marks of the former owner's clients.
            UnawaitedMarks,
            /// A client hands out what it read though its owner had gone, without looking at its checksum.
            StaleExtent,
        }
    }
}
