//! The main task of the process: it opens the store, and makes the calls of the script.

use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;
use std::sync::Arc;

use larder_engine::core::Core;
use larder_engine::memory::AlignedBuf;
use larder_engine::store::LocalStore;
use larder_engine::{
    GetPage, GetStatus, Hint, MissReason, NamespaceId, PageStore, PutOptions, PutPage, PutStatus,
    StoreError, SyncPolicy,
};
use larder_sim_runtime::Queue;

use super::machine::{Device, End, Shared, State, Wish};
use super::promises::{Crash, Deletion, Names, Version};
use super::store::{CHAIN, NAMES, PAGE_BYTES, Store};

/// One operation of a script.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Operation {
    PutPage,
    PutChain,
    Get,
    Delete,
    Clear,
    Flush,
    Reclaim,
    Close,
    Kill,
    PowerLoss,
}

impl Operation {
    pub const ALL: [Operation; 10] = [
        Operation::PutPage,
        Operation::PutChain,
        Operation::Get,
        Operation::Delete,
        Operation::Clear,
        Operation::Flush,
        Operation::Reclaim,
        Operation::Close,
        Operation::Kill,
        Operation::PowerLoss,
    ];
}

/// Opens the store, and plays the script up to its end or to the end of the process.
pub fn run(shared: &Arc<Shared>) {
    let result = open(shared).and_then(Caller::play);
    let mut state = shared.lock();
    match result {
        Ok(end) => state.end = Some(end),
        Err(why) => state.failure = Some(why),
    }
}

fn open(shared: &Arc<Shared>) -> Result<Caller, String> {
    let (store, superblock) = {
        let mut state = shared.lock();
        let State {
            explorer, image, ..
        } = &mut *state;
        let explorer = explorer.as_mut().ok_or("the script is over")?;
        let verdict = explorer.judge.verdict(image)?;
        if let Some(crash) = state.crash.take() {
            state.promises.check(&verdict, crash)?;
            state.promises.end_run(&verdict, crash);
        }
        let superblock = state.image.superblock();
        (state.store.clone(), superblock.map_err(|e| e.to_string())?)
    };
    let device = Device::new(shared);
    let handle = LocalStore::open_simulated(
        vec![Some(superblock)],
        device,
        &store.options(false),
        |_, index| shared.lock().index = Some(index.clone()),
    )
    .map_err(|error| format!("an opening fails: {error}"))?;
    let handle = Arc::new(handle);
    shared.lock().handle = Arc::downgrade(&handle);
    let namespace = handle.namespace(&store.namespace);
    Ok(Caller {
        shared: shared.clone(),
        store,
        handle,
        id: namespace.map_err(|error| format!("no namespace: {error}"))?,
    })
}

struct Caller {
    shared: Arc<Shared>,
    store: Arc<Store>,
    handle: Arc<LocalStore>,
    id: NamespaceId,
}

impl Caller {
    fn play(self) -> Result<End, String> {
        if self.shared.lock().fills {
            self.fill()?;
        }
        loop {
            let next = {
                let mut state = self.shared.lock();
                let next = state.script.pop();
                state.watched = state.script.is_empty();
                next
            };
            match next {
                Some(Operation::PutPage) => self.put(0..1)?,
                Some(Operation::PutChain) => self.put(0..CHAIN)?,
                Some(Operation::Get) => self.get()?,
                Some(Operation::Delete) => self.delete(1)?,
                Some(Operation::Clear) => self.delete(Names::MAX)?,
                Some(Operation::Flush) => self.flush()?,
                Some(Operation::Reclaim) => self.shared.wait_for(Wish::Reclaim),
                Some(Operation::Close) => {
                    self.close()?;
                    return Ok(End::Crash(Crash::Power));
                }
                Some(Operation::Kill) => self.end(End::Crash(Crash::Kill)),
                Some(Operation::PowerLoss) => self.end(End::Crash(Crash::Power)),
                None => {
                    self.shared.wait_for(Wish::Rest);
                    self.end(End::Done);
                }
            }
            self.shared.lock().examine();
        }
    }

    /// Ends the process in the middle of its work: the driver kills it.
    fn end(&self, end: End) {
        self.shared.lock().end = Some(end);
        Queue::new().wait("the end", None);
    }

    /// Fills the store until reclaim is due, with pages worth a copy in each segment.
    fn fill(&self) -> Result<(), String> {
        for chain in 1..NAMES / CHAIN {
            let space = self.handle.try_core(Core::space_view);
            if space.is_some_and(|space| space.free_segments < 2) {
                break;
            }
            self.put(chain * CHAIN..(chain + 1) * CHAIN)?;
            for warm in (1..=chain).step_by(2) {
                let keys = &self.store.keys[warm * CHAIN..(warm + 1) * CHAIN];
                self.handle.touch(self.id, keys, Hint::default());
            }
        }
        self.shared.lock().fills = false;
        self.flush()?;
        self.shared.wait_for(Wish::Rest);
        Ok(())
    }

