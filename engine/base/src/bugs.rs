//! Bugs that can be switched on, to check that a simulation or a model test notices them: the test
//! of the tests.
//!
//! [`bugs!`](crate::bugs!) makes the list of a crate, in its module `planted`. At most one bug of a
//! crate is active, for the calling thread: a simulation runs on one thread. The code with a bug
//! asks [`planted!`](crate::planted!). In a build without debug assertions, such as a release, that
//! is the constant `false`, and there are no lists.

#[cfg(debug_assertions)]
use std::cell::Cell;
#[cfg(debug_assertions)]
use std::thread::LocalKey;

/// The bugs of a crate.
#[cfg(debug_assertions)]
pub trait Plant: Copy + PartialEq + 'static {
    /// The active bug of a thread.
    fn active() -> &'static LocalKey<Cell<Option<Self>>>;
}

/// Activates a bug for this thread; `None` deactivates it.
#[cfg(debug_assertions)]
pub fn plant<B: Plant>(bug: Option<B>) {
    B::active().set(bug);
}

/// Whether this bug is active in this thread.
#[cfg(debug_assertions)]
#[must_use]
pub fn is_planted<B: Plant>(bug: B) -> bool {
    B::active().get() == Some(bug)
}

/// Whether this bug of the calling crate is active.
#[cfg(debug_assertions)]
#[macro_export]
#[allow(clippy::crate_in_macro_def, reason = "each crate has bugs of its own")]
macro_rules! planted {
    ($bug:ident) => {
        $crate::bugs::is_planted(crate::planted::Bug::$bug)
    };
}

/// Whether this bug of the calling crate is active: never, in this build.
#[cfg(not(debug_assertions))]
#[macro_export]
macro_rules! planted {
    ($bug:ident) => {
        false
    };
}

/// Makes `Bug`, the bugs of a crate, with lists of them.
#[cfg(debug_assertions)]
#[macro_export]
macro_rules! bugs {
    ($(
        $(#[doc = $list_doc:literal])*
        $list:ident: { $($(#[doc = $doc:literal])* $bug:ident,)* }
    )*) => {
        /// A deliberate mistake.
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

        impl $crate::bugs::Plant for Bug {
            fn active() -> &'static std::thread::LocalKey<std::cell::Cell<Option<Bug>>> {
                thread_local! {
                    static ACTIVE: std::cell::Cell<Option<Bug>> =
                        const { std::cell::Cell::new(None) };
                }
                &ACTIVE
            }
        }
    };
}

/// Makes nothing, in this build.
#[cfg(not(debug_assertions))]
#[macro_export]
macro_rules! bugs {
    ($($lists:tt)*) => {};
}
