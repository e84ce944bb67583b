//! The cache of engines that run with caching off: it remembers nothing but the chunks of requests that have not ended.
//!
//! With chunked prefill a long prompt is computed in pieces; between two of them the request keeps its row. Nothing is shared,
//! and an ended request leaves nothing behind.

use std::num::NonZeroU32;

use crate::core::NoRoom;
use crate::pool::{PagePool, RequestId, RequestTable, Row, TableError};
use crate::runs::L1;

/// See the module.
#[derive(Debug)]
pub struct ChunkCache {
    pool: PagePool<L1>,
    rows: RequestTable<Row>,
    page_tokens: NonZeroU32,
}

/// Why a chunk has no slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChunkError {
    /// No such request, or no room for one.
    #[error("{0}")]
    Table(#[from] TableError),
    /// L1 has too few pages.
    #[error("{0}")]
    NoRoom(#[from] NoRoom),
}

impl ChunkCache {
    /// Over a pool of `pages` pages, for at most `requests_max` requests.
    #[must_use]
    pub fn new(page_tokens: NonZeroU32, pages: u32, requests_max: u32) -> ChunkCache {
        ChunkCache {
            pool: PagePool::new(pages),
            rows: RequestTable::new(requests_max),
            page_tokens,
        }
    }

    /// Takes a request in, without tokens.
    ///
    /// # Errors
    /// As many run as may.
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

    /// Ends a request; its pages are free.
    ///
    /// # Errors
    /// There is no such request.
    pub fn finish(&mut self, request: RequestId) -> Result<(), ChunkError> {
        let own = self.rows.remove(request)?.into_own_pages();
        let freed = self.pool.free(&own);
        debug_assert_eq!(freed, Ok(()), "a row has pages of this pool");
        Ok(())
    }

    /// Pages that can be had.
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
    fn chunks_of_a_request_stay_until_it_ends_and_then_nothing_does() {
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
