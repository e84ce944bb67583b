//! The main task of the process: it opens the store, and makes the calls of the script.

use std::io::{IoSlice, IoSliceMut};
use std::ops::Range;
use std::sync::Arc;

use larder_core::core::Core;
use larder_engine::{
    AlignedBuf, GetPage, GetStatus, Hint, MissReason, NamespaceId, PageStore, PutOptions, PutPage,
    PutStatus, StoreError, SyncPolicy,
};
use larder_sim_runtime::Queue;
use larder_store::store::LocalStore;

use super::machine::{End, Own, Shared, Wish};
use super::promises::{Crash, Deletion, Names, Version};
use super::store::{CHAIN, NAMES, PAGE_BYTES, Store};
use crate::lines::Lines;

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
        let image = state.image.clone();
        let explorer = state.explorer.as_mut().ok_or("the script is over")?;
        let store = explorer.judge.store.clone();
        let pages = explorer.judge.verdict(&image)?;
        if let Some(crash) = state.crash.take() {
            state.promises.check(&pages, crash)?;
            state.promises.end_run(&pages, crash);
        }
        (store, image.superblock().map_err(|e| e.to_string())?)
    };
    let disk = Lines::new(Own(shared.clone()), 1);
    let handle = LocalStore::open_simulated(
        vec![Some(superblock)],
        disk.clone(),
        &store.options(false),
        |_, index| shared.lock().index = Some(index.clone()),
    )
    .map_err(|error| format!("an opening fails: {error}"))?;
    let handle = Arc::new(handle);
    shared.lock().handle = Arc::downgrade(&handle);
    let namespace = handle.namespace(&store.namespace);
    Ok(Caller {
        shared: shared.clone(),
        disk,
        store,
        handle,
        id: namespace.map_err(|error| format!("no namespace: {error}"))?,
    })
}

struct Caller {
    shared: Arc<Shared>,
    disk: Arc<Lines<Own>>,
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
                Some(Operation::Flush) => self.make_durable(LocalStore::flush)?,
                Some(Operation::Reclaim) => self.wait_for(Wish::Reclaim),
                Some(Operation::Close) => {
                    self.make_durable(LocalStore::close)?;
                    return Ok(End::Crash(Crash::Power));
                }
                Some(Operation::Kill) => self.end(End::Crash(Crash::Kill)),
                Some(Operation::PowerLoss) => self.end(End::Crash(Crash::Power)),
                None => {
                    self.wait_for(Wish::Rest);
                    self.end(End::Done);
                }
            }
            self.shared.lock().examine();
        }
    }

    /// Waits until the device has fulfilled a wish.
    fn wait_for(&self, wish: Wish) {
        {
            let mut state = self.shared.lock();
            state.wish = wish;
            state.victim = None;
        }
        self.disk.call(0);
        self.shared.granted.wait("a wish", None);
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
        self.make_durable(LocalStore::flush)?;
        self.wait_for(Wish::Rest);
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
                let versions = &mut state.promises.versions;
                versions.push(Version {
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
        let all = self.shared.lock().look();
        let mut page = AlignedBuf::zeroed(PAGE_BYTES).expect("memory");
        for name in (0..NAMES).filter(|name| all >> name & 1 == 1) {
            let before = self.shared.lock().promises.present;
            let asked = GetPage {
                key: self.store.keys[name],
                parts: &mut [IoSliceMut::new(&mut page)],
            };
            let status = self.handle.get(self.id, &mut [asked], None)[0];
            let mut state = self.shared.lock();
            state.look();
            let stays = (before & state.promises.present) >> name & 1 == 1;
            match status {
                GetStatus::Hit => {
                    let checksum = self.store.checksum(name, &page);
                    state.promises.allow(name, checksum, Crash::Kill)?;
                }
                GetStatus::Miss(MissReason::Absent | MissReason::Unfinished) if !stays => {}
                GetStatus::Miss(_) => {
                    return Err(format!("a get of page {name} ends as {status:?}"));
                }
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
            let deletions = &mut state.promises.deletions;
            deletions.push(Deletion {
                names,
                at,
                ..Deletion::default()
            });
            deletions.len() - 1
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

    /// Makes a call that makes durable all that was promised before.
    fn make_durable(
        &self,
        call: impl FnOnce(&LocalStore) -> Result<(), StoreError>,
    ) -> Result<(), String> {
        let (owed, acked) = {
            let mut state = self.shared.lock();
            state.look();
            let acked = state.promises.deletions.iter().map(|d| d.acked);
            (state.promises.present, acked.collect::<Vec<bool>>())
        };
        call(&self.handle).map_err(|error| format!("it does not become durable: {error}"))?;
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
