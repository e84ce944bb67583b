//! The housekeeper: reclaim in the steps that the store's own thread takes, with everything else in between.

use larder_engine::catalog::{Finding, Grant, ReservationId};
use larder_engine::core::{Core, Move, Plan, Victim};
use larder_engine::disk::mailbox::{ReadAt, read_all};
use larder_engine::format::DescriptorBlock;

use crate::oracle::VersionId;
use crate::world::{Live, World};

pub enum Keeper {
    Idle,
    /// Between two victims.
    Looking,
    Reading(Victim),
    Planning(Victim, Box<Plan>),
    /// What is left to be moved out of a victim.
    Emptying(Victim, Vec<Move>),
    Moving(Moving),
    Finishing(Victim, bool),
}

pub struct Moving {
    victim: Victim,
    rest: Vec<Move>,
    moves: Vec<Move>,
    pub reservation: ReservationId,
    grants: Vec<Grant>,
    /// The pages that were read well.
    versions: Option<Vec<Option<VersionId>>>,
    committed: bool,
    submitted: bool,
    pub flights: usize,
    pub landed: Vec<(usize, bool)>,
    is_told: bool,
}

impl World {
    pub fn keeper_can_go_on(&self, live: &Live) -> bool {
        match &live.keeper {
            Keeper::Idle => self.is_called(live) && !live.stopping,
            Keeper::Moving(moving) => {
                moving.flights == 0
                    || !moving.committed
                    || live.settled.contains_key(&moving.reservation)
            }
            _ => true,
        }
    }

    pub fn keep_house(&mut self, live: &mut Live) {
        let keeper = std::mem::replace(&mut live.keeper, Keeper::Idle);
        live.keeper = self.go_on_keeping(live, keeper);
    }

    fn go_on_keeping(&mut self, live: &mut Live, keeper: Keeper) -> Keeper {
        match keeper {
            Keeper::Idle => {
                World::answer_call(live);
                self.with_core(live, |_| ());
                Keeper::Looking
            }
            Keeper::Looking => match self.with_core(live, Core::next_victim) {
                Some(victim) => {
                    self.note(u64::from(victim.segment.0), || format!("victim {victim:?}"));
                    Keeper::Reading(victim)
                }
                None => Keeper::Idle,
            },
            Keeper::Reading(victim) => {
                let Some(blocks) = self.read_victim(&victim) else {
                    self.with_core(live, |core| core.put_back_unread(&victim));
                    return if live.stopping {
                        Keeper::Idle
                    } else {
                        Keeper::Looking
                    };
                };
                self.note(blocks.len() as u64, || {
                    format!("{} blocks read", blocks.len())
                });
                let plan = self.with_core(live, |core| core.begin_plan(&victim, blocks));
                Keeper::Planning(victim, Box::new(plan))
            }
            Keeper::Planning(victim, _) if live.stopping => Keeper::Finishing(victim, false),
            Keeper::Planning(victim, mut plan) => {
                let at_once = 1 + self.dice.below(64);
                let go_on = |core: &mut Core| core.go_on_planning(&mut plan, at_once);
                let Some(moves) = self.with_core(live, go_on) else {
                    return Keeper::Planning(victim, plan);
                };
                self.note(moves.len() as u64, || {
                    format!("plan: {} pages to move", moves.len())
                });
                Keeper::Emptying(victim, moves)
            }
            Keeper::Emptying(victim, moves) if moves.is_empty() => Keeper::Finishing(victim, true),
            Keeper::Emptying(victim, mut moves) => {
                let count = moves.len().min(1 + self.dice.below(8));
                let rest = moves.split_off(count);
                let (reservation, grants) =
                    self.with_core(live, |core| core.reserve_copies(&moves));
                self.note(reservation.0, || {
                    format!("copies {reservation:?}: {grants:?}")
                });
                Keeper::Moving(Moving {
                    victim,
                    rest,
                    moves,
                    reservation,
                    grants,
                    versions: None,
                    committed: false,
                    submitted: false,
                    flights: 0,
                    landed: Vec::new(),
                    is_told: false,
                })
            }
            Keeper::Moving(moving) => self.go_on_moving(live, moving),
            Keeper::Finishing(victim, moved_all) => {
                self.note(u64::from(moved_all), || format!("victim done: {moved_all}"));
                let released = self.with_core(live, |core| core.finish_victim(&victim, moved_all));
                if released && !live.stopping {
                    Keeper::Looking
                } else {
                    Keeper::Idle
                }
            }
        }
    }

