//! Runs on their way to the remote.

use larder_base::runtime::Instant;
use larder_format::{Fingerprint, KeyPrefix, PageKey};

use crate::run::{RunName, RunPage};

/// A run that is to be published.
pub(in crate::agent) struct Outgoing {
    pub(in crate::agent) namespace: Fingerprint,
    pub(in crate::agent) pages: Vec<RunPage>,
    /// Not before this moment.
    pub(in crate::agent) due: Instant,
    /// Failed attempts.
    pub(in crate::agent) tries: u32,
}

impl Outgoing {
    pub(super) fn name(&self) -> RunName {
        // A run has pages.
        let last = self.pages.last().map(|page| page.key);
        RunName {
            namespace: self.namespace,
            last: last.unwrap_or(PageKey::from_bytes([0; 32])),
        }
    }

    pub(super) fn id(&self) -> (Fingerprint, KeyPrefix) {
        let RunName { namespace, last } = self.name();
        (namespace, last.prefix())
    }
}
