//! The options of a disk.

use std::sync::Arc;

use larder_base::latency::DeviceLatencies;
use larder_base::system::files::Handle;

use super::board::Board;
use super::pacing::Pacing;

/// The options of a disk.
pub struct DiskOptions {
    /// The volumes' files, in the store's order; `None` for a lost volume. The disk holds these
    /// very descriptions until its last write is over, so that a lock on them lives exactly as
    /// long.
    pub files: Vec<Option<Arc<Handle>>>,
    /// Operations of one volume in the kernel at once.
    pub depth: u32,
    /// Receives the latency of each operation.
    pub latencies: Arc<DeviceLatencies>,
    /// Paces writes beside reads. By default nothing is paced.
    pub pacing: Arc<Pacing>,
    /// Shows how the volumes answer. By default nothing is shown.
    pub board: Arc<Board>,
}
