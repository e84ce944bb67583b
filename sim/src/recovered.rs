//! The checks of a recovery.

use std::collections::BTreeSet;
use std::sync::Arc;

use larder_core::index::{Index, Place};
use larder_store::recovery::{Recovery, recover_with};

use crate::expected::Expected;
use crate::oracle::VersionId;
use crate::world::World;

/// Probability that a reader checks the store that the owner has just recovered.
const READER_SHARE: f64 = 0.25;

impl World {
    /// The namespace of each slot, as recovery found it.
    pub fn namespaces_of(&self, recovery: &Recovery) -> Vec<usize> {
        let found = recovery.recovered.namespaces.iter();
        found
            .map(|init| self.namespace_of(init.fingerprint))
            .collect()
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
                    || self.setup.faults.fail_writes()
                    || self.setup.faults.recall > 0.0,
                "{version:?} of {name:?} is unproven after a clean close"
            );
            assert!(
                !expected.given_up.contains(version),
                "the put of {version:?} of {name:?} failed, and a clean close brings it back"
            );
            assert!(
                !self.is_undead(*version, *place),
                "{version:?} of {name:?} was deleted, and is back at {place:?}"
            );
            // The new epoch does not know of the failed sync. A header that it dropped is lost,
            // whatever reads return now. An older page that must survive in place of this one
            // yields to it all the same. A page that was evicted, and is back where it lay before,
            // is not promised, although a copy of it was durable.
            let known = self.oracle.version_mut(*version);
            let is_expected = expected.names.contains_key(name);
            let is_promised = is_expected && known.durable && known.in_place_of.is_none();
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
            // More may be found: pages whose evictions found no room for a record.
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
    /// acknowledged writes, or if it is of an old generation that came back. Refused writes, and
    /// writes that a failed sync dropped, are never proven.
    fn may_lie(&self, version: VersionId, place: Place) -> bool {
        let known = self.oracle.version(version);
        let is_spoiled = || {
            known.rotten
                || known.refused
                || self.tainted.contains(&place.segment)
                || self.forgotten.contains(&place.segment)
        };
        self.headless.contains(&place.segment) || self.setup.faults.spoils() && is_spoiled()
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

    /// From time to time: a reader that opens at this moment sees only whole pages.
    pub fn check_reader(&mut self, recovery: &Recovery) {
        if !self.dice.chance(READER_SHARE) {
            return;
        }
        let segments: u32 = self.setup.volumes.iter().sum();
        let index = Arc::new(Index::new(
            segments as usize,
            u64::from(segments * self.setup.segment_blocks),
        ));
        let superblocks: Vec<_> = self.superblocks.iter().map(Option::as_ref).collect();
        let reader = recover_with(&*self.disk, &superblocks, self.keys(), &index);
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
}
