//! Opening after a close or a crash: recovery, and the checks of its result.

use std::collections::BTreeSet;
use std::sync::Arc;

use larder_engine::core::Core;
use larder_engine::format::OpenState;
use larder_engine::index::{Index, NamespaceSlot, Place};
use larder_engine::recovery::{Recovery, known_to_all, recover};
use larder_sim_runtime::medium::{Content, contents};

use crate::classes::Class;
use crate::ending::Expected;
use crate::oracle::VersionId;
use crate::setup::{BLOCK, Faults};
use crate::superblocks::{Cut, CutShort};
use crate::world::{Live, World};

/// Moments at which the update of one volume's superblocks can be cut short.
pub const CUTS_A_VOLUME: usize = 4;

/// Probability that a reader checks the store that the owner has just recovered.
const READER_SHARE: f64 = 0.25;

/// The end of an opening.
pub enum Opening {
    Open(Box<Live>),
    /// A crash or an error: another opening follows.
    CutShort,
    /// The store is lost.
    Refused,
}

impl World {
    /// Recovers, checks the result, and begins an epoch.
    pub fn open(&mut self, expected: &mut Expected) -> Opening {
        self.totals.opens += 1;
        self.forgotten.extend(&self.shaken);
        self.revive();
        if self.read_superblocks(expected).is_none() {
            return Opening::Refused;
        }
        let index = self.empty_index();
        let mut recovery = self.recover(&index, false);
        let superblocks = self.superblocks.iter().flatten();
        let known = known_to_all(superblocks.clone(), recovery.highest_run);
        let is_behind = superblocks.clone().any(|superblock| superblock.run < known);
        assert!(!is_behind, "an open would refuse a volume as stale");
        self.note(index.len() as u64, || {
            format!(
                "recovered {} pages, {} unproven, {} damaged, first {}",
                index.len(),
                recovery.unproven,
                recovery.damage.len(),
                recovery.recovered.first
            )
        });
        self.check_recovered(&recovery, &index, expected);
        if self.dice.chance(READER_SHARE) {
            self.check_reader(&recovery);
        }
        if self.begin_run(&mut recovery).is_err() {
            self.fall_in_opening(expected);
            return Opening::CutShort;
        }
        let first = recovery.recovered.first;
        let namespaces = self.namespaces_of(&recovery);
        let core = Core::new(self.config(), recovery.recovered, index.clone());
        let mut live = Live::new(core, index, self.setup.clients, first);
        live.slots = vec![None; self.setup.namespaces.len()];
        for (slot, namespace) in (0..).map(NamespaceSlot).zip(namespaces) {
            live.slots[namespace] = Some(slot);
        }
        live.named = vec![false; self.setup.namespaces.len()];
        let first = self.dice.below(live.named.len());
        for namespace in 0..live.named.len() {
            if namespace == first || self.dice.chance(self.setup.named) {
                self.name_namespace(&mut live, namespace);
            }
        }
        live.unproven = self
            .snapshot(&live.index, &self.namespaces_by_slot(&live))
            .into_iter()
            .map(|(name, (_, place, _))| (name, place))
            .collect();
        self.with_core(&mut live, Core::start);
        self.check_all(&live);
        Opening::Open(Box::new(live))
    }

    /// A caller names a namespace. That costs nothing if it was named before.
    pub fn name_namespace(&mut self, live: &mut Live, namespace: usize) {
        let named = self.setup.namespaces[namespace].clone();
        // The namespace may have been forgotten meanwhile, and its new record is not durable yet.
        let slot = live.slots[namespace];
        if slot.is_none_or(|slot| live.index.pages_of(slot) == 0) {
            self.recorded.remove(&namespace);
        }
        let id = self
            .with_core(live, |core| core.open_namespace(&named))
            .expect("space for a namespace");
        live.slots[namespace] = Some(id.into());
        live.named[namespace] = true;
    }

    /// The namespace of each slot, as recovery found it.
    pub fn namespaces_of(&self, recovery: &Recovery) -> Vec<usize> {
        let found = recovery.recovered.namespaces.iter();
        found
            .map(|init| self.namespace_of(init.fingerprint))
            .collect()
    }

