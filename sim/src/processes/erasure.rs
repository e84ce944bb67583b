//! The erasure of a tenant by a process.

use std::time::Duration;

use larder_engine::NamespaceId;
use larder_sim_runtime::note;
use larder_store::share::erase_tenant;

use super::plan::Name;
use super::process::Caller;
use crate::classes::Class;
use crate::sealed::tenant_of;

impl Caller {
    /// Clears a namespace; or erases its tenant, in an encrypted store.
    pub(super) fn clear_or_erase(&self, namespaces: &[NamespaceId], namespace: usize) {
        let erases = {
            let state = &mut *self.shared.borrow_mut();
            state.plan.seal.is_some() && state.dice.chance(0.7)
        };
        match erases {
            true => self.erase(namespace),
            false => self.clear(namespaces, namespace),
        }
    }

    fn erase(&self, namespace: usize) {
        let (tenant, deletion, patience) = {
            let state = &mut *self.shared.borrow_mut();
            let tenant = tenant_of(&state.plan.namespaces[namespace]);
            let spaces = &state.plan.namespaces;
            let is_own = |name: &Name| tenant_of(&spaces[name.namespace]) == tenant;
            let names = state.plan.names().into_iter().filter(is_own);
            let numbers = names.map(|name| state.plan.index(name)).collect();
            let deletion = state.promises.begin_deletion(numbers);
            // Puts of the tenant that are under way may fail.
            state.is_disturbed = true;
            (tenant, deletion, state.dice.pick(&[0, 1, 10]))
        };
        let outcome = erase_tenant(&self.store, &tenant, Duration::from_secs(patience));
        note(|| format!("erase {tenant:?}: {outcome:?}"));
        let is_done = outcome.is_ok();
        self.end_deletion(deletion, is_done);
        let state = &mut *self.shared.borrow_mut();
        let Ok(erasure) = outcome else {
            return;
        };
        state.promises.is_for_good(deletion);
        state.tally.count(Class::ErasedAmongOthers);
        match erasure.waits_for.is_empty() {
            true => state.erased.extend(erasure.slots),
            false => state.tally.count(Class::ErasedInPart),
        }
    }
}
