//! The quotas of a store, as people and programs see and change them.

use larder_core::core::QuotaLevel;
use larder_format::{BLOCK_BYTES, Fingerprint, Quota, QuotaGroup};
use serde::{Deserialize, Serialize};

/// The quotas of a store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct QuotaReport {
    /// Why they cannot be read: then none is in force.
    pub fault: Option<String>,
    /// The quota of each group, and its use.
    pub groups: Vec<QuotaUse>,
    /// Whether pages older than a limit are removed: the kernel has stated for ten minutes that a
    /// time service keeps the clock right. `None` without a limit.
    pub removes_old_pages: Option<bool>,
}

/// The quota of a group, and its use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaUse {
    /// The quota.
    #[serde(flatten)]
    pub quota: QuotaSpec,
    /// Bytes of the group's pages, as stored.
    pub stored_bytes: u64,
    /// Its namespaces that the store knows.
    pub namespaces: u64,
}

/// The quota of a group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuotaSpec {
    /// The group.
    #[serde(flatten)]
    pub group: GroupName,
    /// Eviction takes none of its pages below this.
    pub min_bytes: u64,
    /// It takes at most this.
    pub max_bytes: Option<u64>,
    /// Its pages are served for this long after their put, in seconds.
    pub max_age_s: Option<u64>,
}

/// A set of namespaces that share a quota.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupName {
    /// What the name is of.
    pub kind: GroupKind,
    /// A fingerprint, the name of a model, or that of a tenant.
    pub name: String,
}

/// See [`GroupName`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupKind {
    /// One namespace.
    Namespace,
    /// All namespaces of a model.
    Model,
    /// All namespaces with this further field `tenant`.
    Tenant,
}

/// A change of the quotas.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum QuotaChange {
    /// None: asks for the report.
    None,
    /// Sets the quota of a group, in place of its former one.
    Set(QuotaSpec),
    /// Removes the quota of a group.
    Remove(GroupName),
    /// Removes all quotas, also if they cannot be read.
    Clear,
}

impl std::fmt::Display for GroupName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let kind = match self.kind {
            GroupKind::Namespace => "namespace",
            GroupKind::Model => "model",
            GroupKind::Tenant => "tenant",
        };
        write!(f, "{kind} {}", self.name)
    }
}

impl GroupName {
    /// The name of a group.
    #[must_use]
    pub fn of(group: &QuotaGroup) -> GroupName {
        let (kind, name) = match group {
            QuotaGroup::Namespace(fingerprint) => (GroupKind::Namespace, fingerprint.to_string()),
            QuotaGroup::Model(name) => (GroupKind::Model, name.clone()),
            QuotaGroup::Tenant(name) => (GroupKind::Tenant, name.clone()),
        };
        GroupName { kind, name }
    }

    /// The group.
    ///
    /// # Errors
    /// The name is no fingerprint, and has to be one.
    pub fn group(&self) -> Result<QuotaGroup, String> {
        Ok(match self.kind {
            GroupKind::Namespace => {
                let fingerprint: Result<Fingerprint, _> = self.name.parse();
                QuotaGroup::Namespace(fingerprint.map_err(|error| error.to_string())?)
            }
            GroupKind::Model => QuotaGroup::Model(self.name.clone()),
            GroupKind::Tenant => QuotaGroup::Tenant(self.name.clone()),
        })
    }
}

impl QuotaSpec {
    /// The quota.
    ///
    /// # Errors
    /// As for [`GroupName::group`].
    pub fn quota(&self) -> Result<Quota, String> {
        Ok(Quota {
            group: self.group.group()?,
            min: self.min_bytes,
            max: self.max_bytes,
            max_age_s: self.max_age_s,
        })
    }
}

impl From<QuotaLevel> for QuotaUse {
    fn from(level: QuotaLevel) -> QuotaUse {
        QuotaUse {
            quota: QuotaSpec {
                group: GroupName::of(&level.quota.group),
                min_bytes: level.quota.min,
                max_bytes: level.quota.max,
                max_age_s: level.quota.max_age_s,
            },
            stored_bytes: level.stored_blocks * BLOCK_BYTES as u64,
            namespaces: level.namespaces,
        }
    }
}
