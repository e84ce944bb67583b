//! Bugs of the agent that a simulation can plant: see [`mod@larder_base::bugs`].

#[cfg(debug_assertions)]
pub use larder_base::bugs::plant;
pub(crate) use larder_base::planted;

larder_base::bugs! {
    /// All bugs.
    ALL: {
        /// Faulty pages of an object are stored.
        UnsealedPage,
        /// A lookup promises more bytes than arrive in time.
        LateByte,
        /// A run is promised again, and given up when the wait of the first reader ends.
        OldPromise,
        /// Requests are made while the breaker is open.
        DeafBreaker,
        /// A run that is gone stays known.
        StaleName,
        /// A run that a listing does not show stays known.
        OldName,
        /// A run with a fault is fetched again without a pause.
        FaultAgain,
        /// A publication that failed is neither repeated nor counted.
        LostRun,
        /// Published bytes are not taken from the budgets.
        FreeBytes,
        /// Pages of a fetch that was given up stay on their way.
        LeftArrival,
        /// Each run is published, used or not.
        EagerRun,
        /// A run is published although pages of it could not be read.
        HollowRun,
        /// The threads of a closed agent do not end.
        RestlessEnd,
        /// An agent that was switched off makes requests.
        DeafSwitch,
        /// Runs are published without a look for the mark.
        BlindPublication,
        /// A gap between two runs is not noticed by the search.
        BlindSearch,
    }
}
