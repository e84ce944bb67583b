//! The quota of a namespace, from an engine's configuration.

use larder_store::quotas::{QuotaChange, QuotaReport};
use larder_store::share::change_quotas;
use larder_tools::quota;

use super::Space;

impl Space {
    /// Sets the quota of this namespace, as `min=SIZE,max=SIZE,max-age=DURATION`, if it has another
    /// one.
    ///
    /// # Errors
    /// A sentence: the form is wrong, or the store refuses the quota.
    pub fn limit(&self, limits: &str) -> Result<(), String> {
        let fingerprint = self.fingerprint().to_string();
        let wanted = quota::limits(limits, &fingerprint)?;
        let store = &self.handle.store;
        let change = |change| change_quotas(store, &change).map_err(|error| error.to_string());
        let QuotaReport { groups, .. } = change(QuotaChange::None)?;
        if groups.iter().all(|group| group.quota != wanted) {
            change(QuotaChange::Set(wanted))?;
        }
        Ok(())
    }
}
