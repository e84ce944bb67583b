//! Namespaces: the fields that must match for the bytes of two pages to be interchangeable.
//!
//! A namespace is stored completely, in a descriptor block of its own, so that an operator can list
//! the contents of a store. Every page refers to it by its [`Fingerprint`]. The encoding is
//! canonical: a namespace has exactly one encoding, and any other bytes are refused. A fingerprint
//! therefore identifies exactly one namespace.
//!
//! ```text
//!   bytes  field
//!       8  magic "LARDERNS"
//!       4  version
//!       4  length         of the whole encoding, in bytes
//!       4  page_tokens
//!    3 x 8  tp, pp, cp    rank and size, 4 bytes each
//!       1  parts
//!   n x 4  part_bytes
//!   2 + n  model          a text is its length in bytes and its UTF-8
//!   2 + n  weights
//!   2 + n  dtype
//!   2 + n  layout
//!   2 + n  pool
//!       2  extra          how many; then a name and a value each, names ascending
//! ```
//!
//! The version is that of the encoding alone. Keys, checksums and the names of a remote depend on
//! the fingerprint, so a new version of the format does not change it.
//!
//! Who knows a fingerprint can test guesses of the fields. So an encrypted store names its
//! namespaces by fingerprints that depend on its key, and gives no others out
//! ([`Namespace::named`]).
//!
//! Texts contain no control characters, because they are shown on terminals and in logs.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::bytes::{Overrun, Reader, all_zero};
use crate::consts::PARTS_MAX;
use crate::ids::identity;
use crate::shape::{PageShape, ShapeError};

/// Maximum length of the encoding of a namespace, in bytes. It fits in the body of one descriptor
/// block.
pub const NAMESPACE_BYTES_MAX: usize = 3800;

/// The version of the encoding.
const ENCODING_VERSION: u32 = 1;

const MAGIC: [u8; 8] = *b"LARDERNS";
const LENGTH_AT: usize = MAGIC.len() + 4;
const HEADER_BYTES: usize = LENGTH_AT + 4;
/// Bytes of an encoding without the part sizes and texts.
const FIXED_BYTES: usize = HEADER_BYTES + 4 + 3 * 8 + 1 + 2;

identity! {
    /// The first 16 bytes of the BLAKE3 of a namespace's encoding; in an encrypted store, of its
    /// HMAC-SHA256 under a key of the store.
    Fingerprint, 16
}

/// A position in a parallel group: rank and group size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rank {
    rank: u32,
    size: u32,
}

impl Rank {
    /// Rank 0 of 1: not parallel.
    pub const ALONE: Rank = Rank { rank: 0, size: 1 };

    /// `None` unless `rank < size`.
    #[must_use]
    pub const fn new(rank: u32, size: u32) -> Option<Rank> {
        if rank < size {
            Some(Rank { rank, size })
        } else {
            None
        }
    }

    /// The rank, counted from 0.
    #[must_use]
    pub const fn rank(self) -> u32 {
        self.rank
    }

    /// The size of the group.
    #[must_use]
    pub const fn size(self) -> u32 {
        self.size
    }
}

impl fmt::Display for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.rank, self.size)
    }
}

/// The fields of a namespace. [`Namespace::new`] checks them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamespaceFields {
    /// The name of the model. Not empty.
    pub model: String,
    /// Distinguishes different weights under the same model name. May be empty.
    pub weights: String,
    /// The element type of the cache, as named by the server. Not empty.
    pub dtype: String,
    /// The byte order within a page (layout), as named by the server. Not empty.
    pub layout: String,
    /// Tokens per page. Not zero.
    pub page_tokens: u32,
    /// The parts of a page.
    pub shape: PageShape,
    /// Position in the tensor-parallel group.
    pub tp: Rank,
    /// Position in the pipeline-parallel group.
    pub pp: Rank,
    /// Position in the context-parallel group.
    pub cp: Rank,
    /// The pool of the server that the pages belong to. May be empty.
    pub pool: String,
    /// Further fields that must match, by name.
    pub extra: BTreeMap<String, String>,
}

/// Makes a [`Namespace`]. The defaults: elements of `bf16` in the layout `page_first_direct`, not
/// parallel, in the pool `kv`.
#[derive(Clone, Debug)]
pub struct NamespaceBuilder {
    fields: NamespaceFields,
}

impl NamespaceBuilder {
    /// Sets [`NamespaceFields::dtype`] and [`NamespaceFields::layout`].
    #[must_use]
    pub fn elements(mut self, dtype: &str, layout: &str) -> NamespaceBuilder {
        dtype.clone_into(&mut self.fields.dtype);
        layout.clone_into(&mut self.fields.layout);
        self
    }

