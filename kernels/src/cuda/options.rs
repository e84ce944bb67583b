//! What a device is opened with.

use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use super::policy::Way;

/// By what the way of each transfer is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// A table: read from the cache, or measured when the device is opened, which takes a fraction of a second. Figures that others
    /// have published where it cannot be measured.
    #[default]
    Measured,
    /// Figures that others have published.
    Published,
    /// This way, wherever it can be gone; else copies of their own.
    Always(Way),
}

/// The time since some moment.
pub type Clock = fn() -> Duration;

fn since_first_asked() -> Duration {
    static FIRST: OnceLock<Instant> = OnceLock::new();
    FIRST.get_or_init(Instant::now).elapsed()
}

/// What a device is opened with.
#[derive(Clone, Debug)]
pub struct CudaOptions {
    /// Which device: its number in the driver's order.
    pub ordinal: u32,
    /// Which way transfers go.
    pub choice: Choice,
    /// The directory in which cubins and tables of the policy are kept from one start to the next.
    pub cache: Option<PathBuf>,
    /// Largest piece of host memory registered at once, in bytes.
    pub piece_bytes: u64,
    /// What the device is measured with; a simulation has its own.
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
