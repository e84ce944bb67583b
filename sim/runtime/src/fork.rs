//! Handles in forked processes, with the interface of the engine's `fork`.
//!
//! A task of another process that uses a handle stands for a forked child. The descriptors that the
//! handle keeps private are not open there.

use crate::task::Process;

/// The process that created an object. `None` outside all tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin(Option<Process>);

impl Origin {
    /// This process.
    #[must_use]
    pub fn here() -> Origin {
        Origin(Process::current())
    }

    /// Whether this process is a forked child of that one. The driver is none: it looks at handles
    /// between two steps.
    #[must_use]
    pub fn is_inherited(self) -> bool {
        Process::current().is_some_and(|process| self.0 != Some(process))
    }
}

/// Keeps the file of a descriptor from forked children.
#[derive(Debug)]
pub struct Private {
    origin: Origin,
}

impl Private {
    /// Whether this process is a forked child of the process that watches the descriptor.
    #[must_use]
    pub fn is_inherited(&self) -> bool {
        self.origin.is_inherited()
    }
}

/// Watches a descriptor.
pub fn keep_private<T>(_file: T) -> Private {
    Private {
        origin: Origin::here(),
    }
}