    fn empty_index(&self) -> Arc<Index> {
        let segments: u32 = self.setup.volumes.iter().sum();
        Arc::new(Index::new(
            segments as usize,
            u64::from(segments * self.setup.segment_blocks),
        ))
    }

    fn recover(&self, index: &Index, proven_only: bool) -> Recovery {
        let superblocks: Vec<_> = self.superblocks.iter().map(Option::as_ref).collect();
        recover(&*self.disk, &superblocks, index, proven_only)
    }

    pub fn check_recovered(&mut self, recovery: &Recovery, index: &Index, expected: &Expected) {
        index.check_invariants().unwrap();
        let spoils = self.setup.faults.spoils();
        // A failed descriptor write leaves a hole. A lost write leaves the same hole.
        let faults = &self.setup.faults;
        if !spoils && !faults.fail_writes() && faults.sync_error == 0.0 && !self.torn_inside {
            assert!(
                recovery.damage.is_empty(),
                "damage after a crash without faults: {:?}",
                recovery.damage
            );
        }
        let namespaces = self.namespaces_of(recovery);
        let pages = self.snapshot(index, &namespaces);
        self.check_records(recovery, &namespaces, expected);
        let mut bad = BTreeSet::new();
        for (name, (version, place, unproven)) in &pages {
            self.totals.unproven += u64::from(*unproven);
            assert!(
                !expected.exactly
                    || !unproven
                    || expected.unproven.contains(name)
                    || !expected.all.contains(name)
                    || self.setup.faults.fail_writes(),
                "{version:?} of {name:?} is unproven after a clean close"
            );
            assert!(
                !self.is_undead(*version, *place),
                "{version:?} of {name:?} was deleted, and is back at {place:?}"
            );
            // The new epoch does not know of the failed sync. A header that it dropped is lost,
            // whatever reads return now. An older page that must survive in place of this one
            // yields to it all the same.
            let known = self.oracle.version_mut(*version);
            let is_promised = known.durable && known.in_place_of.is_none();
            known.rotten |= !is_promised && self.shaken.contains(&place.segment);
            if self.is_intact(*version, *place) {
                continue;
            }
            self.totals.torn += 1;
            bad.insert(*name);
            assert!(
                *unproven || self.may_lie(*version, *place),
                "{version:?} of {name:?} at {place:?} is proven, and is not whole"
            );
            self.oracle.version_mut(*version).torn = true;
        }
        for name in expected.names.keys() {
            let found = pages.get(name);
            assert!(
                found.is_some() && !bad.contains(name),
                "{name:?}, {:?}, is lost: recovery found {found:?}, {}",
                expected.pages[name],
                if bad.contains(name) {
                    "not whole"
                } else {
                    "whole"
                }
            );
        }
        if expected.exactly && !spoils {
            // More may be found: pages whose writes failed, and pages whose evictions found no room
            // for a record.
            let found: Vec<_> = pages
                .keys()
                .filter(|name| expected.all.contains(name))
                .collect();
            let wanted: Vec<_> = expected.all.iter().collect();
            assert_eq!(
                found, wanted,
                "a clean close and an open change the set of pages"
            );
        }
    }

    /// Whether a page that is not whole may be reported as proven: only if the device does not keep
    /// acknowledged writes. Refused writes, and writes that a failed sync dropped, are never
    /// proven.
    fn may_lie(&self, version: VersionId, place: Place) -> bool {
        let known = self.oracle.version(version);
        self.setup.faults.spoils()
            && (known.rotten
                || known.refused
                || self.tainted.contains(&place.segment)
                || self.headless.contains(&place.segment)
                || self.forgotten.contains(&place.segment))
    }

