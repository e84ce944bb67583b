//! How much the segments of each volume hold, for the closing statement of a clean close.

use larder_format::Holdings;

use super::Segments;
use super::segment::State;

impl Segments {
    /// The holdings of each volume, once [`Segments::closing_headers`] is written. `pages` are the
    /// indexed pages of each segment.
    pub(in crate::core) fn holdings(&self, pages: &[u64]) -> Vec<Holdings> {
        let mut all = vec![Holdings::default(); self.volumes()];
        for (id, segment) in self.iter() {
            let own = &mut all[self.volume_of(id)];
            match segment.state() {
                State::Lost | State::Free | State::Releasing => {}
                State::Unreadable => own.unread += 1,
                _ => {
                    let pages = pages.get(id.0 as usize).copied().unwrap_or(0);
                    own.used += 1;
                    own.sequences += u128::from(segment.generation().get());
                    own.pages += pages;
                    // Without live pages it may still hold a copy that failed: a lost header
                    // must not prove it.
                    if segment.proven() < segment.last_commit() {
                        own.unproven += pages.max(1);
                    }
                }
            }
        }
        all
    }
}
