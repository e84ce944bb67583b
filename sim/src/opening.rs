//! Opening after a close or a crash: recovery, and what it must have found.

use std::collections::BTreeSet;
use std::sync::Arc;

use larder_engine::core::Core;
use larder_engine::format::OpenState;
use larder_engine::index::Index;
use larder_engine::recovery::{Recovery, recover};

use crate::disk::contents;
use crate::ending::Expected;
use crate::oracle::Name;
use crate::setup::BLOCK;
use crate::world::{Live, World};

impl World {
    /// Recovers, checks what that found, and begins a run; `None` when a crash comes in between.
    pub fn open(&mut self, expected: &mut Expected) -> Option<Live> {
        self.totals.opens += 1;
        self.forgotten.extend(&self.shaken);
        let segments: u32 = self.setup.volumes.iter().sum();
        let index = Arc::new(Index::new(
            segments as usize,
            u64::from(segments * self.setup.segment_blocks),
        ));
        let superblocks: Vec<_> = self.superblocks.iter().map(Some).collect();
        let recovery = recover(&*self.disk, &superblocks, &index, false);
        let newest = self.superblocks.iter().map(|s| s.run).max();
        let is_behind = self.superblocks.iter().any(|s| Some(s.run) != newest);
        assert!(
            !is_behind || Some(recovery.highest_run) < newest,
            "an open would refuse a volume as stale"
        );
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
        self.check_reader(&recovery);
        if !self.begin_run(&recovery, expected) {
            return None;
        }
        let first = recovery.recovered.first;
        let core = Core::new(self.config(), recovery.recovered, index.clone());
        let mut live = Live::new(core, index, self.setup.clients, first);
        for namespace in self.setup.namespaces.clone() {
            let id = self
                .with_core(&mut live, |core| core.open_namespace(&namespace))
                .expect("few namespaces");
            live.slots.push(id.into());
        }
        live.unproven = self
            .snapshot(&live.index, &self.namespaces_by_slot(&live))
            .into_iter()
            .map(|(name, (_, place, _))| (name, place))
            .collect();
        self.with_core(&mut live, Core::start);
        self.check(&mut live);
        Some(live)
    }

    fn check_recovered(&mut self, recovery: &Recovery, index: &Index, expected: &Expected) {
        index.check_invariants().unwrap();
        let spoils = self.setup.faults.spoils();
        // A descriptor write that fails leaves a hole that nobody can tell from a lost one.
        let faults = &self.setup.faults;
        if !spoils && faults.meta_error == 0.0 && faults.sync_error == 0.0 {
            assert!(
                recovery.damage.is_empty(),
                "damage after a mere crash: {:?}",
                recovery.damage
            );
        }
        let namespaces: Vec<usize> = recovery
            .recovered
            .namespaces
            .iter()
            .map(|init| self.namespace_of(init.fingerprint))
            .collect();
        let pages = self.snapshot(index, &namespaces);
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
                !self.oracle.is_dead(*version),
                "{version:?} of {name:?} came back from the dead at {place:?}"
            );
            // Nobody remembers the failed sync: a header that it dropped is lost however it reads now.
            let known = self.oracle.version_mut(*version);
            known.rotten |= !known.durable && self.shaken.contains(&place.segment);
            if self.is_intact(*version, *place) {
                continue;
            }
            self.totals.torn += 1;
            bad.insert(*name);
            let known = self.oracle.version(*version);
            // That a refused page is not proven stands in a header, which may have been refused or lost too.
            let unheaded = known.refused && (spoils || self.setup.faults.header_error > 0.0);
            assert!(
                *unproven
                    || known.rotten
                    || known.dropped
                    || unheaded
                    || self.tainted.contains(&place.segment)
                    || self.headless.contains(&place.segment),
                "{version:?} of {name:?} at {place:?} is called proven, and is not whole"
            );
            self.oracle.version_mut(*version).torn = true;
        }
        for name in expected.names.keys() {
            let found = pages.get(name);
            assert!(
                found.is_some() && !bad.contains(name),
                "{name:?} is lost: recovery found {found:?}, {}",
                if bad.contains(name) {
                    "not whole"
                } else {
                    "whole"
                }
            );
        }
        if expected.exactly && !spoils {
            // More may be found: a page whose write failed, or one whose eviction found no room to be written down.
            let found: Vec<&Name> = pages
                .keys()
                .filter(|name| expected.all.contains(name))
                .collect();
            let wanted: Vec<&Name> = expected.all.iter().collect();
            assert_eq!(
                found, wanted,
                "a clean close and an open change what is there"
            );
        }
    }

    /// A reader beside the owner sees whole pages only.
    fn check_reader(&mut self, recovery: &Recovery) {
        let segments: u32 = self.setup.volumes.iter().sum();
        let index = Index::new(
            segments as usize,
            u64::from(segments * self.setup.segment_blocks),
        );
        let superblocks: Vec<_> = self.superblocks.iter().map(Some).collect();
        let reader = recover(&*self.disk, &superblocks, &index, true);
        let namespaces: Vec<usize> = reader
            .recovered
            .namespaces
            .iter()
            .map(|init| self.namespace_of(init.fingerprint))
            .collect();
        for (name, (version, place, _)) in self.snapshot(&index, &namespaces) {
            let known = self.oracle.version(version);
            let unheaded = known.refused
                && (self.setup.faults.spoils() || self.setup.faults.header_error > 0.0);
            assert!(
                known.rotten
                    || known.dropped
                    || unheaded
                    || self.headless.contains(&place.segment)
                    || self.is_intact(version, place),
                "a reader is shown {version:?} of {name:?} at {place:?}, which is not whole"
            );
        }
        assert_eq!(
            reader.recovered.segments.len(),
            recovery.recovered.segments.len()
        );
    }

    /// Tells the volumes of the run and writes the headers that recovery asked for; false when a crash comes in between.
    fn begin_run(&mut self, recovery: &Recovery, expected: &mut Expected) -> bool {
        let crashes = self.setup.faults.power > 0.0 && !self.calm && self.dice.chance(0.1);
        let run = recovery.recovered.first.run();
        let told = if crashes {
            self.dice.below(self.superblocks.len() + 1)
        } else {
            usize::MAX
        };
        for superblock in self.superblocks.iter_mut().take(told) {
            superblock.run = run;
            superblock.state = OpenState::Open;
            superblock.generation += 1;
        }
        // Writing a superblock syncs its volume, with all that earlier runs left unsynced there.
        for volume in self.disk.volumes().iter_mut().take(told) {
            let all = volume.unsynced();
            volume.synced(all);
        }
        if told >= self.superblocks.len() {
            for (volume, header) in &recovery.adoptions {
                let mut bytes = vec![0; 2 * BLOCK];
                for copy in bytes.chunks_exact_mut(BLOCK) {
                    header.encode(copy.try_into().unwrap());
                }
                let start = self.segment_first_block(header.segment.0);
                self.disk.volumes()[*volume].write(start, &contents(&bytes), || true);
            }
        }
        if crashes {
            self.note(told as u64, || {
                format!("power loss in the opening, {told} volumes told")
            });
            let mut dice = self.dice.fork();
            for volume in self.disk.volumes().iter_mut() {
                volume.lose_power(&mut dice);
            }
            self.oracle.end_run(true);
            expected.names.retain(|_, durable| *durable);
            expected.exactly = false;
            return false;
        }
        true
    }
}
