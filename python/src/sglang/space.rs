//! The namespace of the pages of a pool, derived from SGLang's description of the server and its
//! pools.
//!
//! SGLang's page keys identify tokens only. Every property that affects the bytes of a page is in
//! its namespace. Two pools share a namespace only if each may use the other's pages. In doubt they
//! are separate, because a miss is only slow.
//!
//! Ranks: if the model's KV is the same on every tensor-parallel rank (MLA, DeepSeek-V4), SGLang
//! makes rank 0 write for all of them, so the namespace contains no rank. State that is sharded
//! even then (Mamba, a draft or a window with its own heads) keeps its rank. Data-parallel replicas
//! hold the same bytes and share everything.

use std::collections::BTreeMap;

use larder_format::{Namespace, NamespaceError, NamespaceFields, PageShape, Rank, ShapeError};
use serde::Deserialize;

/// The contents of SGLang's `HiCacheStorageConfig`, plus the weights tag.
#[derive(Clone, Debug, Deserialize)]
pub struct Server {
    /// The name of the model.
    pub model: String,
    /// Distinguishes its weights from others.
    pub weights: String,
    /// Tensor-parallel rank and size.
    pub tp: (u32, u32),
    /// Pipeline-parallel rank and size.
    pub pp: (u32, u32),
    /// Context-parallel rank and size.
    pub cp: (u32, u32),
    /// Whether every tensor-parallel rank holds the same KV.
    pub replicated: bool,
    /// How long SGLang waits for a read, if not until its end: seconds, and seconds per token
    /// requested. Not part of the namespace.
    #[serde(default)]
    pub prefetch_limit: Option<(f64, f64)>,
}

impl Server {
    /// Whether this is the first rank, which decides and counts for all of them.
    #[must_use]
    pub fn is_first_rank(&self) -> bool {
        [self.tp, self.pp, self.cp].map(|(rank, _)| rank) == [0; 3]
    }
}

/// The description of a host pool.
#[derive(Clone, Debug, Deserialize)]
pub struct PoolFacts {
    /// SGLang's name of the pool: `kv`, `swa`, `mamba`, ...
    pub name: String,
    /// The element type.
    pub dtype: String,
    /// The byte order in a stored page (layout).
    pub layout: String,
    /// Tokens per page.
    pub page_tokens: u32,
    /// Whether tensor-parallel ranks hold different bytes, independent of the rest of the model.
    pub sharded: bool,
    /// Further properties that affect the bytes, by name: layers, heads, dimensions.
    pub extra: BTreeMap<String, String>,
}

/// Why a pool has no valid namespace.
#[derive(Debug, thiserror::Error)]
pub enum SpaceError {
    /// A rank is not below its size.
    #[error("{what} rank {rank} is not below its size {size}")]
    Rank {
        /// The group.
        what: &'static str,
        /// The rank.
        rank: u32,
        /// The size.
        size: u32,
    },
    /// The parts of a page are not valid.
    #[error("pool {pool}: {source}")]
    Shape {
        /// The pool.
        pool: String,
        /// The reason.
        source: ShapeError,
    },
    /// The texts are not valid for a namespace.
    #[error("pool {pool}: {source}")]
    Namespace {
        /// The pool.
        pool: String,
        /// The reason.
        source: NamespaceError,
    },
}

/// The namespace of a pool whose pages have parts of these lengths, in bytes.
///
/// # Errors
/// The description is not valid.
pub fn namespace(
    server: &Server,
    pool: &PoolFacts,
    part_bytes: &[u32],
) -> Result<Namespace, SpaceError> {
    let rank =
        |what, (rank, size)| Rank::new(rank, size).ok_or(SpaceError::Rank { what, rank, size });
    let tp = if server.replicated && !pool.sharded {
        Rank::ALONE
    } else {
        rank("tp", server.tp)?
    };
    let shape = PageShape::new(part_bytes).map_err(|source| SpaceError::Shape {
        pool: pool.name.clone(),
        source,
    })?;
    Namespace::new(NamespaceFields {
        model: server.model.clone(),
        weights: server.weights.clone(),
        dtype: pool.dtype.clone(),
        layout: pool.layout.clone(),
        page_tokens: pool.page_tokens,
        shape,
        tp,
        pp: rank("pp", server.pp)?,
        cp: rank("cp", server.cp)?,
        pool: pool.name.clone(),
        extra: pool.extra.clone(),
    })
    .map_err(|source| SpaceError::Namespace {
        pool: pool.name.clone(),
        source,
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    fn server(tp: (u32, u32), replicated: bool) -> Server {
        Server {
            model: "m".to_owned(),
            weights: "w".to_owned(),
            tp,
            pp: (0, 1),
            cp: (0, 1),
            replicated,
            prefetch_limit: None,
        }
    }

    fn pool(name: &str, sharded: bool) -> PoolFacts {
        PoolFacts {
            name: name.to_owned(),
            dtype: "torch.bfloat16".to_owned(),
            layout: "page_first".to_owned(),
            page_tokens: 64,
            sharded,
            extra: BTreeMap::new(),
        }
    }

    fn of(server: &Server, pool: &PoolFacts) -> Namespace {
        namespace(server, pool, &[4096, 4096]).unwrap()
    }

    #[test]
    fn ranks_that_hold_the_same_bytes_share_and_others_do_not() {
        let (first, second) = (server((0, 2), true), server((1, 2), true));
        assert_eq!(
            of(&first, &pool("kv", false)),
            of(&second, &pool("kv", false))
        );
        assert_ne!(
            of(&first, &pool("mamba", true)),
            of(&second, &pool("mamba", true))
        );
        let (first, second) = (server((0, 2), false), server((1, 2), false));
        assert_ne!(
            of(&first, &pool("kv", false)),
            of(&second, &pool("kv", false))
        );
    }

    #[test]
    fn every_property_that_affects_bytes_changes_the_namespace() {
        let base = of(&server((0, 1), false), &pool("kv", false));
        let mut others = Vec::new();
        for change in 0..8 {
            let (mut server, mut pool) = (server((0, 1), false), pool("kv", false));
            match change {
                0 => server.model.push('2'),
                1 => server.weights.push('2'),
                2 => server.pp = (1, 2),
                3 => server.cp = (1, 2),
                4 => pool.dtype.push('2'),
                5 => pool.layout.push('2'),
                6 => pool.page_tokens = 32,
                _ => {
                    pool.extra.insert("layers".to_owned(), "0..32".to_owned());
                }
            }
            others.push(of(&server, &pool).fingerprint());
        }
        others.push(of(&server((0, 1), false), &pool("swa", false)).fingerprint());
        others.push(base.fingerprint());
        let count = others.len();
        others.sort();
        others.dedup();
        assert_eq!(others.len(), count);
    }

    #[test]
    fn invalid_descriptions_are_refused_with_the_pool() {
        let server = server((2, 2), false);
        assert!(matches!(
            namespace(&server, &pool("kv", false), &[4096]),
            Err(SpaceError::Rank { what: "tp", .. })
        ));
        let parts = [4096; 9];
        let error = namespace(&self::server((0, 1), false), &pool("kv", false), &parts);
        assert!(error.unwrap_err().to_string().contains("pool kv"));
    }
}
