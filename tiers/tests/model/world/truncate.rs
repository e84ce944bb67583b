//! Truncations: rejected tokens, and the copies of kept rows. A copy runs as a forward, or at once.

use larder_format::{PageKey, namespace_seed};
use larder_kernels::RowCopy;
use larder_tiers::core::{Broken, Fence, TruncateError};

use super::{Forward, World};

impl World {
    /// Truncates a request to a random number of tokens.
    pub(super) fn truncate(&mut self) {
        if self.running.is_empty() {
            return;
        }
        let at = self.below(self.running.len());
        if self.below(2) == 0 {
            // Its shared pages are settled, but a forward still reads them.
            self.end_orders();
            self.forward_of(at);
            if at >= self.running.len() {
                return;
            }
        }
        // The forwards of a request are reported before.
        self.insert(at);
        if !self.running[at].since_insert.is_empty() {
            return;
        }
        let all = self.running[at].tokens.len();
        let tokens = 2 + self.below(all - 1);
        let is_ordered = self.below(2) == 0;
        let keys = self.keys(&self.running[at].scope, &self.running[at].tokens);
        let row = self.running[at].request.row_and_loads().0;
        let mut shared = row.pages()[..row.shared_pages()].iter();
        let is_written = !shared.any(|page| self.is_unwritten(*page));
        let running = &mut self.running[at];
        let is_broken = self.core.is_broken(&running.request);
        let before = running.request.row_and_loads().0.clone();
        let cut = self.core.truncate(&mut running.request, tokens, is_ordered);
        let units = tokens - usize::from(running.scope.bigram);
        let row = running.request.row_and_loads().0;
        let copy = match cut {
            Err(error) => {
                assert_eq!(error == TruncateError::Broken(Broken), is_broken);
                assert_eq!(
                    (row.pages(), row.tokens()),
                    (before.pages(), before.tokens())
                );
                return;
            }
            Ok(copy) => copy,
        };
        assert!(!is_broken);
        let kept = units / self.page_tokens;
        assert_eq!(row.shared_pages(), before.shared_pages().min(kept));
        assert_eq!(running.request.prompt().words().len(), units);
        assert!(row.tokens() >= before.tokens().min(units));
        running.tokens.truncate(tokens);
        running.counted = running.counted.min(kept);
        let is_in_shared = units < before.shared_pages() * self.page_tokens;
        let rows = units % self.page_tokens;
        assert_eq!(copy.is_some(), is_in_shared && rows > 0);
        assert!(
            is_written || !is_in_shared,
            "a cut of pages that are not written"
        );
        if let Some(copy) = copy {
            assert_eq!(copy.from, before.pages()[kept]);
            assert_eq!((copy.to, copy.rows as usize), (row.pages()[kept], rows));
            if before.own_pages().is_empty() {
                self.got(at, kept);
            }
            self.inserted.remove(&copy.to);
            let key = keys[kept];
            let mark = namespace_seed(Some(&format!("{key} {rows}")), None).unwrap();
            self.running[at].copied = Some((copy.to, mark));
            if is_ordered {
                self.submit_copy(at, copy, (key, mark));
            } else {
                self.copy_now(at, copy, (key, mark));
            }
        }
        // Its source, and pages that it gave up, may leave and be loaded into before the forwards
        // have run.
        if is_in_shared {
            self.reuse();
        }
    }

    /// Copies rows on the stream of the forwards.
    fn submit_copy(&mut self, at: usize, copy: RowCopy, (key, mark): (PageKey, PageKey)) {
        self.fence += 1;
        let fence = self.fence;
        let running = &mut self.running[at];
        self.forwards.push(Forward {
            fence,
            since: running.since_insert.clone(),
            goes_on: None,
            reads: vec![(copy.from, key)],
            writes: vec![(copy.to, Some(mark))],
            loads: Vec::new(),
        });
        running.forwards = fence;
        running.since_insert.push(fence);
        running.inserted_with.push(fence);
        let id = running.request.id();
        self.inserts.entry(fence).or_default().insert(id);
        let request = &self.running[at].request;
        self.core.rows_copied(request, copy, Fence(fence));
    }

    /// Copies rows on the host.
    fn copy_now(&mut self, at: usize, copy: RowCopy, (key, mark): (PageKey, PageKey)) {
        assert!(
            !self.forwards.iter().any(|of| of.touches(copy.to)),
            "rows are copied into a page that a forward touches"
        );
        let source = self.l1[copy.from as usize];
        assert_eq!(source, Some(key), "wrong rows are copied");
        self.l1[copy.to as usize] = Some(mark);
        self.taint.remove(&copy.to);
        let request = &self.running[at].request;
        self.core.rows_copied(request, copy, Fence::default());
    }
}
