//! The rows of a sequence as chunks: one head of one part of a page, token by token, in each layer
//! by layer, as `page_head` has them. Rows on a device go through a stage in host memory.

use std::ops::Range;

use larder_format::PageKey;

use super::TransferError;
use super::part::{Held, Identity, sent};
use super::wire::ChunkOf;
use crate::prefix::{HeadAt, Sequence, Stage};

/// The most bytes of a stage from which rows are sent.
const STAGE_BYTES: usize = 4 << 20;

/// # Errors
/// The rows of the sequence are not of this rank.
pub(super) fn check_pools(sequence: &Sequence, own: &Identity) -> Result<(), TransferError> {
    if *sequence.shape() == own.shape {
        return Ok(());
    }
    let what = "it is of a cache of another model than the transport";
    Err(TransferError::Sequence(what.to_owned()))
}

pub(super) fn of_sequence(error: &impl ToString) -> TransferError {
    TransferError::Sequence(error.to_string())
}

/// The rows of a sender, page by page.
#[derive(Default)]
pub(super) struct Source {
    /// If L1 is on a device: the stage, and the pages of the sequence in it.
    stage: Option<(Stage, Range<usize>)>,
}

impl Source {
    /// Has a page in the stage, with those behind it, if L1 is on a device. Returns the stage and
    /// the number of the page in it.
    fn staged(
        &mut self,
        sequence: &Sequence,
        wanted: &Wanted,
        page: usize,
    ) -> Result<Option<(&Stage, usize)>, TransferError> {
        if self.stage.is_none() {
            let most = STAGE_BYTES / sequence.shape().page_bytes() as usize;
            let stage = sequence.stage(most.clamp(1, wanted.pages().max(1)));
            let Some(stage) = stage.map_err(|error| of_sequence(&error))? else {
                return Ok(None);
            };
            self.stage = Some((stage, 0..0));
        }
        let Some((stage, held)) = &mut self.stage else {
            return Ok(None);
        };
        if !held.contains(&page) {
            *held = 0..0;
            let pages = page..page + stage.pages();
            let tokens = pages.start * wanted.page_tokens..pages.end * wanted.page_tokens;
            let end = wanted.tokens.end.min(tokens.end);
            let tokens = wanted.tokens.start.max(tokens.start)..end;
            let copied = sequence.copy_out(stage, page, tokens);
            copied.map_err(|error| of_sequence(&error))?;
            *held = pages;
        }
        Ok(Some((stage, page - held.start)))
    }
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

    /// Where a piece of a chunk is in a stage.
    fn head_at(
        &self,
        of: &ChunkOf,
        own: &Identity,
        page: usize,
        (layer, position): (u32, usize),
        head: u32,
    ) -> HeadAt {
        HeadAt {
            page,
            part: of.part,
            layer: layer - own.held.layers.start,
            token: position % self.wanted.page_tokens,
            head: (head - own.held.heads.start) as usize,
        }
    }

    /// Appends the rows of a chunk.
    ///
    /// # Errors
    /// The sequence does not have them, or the device does not copy them.
    pub(super) fn gather(
        &self,
        sequence: &Sequence,
        source: &mut Source,
        own: &Identity,
        of: &ChunkOf,
        into: &mut Vec<u8>,
    ) -> Result<(), TransferError> {
        let head = sent(of.head, &own.held);
        let page = self.wanted.first_page() + of.at as usize;
        if let Some((stage, page)) = source.staged(sequence, &self.wanted, page)? {
            for piece in self.pieces(of) {
                let values = stage.get(self.head_at(of, own, page, piece, head));
                let none = || of_sequence(&"it does not have all rows");
                into.extend_from_slice(values.ok_or_else(none)?);
            }
            return Ok(());
        }
        let start = (head - own.held.heads.start) as usize * self.head_bytes;
        for (layer, position) in self.pieces(of) {
            let row = sequence.row(of.part, layer - own.held.layers.start, position);
            let row = row.map_err(|error| of_sequence(&error))?;
            into.extend_from_slice(&row[start..start + self.head_bytes]);
        }
        Ok(())
    }

    /// Writes the rows of a chunk, to the stage if L1 is on a device. Returns whether they have the
    /// right length.
    ///
    /// # Errors
    /// The sequence has no such rows, or they are cached.
    pub(super) fn scatter(
        &self,
        sequence: &mut Sequence,
        stage: Option<&mut Stage>,
        own: &Identity,
        of: &ChunkOf,
        rows: &[u8],
    ) -> Result<bool, TransferError> {
        if rows.len() != self.pieces(of).count() * self.head_bytes {
            return Ok(false);
        }
        if let Some(stage) = stage {
            let mut pieces = self.pieces(of).zip(rows.chunks_exact(self.head_bytes));
            let set = |(piece, values): ((u32, usize), &[u8])| {
                let at = self.head_at(of, own, of.at as usize, piece, of.head);
                stage.set(at, values)
            };
            return Ok(pieces.all(set));
        }
        let start = (of.head - own.held.heads.start) as usize * self.head_bytes;
        let pieces = rows.chunks_exact(self.head_bytes);
        for ((layer, position), piece) in self.pieces(of).zip(pieces) {
            let row = sequence.row_mut(of.part, layer - own.held.layers.start, position);
            let row = row.map_err(|error| of_sequence(&error))?;
            row[start..start + self.head_bytes].copy_from_slice(piece);
        }
        Ok(true)
    }
}
