//! For a simulation: the segments that were given up, with their pages, for lack of room for
//! copies.

use std::cell::Cell;

use larder_core::core::Victim;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

/// The store is about to empty this victim. The pages of a victim that is given up leave later.
pub(super) fn note(victim: &Victim) {
    COUNT.set(COUNT.get() + u64::from(victim.is_given_up));
}

/// The number since the start of this thread.
pub(super) fn of_this_thread() -> u64 {
    COUNT.get()
}
