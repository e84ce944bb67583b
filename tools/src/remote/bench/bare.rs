//! Bare publications and fetches: the work that none can do without, and nothing else.
//!
//! A bare publication reads the bytes of a run from a file with `O_DIRECT`, encrypts them, makes
//! their checksums, and creates an object by the client of the object store. A bare fetch gets an
//! object, verifies it, and writes its pages into the file. They have no store and no agent: no
//! index, no ring, no queue, no budget, no question whether an object is there.

use std::io::{IoSlice, IoSliceMut};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::Instant;

use larder_engine::AlignedBuf;
use larder_engine::format::{Namespace, StoreId};
use larder_remote::agent::PUBLICATIONS;
use larder_remote::run::{object_bytes, open};
use larder_remote::{Draft, Published, Remote, RunNames, RunPage};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::objects::{Objects, STEP_MAX};
use super::pairs::{Sample, Stop};
use crate::failure::Failure;
use crate::workload::Words;

/// Most ranges of memory that the kernel takes in one call.
const RANGES_MAX: usize = 1024;

/// A file with the bytes of a round's runs.
pub struct Bare {
    file: OwnedFd,
    run_bytes: u64,
    memory: AlignedBuf,
}

/// Runs of one namespace, in the order of their bytes in the file.
pub struct Runs {
    pub namespace: Namespace,
    pub pages: Vec<Vec<RunPage>>,
}

impl Bare {
    pub fn new(directory: &Path, run_bytes: u64) -> Result<Bare, Failure> {
        let name = directory.join("bare");
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::CLOEXEC;
        let create = |more| rustix::fs::open(&name, flags | more, Mode::RUSR | Mode::WUSR);
        // Not every file system has O_DIRECT.
        let file = create(OFlags::DIRECT).or_else(|_| create(OFlags::empty()));
        let bytes = usize::try_from(run_bytes).unwrap_or(usize::MAX);
        let memory = AlignedBuf::zeroed(bytes)
            .map_err(|error| Failure::environment(format!("memory for a run: {error}")))?;
        Ok(Bare {
            file: file.map_err(failed)?,
            run_bytes,
            memory,
        })
    }

    /// Writes new bytes, of the kind that pages have, for so many runs.
    pub fn write(&mut self, round: u64, runs: u64) -> Result<(), Failure> {
        for run in 0..runs {
            Words::named([round, run, 0, 0]).fill(&mut self.memory);
            self.write_pages(run, &[&self.memory])?;
        }
        Ok(())
    }

    /// Publishes runs.
    pub fn publish(&self, objects: &Objects, runs: &Runs) -> Result<Sample, Stop> {
        self.at_once(PUBLICATIONS, objects, runs, |at, pages| {
            let trust = objects.trust.clone();
            let mut draft = Draft::new(runs.namespace.clone(), pages.to_vec(), trust)?;
            self.read_pages(at, &mut draft.payloads())?;
            let name = draft.name().ok_or_else(|| wrong("a run has no pages"))?;
            let object = draft
                .finish(StoreId::from_bytes([0; 16]), 0)
                .map_err(|error| wrong(&error.to_string()))?;
            let deadline = Instant::now() + STEP_MAX;
            match objects.client.publish(&name, object, deadline)? {
                Published::Created => Ok(()),
                Published::Present => Err(wrong("an object was there before").into()),
            }
        })
    }

    /// Fetches published runs.
    pub fn fetch(&self, objects: &Objects, runs: &Runs) -> Result<Sample, Stop> {
        self.at_once(objects.connections, objects, runs, |at, pages| {
            let last = pages.last().ok_or_else(|| wrong("a run has no pages"))?;
            let names = RunNames::of(&objects.trust, runs.namespace.fingerprint());
            let name = names.name(&last.key);
            let deadline = Instant::now() + STEP_MAX;
            let bytes_max = object_bytes(&runs.namespace, pages.len());
            let object = objects.client.fetch(&name, bytes_max, deadline)?;
            let mut object = object.ok_or_else(|| wrong("an object is missing"))?;
            let opened = open(&mut object, &name, &objects.trust);
            let good = opened.pages.iter().filter_map(|page| page.payload.ok());
            let good: Vec<&[u8]> = good.collect();
            if good.len() != pages.len() {
                return Err(wrong("an object has wrong pages").into());
            }
            Ok(self.write_pages(at, &good)?)
        })
    }

    /// Does this work for each run, on so many threads.
    fn at_once(
        &self,
        threads: usize,
        objects: &Objects,
        runs: &Runs,
        work: impl Fn(u64, &[RunPage]) -> Result<(), Stop> + Sync,
    ) -> Result<Sample, Stop> {
        let next = AtomicUsize::new(0);
        let work = || {
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(pages) = runs.pages.get(at) else {
                    return Ok(());
                };
                if objects.interrupt.is_raised() {
                    return Err(Stop::Interrupted);
                }
                work(at as u64, pages)?;
            }
        };
        Sample::of(self.run_bytes * runs.pages.len() as u64, || {
            thread::scope(|scope| {
                let threads: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
                threads.into_iter().try_for_each(|thread| {
                    let ended = thread.join();
                    ended.unwrap_or_else(|_| Err(wrong("a thread panicked").into()))
                })
            })
        })
    }

    /// Reads the pages of a run.
    fn read_pages(&self, run: u64, pages: &mut [&mut [u8]]) -> Result<(), Failure> {
        let mut at = run * self.run_bytes;
        for pages in pages.chunks_mut(RANGES_MAX) {
            let bytes: usize = pages.iter().map(|page| page.len()).sum();
            let mut ranges: Vec<_> = pages.iter_mut().map(|page| IoSliceMut::new(page)).collect();
            whole(
                bytes,
                rustix::io::preadv(&self.file, &mut ranges, at).map_err(failed)?,
            )?;
            at += bytes as u64;
        }
        Ok(())
    }

    /// Writes the pages of a run.
    fn write_pages(&self, run: u64, pages: &[&[u8]]) -> Result<(), Failure> {
        let mut at = run * self.run_bytes;
        for pages in pages.chunks(RANGES_MAX) {
            let bytes: usize = pages.iter().map(|page| page.len()).sum();
            let ranges: Vec<_> = pages.iter().map(|page| IoSlice::new(page)).collect();
            whole(
                bytes,
                rustix::io::pwritev(&self.file, &ranges, at).map_err(failed)?,
            )?;
            at += bytes as u64;
        }
        Ok(())
    }
}

/// Whether the kernel moved all bytes of a call.
fn whole(asked: usize, moved: usize) -> Result<(), Failure> {
    match asked == moved {
        true => Ok(()),
        false => Err(wrong(&format!("{moved} of {asked} bytes were moved"))),
    }
}

fn failed(error: Errno) -> Failure {
    Failure::environment(format!(
        "the file of bare publications: {error}; choose another directory"
    ))
}

fn wrong(what: &str) -> Failure {
    Failure::environment(format!("a bare publication or fetch: {what}"))
}
