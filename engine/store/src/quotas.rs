//! The quotas of a store, as people and programs see them.

use serde::{Deserialize, Serialize};

/// The quotas of a store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct QuotaReport {
    /// Why they cannot be read: then none is in force.
    pub fault: Option<String>,
}
