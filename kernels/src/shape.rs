//! The components of a KV page: parts, layers, tokens, rows.
//!
//! Invariants of a [`KvShape`]: every count is at least one, and a page is smaller than
//! [`PAGE_BYTES_LIMIT`]. All sizes within a page therefore fit in 32 bits, and all offsets within a
//! pool in 63.

/// Upper limit (exclusive) of the bytes of a page. The store has the same limit.
pub const PAGE_BYTES_LIMIT: u64 = 1 << 30;

/// The attention type, which determines the number of parts per page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Attention {
    /// Multi-head or grouped-query attention: K and V, two parts.
    Mha,
    /// Multi-head latent attention: one part.
    Mla,
}

/// The shape of a page: `parts` x `layers` x `page_tokens` rows of `row_bytes`.
///
/// A row is the smallest unit that every layout keeps contiguous: one token, one layer, one part.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvShape {
    attention: Attention,
    layers: u32,
    row_bytes: u32,
    page_tokens: u32,
}

/// Counts that are not valid for a shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// A count is zero.
    #[error("{field} of a KV shape is 0")]
    Zero {
        /// The name of the count.
        field: &'static str,
    },
    /// The pages are too large.
    #[error("a page of this KV shape is not below {PAGE_BYTES_LIMIT} bytes")]
    TooLarge,
}

impl KvShape {
    /// K and V of `heads` heads of this rank, with `head_dim` values of `value_bytes` bytes.
    ///
    /// # Errors
    /// A count of 0, or pages of [`PAGE_BYTES_LIMIT`] or more.
    pub fn mha(
        layers: u32,
        heads: u32,
        head_dim: u32,
        value_bytes: u32,
        page_tokens: u32,
    ) -> Result<KvShape, ShapeError> {
        at_least_one("heads", heads)?;
        at_least_one("head_dim", head_dim)?;
        at_least_one("value_bytes", value_bytes)?;
        let row_bytes = heads
            .checked_mul(head_dim)
            .and_then(|values| values.checked_mul(value_bytes))
            .ok_or(ShapeError::TooLarge)?;
        Self::of_rows(Attention::Mha, layers, row_bytes, page_tokens)
    }

    /// Latent rows of `dim` values (rope part included) of `value_bytes` bytes.
    ///
    /// # Errors
    /// A count of 0, or pages of [`PAGE_BYTES_LIMIT`] or more.
    pub fn mla(
        layers: u32,
        dim: u32,
        value_bytes: u32,
        page_tokens: u32,
    ) -> Result<KvShape, ShapeError> {
        at_least_one("dim", dim)?;
        at_least_one("value_bytes", value_bytes)?;
        let row_bytes = dim.checked_mul(value_bytes).ok_or(ShapeError::TooLarge)?;
        Self::of_rows(Attention::Mla, layers, row_bytes, page_tokens)
    }

    /// Rows of any size, for packed formats whose row size is not a multiple of a value size.
    ///
    /// # Errors
    /// A count of 0, or pages of [`PAGE_BYTES_LIMIT`] or more.
    pub fn of_rows(
        attention: Attention,
        layers: u32,
        row_bytes: u32,
        page_tokens: u32,
    ) -> Result<KvShape, ShapeError> {
        at_least_one("layers", layers)?;
        at_least_one("row_bytes", row_bytes)?;
        at_least_one("page_tokens", page_tokens)?;
        let shape = KvShape {
            attention,
            layers,
            row_bytes,
            page_tokens,
        };
        let bytes = [layers, row_bytes, page_tokens]
            .iter()
            .try_fold(u64::from(shape.parts()), |bytes, count| {
                bytes.checked_mul(u64::from(*count))
            });
        match bytes {
            Some(bytes) if bytes < PAGE_BYTES_LIMIT => Ok(shape),
            _ => Err(ShapeError::TooLarge),
        }
    }

    /// The attention type.
    #[must_use]
    pub fn attention(&self) -> Attention {
        self.attention
    }

    /// Parts of a page: 2 for MHA (K, then V), 1 for MLA.
    #[must_use]
    pub fn parts(&self) -> u32 {
        match self.attention {
            Attention::Mha => 2,
            Attention::Mla => 1,
        }
    }

    /// Layers.
    #[must_use]
    pub fn layers(&self) -> u32 {
        self.layers
    }

    /// Tokens per page.
    #[must_use]
    pub fn page_tokens(&self) -> u32 {
        self.page_tokens
    }

    /// Bytes of one token of one layer of one part.
    #[must_use]
    pub fn row_bytes(&self) -> u32 {
        self.row_bytes
    }

    /// Bytes of a page in one layer of one part. `layer_first` and `page_first_direct` keep them
    /// contiguous.
    #[must_use]
    pub fn chunk_bytes(&self) -> u32 {
        self.row_bytes * self.page_tokens
    }

    /// Bytes of one part of a page, all layers.
    #[must_use]
    pub fn part_bytes(&self) -> u32 {
        self.chunk_bytes() * self.layers
    }

    /// Bytes of a page: below [`PAGE_BYTES_LIMIT`].
    #[must_use]
    pub fn page_bytes(&self) -> u32 {
        self.part_bytes() * self.parts()
    }
}

fn at_least_one(field: &'static str, count: u32) -> Result<(), ShapeError> {
    if count == 0 {
        return Err(ShapeError::Zero { field });
    }
    Ok(())
}
