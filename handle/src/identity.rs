//! The identity of a namespace: everything that decides the bytes of a page besides its key.

use std::collections::BTreeMap;

use larder_format::{Namespace, NamespaceFields, PageShape, Rank};
use serde::Deserialize;

/// The fields of a namespace, with the names of the faces.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Identity {
    /// The model.
    pub model: String,
    /// The weights.
    pub weights: String,
    /// The type of the values.
    pub dtype: String,
    /// The layout of the bytes.
    pub layout: String,
    /// Tokens of a page.
    pub page_tokens: u32,
    /// Bytes of each part of a page.
    pub parts: Vec<u32>,
    /// Rank and size of tensor parallelism.
    #[serde(default = "alone")]
    pub tp: (u32, u32),
    /// Of pipeline parallelism.
    #[serde(default = "alone")]
    pub pp: (u32, u32),
    /// Of context parallelism.
    #[serde(default = "alone")]
    pub cp: (u32, u32),
    /// Tells apart the kinds of pages of a model.
    #[serde(default = "kv")]
    pub pool: String,
    /// Further fields.
    #[serde(default)]
    pub extra: BTreeMap<String, String>,
}

fn alone() -> (u32, u32) {
    (0, 1)
}

fn kv() -> String {
    "kv".to_owned()
}

/// Why an identity is refused.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The text is no JSON with these fields.
    #[error("the identity: {0}")]
    Json(#[from] serde_json::Error),
    /// The sizes of the parts.
    #[error("`parts`: {0}")]
    Parts(#[from] larder_format::ShapeError),
    /// A rank is not below its size.
    #[error("`{name}`: rank {rank} is not below {size}")]
    Rank {
        /// The field.
        name: &'static str,
        /// The rank.
        rank: u32,
        /// The size.
        size: u32,
    },
    /// A field is out of range.
    #[error(transparent)]
    Field(#[from] larder_format::NamespaceError),
}

impl Identity {
    /// Reads JSON.
    ///
    /// # Errors
    /// It is no JSON with these fields alone.
    pub fn parse(json: &str) -> Result<Identity, IdentityError> {
        Ok(serde_json::from_str(json)?)
    }

    /// The record of the namespace.
    ///
    /// # Errors
    /// A field is out of range.
    pub fn record(self) -> Result<Namespace, IdentityError> {
        let ranked = |name, (rank, size)| {
            Rank::new(rank, size).ok_or(IdentityError::Rank { name, rank, size })
        };
        Ok(Namespace::new(NamespaceFields {
            shape: PageShape::new(&self.parts)?,
            tp: ranked("tp", self.tp)?,
            pp: ranked("pp", self.pp)?,
            cp: ranked("cp", self.cp)?,
            model: self.model,
            weights: self.weights,
            dtype: self.dtype,
            layout: self.layout,
            page_tokens: self.page_tokens,
            pool: self.pool,
            extra: self.extra,
        })?)
    }
}
