//! A place for objects beyond the node.

use std::ops::ControlFlow;
use std::time::Duration;

use larder_base::runtime::Instant;
use larder_engine::CodecChoice;
use larder_format::Fingerprint;

use crate::buffer::Buffer;
use crate::error::RemoteError;
use crate::run::{OBJECT_BYTES_MAX, RunName};

/// A place that keeps the objects of runs, for all nodes that use it.
///
/// Objects do not change: they are created once, whole, and removed. No call but a listing lasts
/// longer than its deadline. A call that ends at its deadline may still take effect later.
///
/// A remote has a mark: the directory `v1`, or any object below `v1/` in a bucket. A mount point
/// without its mount and a mistyped prefix have none.
///
/// The failure of a request for one object says nothing about the others. [`look`](Self::look)
/// tells whether the remote itself fails.
pub trait Remote: Send + Sync {
    /// Looks at the remote itself, without an object of it.
    ///
    /// # Errors
    /// It does not answer, or has no mark.
    fn look(&self, deadline: Instant) -> Result<(), RemoteError>;

    /// Makes the mark of a new remote.
    ///
    /// # Errors
    /// [`RemoteError`].
    fn mark(&self, deadline: Instant) -> Result<(), RemoteError>;

    /// Whether nodes encode the pages of the objects that they publish. It is a setting of the
    /// remote; all nodes read plain and encoded pages.
    ///
    /// # Errors
    /// [`RemoteError`], also for the setting of a later release.
    fn codec(&self, _deadline: Instant) -> Result<CodecChoice, RemoteError> {
        Ok(CodecChoice::Off)
    }

    /// Sets [`codec`](Self::codec) for all nodes.
    ///
    /// # Errors
    /// [`RemoteError`].
    fn set_codec(&self, _codec: CodecChoice, _deadline: Instant) -> Result<(), RemoteError> {
        Err(RemoteError::Failed("it keeps no settings".to_owned()))
    }

    /// The time of the clock that stamps the objects, in seconds since 1970. The clock of a node
    /// may differ.
    ///
    /// # Errors
    /// [`RemoteError`].
    fn now_unix_s(&self, deadline: Instant) -> Result<u64, RemoteError>;

    /// Whether there is an object of this run.
    ///
    /// # Errors
    /// [`RemoteError`].
    fn holds(&self, run: &RunName, deadline: Instant) -> Result<bool, RemoteError>;

    /// How many of these runs, consecutive ones of a chain, are there without a gap from the first.
    /// A chain is published from its head, so the first gap is found by few questions.
    ///
    /// # Errors
    /// [`RemoteError`].
    fn lookup(&self, runs: &[RunName], deadline: Instant) -> Result<usize, RemoteError> {
        gallop(runs.len(), |at| self.holds(&runs[at], deadline))
    }

    /// The object of a run; `None` if there is none.
    ///
    /// # Errors
    /// [`RemoteError`], also for an object that is longer than `bytes_max`.
    fn fetch(
        &self,
        run: &RunName,
        bytes_max: usize,
        deadline: Instant,
    ) -> Result<Option<Buffer>, RemoteError>;

    /// Requests of a fetch of so many bytes: one on each connection.
    fn requests_of_fetch(&self, _bytes_max: usize) -> usize {
        1
    }

    /// The first bytes of the object of a run, or all if they are fewer; `None` if there is none.
    ///
    /// # Errors
    /// [`RemoteError`].
    fn begin_of(
        &self,
        run: &RunName,
        bytes: usize,
        deadline: Instant,
    ) -> Result<Option<Buffer>, RemoteError> {
        let object = self.fetch(run, OBJECT_BYTES_MAX, deadline)?;
        Ok(object.map(|mut object| {
            object.truncate(bytes);
            object
        }))
    }

