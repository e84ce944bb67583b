//! Counts over a run. They show that the simulation reaches the states that it has to reach.

macro_rules! totals {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counts over one run, or over many.
        #[derive(Clone, Copy, Debug, Default)]
        pub struct Totals {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Totals {
            /// Adds the counts of another run.
            pub fn add(&mut self, other: &Totals) {
                $(self.$name += other.$name;)*
            }
        }
    };
}

totals! {
    /// Steps of the tasks.
    steps,
    /// Kills and power losses.
    crashes,
    /// Opens of the store.
    opens,
    /// Pages stored.
    stored,
    /// Pages that were present already.
    duplicates,
    /// Pages refused.
    refused,
    /// Pages whose put failed.
    failed,
    /// Pages read and found whole.
    hits,
    /// Pages requested and not found.
    misses,
    /// Pages evicted.
    evicted,
    /// Pages copied by reclaim.
    moved,
    /// Segments released.
    reclaimed,
    /// Deletions finished.
    deleted,
    /// Flushes that succeeded.
    flushes,
    /// Syncs that failed.
    failed_syncs,
    /// Unproven pages that recovery found.
    unproven,
    /// Pages that recovery found with damaged bytes.
    torn,
    /// Runs published to a remote.
    published,
    /// Runs fetched from a remote.
    fetched,
}
