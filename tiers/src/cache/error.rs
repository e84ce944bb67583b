//! Why a cache cannot be made, or cannot go on; and the check that its pools fit its configuration.

use larder_kernels::{DeviceError, KvShape};

use crate::config::{Config, ConfigError};
use crate::core::{Broken, DoneError};
use crate::ranks::RanksError;

/// Why a cache cannot be made, or cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// The configuration makes no sense.
    #[error("{0}")]
    Config(#[from] ConfigError),
    /// A pool does not fit the configuration.
    #[error(
        "the {tier} pool has {found} pages; {needed} are needed: those of {tier}_pages and one for padding"
    )]
    Pool {
        /// Which.
        tier: &'static str,
        /// Its pages.
        found: u32,
        /// Pages it must have.
        needed: u32,
    },
    /// The pools do not have the configured page.
    #[error(
        "a page of the {tier} pool has {found_tokens} tokens and {found_bytes} bytes, the configuration says {tokens} and {bytes}"
    )]
    Page {
        /// Which pool.
        tier: &'static str,
        /// Its tokens.
        found_tokens: u32,
        /// Its bytes.
        found_bytes: u64,
        /// Tokens configured.
        tokens: u32,
        /// Bytes configured.
        bytes: u64,
    },
    /// The threads for L3 cannot be started.
    #[error("threads for L3 cannot be started: {0}")]
    Threads(#[from] std::io::Error),
    /// The ranks do not agree.
    #[error("{0}")]
    Ranks(#[from] RanksError),
    /// A completion that belongs to nothing: a defect of this crate.
    #[error("{0}")]
    Done(#[from] DoneError),
}

/// Why a chunk cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChunkError {
    /// The request stands on lost pages.
    #[error(transparent)]
    Broken(#[from] Broken),
    /// A load failed, or there is no such chunk.
    #[error(transparent)]
    Device(#[from] DeviceError),
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