    /// Creates the object of a run, unless there is one.
    ///
    /// # Errors
    /// [`RemoteError`].
    fn publish(
        &self,
        run: &RunName,
        object: Buffer,
        deadline: Instant,
    ) -> Result<Published, RemoteError>;

    /// Marks a run as used now. The mark is made, or made anew.
    ///
    /// # Errors
    /// [`RemoteError`].
    fn touch(&self, run: &RunName, deadline: Instant) -> Result<(), RemoteError>;

    /// Removes the object of a run and its mark, if they are there.
    ///
    /// # Errors
    /// [`RemoteError`].
    fn remove(&self, run: &RunName, deadline: Instant) -> Result<(), RemoteError>;

    /// Gives all objects, or those of a namespace, to `each`. Calls `part` before each request for
    /// a part of them: for 1,000 objects in a bucket, for all in a directory. Both may end the
    /// listing. Waits at most `patience` for the next part: the time of all parts has no bound. An
    /// object that cannot be looked at does not end the listing.
    ///
    /// # Errors
    /// [`RemoteError`], also for a server that gives the same part again, or parts without a run
    /// and without an end.
    fn list(
        &self,
        within: Option<Fingerprint>,
        part: &mut dyn FnMut() -> ControlFlow<()>,
        each: &mut dyn FnMut(Result<Listed, Unreadable>) -> ControlFlow<()>,
        patience: Duration,
    ) -> Result<(), RemoteError>;

    /// Gives the marks of all runs to `each`, as [`list`](Self::list) gives objects: the time of a
    /// mark is that of the last use.
    ///
    /// # Errors
    /// [`RemoteError`].
    fn list_marks(
        &self,
        part: &mut dyn FnMut() -> ControlFlow<()>,
        each: &mut dyn FnMut(Result<Listed, Unreadable>) -> ControlFlow<()>,
        patience: Duration,
    ) -> Result<(), RemoteError>;
}

/// The setting of the codec by its text in a place.
pub(crate) fn codec_of(place: &str, text: &[u8]) -> Result<CodecChoice, RemoteError> {
    let text = String::from_utf8_lossy(text);
    let named = text.trim().parse();
    named.map_err(|error: String| {
        RemoteError::Failed(format!(
            "{place}: {error}; set it again: `larder remote init URL --codec`"
        ))
    })
}

/// The number of runs that are there without a gap from the first, by few questions.
pub(crate) fn gallop<E>(
    runs: usize,
    mut holds: impl FnMut(usize) -> Result<bool, E>,
) -> Result<usize, E> {
    // The runs before `there` are there, the one at `gone` is not.
    let (mut there, mut gone, mut step) = (0, runs, 1);
    while there < gone {
        let probed = (there + step).min(gone) - 1;
        if holds(probed)? {
            there = probed + 1;
            step *= 2;
        } else {
            gone = probed;
            step = (gone - there).div_ceil(2).max(1);
        }
    }
    Ok(there)
}

/// The outcome of a publication.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Published {
    /// The object was created.
    Created,
    /// There was one already.
    Present,
}

/// Most runs of a remote whose names a process keeps: 13 bytes each, and as much for a table.
pub const LISTED_MAX: usize = 4 << 20;

/// An object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Its name.
    pub run: RunName,
    /// Its length in bytes.
    pub bytes: u64,
    /// When it was created, in seconds since 1970.
    pub created_unix_s: u64,
}

/// An object, or a directory of objects, that a listing could not look at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unreadable {
    /// The run of the object, if its name is that of one.
    pub run: Option<RunName>,
    /// The reason, with the full name.
    pub reason: String,
}

impl Listed {
    /// An object or a mark that a place lists with this name; `None` if it names no run.
    pub(crate) fn of(name: &str, bytes: u64, created_unix_s: u64) -> Option<Listed> {
        let run = name.parse().ok().or_else(|| RunName::of_mark(name))?;
        Some(Listed {
            run,
            bytes,
            created_unix_s,
        })
    }
}
