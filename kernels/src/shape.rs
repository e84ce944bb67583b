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

/// The counts of a [`KvShape`]. Each of them decides the meaning of a page's bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvCounts {
    /// The attention type.
    pub attention: Attention,
    /// Layers.
    pub layers: u32,
    /// Heads of a row: KV heads, or 1 for latent rows.
    pub heads: u32,
    /// Values of a head, in K and in V; or of a latent row, rope part included.
    pub head_dim: u32,
    /// Bytes of a value.
    pub value_bytes: u32,
    /// Tokens per page.
    pub page_tokens: u32,
}

/// The shape of a page: `parts` x `layers` x `page_tokens` rows of `heads` x `head_dim` values.
///
/// A row is one token of one layer of one part. The values of one of its heads are the smallest
/// unit that every layout keeps contiguous.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvShape(KvCounts);

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
    /// A shape of these counts.
    ///
    /// # Errors
    /// A count of 0, or pages of [`PAGE_BYTES_LIMIT`] or more.
    pub fn new(counts: KvCounts) -> Result<KvShape, ShapeError> {
        let KvCounts {
            attention: _,
            layers,
            heads,
            head_dim,
            value_bytes,
            page_tokens,
        } = counts;
        let factors = [
            ("layers", layers),
            ("heads", heads),
            ("head_dim", head_dim),
            ("value_bytes", value_bytes),
            ("page_tokens", page_tokens),
        ];
        if let Some((field, _)) = factors.iter().find(|(_, count)| *count == 0) {
            return Err(ShapeError::Zero { field });
        }
        let shape = KvShape(counts);
        let bytes = factors
            .iter()
            .try_fold(u64::from(shape.parts()), |bytes, (_, count)| {
                bytes.checked_mul(u64::from(*count))
            });
        match bytes {
            Some(bytes) if bytes < PAGE_BYTES_LIMIT => Ok(shape),
            _ => Err(ShapeError::TooLarge),
        }
    }

    /// K and V of `heads` heads, with `head_dim` values of `value_bytes` bytes.
    ///
    /// # Errors
    /// Those of [`KvShape::new`].
    pub fn mha(
        layers: u32,
        heads: u32,
        head_dim: u32,
        value_bytes: u32,
        page_tokens: u32,
    ) -> Result<KvShape, ShapeError> {
        KvShape::new(KvCounts {
            attention: Attention::Mha,
            layers,
            heads,
            head_dim,
            value_bytes,
            page_tokens,
        })
    }

    /// Latent rows of `dim` values (rope part included) of `value_bytes` bytes.
    ///
    /// # Errors
    /// Those of [`KvShape::new`].
    pub fn mla(
        layers: u32,
        dim: u32,
        value_bytes: u32,
        page_tokens: u32,
    ) -> Result<KvShape, ShapeError> {
        KvShape::new(KvCounts {
            attention: Attention::Mla,
            layers,
            heads: 1,
            head_dim: dim,
            value_bytes,
            page_tokens,
        })
    }

    /// Rows of any size, for packed formats whose row size is not a multiple of a value size: one
    /// head of `row_bytes` values of one byte. If a packed row has several heads, and ranks divide
    /// them, use [`KvShape::mha`] with the bytes of a head as its values.
    ///
    /// # Errors
    /// Those of [`KvShape::new`].
    pub fn of_rows(
        attention: Attention,
        layers: u32,
        row_bytes: u32,
        page_tokens: u32,
    ) -> Result<KvShape, ShapeError> {
        if row_bytes == 0 {
            return Err(ShapeError::Zero { field: "row_bytes" });
        }
        KvShape::new(KvCounts {
            attention,
            layers,
            heads: 1,
            head_dim: row_bytes,
            value_bytes: 1,
            page_tokens,
        })
    }

    /// Its counts.
    #[must_use]
    pub fn counts(&self) -> KvCounts {
        self.0
    }

    /// A part of it: so many of its layers, heads and tokens of a page; at least one of each, and
    /// at most all.
    #[must_use]
    pub fn part(&self, layers: u32, heads: u32, page_tokens: u32) -> KvShape {
        let whole = self.0;
        KvShape(KvCounts {
            layers: layers.clamp(1, whole.layers),
            heads: heads.clamp(1, whole.heads),
            page_tokens: page_tokens.clamp(1, whole.page_tokens),
            ..whole
        })
    }

    /// The attention type.
    #[must_use]
    pub fn attention(&self) -> Attention {
        self.0.attention
    }

    /// Parts of a page: 2 for MHA (K, then V), 1 for MLA.
    #[must_use]
    pub fn parts(&self) -> u32 {
        match self.0.attention {
            Attention::Mha => 2,
            Attention::Mla => 1,
        }
    }

    /// Layers.
    #[must_use]
    pub fn layers(&self) -> u32 {
        self.0.layers
    }

    /// Tokens per page.
    #[must_use]
    pub fn page_tokens(&self) -> u32 {
        self.0.page_tokens
    }

    /// Heads of a row.
    #[must_use]
    pub fn heads(&self) -> u32 {
        self.0.heads
    }

    /// Bytes of one head of a row.
    #[must_use]
    pub fn head_bytes(&self) -> u32 {
        self.0.head_dim * self.0.value_bytes
    }

    /// Bytes of one token of one layer of one part.
    #[must_use]
    pub fn row_bytes(&self) -> u32 {
        self.0.heads * self.head_bytes()
    }

    /// Bytes of a page in one layer of one part. `layer_first` and `page_first_direct` keep them
    /// contiguous.
    #[must_use]
    pub fn chunk_bytes(&self) -> u32 {
        self.row_bytes() * self.page_tokens()
    }

    /// Bytes of one part of a page, all layers.
    #[must_use]
    pub fn part_bytes(&self) -> u32 {
        self.chunk_bytes() * self.layers()
    }

    /// Bytes of a page: below [`PAGE_BYTES_LIMIT`].
    #[must_use]
    pub fn page_bytes(&self) -> u32 {
        self.part_bytes() * self.parts()
    }
}
