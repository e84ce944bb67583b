//! The name of a run.

use std::fmt;
use std::str::FromStr;

use larder_format::{ArchiveId, Fingerprint, HexError, KeyPrefix, PageKey};

use super::{USED, VERSION};
use crate::keys::{Keyring, SealKey, Trust};

const SUFFIX: &str = ".run";

/// The name of a run in a remote.
///
/// Without keys it is the namespace and the key of the last page. With keys both are keyed hashes
/// of them: see [`RunNames`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RunName {
    /// Its namespace.
    pub namespace: Fingerprint,
    /// The key of its last page.
    pub last: PageKey,
}

/// The names of the runs of a namespace in a remote. While keys are rotated a run has two.
#[derive(Clone, Debug)]
pub struct RunNames {
    namespace: Fingerprint,
    /// With the names of the namespace, that for new objects first; none without keys.
    keys: Vec<(SealKey, Fingerprint)>,
}

impl RunNames {
    /// Those for a node with these keys.
    #[must_use]
    pub fn of(trust: &Trust, namespace: Fingerprint) -> RunNames {
        let keys = trust.keys().into_iter().flat_map(Keyring::all);
        let keys = keys.map(|key| (key.clone(), key.space(namespace)));
        RunNames {
            namespace,
            keys: keys.collect(),
        }
    }

    /// The names of the namespace.
    pub fn spaces(&self) -> impl Iterator<Item = Fingerprint> {
        let plain = self.keys.is_empty().then_some(self.namespace);
        plain
            .into_iter()
            .chain(self.keys.iter().map(|(_, space)| *space))
    }

    /// The name of a new object of the run that ends in this page.
    #[must_use]
    pub fn name(&self, last: &PageKey) -> RunName {
        match self.keys.first() {
            Some(key) => self.keyed(key, last.prefix()),
            None => RunName {
                namespace: self.namespace,
                last: *last,
            },
        }
    }

    /// All names of the run that ends in this page, that of a new object first.
    pub fn all(&self, last: &PageKey) -> impl Iterator<Item = RunName> {
        let others = self.keys.iter().skip(1);
        let others = others.map(|key| self.keyed(key, last.prefix()));
        std::iter::once(self.name(last)).chain(others)
    }

    /// The identities of the names of a run, by the first bytes of the key of its last page.
    #[must_use]
    pub fn ids(&self, last: KeyPrefix) -> Vec<RunId> {
        if self.keys.is_empty() {
            return vec![(self.namespace, last)];
        }
        let id = |key| self.keyed(key, last).id();
        self.keys.iter().map(id).collect()
    }

    fn keyed(&self, (key, space): &(SealKey, Fingerprint), last: KeyPrefix) -> RunName {
        RunName {
            namespace: *space,
            last: key.run(self.namespace, last),
        }
    }
}

/// The part of a name that tells runs apart in memory.
pub type RunId = (Fingerprint, KeyPrefix);

impl RunName {
    /// The name of no run: a page has no such key.
    #[cfg(feature = "s3")]
    pub(crate) const NONE: RunName = RunName {
        namespace: Fingerprint::from_bytes([0; 16]),
        last: PageKey::from_bytes([0; 32]),
    };

    /// The part that tells runs apart in memory.
    #[must_use]
    pub fn id(&self) -> RunId {
        (self.namespace, self.last.prefix())
    }

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
