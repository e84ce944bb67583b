//! The keys that seal runs: who has one can make pages that a node takes.
//!
//! A checksum finds damage, and anybody can compute one. A seal is a keyed BLAKE3, and only a
//! holder of the key can compute it. From the secret of a key file three keys are derived, for
//! pages, for runs, and for the identity that a seal names.
//!
//! While keys are rotated, a key file has two lines: the first seals, both are accepted.

use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use larder_format::{HexError, PageKey};

/// Bytes of a secret. A key file has twice as many hex digits in a line.
pub const SECRET_BYTES: usize = 32;

/// Permissions of users that are neither the owner of a file nor of its group.
const OF_OTHERS: u32 = 0o007;

const PAGE_CONTEXT: &str = "larder remote 2026-11 seal of a page";
const RUN_CONTEXT: &str = "larder remote 2026-11 seal of a run";
const IDENTITY_CONTEXT: &str = "larder remote 2026-11 identity of a key";

/// Identity of a key. It does not disclose the key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SealKeyId(pub [u8; 8]);

impl fmt::Display for SealKeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// One key.
#[derive(Clone)]
pub struct SealKey {
    id: SealKeyId,
    page: [u8; SECRET_BYTES],
    run: [u8; SECRET_BYTES],
}

/// The keys of a node: one seals, a second is accepted while keys are rotated.
#[derive(Clone)]
pub struct Keyring {
    current: SealKey,
    other: Option<SealKey>,
}

/// The runs that a node takes.
#[derive(Clone)]
pub enum Trust {
    /// Those sealed with one of these keys.
    Sealed(Keyring),
    /// All with correct checksums: every writer of the remote can plant pages.
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
    /// It has no key, or too many.
    #[error(
        "{path}: has {found} keys; one is needed, or two while keys are rotated: the first seals"
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
    #[must_use]
    pub fn new(secret: &[u8; SECRET_BYTES]) -> SealKey {
        let identity = blake3::derive_key(IDENTITY_CONTEXT, secret);
        let [a, b, c, d, e, f, g, h, ..] = identity;
        SealKey {
            id: SealKeyId([a, b, c, d, e, f, g, h]),
            page: blake3::derive_key(PAGE_CONTEXT, secret),
            run: blake3::derive_key(RUN_CONTEXT, secret),
        }
    }

    /// The identity that seals name.
    #[must_use]
    pub fn id(&self) -> SealKeyId {
        self.id
    }

    pub(crate) fn of_page(&self) -> blake3::Hasher {
        blake3::Hasher::new_keyed(&self.page)
    }

    pub(crate) fn of_run(&self) -> blake3::Hasher {
        blake3::Hasher::new_keyed(&self.run)
    }
}

impl fmt::Debug for SealKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SealKey({})", self.id)
    }
}

impl Keyring {
    /// A key that seals, and another that is accepted, too.
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
                Ok(secret) => keys.push(SealKey::new(secret.as_bytes())),
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

    /// The key that seals.
    #[must_use]
    pub fn current(&self) -> &SealKey {
        &self.current
    }

    /// The key with this identity.
    #[must_use]
    pub fn find(&self, id: SealKeyId) -> Option<&SealKey> {
        let keys = [Some(&self.current), self.other.as_ref()];
        keys.into_iter().flatten().find(|key| key.id == id)
    }
}
