//! The cache of engines that run with caching disabled. It stores only the chunks of running
//! requests.
//!
//! With chunked prefill, a long prompt is computed in pieces, and the request keeps its row between
//! them. Requests share nothing, and an ended request leaves no pages.

use std::num::NonZeroU32;

use crate::core::NoRoom;
use crate::pool::{PagePool, RequestId, RequestTable, Row, TableError};
use crate::runs::L1;

/// See the module documentation.
#[derive(Debug)]
pub struct ChunkCache {
    pool: PagePool<L1>,
    rows: RequestTable<Row>,
    page_tokens: NonZeroU32,
}

/// Why a chunk has no slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChunkError {
    /// No such request, or the table is full.
    #[error("{0}")]
    Table(#[from] TableError),
    /// L1 has too few pages.
    #[error("{0}")]
    NoRoom(#[from] NoRoom),
}

impl ChunkCache {
    /// A cache over a pool of `pages` pages, for at most `requests_max` requests.
    #[must_use]
    pub fn new(page_tokens: NonZeroU32, pages: u32, requests_max: u32) -> ChunkCache {
        ChunkCache {
            pool: PagePool::new(pages),
            rows: RequestTable::new(requests_max),
            page_tokens,
        }
    }

    /// Adds a request without tokens.
    ///
    /// # Errors
    /// The maximum number of requests is running.
    pub fn start(&mut self) -> Result<RequestId, ChunkError> {
        Ok(self.rows.add(Row::new(self.page_tokens))?)
    }

    /// Gives a request slots for its next chunk.
    ///
    /// # Errors
    /// There is no such request, or no room: nothing changes.
    pub fn extend(&mut self, request: RequestId, tokens: usize) -> Result<&Row, ChunkError> {
        let row = self.rows.get_mut(request)?;
        let short = row
            .pages_short(tokens)
            .saturating_sub(self.pool.free_pages() as usize);
        row.extend(&mut self.pool, tokens)
            .ok_or(NoRoom { short, pending: 0 })?;
        Ok(row)
    }

    /// The row of a request.
    ///
    /// # Errors
    /// There is no such request.
    pub fn row(&self, request: RequestId) -> Result<&Row, ChunkError> {
        Ok(self.rows.get(request)?)
    }

    /// Ends a request and frees its pages.
    ///
    /// # Errors
    /// There is no such request.
    pub fn finish(&mut self, request: RequestId) -> Result<(), ChunkError> {
        let own = self.rows.remove(request)?.into_own_pages();
        let freed = self.pool.free(&own);
        debug_assert_eq!(freed, Ok(()), "a row has pages of this pool");
        Ok(())
    }

    /// Free pages.
    #[must_use]
    pub fn free_pages(&self) -> u32 {
        self.pool.free_pages()
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn chunks_of_a_request_stay_until_it_ends() {
        let mut cache = ChunkCache::new(NonZeroU32::new(4).unwrap(), 5, 2);
        let (a, b) = (cache.start().unwrap(), cache.start().unwrap());
        assert!(matches!(
            cache.start(),
            Err(ChunkError::Table(TableError::Full { requests: 2 }))
        ));
        cache.extend(a, 10).unwrap();
        assert_eq!(cache.extend(a, 2).unwrap().pages().len(), 3);
        cache.extend(b, 5).unwrap();
        let no_room = NoRoom {
            short: 1,
            pending: 0,
        };
        assert_eq!(cache.extend(b, 4).unwrap_err(), ChunkError::NoRoom(no_room));
        cache.finish(a).unwrap();
        assert!(cache.row(a).is_err());
        assert_eq!(cache.extend(b, 4).unwrap().tokens(), 9);
        cache.finish(b).unwrap();
        assert_eq!(cache.free_pages(), 5);
    }
}