    /// The victim's descriptor blocks, but for damaged ones; `None` when one could not be read.
    fn read_victim(&mut self, victim: &Victim) -> Option<Vec<DescriptorBlock>> {
        let spot = self.spot(victim.volume, victim.number);
        let reads: Vec<ReadAt> = (0..victim.blocks)
            .map(|index| spot.blocks(index, 1))
            .collect();
        let mut blocks = Vec::new();
        for (bytes, index) in read_all(&*self.disk, &reads).into_iter().zip(0..) {
            if let Ok(block) = spot.parse_block(index, &bytes.ok()?)
                && block.header.sequence == victim.sequence
            {
                blocks.push(block);
            }
        }
        Some(blocks)
    }

    fn go_on_moving(&mut self, live: &mut Live, mut moving: Moving) -> Keeper {
        if moving.versions.is_none() {
            moving.versions = Some(self.read_moves(live, &mut moving));
        } else if !moving.committed {
            moving.committed = true;
            let versions = moving.versions.as_deref().unwrap_or_default();
            let checksums: Vec<Option<u64>> = versions
                .iter()
                .map(|version| version.map(|version| self.oracle.version(version).checksum))
                .collect();
            self.with_core(live, |core| core.commit(moving.reservation, &checksums));
        } else if !moving.submitted {
            moving.submitted = true;
            let versions = moving.versions.clone().unwrap_or_default();
            let grants = moving.grants.clone();
            self.submit(live, None, &grants, &versions, &mut moving.flights);
        } else if moving.flights == 0 && !moving.is_told {
            moving.is_told = true;
            let landed = std::mem::take(&mut moving.landed);
            self.note(moving.reservation.0, || format!("copies landed {landed:?}"));
            self.with_core(live, |core| core.landed(moving.reservation, &landed));
        } else if let Some(statuses) = moving
            .is_told
            .then(|| live.settled.remove(&moving.reservation))
            .flatten()
        {
            let complete = moving
                .grants
                .iter()
                .all(|grant| !matches!(grant, Grant::Refused(_)));
            let versions = moving.versions.unwrap_or_default();
            let all_good = versions
                .iter()
                .zip(&statuses)
                .all(|(version, status)| version.is_none() || status.is_present());
            if !complete || !all_good || live.stopping {
                return Keeper::Finishing(moving.victim, false);
            }
            return Keeper::Emptying(moving.victim, moving.rest);
        }
        Keeper::Moving(moving)
    }

    /// Reads the pages that have been granted a place, and says which are good.
    fn read_moves(&mut self, live: &mut Live, moving: &mut Moving) -> Vec<Option<VersionId>> {
        let mut versions = vec![None; moving.moves.len()];
        for (at, page) in moving.moves.iter().enumerate() {
            if !matches!(moving.grants[at], Grant::Write(_)) {
                continue;
            }
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
                Ok(blocks) if self.oracle.is_payload(version, &blocks) => Finding::Good,
                Ok(_) => Finding::Mismatch,
                Err(_) => Finding::Unreadable,
            };
            if finding == Finding::Good {
                versions[at] = Some(version);
                continue;
            }
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
            self.with_core(live, |core| {
                core.found(page.namespace, &page.record.key, page.from, finding);
            });
            moving.landed.push((at, true));
        }
        versions
    }
}