    /// Sets the positions in the tensor-, pipeline- and context-parallel groups.
    #[must_use]
    pub fn ranks(mut self, tp: Rank, pp: Rank, cp: Rank) -> NamespaceBuilder {
        (self.fields.tp, self.fields.pp, self.fields.cp) = (tp, pp, cp);
        self
    }

    /// Sets [`NamespaceFields::pool`].
    #[must_use]
    pub fn pool(mut self, pool: &str) -> NamespaceBuilder {
        pool.clone_into(&mut self.fields.pool);
        self
    }

    /// Adds a further field that must match.
    #[must_use]
    pub fn extra(mut self, name: &str, value: &str) -> NamespaceBuilder {
        self.fields.extra.insert(name.to_owned(), value.to_owned());
        self
    }

    /// The namespace.
    ///
    /// # Errors
    /// Those of [`Namespace::new`].
    pub fn build(self) -> Result<Namespace, NamespaceError> {
        Namespace::new(self.fields)
    }
}

/// A valid namespace. Cloning is cheap. Equal fields are an equal namespace, whatever its
/// fingerprint.
#[derive(Clone)]
pub struct Namespace {
    inner: Arc<Inner>,
    fingerprint: Fingerprint,
}

#[derive(PartialEq, Eq)]
struct Inner {
    fields: NamespaceFields,
    encoding: Vec<u8>,
}

impl PartialEq for Namespace {
    fn eq(&self, other: &Namespace) -> bool {
        self.inner == other.inner
    }
}

impl Eq for Namespace {}

/// Why fields or bytes are not a namespace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NamespaceError {
    /// A required field is empty.
    #[error("{field} is empty")]
    Empty {
        /// The field.
        field: &'static str,
    },
    /// A text contains a control character, which would garble a terminal.
    #[error("{field} holds a control character")]
    Control {
        /// The field.
        field: &'static str,
    },
    /// The encoding does not fit in a descriptor block.
    #[error("it takes {bytes} bytes, at most {NAMESPACE_BYTES_MAX} fit: shorten its texts")]
    TooLong {
        /// Bytes of the encoding.
        bytes: usize,
    },
    /// The parts are not a valid page shape.
    #[error("its page shape is not valid: {0}")]
    Shape(#[from] ShapeError),
    /// A rank is not below its size.
    #[error("{field} rank {rank} is not below its size {size}")]
    Rank {
        /// The group.
        field: &'static str,
        /// The rank.
        rank: u32,
        /// The size.
        size: u32,
    },
    /// The encoding ends too early.
    #[error("its encoding ends in the middle of a field")]
    Short,
    /// The bytes are not a canonical encoding of a namespace.
    #[error("its encoding is not canonical")]
    NotCanonical,
    /// The encoding has another version.
    #[error("its encoding has version {found}, this build reads version {ENCODING_VERSION}")]
    Version {
        /// The version.
        found: u32,
    },
}

impl From<Overrun> for NamespaceError {
    fn from(Overrun: Overrun) -> NamespaceError {
        NamespaceError::Short
    }
}

impl Namespace {
    /// A namespace of pages of this model and these weights, with so many tokens a page.
    #[must_use]
    pub fn builder(
        model: &str,
        weights: &str,
        page_tokens: u32,
        shape: PageShape,
    ) -> NamespaceBuilder {
        NamespaceBuilder {
            fields: NamespaceFields {
                model: model.to_owned(),
                weights: weights.to_owned(),
                dtype: "bf16".to_owned(),
                layout: "page_first_direct".to_owned(),
                page_tokens,
                shape,
                tp: Rank::ALONE,
                pp: Rank::ALONE,
                cp: Rank::ALONE,
                pool: "kv".to_owned(),
                extra: BTreeMap::new(),
            },
        }
    }

    /// A namespace of these fields.
    ///
    /// # Errors
    /// An empty model, dtype, layout or extra name; zero page tokens; a control character; an
    /// encoding above [`NAMESPACE_BYTES_MAX`].
    pub fn new(fields: NamespaceFields) -> Result<Namespace, NamespaceError> {
        validate(&fields)?;
        let encoding = encode(&fields)?;
        let fingerprint = fingerprint_of(&encoding);
        Ok(Namespace {
            inner: Arc::new(Inner { fields, encoding }),
            fingerprint,
        })
    }

    /// The same namespace, by the name that an encrypted store gives it.
    #[must_use]
    pub fn named(&self, fingerprint: Fingerprint) -> Namespace {
        Namespace {
            inner: self.inner.clone(),
            fingerprint,
        }
    }

    /// The same namespace, by the fingerprint of its fields alone: for places outside of the store.
    #[must_use]
    pub fn plain(&self) -> Namespace {
        self.named(fingerprint_of(self.encode()))
    }

