//! Whole stores of arbitrary bytes, as files, read by `larder inspect`, by `larder verify --deep`
//! and by an opening.
//!
//! An input is a list of patches. They apply to a file of zeros with the length that the samples'
//! geometry requires:
//!
//! ```text
//!      4  block       modulo the file's blocks
//!      2  offset      in the block
//!      2  length
//!      n  bytes
//! ```
//!
//! So a store of a hundred megabytes is an input of a few kilobytes ([`patches`] writes one).
//! Checksums are not fixed: a patched structure fails its checksum unless the input itself contains
//! the valid one.

use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::ops::ControlFlow;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use larder_disk::probe::Want;
use larder_engine::format::{BLOCK_BYTES, OVERHEAD_BYTES, superblock_offsets};
use larder_engine::{GetPage, OpenOptions, PageStore, PutOptions, PutPage, PutStatus, Store};
use larder_offline::survey::{Survey, SurveyOptions};
use larder_store::share::Inside;

use crate::feed::Feed;
use crate::machine::Image;
use crate::sample::{REAL_SEGMENT_BLOCKS, Sample, Truth, chain, namespaces, payload};

/// Segments of the files.
pub const SEGMENTS: u64 = 6;

/// A file in memory on which a store can be opened by its path.
pub struct MemoryFile {
    file: File,
}

impl MemoryFile {
    /// A file of zeros.
    ///
    /// # Panics
    /// If the kernel does not support such files.
    #[must_use]
    pub fn new(bytes: u64) -> MemoryFile {
        let fd: OwnedFd = rustix::fs::memfd_create("store", rustix::fs::MemfdFlags::CLOEXEC)
            .expect("a file in memory");
        let file = File::from(fd);
        file.set_len(bytes).expect("a sparse file");
        MemoryFile { file }
    }

    /// A file with the bytes of an image's first volume.
    #[must_use]
    pub fn holding(image: &Image) -> MemoryFile {
        let volume = &image.volumes[0];
        let file = MemoryFile::new(volume.blocks() * BLOCK_BYTES as u64);
        for at in volume.written() {
            file.write(at * BLOCK_BYTES as u64, &volume.block(at));
        }
        file
    }

    /// The same, with all copies of its superblock.
    ///
    /// # Panics
    /// If the image's geometry is not valid for a file.
    #[must_use]
    pub fn of(image: &Image) -> MemoryFile {
        let file = MemoryFile::holding(image);
        let superblock = image.superblocks[0].encode();
        let superblock = superblock.expect("a valid geometry");
        let bytes = image.volumes[0].blocks() * BLOCK_BYTES as u64;
        for offset in superblock_offsets(bytes) {
            file.write(offset, &superblock[..]);
        }
        file
    }

    /// Its path, as long as the file exists.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.file.as_raw_fd()))
    }

    /// Writes bytes into it.
    ///
    /// # Panics
    /// If there is no memory for them.
    pub fn write(&self, offset: u64, bytes: &[u8]) {
        self.file.write_all_at(bytes, offset).expect("memory");
    }

    /// Reads a range.
    ///
    /// # Panics
    /// If the range is beyond its end.
    #[must_use]
    pub fn read(&self, offset: u64, bytes: usize) -> Vec<u8> {
        let mut out = vec![0; bytes];
        self.file.read_exact_at(&mut out, offset).expect("a read");
        out
    }
}

/// The options for opening a store in memory.
#[must_use]
pub fn options(read_only: bool) -> OpenOptions {
    OpenOptions::default().with(|o| {
        o.disk = Want::Threads;
        o.read_only = read_only;
    })
}

/// Surveys, opens and reads a file that the input describes.
///
/// # Panics
/// If a reader panics, or bytes are returned that were never put.
pub fn raw_image(data: &[u8]) {
    let bytes = OVERHEAD_BYTES + SEGMENTS * u64::from(REAL_SEGMENT_BLOCKS) * BLOCK_BYTES as u64;
    let file = MemoryFile::new(bytes);
    let mut feed = Feed::new(data);
    while !feed.is_empty() {
        let block = feed.word::<4>() % (bytes / BLOCK_BYTES as u64);
        let offset = u64::from(feed.short()) % BLOCK_BYTES as u64;
        let count = usize::from(feed.short()).min(BLOCK_BYTES - offset as usize);
        let patch = feed.bytes(count);
        file.write(block * BLOCK_BYTES as u64 + offset, patch);
    }
    let truth = &raw_sample().truth;
    survey(&file.path());
    for read_only in [true, false] {
        if let Ok(store) = Store::open(&file.path(), options(read_only)) {
            read_all(&store, truth);
            if !read_only {
                put_and_get(&store);
            }
            let local = store.local().expect("it is open here");
            local.check_invariants().expect("an invariant");
            let _ = store.close();
        }
    }
    if let Ok(store) = Store::open(&file.path(), options(false)) {
        read_all(&store, truth);
        let local = store.local().expect("it is open here");
        local.check_invariants().expect("an invariant");
    }
}

