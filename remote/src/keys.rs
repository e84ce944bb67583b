//! The keys of a remote: who has one can read its pages, and make pages that a node takes.
//!
//! From the secret of a key file two keys are derived. One wraps the key of each object: an object
//! is an encrypted archive. The other one makes the names of runs: a name that anybody could
//! compute would show whether a known prompt was seen.
//!
//! While keys are rotated, a key file has two lines: the first is for new objects, both are
//! accepted.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use larder_format::{Fingerprint, HexError, KeyPrefix, PageKey, WrapId};
use larder_seal::{Vault, VaultError, WrappingKey};
use zeroize::Zeroizing;

/// Bytes of a secret. A key file has twice as many hex digits in a line.
pub const SECRET_BYTES: usize = 32;

/// Permissions of users that are neither the owner of a file nor of its group.
const OF_OTHERS: u32 = 0o007;

const OBJECTS_CONTEXT: &str = "larder remote 2026-11 keys of objects";
const NAMES_CONTEXT: &str = "larder remote 2026-11 names of runs";

/// One key.
#[derive(Clone)]
pub struct SealKey {
    wrapping: WrappingKey,
    names: Zeroizing<[u8; SECRET_BYTES]>,
}

/// The keys of a node: one for new objects, a second is accepted while keys are rotated.
#[derive(Clone, Debug)]
pub struct Keyring {
    current: SealKey,
    other: Option<SealKey>,
}

/// The runs that a node takes.
#[derive(Clone, Debug)]
pub enum Trust {
    /// Those encrypted with one of these keys.
    Sealed(Keyring),
    /// Plain ones with correct checksums: every writer of the remote can plant pages, and every
    /// reader reads them.
    Unsigned,
}

/// Why a key file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// It cannot be read.
    #[error("{path}: reading the key file: {error}; check its path and permissions")]
    Unreadable {
        /// The key file.
        path: PathBuf,
        /// The error.
        error: io::Error,
    },
    /// A line is no secret.
    #[error(
        "{path}: line {line}: {error}; a key is {digits} lowercase hex digits, as `larder remote \
         key` makes one", digits = 2 * SECRET_BYTES
    )]
    Malformed {
        /// The key file.
        path: PathBuf,
        /// Number of the line, counted from 1.
        line: usize,
        /// The error.
        error: HexError,
    },
    /// There is no memory for keys.
    #[error(transparent)]
    Vault(#[from] VaultError),
    /// It has no key, or too many.
    #[error(
        "{path}: has {found} keys; one is needed, or two while keys are rotated: the first \
         is for new objects"
    )]
    Count {
        /// The key file.
        path: PathBuf,
        /// Number of keys.
        found: usize,
    },
}

impl SealKey {
    /// The key of a secret.
    ///
    /// # Errors
    /// There is no memory for keys, or the cipher failed.
    pub fn new(secret: &[u8; SECRET_BYTES]) -> Result<SealKey, VaultError> {
        // Locked memory would outlive the processes that a simulation kills.
        let vault = match cfg!(feature = "simulated") {
            true => Vault::plain(),
            false => Vault::new(),
        };
        let objects = Zeroizing::new(blake3::derive_key(OBJECTS_CONTEXT, secret));
        Ok(SealKey {
            wrapping: WrappingKey::new(&vault, &objects)?,
            names: Zeroizing::new(blake3::derive_key(NAMES_CONTEXT, secret)),
        })
    }

    /// The identity that objects name. It does not show the key.
    #[must_use]
    pub fn id(&self) -> WrapId {
        self.wrapping.id()
    }

    pub(crate) fn wrapping(&self) -> &WrappingKey {
        &self.wrapping
    }

    /// The name of a namespace in the remote.
    pub(crate) fn space(&self, namespace: Fingerprint) -> Fingerprint {
        let digest = blake3::keyed_hash(&self.names, namespace.as_bytes());
        let mut bytes = [0; 16];
        bytes.copy_from_slice(&digest.as_bytes()[..16]);
        Fingerprint::from_bytes(bytes)
    }

    /// The name of the run of a namespace that ends in this page. The input has another length than
    /// that of a namespace.
    pub(crate) fn run(&self, namespace: Fingerprint, last: KeyPrefix) -> PageKey {
        let mut input = [0; 16 + 12];
        input[..16].copy_from_slice(namespace.as_bytes());
        input[16..].copy_from_slice(last.as_bytes());
        PageKey::from_bytes(*blake3::keyed_hash(&self.names, &input).as_bytes())
    }
}

impl fmt::Debug for SealKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SealKey({})", self.id())
    }
}

impl Keyring {
    /// A key for new objects, and another that is accepted, too.
    #[must_use]
    pub fn new(current: SealKey, other: Option<SealKey>) -> Keyring {
        Keyring { current, other }
    }

    /// Reads a key file: a secret in hex, and a second one in the next line while keys are rotated.
    /// Empty lines, and lines that begin with `#`, are skipped.
    ///
    /// # Errors
    /// It cannot be read, or is no key file.
    pub fn load(path: &Path) -> Result<Keyring, KeyError> {
        let path = path.to_owned();
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) => return Err(KeyError::Unreadable { path, error }),
        };
        if path
            .metadata()
            .is_ok_and(|found| found.mode() & OF_OTHERS != 0)
        {
            tracing::warn!(
                "{}: all users of this machine can read the key, and so make pages that nodes \
                 take: chmod o-rwx it",
                path.display()
            );
        }
        let mut keys = Vec::new();
        for (line, text) in (1..).zip(text.lines().map(str::trim)) {
            if text.is_empty() || text.starts_with('#') {
                continue;
            }
            // Parsed as a page key, which is as long and has the same strict text form.
            match text.parse::<PageKey>() {
                Ok(secret) => keys.push(SealKey::new(secret.as_bytes())?),
                Err(error) => return Err(KeyError::Malformed { path, line, error }),
            }
        }
        let found = keys.len();
        let mut keys = keys.into_iter();
        match (keys.next(), keys.next(), keys.next()) {
            (Some(current), other, None) => Ok(Keyring { current, other }),
            _ => Err(KeyError::Count { path, found }),
        }
    }

    /// The key for new objects.
    #[must_use]
    pub fn current(&self) -> &SealKey {
        &self.current
    }

    /// Both keys, that for new objects first.
    pub(crate) fn all(&self) -> impl Iterator<Item = &SealKey> {
        std::iter::once(&self.current).chain(&self.other)
    }

    /// The key with this identity.
    #[must_use]
    pub fn find(&self, id: WrapId) -> Option<&SealKey> {
        self.all().find(|key| key.id() == id)
    }
}

impl Trust {
    /// Whether pages are encrypted in the remote, and names are keyed hashes.
    #[must_use]
    pub fn encrypts(&self) -> bool {
        matches!(self, Trust::Sealed(_))
    }

    pub(crate) fn keys(&self) -> Option<&Keyring> {
        match self {
            Trust::Sealed(keys) => Some(keys),
            Trust::Unsigned => None,
        }
    }
}
