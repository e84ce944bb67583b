//! From a path to a recovered store that is not in use yet, and from a store in use to a closed
//! one.
//!
//! The serving handle and the offline tools both open and close a store here. Nothing is written
//! before [`begin_run`]: a caller that rejects the result of recovery can leave everything as it
//! is.

use std::num::NonZeroU32;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use larder_base::memory::AlignedBuf;
use larder_base::planted;
use larder_base::runtime::Instant;
use larder_base::seldom::Seldom;
use larder_base::system::holder::this_holder;
use larder_base::system::processes;
use larder_core::core::{Config, Core};
use larder_core::grants::SegmentMap;
use larder_core::index::Index;
use larder_core::policy::make;
use larder_disk::mailbox::{WriteAt, write_all};
use larder_disk::{Common, Disk, Witness};
use larder_format::{
    BLOCK_BYTES, CLOSING_OFFSET, ClosingStatement, History, Holdings, OpenState, SEGMENTS_OFFSET,
    SegmentState, Superblock, Unclosed,
};

use super::lessons::Lessons;
use super::local::Local;
use super::services::Services;
use crate::api::OpenOptions;
use crate::catalog::Catalog;
use crate::error::{StoreError, io_error};
use crate::keys::Keys;
use crate::recovery::{Extra, Found, Recovery, known_to_all, recover_pages};
use crate::volume::{Access, Volume, Volumes};

/// How long a close waits for operations in flight. It takes longer only if the device hangs; then
/// the store is left as after a crash.
const CLOSE_PATIENCE: Duration = Duration::from_secs(30);

/// Bytes of pages that reclaim copies at once.
const COPY_BYTES: u64 = 8 << 20;

/// A store that has been recovered and not written to. Dropping it leaves everything unchanged.
pub struct Opening<E = ()> {
    pub volumes: Volumes,
    pub disk: Arc<dyn Disk>,
    pub index: Arc<Index>,
    pub recovery: Recovery,
    /// The valid pages, the oldest commits first.
    pub pages: Vec<Found<E>>,
}

/// Opens the volumes of the store at `path`, and a disk on them.
pub fn open_volumes(
    path: &Path,
    options: &OpenOptions,
    access: Access,
) -> Result<(Volumes, Arc<dyn Disk>), StoreError> {
    // The clock of the board is that of the machine, which a simulation has not.
    let common = (!cfg!(feature = "simulated")).then(|| Arc::new(Common::create()));
    Volumes::open_unlocked(path, options, access, common)
}

impl<E: Extra> Opening<E> {
    /// Recovers. Leaves out, or refuses, volumes that missed the store's last epoch.
    pub fn new(
        mut volumes: Volumes,
        disk: Arc<dyn Disk>,
        options: &OpenOptions,
    ) -> Result<Opening<E>, StoreError> {
        match recover_current(&disk, &mut volumes, options) {
            Ok((index, recovery, pages)) => Ok(Opening {
                volumes,
                disk,
                index,
                recovery,
                pages,
            }),
            Err(error) => {
                disk.shutdown();
                Err(error)
            }
        }
    }
}

impl<E> Opening<E> {
    /// Releases the store for others, unchanged.
    pub fn give_up(self) {
        self.disk.shutdown();
        for (_, volume) in self.volumes.present() {
            volume.unlock();
        }
    }
}

/// The recovered index, the recovery itself, and the valid pages.
type Recovered<E> = (Arc<Index>, Recovery, Vec<Found<E>>);