/// The sample from which inputs of [`raw_image`] are made.
#[must_use]
pub fn raw_sample() -> &'static Sample {
    crate::sample::sample(crate::sample::RECIPES - 1)
}

/// The input that describes an image.
#[must_use]
pub fn patches(image: &Image) -> Vec<u8> {
    let file = MemoryFile::of(image);
    let offsets = superblock_offsets(image.volumes[0].blocks() * BLOCK_BYTES as u64);
    let superblocks = offsets.map(|offset| offset / BLOCK_BYTES as u64);
    let mut input = Vec::new();
    for block in superblocks.into_iter().chain(image.volumes[0].written()) {
        let bytes = file.read(block * BLOCK_BYTES as u64, BLOCK_BYTES);
        let end = bytes
            .iter()
            .rposition(|byte| *byte != 0)
            .map_or(0, |last| last + 1);
        input.extend_from_slice(&u32::try_from(block).unwrap_or(0).to_le_bytes());
        input.extend_from_slice(&[0, 0]);
        input.extend_from_slice(&u16::try_from(end).unwrap_or(0).to_le_bytes());
        input.extend_from_slice(&bytes[..end]);
    }
    input
}

/// Surveys a store as the tools do.
///
/// # Panics
/// If a chain is longer than its namespace.
pub fn survey(path: &Path) {
    let survey = SurveyOptions {
        disk: Want::Threads,
        ..SurveyOptions::default()
    };
    let Ok(survey) = Survey::new(path, &survey) else {
        return;
    };
    for facts in survey.chains() {
        assert!(facts.longest <= facts.pages, "{facts:?}");
    }
    for page in survey.live() {
        assert!(survey.records_of(page.key.prefix()).count() > 0);
    }
    for flaw in &survey.flaws {
        let _ = (flaw.reason.to_string(), flaw.reason.advice());
    }
    let checked = survey.check_payloads(|_| ControlFlow::Continue(()), |_| ());
    let counts = checked.expect("memory for the reads");
    assert_eq!(
        counts.checked,
        counts.good + counts.unfinished + counts.bad,
        "{counts:?}"
    );
}

/// Reads every page that was ever put. Returns the number of hits.
///
/// # Panics
/// If bytes are returned that were never put under that name.
pub fn read_all(store: &Store, truth: &Truth) -> usize {
    let mut hits = 0;
    for name in truth.names() {
        let (namespace, key) = name;
        let Ok(id) = store.namespace(&namespaces()[namespace]) else {
            continue;
        };
        let shape = namespaces()[namespace].shape();
        let mut memory: Vec<Vec<u8>> = shape
            .part_sizes()
            .iter()
            .map(|bytes| vec![0; *bytes as usize])
            .collect();
        let mut parts: Vec<IoSliceMut<'_>> = memory
            .iter_mut()
            .map(|part| IoSliceMut::new(part))
            .collect();
        let mut pages = [GetPage {
            key,
            parts: &mut parts,
        }];
        if store.get(id, &mut pages, None)[0].is_hit() {
            let mut bytes = Vec::new();
            for part in &memory {
                bytes.extend_from_slice(part);
                bytes.resize(bytes.len().next_multiple_of(BLOCK_BYTES), 0);
            }
            assert!(truth.was_put(&name, &bytes), "wrong bytes for {key}");
            hits += 1;
        }
    }
    hits
}

/// Checks that an open store takes pages.
fn put_and_get(store: &Store) {
    let Ok(id) = store.namespace(&namespaces()[0]) else {
        return;
    };
    for key in chain(0x00ff_ffff, 3) {
        let bytes = payload(&(0, key), 1);
        let parts = [IoSlice::new(&bytes)];
        let page = PutPage {
            key,
            parent: None,
            depth: 0,
            parts: &parts,
        };
        let status = store.put(id, &[page], PutOptions::default())[0];
        let mut memory = vec![0; bytes.len()];
        let mut parts = [IoSliceMut::new(&mut memory)];
        let mut pages = [GetPage {
            key,
            parts: &mut parts,
        }];
        let hit = store.get(id, &mut pages, None)[0].is_hit();
        assert!(hit || status != PutStatus::Stored, "a new page is missing");
        assert!(!hit || memory == bytes, "wrong bytes for a new page");
    }
}
