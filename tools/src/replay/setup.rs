//! The trace of a replay, and its store: its creation, and the checks of an existing one.

use std::iter::Peekable;
use std::path::{Path, PathBuf};

use clap::Args;
use larder_engine::{CreateOptions, Created, PageStore, PutStatus, Refusal, Store};
use larder_format::{BLOCK_BYTES, HEADER_BLOCKS, Namespace, PageShape};
use larder_offline::superblock_to_save;

use crate::bench;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::trace::{Request, Trace, TraceError};

/// The arguments of every replay.
#[derive(Args, Clone, Debug)]
pub struct Setup {
    /// Mooncake trace, or a recording of `larder record --requests`: one JSON object a line, with
    /// hash_ids of blocks; may be compressed by zstd
    pub trace: PathBuf,
    /// Stop after this many requests
    #[arg(long)]
    pub limit: Option<u64>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

impl Setup {
    /// The requests of the trace.
    pub fn requests(
        &self,
        interrupt: &Interrupt,
    ) -> Result<Peekable<impl Iterator<Item = Result<Request, TraceError>> + use<>>, TraceError>
    {
        let requests = Trace::open(&self.trace, interrupt)?.take(self.limit());
        Ok(requests.peekable())
    }

    /// Most requests to read.
    pub fn limit(&self) -> usize {
        let limit = self.limit.map(usize::try_from);
        limit.and_then(Result::ok).unwrap_or(usize::MAX)
    }
}

/// Creates the store if there is none. Returns whether it did. A store in which no page of this
/// shape fits is not created.
pub fn create_missing(
    path: &Path,
    options: &CreateOptions<'_>,
    shape: &PageShape,
) -> Result<bool, Failure> {
    let there = path.try_exists().map_err(|error| {
        Failure::environment(format!(
            "{}: looking at the file: {error}; check the path",
            path.display()
        ))
    });
    if there? {
        return match superblock_to_save(path) {
            Ok(superblock) if superblock.keyring != 0 => Err(Failure::environment(format!(
                "{}: the store is encrypted, and a replay takes no such store: give another \
                 --store",
                path.display()
            ))),
            _ => Ok(false),
        };
    }
    let planned = create(path, &options.clone().with(|o| o.dry_run = true))?;
    let page_blocks = u64::from(shape.page_blocks()) + 1;
    if (page_blocks + u64::from(HEADER_BLOCKS)) * BLOCK_BYTES as u64 > planned.segment_bytes {
        return Err(does_not_fit(path));
    }
    create(path, options)?;
    Ok(true)
}

/// Creates a store, or plans it.
pub fn create(path: &Path, options: &CreateOptions<'_>) -> Result<Created, Failure> {
    larder_engine::create(path, options).map_err(|error| Failure::sized(error, "--capacity"))
}

/// No page of the replay fits the store.
pub fn does_not_fit(path: &Path) -> Failure {
    let why = bench::reason(PutStatus::Refused(Refusal::TooLarge));
    Failure::usage(format!("{}: {why}", path.display()))
}

/// Refuses a store of another capacity than `asked`, which is `bytes` when scaled.
pub fn check_capacity(store: &Store, path: &Path, asked: u64, bytes: u64) -> Result<(), Failure> {
    let capacity_bytes = store.stats().capacity_bytes;
    // A file is whole blocks.
    if bytes - bytes % BLOCK_BYTES as u64 == capacity_bytes {
        return Ok(());
    }
    let scaled = if bytes == asked {
        String::new()
    } else {
        format!(", which is {bytes} when scaled")
    };
    Err(Failure::usage(format!(
        "{}: its capacity is {capacity_bytes} bytes, --capacity says {asked}{scaled}; give the \
         store's own, or another --store",
        path.display(),
    )))
}

/// Refuses the namespace of replay pages if the store holds replay pages of another shape.
pub fn check_namespace(store: &Store, path: &Path, asked: &Namespace) -> Result<(), Failure> {
    let other = store
        .namespaces()
        .into_iter()
        .find(|held| held.fields().model == asked.fields().model && held != asked);
    if let Some(held) = other {
        return Err(Failure::usage(format!(
            "{}: namespace mismatch: it holds pages of `{held}`, asked for is `{asked}`; give the \
             same --page-bytes (or \
             --model, --page-size and --scale), or another --store",
            path.display()
        )));
    }
    Ok(())
}