fn recover_current<E: Extra>(
    disk: &Arc<dyn Disk>,
    volumes: &mut Volumes,
    options: &OpenOptions,
) -> Result<Recovered<E>, StoreError> {
    let disk = Witness::new(disk.clone(), volumes.patience.clone());
    loop {
        let superblock = volumes.superblock();
        let entries = || superblock.volumes.iter().zip(&volumes.list);
        let segments: u64 = entries().map(|(entry, _)| u64::from(entry.segments)).sum();
        let there = entries().filter(|(_, volume)| volume.is_some());
        let there: u64 = there.map(|(entry, _)| u64::from(entry.segments)).sum();
        let index = Arc::new(Index::new(
            usize::try_from(segments).unwrap_or(usize::MAX),
            there * u64::from(superblock.segment_blocks),
        ));
        if let Some(policy) = &options.eviction {
            let mut policy = make(policy);
            let segments = usize::try_from(segments).unwrap_or(usize::MAX);
            if let Some(reason) = policy.opened(segments) {
                index.stay_with_lru(&reason);
            } else {
                if let Some(lessons) = Lessons::beside(volumes) {
                    let (lessons, notes) = lessons.read();
                    policy.recall(&lessons, notes);
                }
                index.choose(policy);
            }
        }
        let (recovery, pages) = recover_pages(
            &disk,
            &volumes.superblocks(),
            volumes.keys.as_ref(),
            &index,
            options.read_only,
        );
        disk.verdict().map_err(|source| StoreError::NotRead {
            path: volumes.first_path(),
            source,
        })?;
        let newest = volumes.newest_run();
        if newest.max(recovery.highest_run).next().is_none() && !options.read_only {
            return Err(StoreError::RunsExhausted(volumes.first_path()));
        }
        // A crash while an open was writing the new epoch to the volumes leaves some volumes
        // behind.
        let superblocks = volumes.present().map(|(_, volume)| &volume.superblock);
        let known = known_to_all(superblocks, recovery.highest_run);
        let Some(behind) = volumes.older_than(known) else {
            return Ok((index, recovery, pages));
        };
        let at = volumes
            .present()
            .find(|(_, volume)| volume.path == behind.path)
            .map(|(index, _)| index);
        match at {
            Some(at) if options.degraded && at > 0 => volumes.list[at] = None,
            _ => {
                return Err(StoreError::VolumeStale {
                    path: behind.path.clone(),
                    run: behind.superblock.run.get(),
                    newest: known.get(),
                });
            }
        }
    }
}

/// The last open of a store, if it was not closed in order.
fn unclosed(superblock: &Superblock) -> Option<Unclosed> {
    let pid = NonZeroU32::new(superblock.holder.pid)?;
    (superblock.state == OpenState::Open).then_some(Unclosed {
        opened_unix_s: superblock.history.opened_unix_s,
        pid,
    })
}

/// Mends the keyring, writes the new epoch to every volume, then the headers that recovery asked
/// for. If the header of a segment cannot be written, the segment is left alone, like an unreadable
/// segment. The remaining adoptions have been carried out.
pub fn begin_run(
    volumes: &mut Volumes,
    disk: &dyn Disk,
    recovery: &mut Recovery,
) -> Result<(), StoreError> {
    volumes.mend_keyring(disk)?;
    let run = recovery.recovered.first.run();
    let unix_ms = processes::unix_ms();
    // That of the first volume counts: the others may lack a part of its use.
    let clock = volumes.superblock().clock.at(unix_ms);
    volumes.update(disk, |superblock| {
        superblock.history = History {
            opened_unix_s: unix_ms / 1000,
            unclosed: unclosed(superblock),
        };
        superblock.clock = clock;
        superblock.run = run;
        superblock.state = OpenState::Open;
        superblock.holder = this_holder();
    })?;
    let superblock = volumes.superblock();
    let segment_bytes = u64::from(superblock.segment_blocks) * BLOCK_BYTES as u64;
    let mut writes = Vec::with_capacity(recovery.adoptions.len());
    for (volume, header) in &recovery.adoptions {
        debug_assert_eq!(header.state, SegmentState::Sealed);
        let mut memory = AlignedBuf::zeroed(2 * BLOCK_BYTES)
            .map_err(|e| io_error("opening", &volumes.first_path(), e))?;
        for copy in memory.chunks_exact_mut(BLOCK_BYTES) {
            if let Ok(copy) = copy.try_into() {
                header.encode(copy);
            }
        }
        writes.push(WriteAt {
            volume: *volume,
            offset: SEGMENTS_OFFSET + u64::from(header.segment.0) * segment_bytes,
            memory,
        });
    }
    let adoptions = std::mem::take(&mut recovery.adoptions);
    let failures = Seldom::default();
    for ((volume, header), written) in adoptions.into_iter().zip(write_all(disk, writes)) {
        match written {
            Ok(()) => recovery.adoptions.push((volume, header)),
            Err(error) => {
                if failures.is_due().is_some() {
                    tracing::warn!(
                        volume,
                        segment = header.segment.0,
                        "the segment's header cannot be written ({error}): its pages are served, \
                         and it is left unchanged (logged once a minute)"
                    );
                }
                recovery.leave_alone(volume, header.segment);
            }
        }
    }
    Ok(())
}