    fn put(&self, names: Range<usize>) -> Result<(), String> {
        let count = names.len();
        let mut memory = AlignedBuf::zeroed(count * PAGE_BYTES).expect("memory");
        {
            let mut state = self.shared.lock();
            let pages = memory.chunks_exact_mut(PAGE_BYTES);
            for (name, page) in names.clone().zip(pages) {
                let checksum = self.store.write(name, state.attempts[name], page);
                let born = state.clock;
                state.promises.versions.push(Version {
                    name,
                    checksum,
                    born,
                });
            }
        }
        let parts: Vec<[IoSlice<'_>; 1]> = memory
            .chunks_exact(PAGE_BYTES)
            .map(|page| [IoSlice::new(page)])
            .collect();
        // Names are numbered chain by chain.
        let pages = names.clone().zip(&parts).map(|(name, parts)| PutPage {
            key: self.store.keys[name],
            parent: (name % CHAIN > 0).then(|| self.store.keys[name - 1]),
            depth: u32::try_from(name % CHAIN).expect("short chains"),
            parts,
        });
        let pages: Vec<PutPage<'_>> = pages.collect();
        let statuses = self.handle.put(self.id, &pages, PutOptions::default());
        let mut state = self.shared.lock();
        state.look();
        let first = state.promises.versions.len() - count;
        let versions = state.promises.versions.split_off(first);
        for (version, status) in versions.into_iter().zip(statuses) {
            let name = version.name;
            match status {
                PutStatus::Failed(why) => return Err(format!("a put fails, {why:?}")),
                PutStatus::Refused(_) => continue,
                PutStatus::Stored => {
                    state.attempts[name] += 1;
                    state.promises.versions.push(version);
                }
                PutStatus::Duplicate => {}
                other => return Err(format!("an unknown status {other:?}")),
            }
            if !state.fills && state.promises.present >> name & 1 == 0 {
                return Err(format!("page {name} is {status:?}, and is missing"));
            }
            let is_always = self.store.sync == SyncPolicy::Always;
            state.promises.durable |= Names::from(is_always) << name;
        }
        Ok(())
    }

    /// Reads every page that the index knows.
    fn get(&self) -> Result<(), String> {
        let (all, before) = {
            let mut state = self.shared.lock();
            (state.look(), state.promises.present)
        };
        let names: Vec<usize> = (0..NAMES).filter(|name| all >> name & 1 == 1).collect();
        let mut memory = AlignedBuf::zeroed(names.len() * PAGE_BYTES).expect("memory");
        let mut parts: Vec<[IoSliceMut<'_>; 1]> = memory
            .chunks_exact_mut(PAGE_BYTES)
            .map(|page| [IoSliceMut::new(page)])
            .collect();
        let pages = names.iter().zip(&mut parts).map(|(name, parts)| GetPage {
            key: self.store.keys[*name],
            parts,
        });
        let mut pages: Vec<GetPage<'_, '_>> = pages.collect();
        let statuses = self.handle.get(self.id, &mut pages, None);
        drop(pages);
        drop(parts);
        let mut state = self.shared.lock();
        state.look();
        let stay = before & state.promises.present;
        let read = names.into_iter().zip(memory.chunks_exact(PAGE_BYTES));
        for ((name, page), status) in read.zip(statuses) {
            let is_right = match status {
                GetStatus::Hit => {
                    let checksum = self.store.checksum(name, page);
                    state.promises.allow(name, checksum)
                }
                GetStatus::Miss(why) => {
                    let may = [MissReason::Absent, MissReason::Unfinished].contains(&why);
                    may && stay >> name & 1 == 0
                }
                _ => false,
            };
            if !is_right {
                return Err(format!("a get of page {name} ends as {status:?}"));
            }
        }
        Ok(())
    }

    /// Deletes the first page, or the whole namespace.
    fn delete(&self, names: Names) -> Result<(), String> {
        let at = {
            let mut state = self.shared.lock();
            state.clock += 1;
            let at = state.clock;
            state.promises.deletions.push(Deletion {
                names,
                at,
                acked: false,
                durable: false,
            });
            state.promises.deletions.len() - 1
        };
        let deleted = match names {
            1 => self.handle.delete(self.id, &self.store.keys[..1]),
            _ => self.handle.clear_namespace(self.id),
        };
        let is_written = match deleted {
            Ok(_) => true,
            Err(StoreError::NoRoom) => false,
            Err(error) => return Err(format!("a deletion fails: {error}")),
        };
        let mut state = self.shared.lock();
        let deletion = &mut state.promises.deletions[at];
        deletion.acked = is_written;
        deletion.durable = is_written && self.store.sync == SyncPolicy::Always;
        Ok(())
    }

    fn flush(&self) -> Result<(), String> {
        self.make_durable(|handle| handle.flush())
            .map_err(|error| format!("a flush fails: {error}"))
    }

    fn close(&self) -> Result<(), String> {
        self.make_durable(|handle| handle.close())
            .map_err(|error| format!("a close fails: {error}"))
    }

    /// Makes a call that makes durable all that was promised before.
    fn make_durable(
        &self,
        call: impl FnOnce(&LocalStore) -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        let (owed, acked) = {
            let mut state = self.shared.lock();
            state.look();
            let acked = state.promises.deletions.iter().map(|d| d.acked);
            (state.promises.present, acked.collect::<Vec<bool>>())
        };
        call(&self.handle)?;
        let mut state = self.shared.lock();
        state.look();
        let promises = &mut state.promises;
        promises.durable |= owed & promises.present;
        for (deletion, acked) in promises.deletions.iter_mut().zip(acked) {
            deletion.durable |= acked;
        }
        Ok(())
    }
}
