//! The end of a command: its exit code, and the sentence of a failure.
//!
//! | code | meaning |
//! |---|---|
//! | 0 | done |
//! | 1 | done, and found something wrong: damage, wrong bytes, a failed check |
//! | 2 | the command line or its input makes no sense |
//! | 3 | the environment is in the way: locked, not a store, no space |
//! | 130 | stopped by the operator; the work until then was reported |

use std::fmt;

use larder_engine::StoreError;
use larder_kernels::DeviceError;
use larder_remote::l4::L4Error;
use larder_remote::{KeyError, PlaceError, RemoteError};
use larder_tiers::CacheError;
use larder_tiers::cache::ChunkError;
use larder_tiers::core::Broken;

use crate::refusal::explained;

/// The end of a command that ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Complete, nothing wrong.
    Done,
    /// Complete, and something is wrong with the examined object.
    Findings,
    /// Not complete: another process is in the way. The report names it.
    Blocked,
    /// Early, at the operator's request.
    Interrupted,
}

impl Ending {
    /// `Findings` if something is wrong, else the same. Of several such calls the last one that
    /// applies counts.
    #[must_use]
    pub fn or_findings(self, has_findings: bool) -> Ending {
        if has_findings { Ending::Findings } else { self }
    }

    /// `Interrupted` if the operator ended the command, else the same.
    #[must_use]
    pub fn or_interrupted(self, interrupted: bool) -> Ending {
        if interrupted {
            Ending::Interrupted
        } else {
            self
        }
    }

    /// The code that the process ends with.
    pub fn exit_code(self) -> u8 {
        match self {
            Ending::Done => 0,
            Ending::Findings => 1,
            Ending::Blocked => 3,
            Ending::Interrupted => 130,
        }
    }
}

/// The reason why a command could not do its work: the problem, its place, and the remedy.
#[derive(Debug)]
pub struct Failure {
    code: u8,
    message: String,
}

impl Failure {
    /// The command line or its input makes no sense.
    pub fn usage(message: impl Into<String>) -> Self {
        Failure {
            code: 2,
            message: message.into(),
        }
    }

    /// The environment is in the way.
    pub fn environment(message: impl Into<String>) -> Self {
        Failure {
            code: 3,
            message: message.into(),
        }
    }

    /// A thread could not be started.
    #[must_use]
    pub fn thread(error: &std::io::Error) -> Self {
        Failure::environment(format!("starting a thread: {error}"))
            .with_hint("raise the limits on threads and memory: ulimit -u, ulimit -v, TasksMax=")
    }

    /// The same, with more information.
    #[must_use]
    pub fn with_hint(self, hint: &str) -> Self {
        Failure {
            message: format!("{} ({hint})", self.message),
            ..self
        }
    }

    /// The same, with a further sentence.
    #[must_use]
    pub fn with_more(self, more: &str) -> Self {
        Failure {
            message: format!("{}; {more}", self.message),
            ..self
        }
    }

    /// The reason why no store of the size that `flag` gives can be created.
    #[must_use]
    pub fn sized(error: StoreError, flag: &str) -> Self {
        let hint = match error {
            StoreError::TooSmall { .. } => format!("give a larger {flag}"),
            StoreError::NoSpace { .. } => format!("or give a smaller {flag}"),
            StoreError::NoSize(_) => format!("give {flag}"),
            error => return error.into(),
        };
        Failure::from(error).with_hint(&hint)
    }

    /// The code that the process ends with.
    pub fn exit_code(&self) -> u8 {
        self.code
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<StoreError> for Failure {
    fn from(error: StoreError) -> Self {
        Failure {
            code: match error {
                StoreError::Damaged { .. } | StoreError::Unsound { .. } => 1,
                StoreError::Usage(_)
                | StoreError::TooSmall { .. }
                | StoreError::NoSize(_)
                | StoreError::Quotas(_)
                | StoreError::UnknownNamespace => 2,
                _ => 3,
            },
            message: explained(&error),
        }
    }
}

impl From<DeviceError> for Failure {
    fn from(error: DeviceError) -> Self {
        Failure::environment(format!("the device that holds L1: {error}"))
    }
}

impl From<CacheError> for Failure {
    fn from(error: CacheError) -> Self {
        Failure::environment(format!("the cache over L1 and L2: {error}"))
    }
}

impl From<Broken> for Failure {
    fn from(error: Broken) -> Self {
        Failure::environment(format!("the cache over L1 and L2: {error}"))
    }
}

impl From<ChunkError> for Failure {
    fn from(error: ChunkError) -> Self {
        match error {
            ChunkError::Broken(error) => error.into(),
            ChunkError::Device(error) => error.into(),
        }
    }
}

impl From<RemoteError> for Failure {
    fn from(error: RemoteError) -> Failure {
        Failure::environment(format!("the remote: {error}"))
    }
}

impl From<PlaceError> for Failure {
    fn from(error: PlaceError) -> Failure {
        Failure::usage(error.to_string())
    }
}

impl From<L4Error> for Failure {
    fn from(error: L4Error) -> Failure {
        match error {
            L4Error::NoKey | L4Error::NotPositive(_) => Failure::usage(error.to_string()),
            L4Error::Key(error) => error.into(),
            L4Error::Place(error) => error.into(),
        }
    }
}

impl From<KeyError> for Failure {
    fn from(error: KeyError) -> Failure {
        match error {
            KeyError::Unreadable { .. } | KeyError::Vault(_) => {
                Failure::environment(error.to_string())
            }
            KeyError::Malformed { .. } | KeyError::Count { .. } => {
                Failure::usage(error.to_string())
            }
        }
    }
}