    /// The fields.
    #[must_use]
    pub fn fields(&self) -> &NamespaceFields {
        &self.inner.fields
    }

    /// The parts of a page of this namespace.
    #[must_use]
    pub fn shape(&self) -> &PageShape {
        &self.inner.fields.shape
    }

    /// The fingerprint that the page records hold.
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// The canonical encoding: at most [`NAMESPACE_BYTES_MAX`] bytes.
    #[must_use]
    pub fn encode(&self) -> &[u8] {
        &self.inner.encoding
    }

    /// Decodes an encoding; the whole slice must be used.
    ///
    /// # Errors
    /// The bytes are not the canonical encoding of a namespace.
    pub fn decode(bytes: &[u8]) -> Result<Namespace, NamespaceError> {
        if bytes.len() > NAMESPACE_BYTES_MAX {
            return Err(NamespaceError::TooLong { bytes: bytes.len() });
        }
        let namespace = Namespace::new(decode_fields(bytes)?)?;
        // This comparison detects every other deviation: order, length, repeated names, trailing
        // bytes.
        if namespace.encode() == bytes {
            Ok(namespace)
        } else {
            Err(NamespaceError::NotCanonical)
        }
    }

    /// Decodes an encoding with zeros behind it.
    ///
    /// # Errors
    /// The bytes are not the canonical encoding of a namespace, or others are behind it.
    pub(crate) fn decode_padded(bytes: &[u8]) -> Result<Namespace, NamespaceError> {
        let length = bytes.get(LENGTH_AT..).and_then(<[u8]>::first_chunk);
        let length = length.map_or(0, |bytes| u32::from_le_bytes(*bytes)) as usize;
        let (own, behind) = bytes
            .split_at_checked(length)
            .ok_or(NamespaceError::Short)?;
        match all_zero(behind) {
            true => Namespace::decode(own),
            false => Err(NamespaceError::NotCanonical),
        }
    }
}

impl fmt::Debug for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Namespace({}: {self})", self.fingerprint())
    }
}

impl fmt::Display for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let fields = self.fields();
        f.write_str(&fields.model)?;
        if !fields.weights.is_empty() {
            write!(f, "@{}", fields.weights)?;
        }
        write!(f, " {} {}", fields.dtype, fields.layout)?;
        if !fields.pool.is_empty() {
            write!(f, " pool {}", fields.pool)?;
        }
        let shape = &fields.shape;
        write!(
            f,
            ", {} tokens in {} bytes a page",
            fields.page_tokens,
            shape.page_bytes()
        )?;
        write!(f, " ({} parts)", shape.parts())?;
        for (name, rank) in ranks(fields) {
            if rank != Rank::ALONE {
                write!(f, ", {name} {rank}")?;
            }
        }
        fields
            .extra
            .iter()
            .try_for_each(|(name, value)| write!(f, ", {name}={value}"))
    }
}

fn ranks(fields: &NamespaceFields) -> [(&'static str, Rank); 3] {
    [("tp", fields.tp), ("pp", fields.pp), ("cp", fields.cp)]
}

fn texts(fields: &NamespaceFields) -> [(&'static str, &str); 5] {
    [
        ("model", &fields.model),
        ("weights", &fields.weights),
        ("dtype", &fields.dtype),
        ("layout", &fields.layout),
        ("pool", &fields.pool),
    ]
}

fn validate(fields: &NamespaceFields) -> Result<(), NamespaceError> {
    let named = [
        ("model", fields.model.is_empty()),
        ("dtype", fields.dtype.is_empty()),
        ("layout", fields.layout.is_empty()),
        ("page_tokens", fields.page_tokens == 0),
        ("extra", fields.extra.contains_key("")),
    ];
    if let Some((field, _)) = named.into_iter().find(|(_, empty)| *empty) {
        return Err(NamespaceError::Empty { field });
    }
    let extra = fields
        .extra
        .iter()
        .flat_map(|(name, value)| [("extra", name.as_str()), ("extra", value.as_str())]);
    let garbled = texts(fields)
        .into_iter()
        .chain(extra)
        .find(|(_, text)| text.chars().any(char::is_control));
    match garbled {
        Some((field, _)) => Err(NamespaceError::Control { field }),
        None => Ok(()),
    }
}

/// Bytes of the encoding, computed without encoding: a caller may pass texts of any size.
fn encoded_bytes(fields: &NamespaceFields) -> usize {
    let text_bytes = texts(fields)
        .into_iter()
        .map(|(_, text)| text)
        .chain(
            fields
                .extra
                .iter()
                .flat_map(|(name, value)| [name.as_str(), value.as_str()]),
        )
        .fold(0_usize, |sum, text| {
            sum.saturating_add(text.len()).saturating_add(2)
        });
    let part_bytes = fields.shape.parts().saturating_mul(4);
    FIXED_BYTES
        .saturating_add(part_bytes)
        .saturating_add(text_bytes)
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "every length is at most NAMESPACE_BYTES_MAX"
)]
fn encode(fields: &NamespaceFields) -> Result<Vec<u8>, NamespaceError> {
    let bytes = encoded_bytes(fields);
    if bytes > NAMESPACE_BYTES_MAX {
        return Err(NamespaceError::TooLong { bytes });
    }
    let mut out = Vec::with_capacity(bytes);
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&ENCODING_VERSION.to_le_bytes());
    out.extend_from_slice(&(bytes as u32).to_le_bytes());
    out.extend_from_slice(&fields.page_tokens.to_le_bytes());
    for (_, rank) in ranks(fields) {
        out.extend_from_slice(&rank.rank.to_le_bytes());
        out.extend_from_slice(&rank.size.to_le_bytes());
    }
    out.push(fields.shape.parts() as u8);
    for bytes in fields.shape.part_sizes() {
        out.extend_from_slice(&bytes.to_le_bytes());
    }
    texts(fields)
        .into_iter()
        .for_each(|(_, text)| push_text(&mut out, text));
    out.extend_from_slice(&(fields.extra.len() as u16).to_le_bytes());
    for (name, value) in &fields.extra {
        push_text(&mut out, name);
        push_text(&mut out, value);
    }
    debug_assert_eq!(out.len(), bytes);
    Ok(out)
}

