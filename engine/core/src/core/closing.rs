//! The steps of a clean close: the last records and headers, and the statement of what is there.

use larder_base::memory::AlignedBuf;
use larder_format::Holdings;

use super::Core;

impl Core {
    /// Writes the free headers again that could not be written.
    pub fn retry_freeing(&mut self) {
        self.segments.retry_freeing(&mut self.base);
        self.run();
    }

    /// Writes every departure (an eviction, a failed put) that is not written yet. Returns how many
    /// find no room: they go on waiting.
    pub fn write_departures(&mut self) -> usize {
        let (base, segments) = (&mut self.base, &mut self.segments);
        let left = self.journal.write_departures(base, segments);
        self.run();
        left
    }

    /// Departures of this epoch that are not on the device: the next open may find their pages.
    #[must_use]
    pub fn unwritten_departures(&self) -> u64 {
        self.journal.unwritten_departures()
    }

    /// Headers for every segment whose header on disk does not state its content. Written last
    /// before a clean close, when nothing is under way. Volume, byte offset, bytes.
    ///
    /// # Errors
    /// When there is no memory for them.
    pub fn closing_headers(&mut self) -> Result<Vec<(usize, u64, AlignedBuf)>, std::io::Error> {
        self.base.is_closed = true;
        self.segments.closing_headers(&self.base)
    }

    /// How much each volume holds. Called after [`Core::closing_headers`].
    #[must_use]
    pub fn holdings(&self) -> Vec<Holdings> {
        let mut pages = vec![0; self.segments.iter().count()];
        self.base.index.each(|page| {
            if let Some(count) = pages.get_mut(page.place.segment.0 as usize) {
                *count += 1;
            }
        });
        let mut all = self.segments.holdings(&pages);
        // Their pages may be found again.
        let unwritten = self.journal.unwritten_departures();
        for holdings in &mut all {
            holdings.unproven += unwritten;
        }
        all
    }
}
