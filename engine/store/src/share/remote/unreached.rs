//! Why no owner was reached.

use std::io;

use super::line::{ANSWER_PATIENCE, silence};
use crate::error::served_by;
use crate::protocol::Protocol;
use crate::share::wire::Denial;

/// Why no owner was reached.
#[derive(Debug, thiserror::Error)]
pub(in crate::share) enum ReachError {
    #[error("no process serves the store; start `larder serve`")]
    Nobody,
    /// The socket's permissions exclude this process.
    #[error(
        "this process may not connect to its owner's socket: {0}; run it as the user that the \
         store belongs to, or have the store served with `larder serve --group GID` for a group \
         that this process is a member of"
    )]
    Forbidden(io::Error),
    #[error(transparent)]
    Denied(Denial),
    #[error(
        "its owner{} has not answered for {} s: {}",
        .pid.map_or_else(String::new, |pid| format!(", process {pid},")),
        ANSWER_PATIENCE.as_secs(),
        silence(*.is_stopped)
    )]
    Silent {
        /// Its pid, if it is of this pid namespace and could be connected to.
        pid: Option<u32>,
        /// Whether a signal or a debugger has stopped it, if that is known.
        is_stopped: Option<bool>,
    },
    /// The owner hung up, or cannot be connected to.
    #[error("its owner cannot be reached: {0}; try again")]
    Unreachable(io::Error),
    /// The owner speaks no version that this process speaks.
    #[error(
        "the owner of the store is release {release} and speaks version {theirs} of the catalog \
         protocol; this process is {ours}. Use releases that have a version in common"
    )]
    Version {
        theirs: u32,
        release: String,
        ours: Protocol,
    },
    #[error("the owner's greeting makes no sense: is something else on its socket?")]
    Nonsense,
    /// The process on the socket owns another store.
    #[error(
        "no process serves this store. {} listens at {} and serves another store, whose file was \
         deleted or replaced. Stop that process",
        served_by(*.pid),
        socket.display()
    )]
    OfAnother {
        pid: Option<u32>,
        socket: std::path::PathBuf,
    },
}

impl From<io::Error> for ReachError {
    fn from(error: io::Error) -> ReachError {
        match error.kind() {
            io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused => ReachError::Nobody,
            io::ErrorKind::PermissionDenied => ReachError::Forbidden(error),
            io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock => {
                let (pid, is_stopped) = (None, None);
                ReachError::Silent { pid, is_stopped }
            }
            _ => ReachError::Unreachable(error),
        }
    }
}
