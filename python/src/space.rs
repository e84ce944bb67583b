//! From what SGLang says of a server and its pools to the namespace that their pages live in.
//!
//! SGLang's page keys name tokens and nothing else. Everything that makes the bytes of a page differ is in its namespace: two
//! pools share one only when each may be given the other's pages. What is in doubt is told apart, for a miss is only slow.
//!
//! Ranks: where the model's KV is the same on every tensor-parallel rank (MLA, DeepSeek-V4), SGLang has rank 0 write for all of
//! them, so the namespace has no rank. State that is sharded even there (Mamba, a draft or window with heads of its own) keeps its
//! rank. Data-parallel replicas hold the same bytes and share everything.

use std::collections::BTreeMap;

use larder_format::{Namespace, NamespaceError, NamespaceFields, PageShape, Rank, ShapeError};
use serde::Deserialize;

/// What SGLang's `HiCacheStorageConfig` says, and the weights tag.
#[derive(Clone, Debug, Deserialize)]
pub struct Server {
    /// The model's name.
    pub model: String,
    /// What tells its weights from others.
    pub weights: String,
    /// Tensor-parallel rank and size.
    pub tp: (u32, u32),
    /// Pipeline-parallel rank and size.
    pub pp: (u32, u32),
    /// Context-parallel rank and size.
    pub cp: (u32, u32),
    /// Whether every tensor-parallel rank holds the same KV.
    pub replicated: bool,
}

/// What a host pool says of itself.
#[derive(Clone, Debug, Deserialize)]
pub struct PoolFacts {
    /// SGLang's name for it: `kv`, `swa`, `mamba`, ...
    pub name: String,
    /// Element type.
    pub dtype: String,
    /// Order of the bytes in a page, as they are stored.
    pub layout: String,
    /// Tokens of a page.
    pub page_tokens: u32,
    /// Whether tensor-parallel ranks hold different bytes whatever the rest of the model does.
    pub sharded: bool,
    /// Whatever else shapes the bytes, by name: layers, heads, dimensions.
    pub extra: BTreeMap<String, String>,
}

/// Why there is no namespace for a pool.
#[derive(Debug, thiserror::Error)]
pub enum SpaceError {
    /// A rank that is not below its size.
    #[error("{what} rank {rank} is not below its size {size}")]
    Rank {
        /// Of which group.
        what: &'static str,
        /// The rank.
        rank: u32,
        /// The size.
        size: u32,
    },
    /// The page's parts are not possible.
    #[error("pool {pool}: {source}")]
    Shape {
        /// Which pool.
        pool: String,
        /// Why not.
        source: ShapeError,
    },
    /// The texts make no namespace.
    #[error("pool {pool}: {source}")]
    Namespace {
        /// Which pool.
        pool: String,
        /// Why not.
        source: NamespaceError,
    },
}

/// The namespace of a pool whose pages have parts of these lengths, in bytes.
///
/// # Errors
/// Facts that make none.
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
    fn whatever_makes_bytes_differ_makes_another_namespace() {
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
    fn facts_that_make_no_namespace_are_refused_with_the_pool() {
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
