//! The name of a run.

use std::fmt;
use std::str::FromStr;

use larder_format::{ArchiveId, Fingerprint, HexError, PageKey};

use super::{USED, VERSION};

const SUFFIX: &str = ".run";

/// The name of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RunName {
    /// Its namespace.
    pub namespace: Fingerprint,
    /// The key of its last page.
    pub last: PageKey,
}

impl RunName {
    /// The name of no run: a page has no such key.
    #[cfg(feature = "s3")]
    pub(crate) const NONE: RunName = RunName {
        namespace: Fingerprint::from_bytes([0; 16]),
        last: PageKey::from_bytes([0; 32]),
    };

    /// The prefix of the names of all runs of a namespace, or of all runs.
    #[must_use]
    pub fn prefix(namespace: Option<Fingerprint>) -> String {
        match namespace {
            Some(fingerprint) => format!("{VERSION}/{fingerprint}"),
            None => VERSION.to_owned(),
        }
    }

    /// The name of the mark of its last use: an empty object.
    #[must_use]
    pub(crate) fn mark(&self) -> String {
        let [first, ..] = self.last.as_bytes();
        let RunName { namespace, last } = self;
        format!("{USED}/{namespace}/{first:02x}/{last}")
    }

    /// The run of a mark with this name.
    pub(crate) fn of_mark(name: &str) -> Option<RunName> {
        let run = name.strip_prefix(USED)?;
        format!("{VERSION}{run}{SUFFIX}").parse().ok()
    }

    pub(super) fn archive(&self) -> ArchiveId {
        let mut hasher = blake3::Hasher::new();
        hasher.update(self.namespace.as_bytes());
        hasher.update(self.last.as_bytes());
        let mut id = [0; 16];
        hasher.finalize_xof().fill(&mut id);
        ArchiveId::from_bytes(id)
    }
}

impl fmt::Display for RunName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [first, ..] = self.last.as_bytes();
        let RunName { namespace, last } = self;
        write!(f, "{VERSION}/{namespace}/{first:02x}/{last}{SUFFIX}")
    }
}

/// A text is not the name of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not the name of a run")]
pub struct NoRunName;

impl From<HexError> for NoRunName {
    fn from(_: HexError) -> NoRunName {
        NoRunName
    }
}

impl FromStr for RunName {
    type Err = NoRunName;

    fn from_str(text: &str) -> Result<RunName, NoRunName> {
        let mut components = text.split('/');
        let (version, namespace) = (components.next(), components.next().ok_or(NoRunName)?);
        let (_, file) = (components.next(), components.next().ok_or(NoRunName)?);
        let name = RunName {
            namespace: namespace.parse()?,
            last: file.strip_suffix(SUFFIX).ok_or(NoRunName)?.parse()?,
        };
        // A name has one spelling.
        if version == Some(VERSION) && name.to_string() == text {
            Ok(name)
        } else {
            Err(NoRunName)
        }
    }
}
