//! The engine's core over a disk in memory, driven by one thread and without a clock. It does the
//! work of the store's handle and of its housekeeping thread, and each step completes at once. So
//! the operations after an opening can be tried on thousands of images a second, with the same
//! result each time.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use larder_core::core::{
    Config, Copied, Core, Descriptors, Effect, Fault, Io, PageCopy, RequestId, Victim,
};
use larder_core::grants::{Ask, Finding, Grant, ReservationId};
use larder_core::index::{Index, NamespaceSlot, Place};
use larder_disk::Disk;
use larder_disk::mailbox::read_all;
use larder_engine::format::{
    BLOCK_BYTES, Fingerprint, Namespace, OpenState, PageChecksum, PageKey, SEGMENTS_OFFSET,
    Superblock,
};
use larder_engine::{Hint, PutStatus, Refusal, SyncPolicy};
use larder_store::recovery::scan::{Spot, read_descriptors};
use larder_store::recovery::{Damage, Recovery, recover, spots_of};

use crate::memory_disk::{Block, MemoryDisk, Volume};

/// Reclaim that takes more steps than this is an error.
const STEPS_MAX: usize = 1024;

/// A store that is not open.
#[derive(Clone, Debug)]
pub struct Image {
    /// The valid superblock of each volume. The segment size need not be valid for a file.
    pub superblocks: Vec<Superblock>,
    /// The volumes' bytes.
    pub volumes: Vec<Volume>,
}

impl Image {
    /// Blocks of a segment.
    #[must_use]
    pub fn segment_blocks(&self) -> u32 {
        self.superblocks[0].segment_blocks
    }

    /// All segments, with their locations.
    #[must_use]
    pub fn spots(&self) -> Vec<Spot> {
        spots_of(&self.superblocks[0])
    }

    /// An index that fits the store.
    #[must_use]
    pub fn index(&self) -> Index {
        let segments = self.spots().len();
        let blocks = segments as u64 * u64::from(self.segment_blocks());
        Index::new(segments, blocks)
    }

    /// The result of its recovery, read through `disk`.
    pub fn recover(&self, disk: &dyn Disk, index: &Index, proven_only: bool) -> Recovery {
        let superblocks: Vec<_> = self.superblocks.iter().map(Some).collect();
        recover(disk, &superblocks, index, proven_only)
    }
}

/// A page to put: whole blocks.
#[derive(Clone, Debug)]
pub struct NewPage {
    /// Its key.
    pub key: PageKey,
    /// The key before it.
    pub parent: Option<PageKey>,
    /// Pages before it.
    pub depth: u32,
    /// Its bytes.
    pub bytes: Vec<u8>,
}

/// An open store.
pub struct Machine {
    image: Image,
    disk: Arc<MemoryDisk>,
    spots: Vec<Spot>,
    /// The index of its pages.
    pub index: Arc<Index>,
    core: Core,
    fingerprints: Vec<Fingerprint>,
    settled: HashMap<ReservationId, Vec<PutStatus>>,
    finished: HashMap<RequestId, Result<(), Fault>>,
    wants_reclaim: bool,
    now_ms: u64,
    next_request: u64,
}

impl Machine {
    /// Opens a store as its owner does, and returns the damage. Returns `None` when no epoch number
    /// is left: then it cannot be opened for writing.
    ///
    /// # Panics
    /// If an invariant of the core or of the index is broken: here, and in all later calls.
    #[must_use]
    pub fn open(mut image: Image) -> Option<(Machine, Vec<Damage>)> {
        let disk = MemoryDisk::new(image.volumes.clone());
        let index = Arc::new(image.index());
        let recovery = image.recover(&*disk, &index, false);
        let run = recovery.recovered.first.run();
        let newest = image.superblocks.iter().map(|superblock| superblock.run);
        if newest.max() >= Some(run) || recovery.highest_run >= run {
            return None;
        }
        for superblock in &mut image.superblocks {
            superblock.run = run;
            superblock.state = OpenState::Open;
            superblock.generation = superblock.generation.saturating_add(1);
        }
        let spots = image.spots();
        for (volume, header) in &recovery.adoptions {
            let mut block = [0; BLOCK_BYTES];
            header.encode(&mut block);
            let first = segment_start(image.segment_blocks(), header.segment.0);
            for copy in 0..2 {
                disk.volumes()[*volume].put(first + copy, block);
            }
        }
        let config = Config {
            store: image.superblocks[0].store,
            segment_blocks: image.segment_blocks(),
            sync: SyncPolicy::Relaxed,
            write_bytes_max: 1 << 30,
            copy_blocks_max: 64,
            read_only: false,
            began_ms: 0,
        };
        let namespaces = &recovery.recovered.namespaces;
        let fingerprints = namespaces.iter().map(|init| init.fingerprint).collect();
        let core = Core::new(config, recovery.recovered, index.clone());
        let mut machine = Machine {
            image,
            disk,
            spots,
            index,
            core,
            fingerprints,
            settled: HashMap::new(),
            finished: HashMap::new(),
            wants_reclaim: false,
            now_ms: 0,
            next_request: 0,
        };
        machine.with_core(Core::start);
        machine.check();
        Some((machine, recovery.damage))
    }

