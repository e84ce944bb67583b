//! What a run did, to see that the simulation reaches what it is meant to.

macro_rules! totals {
    ($($(#[$doc:meta])* $name:ident,)*) => {
        /// Counts over one run, or over many.
        #[derive(Clone, Copy, Debug, Default)]
        pub struct Totals {
            $($(#[$doc])* pub $name: u64,)*
        }

        impl Totals {
            /// Adds those of another run.
            pub fn add(&mut self, other: &Totals) {
                $(self.$name += other.$name;)*
            }
        }
    };
}

totals! {
    /// Steps played.
    steps,
    /// Times that the process was killed or the power went.
    crashes,
    /// Times that the store was opened.
    opens,
    /// Pages stored.
    stored,
    /// Pages that were there already.
    duplicates,
    /// Pages refused.
    refused,
    /// Pages whose put failed.
    failed,
    /// Pages read and found whole.
    hits,
    /// Pages asked for and not found.
    misses,
    /// Pages evicted.
    evicted,
    /// Pages copied by reclaim.
    moved,
    /// Segments given back.
    reclaimed,
    /// Deletions finished.
    deleted,
    /// Flushes that succeeded.
    flushes,
    /// Syncs that failed.
    failed_syncs,
    /// Unproven pages that recovery found.
    unproven,
    /// Pages that recovery found and whose bytes were not whole.
    torn,
}