/// The configuration of the core of this store.
pub fn config(volumes: &Volumes, options: &OpenOptions) -> Config {
    let superblock = volumes.superblock();
    let clock = superblock.clock.at(processes::unix_ms());
    let began_ms = match planted!(WallClock) {
        true => clock.unix_ms,
        false => clock.store_ms,
    };
    Config {
        store: superblock.store,
        segment_blocks: superblock.segment_blocks,
        sync: options.sync,
        write_bytes_max: options.write_bytes_max,
        copy_blocks_max: COPY_BYTES / BLOCK_BYTES as u64,
        read_only: options.read_only,
        began_ms,
    }
}

/// The catalog over a recovered store.
pub fn catalog(
    config: Config,
    recovery: Recovery,
    index: Arc<Index>,
    disk: Arc<dyn Disk>,
    options: &OpenOptions,
    services: Services,
    keys: Option<Arc<Keys>>,
) -> Arc<Local> {
    let map = SegmentMap::new(&recovery.recovered.volumes, config.segment_blocks);
    let core = Core::new(config, recovery.recovered, index.clone());
    Local::new(core, index, disk, map, options, services, keys)
}

/// The log's view of these volumes' services.
pub fn services(volumes: &Volumes) -> Services {
    let path = |volume: &Option<Volume>| {
        let path = volume.as_ref().map(|volume| volume.path.clone());
        path.unwrap_or_default()
    };
    Services::new(volumes.list.iter().map(path).collect())
}

/// Waits until no operation is in flight and all are durable: copies, sealed headers, released
/// segments, evictions. Returns the number of evictions for which there was no room to write a
/// record.
pub fn settle(local: &Local) -> Result<usize, StoreError> {
    let until = Instant::now() + CLOSE_PATIENCE;
    // Operations that settle after one flush (segments being sealed or released, their syncs) are
    // covered by the next, which fails while anything is in doubt. The last round writes nothing of
    // its own: no operation is in flight when it returns.
    let mut unwritten = 0;
    for is_last in [false, false, true] {
        if !is_last {
            // The housekeeper, which usually retries, has stopped.
            local.with_core(Core::retry_freeing);
        }
        if !local.wait_until_idle(until) {
            return Err(StoreError::WriteFailed(
                "the device did not finish the operations in flight".to_owned(),
            ));
        }
        // Records that found no room before may find it in a segment that was released since.
        if !is_last {
            unwritten = local.with_core(Core::write_departures);
        }
        local.flush()?;
    }
    Ok(unwritten)
}

/// The write of a volume's closing statement, which names the superblock that is written next.
fn closing_statement(
    index: usize,
    volume: &Volume,
    holdings: Holdings,
) -> Result<WriteAt, StoreError> {
    let mut memory =
        AlignedBuf::zeroed(BLOCK_BYTES).map_err(|e| io_error("closing", &volume.path, e))?;
    let statement = ClosingStatement {
        store: volume.superblock.store,
        volume: volume.superblock.volume,
        generation: volume.superblock.generation.saturating_add(1),
        run: volume.superblock.run,
        holdings,
    };
    if let Ok(block) = (&mut memory[..]).try_into() {
        statement.encode(block);
    }
    Ok(WriteAt {
        volume: index,
        offset: CLOSING_OFFSET,
        memory,
    })
}

/// Leaves the store marked clean, so that the next open need not search for the remains of a crash.
/// Returns the number of evictions for which there was no room to write a record.
pub fn mark_clean(local: &Local, volumes: &mut Volumes) -> Result<usize, StoreError> {
    let unwritten = settle(local)?;
    let (headers, holdings) = local.with_core(|core| (core.closing_headers(), core.holdings()));
    let headers = headers.map_err(|e| io_error("closing", Path::new("memory"), e))?;
    let is_there = |volume| matches!(volumes.list.get(volume), Some(Some(_)));
    let headers = headers.into_iter();
    let writes =
        headers
            .filter(|(volume, ..)| is_there(*volume))
            .map(|(volume, offset, memory)| WriteAt {
                volume,
                offset,
                memory,
            });
    let disk = local.disk.as_ref();
    let mut writes: Vec<WriteAt> = writes.collect();
    for (index, volume) in volumes.present() {
        let holdings = holdings.get(index).copied().unwrap_or_default();
        writes.push(closing_statement(index, volume, holdings)?);
    }
    volumes.write(disk, writes)?;
    volumes.sync(disk)?;
    let clock = local.clock();
    volumes.update(disk, |superblock| {
        superblock.state = OpenState::Clean;
        superblock.clock = clock;
    })?;
    Ok(unwritten)
}
