//! The rows of a sequence as chunks: one head of one part of a page, token by token, in each layer
//! by layer, as `page_head` has them.

use std::ops::Range;

use larder_format::PageKey;

use super::TransferError;
use super::part::{Held, Identity, sent};
use super::wire::ChunkOf;
use crate::prefix::Sequence;

/// # Errors
/// The rows of the sequence are not in host memory, or not of this rank.
pub(super) fn check_pools(sequence: &Sequence, own: &Identity) -> Result<(), TransferError> {
    let what = match sequence.shape_on_host() {
        Some(shape) if *shape == own.shape => return Ok(()),
        Some(_) => "it is of a cache of another model than the transport",
        None => "its rows are not in host memory, which this transport needs",
    };
    Err(TransferError::Sequence(what.to_owned()))
}

/// A digest of the first tokens.
///
/// # Errors
/// The sequence is broken, or its vocabulary was full.
pub(super) fn digest(sequence: &Sequence, tokens: usize) -> Result<PageKey, TransferError> {
    let digest = sequence.digest(tokens);
    let digest = digest.map_err(|error| TransferError::Sequence(error.to_string()))?;
    let what = || format!("it has fewer than {tokens} known tokens; raise wide_tokens_max");
    digest.ok_or_else(|| TransferError::Sequence(what()))
}

/// The tokens that a receiver wants, by page.
#[derive(Clone, Debug)]
pub(super) struct Wanted {
    pub(super) tokens: Range<usize>,
    pub(super) page_tokens: usize,
}

impl Wanted {
    /// Number of the first page.
    pub(super) fn first_page(&self) -> usize {
        self.tokens.start / self.page_tokens
    }

    pub(super) fn pages(&self) -> usize {
        match self.tokens.is_empty() {
            true => 0,
            false => self.tokens.end.div_ceil(self.page_tokens) - self.first_page(),
        }
    }

    /// The positions in a page, by its number among the wanted ones.
    fn positions(&self, at: usize) -> Range<usize> {
        let start = (self.first_page() + at) * self.page_tokens;
        let end = start + self.page_tokens;
        self.tokens.start.max(start)..self.tokens.end.min(end)
    }
}

/// The chunks that a receiver takes from a sender.
#[derive(Clone, Debug)]
pub(super) struct Chunks {
    pub(super) wanted: Wanted,
    /// The part of the model. `None`: no chunk.
    pub(super) held: Option<Held>,
    pub(super) parts: u32,
    pub(super) head_bytes: usize,
}

impl Chunks {
    pub(super) fn new(own: &Identity, wanted: Wanted, held: Option<Held>) -> Chunks {
        Chunks {
            wanted,
            held,
            parts: own.shape.parts(),
            head_bytes: own.shape.head_bytes() as usize,
        }
    }

    /// Number of chunks.
    pub(super) fn count(&self) -> u64 {
        let heads = self.held.as_ref().map_or(0, |held| held.heads.len() as u64);
        self.wanted.pages() as u64 * u64::from(self.parts) * heads
    }

    /// The place of a chunk, without the number of its page.
    pub(super) fn place(&self, number: u64) -> Option<ChunkOf> {
        let held = self.held.as_ref().filter(|_| number < self.count())?;
        let heads = held.heads.len() as u64;
        let parts = u64::from(self.parts);
        Some(ChunkOf {
            page: 0,
            at: u32::try_from(number / heads / parts).ok()?,
            part: u32::try_from(number / heads % parts).ok()?,
            head: held.heads.start + u32::try_from(number % heads).ok()?,
        })
    }

    /// The number of a chunk, if there is one.
    pub(super) fn number(&self, of: &ChunkOf) -> Option<u64> {
        let held = self.held.as_ref()?;
        let is_one = (of.at as usize) < self.wanted.pages()
            && of.part < self.parts
            && held.heads.contains(&of.head);
        let heads = held.heads.len() as u64;
        let row = u64::from(of.at) * u64::from(self.parts) + u64::from(of.part);
        is_one.then(|| row * heads + u64::from(of.head - held.heads.start))
    }

    /// The rows of a chunk: layer and position of each piece.
    fn pieces(&self, of: &ChunkOf) -> impl Iterator<Item = (u32, usize)> + use<> {
        let layers = self.held.as_ref().map_or(0..0, |held| held.layers.clone());
        let positions = self.wanted.positions(of.at as usize);
        positions.flat_map(move |position| layers.clone().map(move |layer| (layer, position)))
    }

    /// Appends the rows of a chunk.
    ///
    /// # Errors
    /// The sequence does not have them.
    pub(super) fn gather(
        &self,
        sequence: &Sequence,
        own: &Identity,
        of: &ChunkOf,
        into: &mut Vec<u8>,
    ) -> Result<(), TransferError> {
        let head = sent(of.head, &own.held) - own.held.heads.start;
        let start = head as usize * self.head_bytes;
        for (layer, position) in self.pieces(of) {
            let row = sequence.row(of.part, layer - own.held.layers.start, position);
            let row = row.map_err(|error| TransferError::Sequence(error.to_string()))?;
            into.extend_from_slice(&row[start..start + self.head_bytes]);
        }
        Ok(())
    }

    /// Writes the rows of a chunk. Returns whether they have the right length.
    ///
    /// # Errors
    /// The sequence has no such rows, or they are cached.
    pub(super) fn scatter(
        &self,
        sequence: &mut Sequence,
        own: &Identity,
        of: &ChunkOf,
        rows: &[u8],
    ) -> Result<bool, TransferError> {
        if rows.len() != self.pieces(of).count() * self.head_bytes {
            return Ok(false);
        }
        let start = (of.head - own.held.heads.start) as usize * self.head_bytes;
        let pieces = rows.chunks_exact(self.head_bytes);
        for ((layer, position), piece) in self.pieces(of).zip(pieces) {
            let row = sequence.row_mut(of.part, layer - own.held.layers.start, position);
            let row = row.map_err(|error| TransferError::Sequence(error.to_string()))?;
            row[start..start + self.head_bytes].copy_from_slice(piece);
        }
        Ok(true)
    }
}
