//! Rows of other tenants, zeroed where the host reads rows.

use larder_kernels::ChunkAt;

use super::Cache;

impl Cache {
    /// Zeroes the pages that a request got and whose rows are those of another tenant. On a device
    /// with streams nothing may read a slot before it is written.
    pub(super) fn clean(&mut self) {
        self.clean_tails();
        let pages = self.core.take_unclean();
        if pages.is_empty() || self.device.has_streams() {
            return;
        }
        let shape = *self.l1.shape();
        let zeros = vec![0; shape.chunk_bytes() as usize];
        for page in pages {
            for (part, layer) in (0..shape.parts())
                .flat_map(|part| (0..shape.layers()).map(move |layer| (part, layer)))
            {
                let at = ChunkAt { part, layer, page };
                // SAFETY: the request owns the page, no order uses it, and all forwards that
                // touched it have ended. This synchronous call is its only access.
                let zeroed = unsafe { self.device.write_l1(&self.l1, at, &zeros) };
                if let Err(error) = zeroed {
                    // runbook: rows of another tenant were not zeroed
                    tracing::error!("rows of another tenant were not zeroed: {error}");
                }
            }
        }
    }
}