    /// The disk under it.
    #[must_use]
    pub fn disk(&self) -> &MemoryDisk {
        &self.disk
    }

    /// Checks the invariants.
    #[track_caller]
    pub fn check(&self) {
        if let Err(broken) = self.core.check_invariants() {
            panic!("{broken}");
        }
    }

    /// The statuses of a reservation, once.
    pub fn settled(&mut self, id: ReservationId) -> Option<Vec<PutStatus>> {
        self.settled.remove(&id)
    }

    /// Runs a command, and performs all its effects.
    pub fn with_core<R>(&mut self, command: impl FnOnce(&mut Core) -> R) -> R {
        self.now_ms += 1;
        self.core.tick(self.now_ms);
        let result = command(&mut self.core);
        loop {
            let effects = self.core.take_effects();
            if effects.is_empty() {
                return result;
            }
            for effect in effects {
                self.carry_out(effect);
            }
        }
    }

    fn carry_out(&mut self, effect: Effect) {
        match effect {
            Effect::Io { id, volume, io } => {
                if let Io::Write { offset, bytes } = io {
                    self.write(volume, offset, &bytes);
                }
                self.core.io_done(id, Ok(()));
            }
            Effect::Settled(id, statuses) => {
                self.settled.insert(id, statuses);
            }
            Effect::Finished(id, result) => {
                self.finished.insert(id, result);
            }
            Effect::ReadDescriptors(victim) => {
                let read = self.read_descriptors(&victim);
                self.core.descriptors_read(read);
            }
            Effect::Copy(id, pages) => {
                let outcomes: Vec<Copied> = pages.iter().map(|page| self.copy(page)).collect();
                self.core.copied(id, &outcomes);
            }
            Effect::Room | Effect::ReadOnly(..) | Effect::ReadWrite(_) | Effect::Damaged(_) => {}
            Effect::Reclaim => self.wants_reclaim = true,
        }
    }

    fn write(&self, volume: usize, offset: u64, bytes: &[u8]) {
        let mut volumes = self.disk.volumes();
        let first = offset / BLOCK_BYTES as u64;
        for (at, bytes) in (first..).zip(bytes.chunks_exact(BLOCK_BYTES)) {
            assert!(at < volumes[volume].blocks(), "a write beyond the volume");
            let mut block: Block = [0; BLOCK_BYTES];
            block.copy_from_slice(bytes);
            volumes[volume].put(at, block);
        }
    }

    /// Names a namespace. Returns `None` when there are too many.
    pub fn namespace(&mut self, namespace: &Namespace) -> Option<NamespaceSlot> {
        let slot: NamespaceSlot = self
            .with_core(|core| core.open_namespace(namespace))?
            .into();
        let at = usize::from(slot.0);
        if at == self.fingerprints.len() {
            self.fingerprints.push(namespace.fingerprint());
        }
        assert!(
            self.fingerprints[at] == namespace.fingerprint(),
            "two namespaces have the same number"
        );
        Some(slot)
    }

    /// Puts pages. Returns one status for each.
    pub fn put(&mut self, namespace: NamespaceSlot, pages: &[NewPage]) -> Vec<PutStatus> {
        let asks: Vec<Ask> = pages
            .iter()
            .map(|page| Ask {
                key: page.key,
                parent: page.parent,
                depth: page.depth,
                saved: 0,
            })
            .collect();
        let (id, grants) = self.with_core(|core| core.reserve(namespace, &asks, Hint::default()));
        let mut checksums = vec![None; pages.len()];
        let mut landed = Vec::new();
        for (at, (page, grant)) in pages.iter().zip(&grants).enumerate() {
            if let Grant::Write(extent) = grant {
                self.write(extent.volume, extent.offset, &page.bytes);
                checksums[at] = Some(self.checksum(namespace, &page.key, &page.bytes).into());
                landed.push((at, true));
            }
        }
        self.with_core(|core| core.commit(id, &checksums));
        self.with_core(|core| core.landed(id, &landed));
        self.settled
            .remove(&id)
            .expect("a put settles when its writes have ended")
    }

    /// Puts pages as a patient caller does: reclaim runs when there is no space.
    pub fn put_patiently(&mut self, namespace: NamespaceSlot, pages: &[NewPage]) -> Vec<PutStatus> {
        let mut statuses = Vec::with_capacity(pages.len());
        let mut tries = 0;
        while statuses.len() < pages.len() {
            let batch = self.put(namespace, &pages[statuses.len()..]);
            let refused = |status: &PutStatus| *status == PutStatus::Refused(Refusal::NoSpace);
            let done = batch.iter().position(refused).unwrap_or(batch.len());
            statuses.extend_from_slice(&batch[..done]);
            tries = if done == 0 { tries + 1 } else { 0 };
            if tries > 2 {
                statuses.extend_from_slice(&batch[done..]);
            }
            self.reclaim();
        }
        statuses
    }

