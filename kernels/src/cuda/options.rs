//! The options of a device.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::policy::Way;

/// The source of the decision on the way of each transfer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// A table, read from the cache or measured when the device is opened (a fraction of a second).
    /// Published figures if the measurement is not possible.
    #[default]
    Measured,
    /// Published figures.
    Published,
    /// Always this way if it is available; otherwise separate copies. Whether the driver accepts
    /// batches is not tried.
    Always(Way),
}

/// Returns the time since a fixed moment.
pub type Clock = fn() -> Duration;

fn since_first_asked() -> Duration {
    static FIRST: OnceLock<Instant> = OnceLock::new();
    FIRST.get_or_init(Instant::now).elapsed()
}

/// The options of a device.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// The number of the device in the driver's order.
    pub ordinal: u32,
    /// How the way of a transfer is chosen.
    pub choice: Choice,
    /// The directory that keeps cubins and policy tables between starts.
    pub cache: Option<PathBuf>,
    /// Maximum size of host memory registered in one call, in bytes.
    pub piece_bytes: u64,
    /// The clock used for measurements. A simulation provides its own.
    pub clock: Clock,
}

impl Default for CudaOptions {
    fn default() -> CudaOptions {
        CudaOptions {
            ordinal: 0,
            choice: Choice::default(),
            cache: None,
            piece_bytes: 32 << 30,
            clock: since_first_asked,
        }
    }
}
