//! Why a disk did not carry out an operation.

use std::io;

/// Why an operation was not carried out in full.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DiskError {
    /// The kernel refused or the device failed.
    #[error("{}", std::io::Error::from_raw_os_error(*.0))]
    Os(i32),
    /// The kernel reported success without moving a byte.
    #[error("the transfer made no progress (end of the volume?)")]
    NoProgress,
    /// Never handed to the kernel: its deadline had passed.
    #[error("the deadline passed before the operation was started")]
    Deadline,
    /// The disk was shut down before the operation was started.
    #[error("the disk is shut down")]
    Shutdown,
}

/// Whether an error number is about the bytes on the medium. The kernel reports an unrecovered read
/// of a drive as `ENODATA`, and bytes that fail their protection as `EILSEQ` (`blk_errors` in its
/// block/blk-core.c).
pub fn is_of_the_medium(errno: i32) -> bool {
    matches!(
        errno,
        libc::EIO | libc::EILSEQ | libc::ENODATA | libc::EREMOTEIO | libc::EBADMSG
    )
}

impl DiskError {
    /// Whether it is about the bytes on the medium, rather than about this attempt to read them
    /// (memory, limits).
    pub fn is_of_the_medium(&self) -> bool {
        match self {
            DiskError::Os(errno) => is_of_the_medium(*errno),
            DiskError::NoProgress => true,
            DiskError::Deadline | DiskError::Shutdown => false,
        }
    }

    /// Whether the cause is this process, or its limits: no worker threads, no memory, no
    /// permission.
    pub fn is_of_this_process(&self) -> bool {
        match self {
            DiskError::Os(errno) => matches!(
                *errno,
                libc::ECANCELED
                    | libc::EAGAIN
                    | libc::EINTR
                    | libc::ENOMEM
                    | libc::EPERM
                    | libc::EACCES
            ),
            DiskError::NoProgress => false,
            DiskError::Deadline | DiskError::Shutdown => true,
        }
    }

    /// Whether a volume that answers a write with this error refuses every other write too: it is
    /// full or read-only, or its device is gone.
    pub fn is_of_every_write(&self) -> bool {
        let DiskError::Os(errno) = self else {
            return false;
        };
        matches!(
            *errno,
            libc::ENOSPC
                | libc::EDQUOT
                | libc::EROFS
                | libc::ENODEV
                | libc::ENXIO
                | libc::ENOMEDIUM
        )
    }

    /// Succeeds if the error is a fact of the medium.
    ///
    /// # Errors
    /// The error itself, if it concerns this process, or the path to the medium.
    pub fn on_the_medium(&self) -> io::Result<()> {
        match self.is_of_the_medium() {
            true => Ok(()),
            false => Err((*self).into()),
        }
    }
}

impl From<DiskError> for io::Error {
    fn from(error: DiskError) -> io::Error {
        match error {
            DiskError::Os(errno) => io::Error::from_raw_os_error(errno),
            error => io::Error::other(error),
        }
    }
}