    fn checksum(&self, namespace: NamespaceSlot, key: &PageKey, bytes: &[u8]) -> u64 {
        let fingerprint = self.fingerprints[usize::from(namespace.0)];
        let mut checksum = PageChecksum::new(fingerprint, key);
        checksum.blocks(bytes);
        checksum.finish()
    }

    /// Reads a page of this many blocks and verifies it, as the handle does. `None` is a miss, and
    /// the page is forgotten.
    pub fn get(&mut self, namespace: NamespaceSlot, key: &PageKey, blocks: u32) -> Option<Vec<u8>> {
        let located = self.index.locate(namespace, key)?;
        let read = self.read(located.place, blocks);
        let finding = match &read {
            Some(bytes) if located.proof == self.checksum(namespace, key, bytes).into() => {
                Finding::Good
            }
            Some(_) => Finding::Mismatch,
            None => Finding::Unreadable,
        };
        self.with_core(|core| core.found(namespace, key, located.place, finding));
        read.filter(|_| finding == Finding::Good)
    }

    fn read(&self, place: Place, blocks: u32) -> Option<Vec<u8>> {
        let at = self.spots[place.segment.0 as usize].data(place.start, blocks);
        let bytes = read_all(&*self.disk, &[at]).pop()?.ok()?;
        Some(bytes.to_vec())
    }

    /// Deletes keys. Returns whether the deletion was recorded.
    pub fn delete(&mut self, namespace: NamespaceSlot, keys: &[PageKey]) -> bool {
        self.request(|core, request| {
            core.delete(request, namespace, keys);
        })
    }

    /// Clears a namespace. Returns whether that was recorded.
    pub fn clear(&mut self, namespace: NamespaceSlot) -> bool {
        self.request(|core, request| {
            core.clear(request, namespace);
        })
    }

    /// Makes everything durable.
    pub fn flush(&mut self) -> bool {
        self.request(Core::flush)
    }

    fn request(&mut self, command: impl FnOnce(&mut Core, RequestId)) -> bool {
        let request = RequestId(self.next_request);
        self.next_request += 1;
        self.with_core(|core| command(core, request));
        self.finished
            .remove(&request)
            .expect("a request finishes when its writes have ended")
            .is_ok()
    }

    /// Reclaims until nothing is left to reclaim.
    pub fn reclaim(&mut self) {
        for _ in 0..STEPS_MAX {
            let wanted = std::mem::take(&mut self.wants_reclaim);
            if !self.with_core(|core| core.reclaim_step(usize::MAX)) && !wanted {
                return;
            }
        }
    }

    fn read_descriptors(&self, victim: &Victim) -> Descriptors {
        let spot = &self.spots[victim.segment.0 as usize];
        read_descriptors(&*self.disk, spot, victim)
    }

    fn copy(&self, copy: &PageCopy) -> Copied {
        let PageCopy { page, to, .. } = copy;
        match self.read(page.from, page.record.blocks) {
            Some(bytes)
                if self.checksum(page.namespace, &page.record.key, &bytes)
                    == page.record.checksum =>
            {
                self.write(to.volume, to.offset, &bytes);
                copy.written()
            }
            Some(_) => Copied::Damaged(Finding::Mismatch),
            None => Copied::Damaged(Finding::Unreadable),
        }
    }

    /// Leaves the store as a killed process does.
    #[must_use]
    pub fn kill(self) -> Image {
        let volumes = self.disk.volumes().clone();
        Image {
            volumes,
            ..self.image
        }
    }

    /// Closes it in order.
    ///
    /// # Panics
    /// If it does not come to rest.
    #[must_use]
    pub fn close(mut self) -> Image {
        for _ in 0..2 {
            self.with_core(Core::write_departures);
            assert!(self.flush(), "a flush fails without a failed sync");
            assert!(self.core.is_idle(), "the core does not come to rest");
        }
        let headers = self.with_core(Core::closing_headers);
        for (volume, offset, bytes) in headers.expect("memory for a few blocks") {
            self.write(volume, offset, &bytes);
        }
        let mut image = self.kill();
        for superblock in &mut image.superblocks {
            superblock.state = OpenState::Clean;
        }
        image
    }
}

/// The first block of a segment in its volume.
#[must_use]
pub fn segment_start(segment_blocks: u32, number: u32) -> u64 {
    SEGMENTS_OFFSET / BLOCK_BYTES as u64 + u64::from(number) * u64::from(segment_blocks)
}

/// The blocks of a segment in its volume.
#[must_use]
pub fn segment_range(segment_blocks: u32, number: u32) -> Range<u64> {
    let start = segment_start(segment_blocks, number);
    start..start + u64::from(segment_blocks)
}