#[expect(
    clippy::cast_possible_truncation,
    reason = "every length is at most NAMESPACE_BYTES_MAX"
)]
fn push_text(out: &mut Vec<u8>, text: &str) {
    out.extend_from_slice(&(text.len() as u16).to_le_bytes());
    out.extend_from_slice(text.as_bytes());
}

fn fingerprint_of(encoding: &[u8]) -> Fingerprint {
    let mut bytes = [0; 16];
    blake3::Hasher::new()
        .update(encoding)
        .finalize_xof()
        .fill(&mut bytes);
    Fingerprint(bytes)
}

fn decode_fields(bytes: &[u8]) -> Result<NamespaceFields, NamespaceError> {
    let mut reader = Reader::new(bytes);
    if reader.array()? != MAGIC {
        return Err(NamespaceError::NotCanonical);
    }
    let version = reader.u32()?;
    if version != ENCODING_VERSION {
        return Err(NamespaceError::Version { found: version });
    }
    reader.u32()?;
    let page_tokens = reader.u32()?;
    let [tp, pp, cp] = [
        read_rank(&mut reader, "tp"),
        read_rank(&mut reader, "pp"),
        read_rank(&mut reader, "cp"),
    ];
    let shape = read_shape(&mut reader)?;
    Ok(NamespaceFields {
        page_tokens,
        tp: tp?,
        pp: pp?,
        cp: cp?,
        shape,
        model: read_text(&mut reader)?,
        weights: read_text(&mut reader)?,
        dtype: read_text(&mut reader)?,
        layout: read_text(&mut reader)?,
        pool: read_text(&mut reader)?,
        extra: read_extra(&mut reader)?,
    })
}

fn read_rank(reader: &mut Reader<'_>, field: &'static str) -> Result<Rank, NamespaceError> {
    let (rank, size) = (reader.u32()?, reader.u32()?);
    Rank::new(rank, size).ok_or(NamespaceError::Rank { field, rank, size })
}

fn read_shape(reader: &mut Reader<'_>) -> Result<PageShape, NamespaceError> {
    let found = usize::from(reader.u8()?);
    let mut sizes = [0; PARTS_MAX];
    let sizes = sizes.get_mut(..found).ok_or(ShapeError::Count { found })?;
    for bytes in sizes.iter_mut() {
        *bytes = reader.u32()?;
    }
    Ok(PageShape::new(sizes)?)
}

fn read_text(reader: &mut Reader<'_>) -> Result<String, NamespaceError> {
    let bytes = usize::from(reader.u16()?);
    let text =
        std::str::from_utf8(reader.slice(bytes)?).map_err(|_| NamespaceError::NotCanonical)?;
    Ok(text.to_owned())
}

fn read_extra(reader: &mut Reader<'_>) -> Result<BTreeMap<String, String>, NamespaceError> {
    let count = reader.u16()?;
    let mut extra = BTreeMap::new();
    // Each entry takes at least four bytes, so a count that is too high runs out of bytes at once.
    for _ in 0..count {
        extra.insert(read_text(reader)?, read_text(reader)?);
    }
    Ok(extra)
}
