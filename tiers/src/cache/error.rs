//! Errors of a cache, and the check of its pools against its configuration.

use larder_kernels::{DeviceError, KvShape};

use crate::config::{Config, ConfigError};
use crate::core::{Broken, DoneError};
use crate::l3::L3;
use crate::ranks::RanksError;

/// Why a cache cannot be created or cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// The configuration is not valid.
    #[error("{0}")]
    Config(#[from] ConfigError),
    /// A pool does not fit the configuration.
    #[error(
        "the {tier} pool has {found} pages; {needed} are needed: {tier}_pages plus one for padding"
    )]
    Pool {
        /// The pool.
        tier: &'static str,
        /// Pages of the pool.
        found: u32,
        /// Required pages.
        needed: u32,
    },
    /// The page shape of a pool does not match the configuration.
    #[error(
        "a page of the {tier} pool has {found_tokens} tokens and {found_bytes} bytes, \
         but the configuration has {tokens} and {bytes}"
    )]
    Page {
        /// The pool.
        tier: &'static str,
        /// Tokens per page of the pool.
        found_tokens: u32,
        /// Bytes per page of the pool.
        found_bytes: u64,
        /// Tokens configured.
        tokens: u32,
        /// Bytes configured.
        bytes: u64,
    },
    /// The namespace of L3 does not have the pages of the pools: no page could be stored or found.
    #[error(
        "the namespace of L3 has pages of {found_tokens} tokens in parts of {found_parts:?} bytes, \
         but the pools have {tokens} tokens in parts of {parts:?} bytes; see l3::page_shape"
    )]
    Namespace {
        /// Tokens per page of the namespace.
        found_tokens: u32,
        /// Bytes of each part of the namespace.
        found_parts: Vec<u32>,
        /// Tokens per page of the pools.
        tokens: u32,
        /// Bytes of each part of the pools.
        parts: Vec<u32>,
    },
    /// The threads for L3 cannot be started.
    #[error("threads for L3 cannot be started: {0}")]
    Threads(#[from] std::io::Error),
    /// The group of ranks is broken.
    #[error("{0}")]
    Ranks(#[from] RanksError),
    /// A completion without a matching order: a defect of this crate.
    #[error("{0}")]
    Done(#[from] DoneError),
}

/// Why a chunk cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChunkError {
    /// The request depends on lost pages.
    #[error(transparent)]
    Broken(#[from] Broken),
    /// A load failed, or there is no such chunk.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Checks an L3 against the configuration and the pools.
pub(super) fn check_l3(config: &Config, shape: &KvShape, l3: &dyn L3) -> Result<(), CacheError> {
    config.check_with_l3()?;
    let Some(namespace) = l3.namespace() else {
        return Ok(());
    };
    let found_parts = namespace.shape().part_sizes().to_vec();
    let parts = vec![shape.part_bytes(); shape.parts() as usize];
    let (found_tokens, tokens) = (namespace.fields().page_tokens, shape.page_tokens());
    if (found_tokens, &found_parts) != (tokens, &parts) {
        return Err(CacheError::Namespace {
            found_tokens,
            found_parts,
            tokens,
            parts,
        });
    }
    Ok(())
}

/// Checks a pool against the configuration.
pub(super) fn check_pool(
    tier: &'static str,
    config: &Config,
    shape: &KvShape,
    found: u32,
    pages: u32,
) -> Result<(), CacheError> {
    let needed = pages + 1;
    if found < needed {
        return Err(CacheError::Pool {
            tier,
            found,
            needed,
        });
    }
    let (found_tokens, found_bytes) = (shape.page_tokens(), u64::from(shape.page_bytes()));
    let (tokens, bytes) = (config.page_tokens, config.page_bytes);
    if (found_tokens, found_bytes) != (tokens, bytes) {
        return Err(CacheError::Page {
            tier,
            found_tokens,
            found_bytes,
            tokens,
            bytes,
        });
    }
    Ok(())
}
