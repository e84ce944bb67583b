//! Errors of a cache, and the check of its pools against its configuration.

use larder_kernels::{DeviceError, KvShape, L2Pool};

use super::pools::{Components, Section};
use crate::config::{Config, ConfigError};
use crate::core::{Broken, DoneError, ExtendError, TruncateError};
use crate::l3::L3;
use crate::model::{counted, page_shape_of, stored};
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
    /// The namespace of L3 does not describe the pages of the pools: they could not be stored, or
    /// pages of another model could be found.
    #[error(
        "{field} of the namespace of L3 is {found:?}, the pools have {needed:?}; make the \
         namespace by Model::namespace"
    )]
    Namespace {
        /// The field.
        field: &'static str,
        /// Its value in the namespace. Empty if it has no such field.
        found: String,
        /// The value of the pools.
        needed: String,
    },
    /// The pools of a section have different shapes.
    #[error("a section has pages of {l1:?} in L1 and of {l2:?} in L2; give both one shape")]
    Shapes {
        /// The shape in L1.
        l1: KvShape,
        /// The shape in L2.
        l2: KvShape,
    },
    /// The components differ from those of the configuration.
    #[error(
        "there are pools of {found} windows and states, the configuration has {needed} tails; \
         each has an L3 exactly if the model has one"
    )]
    Components {
        /// Windows and states among the components.
        found: usize,
        /// Those of the configuration.
        needed: usize,
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

/// Why a forward is not prepared. Nothing is lost.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PrepareError {
    /// A pool has no room, or the request is broken.
    #[error(transparent)]
    Extend(#[from] ExtendError),
    /// A load of the state from which the request starts has not ended.
    #[error("the state from which the request starts is being loaded; poll, and try again")]
    Loading,
    /// The stream is missing, or the device has none.
    #[error(transparent)]
    Device(#[from] DeviceError),
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

/// Why a request is not truncated: nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CutError {
    /// The request, or its pages.
    #[error(transparent)]
    Request(#[from] TruncateError),
    /// The stream is missing, or the device has none.
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// Checks an L3 against the configuration and the host pool.
pub(super) fn check_l3(config: &Config, l2: &L2Pool, l3: &dyn L3) -> Result<(), CacheError> {
    config.check_with_l3()?;
    let Some(namespace) = l3.namespace() else {
        return Ok(());
    };
    let (shape, fields) = (l2.shape(), namespace.fields());
    let of_extra = |(field, needed): (&'static str, String)| {
        let found = fields.extra.get(field).cloned().unwrap_or_default();
        (field, found, needed)
    };
    let mut all = vec![
        (
            "page_tokens",
            fields.page_tokens.to_string(),
            shape.page_tokens().to_string(),
        ),
        (
            "parts",
            format!("{:?}", namespace.shape().part_sizes()),
            format!("{:?}", vec![shape.part_bytes(); shape.parts() as usize]),
        ),
        (
            "layout",
            fields.layout.clone(),
            stored(l2.layout()).name().to_owned(),
        ),
    ];
    all.extend(counted(shape).map(of_extra));
    match all.into_iter().find(|(_, found, needed)| found != needed) {
        None => Ok(()),
        Some((field, found, needed)) => Err(CacheError::Namespace {
            field,
            found,
            needed,
        }),
    }
}

/// Checks the pools of components, and their L3, against the configuration.
pub(super) fn check_components(
    config: &Config,
    components: &Components,
    has_l3: bool,
) -> Result<(), CacheError> {
    let (found, needed) = (components.tails.len(), config.tails.len());
    let mut all = components.all();
    if found != needed || !all.all(|of| of.l3.is_some() == has_l3) {
        return Err(CacheError::Components { found, needed });
    }
    let main = components.followers.iter();
    let main = main.map(|of| (of, config.l1_pages, config.l2_pages));
    let tails = components.tails.iter().zip(&config.tails);
    let tails = tails.map(|(of, tail)| (of, tail.l1_pages, tail.l2_pages));
    for (of, l1_pages, l2_pages) in main.chain(tails) {
        for Section { l1, l2 } in &of.sections {
            if l1.shape() != l2.shape() {
                return Err(CacheError::Shapes {
                    l1: *l1.shape(),
                    l2: *l2.shape(),
                });
            }
            for (tier, found, pages) in [("l1", l1.pages(), l1_pages), ("l2", l2.pages(), l2_pages)]
            {
                let needed = pages + 1;
                if found < needed {
                    return Err(CacheError::Pool {
                        tier,
                        found,
                        needed,
                    });
                }
            }
        }
        let namespace = of.l3.as_ref().and_then(|l3| l3.namespace());
        let shapes: Vec<KvShape> = of.sections.iter().map(|of| *of.l2.shape()).collect();
        let parts = page_shape_of(&shapes).map(|shape| format!("{:?}", shape.part_sizes()));
        let needed = parts.unwrap_or_default();
        let found = namespace.map(|of| format!("{:?}", of.shape().part_sizes()));
        if let Some(found) = found.filter(|found| *found != needed) {
            return Err(CacheError::Namespace {
                field: "parts",
                found,
                needed,
            });
        }
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
