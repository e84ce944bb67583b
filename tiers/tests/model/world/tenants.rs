//! Pages of other tenants, and of other weights.

use larder_tiers::prompt::Scope;

use super::World;

impl World {
    /// Replaces the weights, sometimes by former ones: all requests are broken.
    pub(super) fn new_weights(&mut self) {
        let tag = ["a", "b", "c"][self.below(3)];
        self.weights = Some(tag.to_owned());
        self.core.new_weights(tag);
        self.check_promised();
        for running in &mut self.running {
            (running.must_break, running.may_break) = (true, true);
        }
    }

    /// A request got the pages of its row from `from` on. They have rows of its own tenant, or are
    /// zeroed, unless a forward may touch them.
    pub(super) fn got(&mut self, at: usize, from: usize) {
        let unclean = self.core.take_unclean();
        let running = &self.running[at];
        let (scope, row) = (&running.scope, running.request.row_and_loads().0);
        let is_same =
            |of: &Scope| (&of.extra_key, &of.cache_salt) == (&scope.extra_key, &scope.cache_salt);
        for page in &row.pages()[from..] {
            let former = self.tenants.insert(*page, scope.clone());
            let former = former.unwrap_or_default();
            let is_idle = self.forwards.is_empty() && self.ran.is_empty();
            let is_own = row.own_pages().contains(page);
            assert!(
                is_same(&former) || unclean.contains(page) || !is_own || !is_idle,
                "a request gets rows of another tenant"
            );
        }
    }
}
