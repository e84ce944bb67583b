//! The housekeeper: takes the steps of reclaim, and performs its reads and copies.

use larder_engine::catalog::{Finding, Grant, ReservationId};
use larder_engine::core::{Copied, Core, Descriptors, PageCopy, Victim};
use larder_engine::disk::mailbox::{ReadAt, read_all};

use crate::oracle::VersionId;
use crate::world::{Live, World};

pub enum Keeper {
    Idle,
    /// Another step may follow.
    Stepping,
    Reading(Victim),
    Copying(Copying),
}

pub struct Copying {
    id: ReservationId,
    pages: Vec<PageCopy>,
    pub outcomes: Vec<Copied>,
    is_read: bool,
    pub flights: usize,
}

impl Live {
    /// The housekeeper sleeps, and no victim is being emptied.
    pub fn keeper_rests(&self) -> bool {
        matches!(self.keeper, Keeper::Idle) && !self.core.is_reclaiming()
    }

    pub fn begin_copying(&mut self, id: ReservationId, pages: Vec<PageCopy>) {
        self.keeper = Keeper::Copying(Copying {
            id,
            outcomes: vec![Copied::NotRead; pages.len()],
            pages,
            is_read: false,
            flights: 0,
        });
    }
}

impl World {
    pub fn keeper_can_go_on(&self, live: &Live) -> bool {
        match &live.keeper {
            Keeper::Idle => self.is_called(live) && !(live.stopping && live.keeper_rests()),
            Keeper::Copying(copying) => copying.flights == 0,
            Keeper::Stepping | Keeper::Reading(_) => true,
        }
    }

    /// The housekeeper stops, and ends its current work.
    pub fn stop_keeper(&mut self, live: &mut Live) {
        live.stopping = true;
        self.with_core(live, Core::stop_reclaim);
        live.reclaim = true;
    }

    pub fn keep_house(&mut self, live: &mut Live) {
        match std::mem::replace(&mut live.keeper, Keeper::Idle) {
            Keeper::Idle => {
                World::answer_call(live);
                self.with_core(live, |_| ());
                live.keeper = Keeper::Stepping;
            }
            Keeper::Stepping => {
                let pages = 1 + self.dice.below(64);
                if self.with_core(live, |core| core.reclaim_step(pages)) {
                    live.keeper = Keeper::Stepping;
                }
            }
            Keeper::Reading(victim) => {
                let read = self.read_victim(&victim);
                self.note(read.blocks.len() as u64, || {
                    format!("{} blocks read of {victim:?}", read.blocks.len())
                });
                self.with_core(live, |core| core.descriptors_read(read));
                live.keeper = Keeper::Stepping;
            }
            Keeper::Copying(mut copying) if !copying.is_read => {
                copying.is_read = true;
                let versions = self.read_pages(live, &mut copying);
                let grants: Vec<Grant> = copying.pages.iter().map(|p| Grant::Write(p.to)).collect();
                self.submit(live, None, &grants, &versions, &mut copying.flights);
                live.keeper = Keeper::Copying(copying);
            }
            Keeper::Copying(copying) => {
                let Copying { id, outcomes, .. } = copying;
                self.note(id.0, || format!("{id:?} copied: {outcomes:?}"));
                self.with_core(live, |core| core.copied(id, &outcomes));
                live.keeper = Keeper::Stepping;
            }
        }
    }

    fn read_victim(&mut self, victim: &Victim) -> Descriptors {
        let spot = self.spot(victim.volume, victim.number);
        let reads: Vec<ReadAt> = (0..victim.blocks)
            .map(|index| spot.blocks(index, 1))
            .collect();
        let mut read = Descriptors::default();
        for (bytes, index) in read_all(&*self.disk, &reads).into_iter().zip(0..) {
            let Ok(bytes) = bytes else {
                read.some_unreadable = true;
                break;
            };
            if let Ok(block) = spot.parse_block(index, &bytes)
                && block.header.sequence == victim.sequence
            {
                read.blocks.push(block);
            }
        }
        read
    }

    /// Reads the pages to copy. Returns the versions of the good ones.
    fn read_pages(&mut self, live: &Live, copying: &mut Copying) -> Vec<Option<VersionId>> {
        let mut versions = vec![None; copying.pages.len()];
        for (at, PageCopy { page, .. }) in copying.pages.iter().enumerate() {
            let namespace = self.namespace_of(page.record.namespace);
            let name = self
                .oracle
                .by_key(namespace, page.record.key.prefix().as_bytes())
                .expect("a page that was never put");
            let version = self
                .oracle
                .find(name, page.record.checksum)
                .expect("never put");
            let (volume, start) = self.address(page.from);
            let count = page.record.blocks as usize;
            let (misdirected, from) = self.read_from(volume, start, count);
            let finding = match self.disk.read(volume, from, count) {
                Ok(blocks) if self.oracle.is_payload(version, &blocks) => {
                    versions[at] = Some(version);
                    continue;
                }
                Ok(_) => Finding::Mismatch,
                Err(_) => Finding::Unreadable,
            };
            let known = self.oracle.version(version);
            let is_gone = live
                .index
                .locate(page.namespace, &page.record.key)
                .is_none_or(|found| found.place != page.from);
            assert!(
                is_gone || misdirected || known.rotten || known.dropped || known.torn,
                "{version:?} of {name:?} at {:?} is {finding:?} to reclaim",
                page.from
            );
            self.note(version.0 as u64, || {
                format!("{version:?} is {finding:?} to reclaim")
            });
            copying.outcomes[at] = Copied::Damaged(finding);
        }
        versions
    }
}