    /// A namespace with pages keeps its record, whether it is named in this epoch or not.
    fn check_records(&mut self, recovery: &Recovery, namespaces: &[usize], expected: &Expected) {
        let found = recovery.recovered.namespaces.iter().zip(namespaces);
        let recorded = found.filter(|(init, _)| init.record.is_some());
        let recorded: BTreeSet<usize> = recorded.map(|(_, namespace)| *namespace).collect();
        let faults = &self.setup.faults;
        if self.superblocks.iter().any(Option::is_none) {
            // The records may have been on the lost volume.
            self.recorded.clear();
        }
        if !faults.spoils() && !faults.misleads() && !faults.fail_writes() {
            for name in expected.names.keys() {
                let namespace = self.oracle.name(*name).namespace;
                assert!(
                    recorded.contains(&namespace) || !self.recorded.contains(&namespace),
                    "namespace {namespace} has pages, and its record is lost"
                );
            }
        }
        self.recorded.retain(|known| recorded.contains(known));
        if expected.exactly {
            self.recorded.extend(recorded);
        }
    }

    /// A reader beside the owner sees only whole pages.
    pub fn check_reader(&mut self, recovery: &Recovery) {
        let index = self.empty_index();
        let reader = self.recover(&index, true);
        let namespaces = self.namespaces_of(&reader);
        for (name, (version, place, _)) in self.snapshot(&index, &namespaces) {
            assert!(
                self.is_intact(version, place) || self.may_lie(version, place),
                "a reader sees {version:?} of {name:?} at {place:?}, which is not whole"
            );
        }
        assert_eq!(
            reader.recovered.segments.len(),
            recovery.recovered.segments.len()
        );
    }

    /// Writes the new epoch to the volumes, and the headers that recovery asked for. A segment
    /// whose header fails is left alone.
    fn begin_run(&mut self, recovery: &mut Recovery) -> Result<(), CutShort> {
        let moments = CUTS_A_VOLUME * self.superblocks.len() + recovery.adoptions.len() + 1;
        let mut cut = self.draw_cut(moments);
        let run = recovery.recovered.first.run();
        self.update_superblocks(&mut cut, |superblock| {
            superblock.run = run;
            superblock.state = OpenState::Open;
        })?;
        for (volume, header) in recovery.adoptions.clone() {
            let mut bytes = vec![0; 2 * BLOCK];
            for copy in bytes.chunks_exact_mut(BLOCK) {
                header.encode(copy.try_into().unwrap());
            }
            let start = self.segment_first_block(header.segment.0);
            if !self.write_header_now(volume, start, &contents(&bytes), &mut cut)? {
                recovery.leave_alone(volume, header.segment);
            }
        }
        if cut.is_now() {
            return Err(CutShort);
        }
        Ok(())
    }

    /// The moment at which an opening or a close of this many moments is cut short, if at all.
    pub fn draw_cut(&mut self, moments: usize) -> Cut {
        let faults = &self.setup.faults;
        let may_crash = faults.kill + faults.power > 0.0;
        if may_crash && self.fault(self.setup.faults.cut) {
            Cut::after(self.dice.below(moments))
        } else {
            Cut::never()
        }
    }

    /// Writes both copies of a header and waits, as an opening and a close do. Returns whether the
    /// device took them.
    pub fn write_header_now(
        &mut self,
        volume: usize,
        start: usize,
        blocks: &[Content],
        cut: &mut Cut,
    ) -> Result<bool, CutShort> {
        if cut.is_now() {
            let arrival = self.draw_tear(blocks.len());
            self.tear(volume, start, blocks, &arrival);
            return Err(CutShort);
        }
        let error = |faults: &Faults| (faults.header_error, Class::HeaderError);
        Ok(self.write(volume, start, blocks, error).is_ok())
    }

    /// The opening is cut short, by a kill or a power loss.
    fn fall_in_opening(&mut self, expected: &mut Expected) {
        self.count(Class::CrashInOpen);
        self.totals.crashes += 1;
        let power = self.draws_power();
        self.note(u64::from(power), || {
            format!("the opening is cut short, power lost: {power}")
        });
        if power {
            self.lose_power();
            expected.names.retain(|_, durable| *durable);
        }
        self.expect_less(expected);
        self.oracle.end_run(power || !self.shaken.is_empty());
        expected.exactly = false;
    }
}
