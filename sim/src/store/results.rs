//! The checks of the results of calls.
//!
//! A check compares the index right before the call ([`Pages`]) with the index right after it.
//! Other tasks run in between, so a check that needs an unchanged store holds only if the page did
//! not change.

use larder_core::core::Core;
use larder_core::index::SegmentId;
use larder_engine::format::PageKey;
use larder_engine::{GetStatus, MissReason, PutFailure, PutStatus, Refusal, SyncPolicy};
use larder_sim_runtime::medium::Content;
use larder_sim_runtime::time::Instant;
use larder_store::api::WriteBudget;

use super::state::{Phase, State};
use crate::classes::Class;
use crate::oracle::{Name, Oracle, VersionId};
use crate::setup::BLOCK;

/// A page in the index: its version, and its segment.
pub type There = Option<(VersionId, SegmentId)>;

/// Pages of one call.
pub struct Pages {
    pub namespace: usize,
    pub names: Vec<Name>,
    pub keys: Vec<PageKey>,
    /// The index before the call.
    pub before: Vec<There>,
    /// The moment before the call.
    pub begun: u64,
    pub misdirected: u64,
    /// Answers of the policy of admission before the call.
    pub answers: u64,
    /// Pages that had left the index before the call.
    pub departed: Option<u64>,
    /// The clock of the store, and the changes of quotas, before the call.
    pub age: (u64, u64),
}

impl State {
    /// Pages of a call that begins now.
    pub fn pages(&mut self, namespace: usize, names: Vec<Name>) -> Pages {
        self.world.clock += 1;
        Pages {
            namespace,
            keys: names
                .iter()
                .map(|name| self.world.oracle.name(*name).key)
                .collect(),
            before: self.there(&names),
            begun: self.world.clock,
            misdirected: self.misdirected,
            answers: self.leases.answers(),
            departed: self.departed(),
            age: (self.lives.now(), self.quotas.count),
            names,
        }
    }

    pub fn there(&self, names: &[Name]) -> Vec<There> {
        let now = |name: &Name| self.world.current(self.epoch.as_ref()?, *name);
        names.iter().map(now).collect()
    }

    /// Pages that have left the index, for any reason. `None` while a task holds the core.
    fn departed(&self) -> Option<u64> {
        let c = self.try_core(Core::counters)?;
        let removed = c.store;
        let by_calls = removed.deleted + removed.expired;
        Some(removed.evicted + by_calls + removed.damaged + removed.unfinished)
    }

    pub fn check_put(&mut self, pages: &Pages, versions: &[VersionId], statuses: &[PutStatus]) {
        let now = self.there(&pages.names);
        let departed = self.departed();
        let is_still = departed.is_some() && departed == pages.departed;
        assert_eq!(
            statuses.len(),
            versions.len(),
            "not one status for each page"
        );
        let names = &pages.names;
        self.world.note(pages.begun, || {
            format!("put of {names:?} ends: {statuses:?}")
        });
        let always = self.world.setup.sync == SyncPolicy::Always;
        let failures = self.epoch.as_ref().map_or(0, |epoch| epoch.failures);
        self.check_admission(pages, &now, statuses);
        for (at, status) in statuses.iter().enumerate() {
            if matches!(
                status,
                PutStatus::Refused(_) | PutStatus::Failed(PutFailure::Write)
            ) && let Some(epoch) = &mut self.epoch
            {
                epoch.given_up.insert(versions[at]);
            }
            let totals = &mut self.world.totals;
            match status {
                PutStatus::Stored => totals.stored += 1,
                PutStatus::Duplicate => totals.duplicates += 1,
                PutStatus::Refused(why) => {
                    totals.refused += 1;
                    let may_close = self.phase == Phase::Closing;
                    assert!(
                        *why != Refusal::Closed || may_close,
                        "an open store is closed"
                    );
                    assert!(
                        *why != Refusal::WrongShape,
                        "a page of the right shape is refused"
                    );
                    if *why == Refusal::Budget {
                        let budget = self.world.setup.write_budget;
                        assert_ne!(budget, WriteBudget::Off, "a budget that is off refuses");
                        self.world.count(Class::OverBudget);
                    }
                }
                PutStatus::Failed(_) => {
                    totals.failed += 1;
                    // A put that was recalled costs others the rest of its segment.
                    let may_fail = failures > 0 || !self.recalled.is_empty();
                    assert!(may_fail, "a put fails without a fault");
                }
            }
            let reserved = self.world.oracle.version(versions[at]).reserved_at;
            let is_written = reserved != u64::MAX;
            assert!(
                is_written || *status != PutStatus::Stored,
                "{:?} is stored, and its bytes were never written",
                versions[at]
            );
            if !status.is_present() {
                continue;
            }
            let Some((version, _)) = now[at] else {
                // It may be old by now.
                assert!(
                    !is_still || self.lives.on,
                    "{:?} is reported as {status:?} and is missing",
                    names[at]
                );
                continue;
            };
            let meant = match status {
                PutStatus::Stored => Some(versions[at]),
                _ => pages.before[at].map(|(before, _)| before),
            };
            let always = always && meant == Some(version);
            // A version that a crash cut short is present because the version before it is lost
            // already.
            let before = pages.before[at].filter(|(before, _)| {
                let before = self.world.oracle.version(*before);
                is_still && before.durable && !before.torn
            });
            if always || before.is_some_and(|(before, _)| before != version) {
                let known = self.world.oracle.version_mut(version);
                known.durable = true;
                known.in_place_of = before.filter(|_| !always);
                if always && *status == PutStatus::Stored {
                    self.world.made_durable(version);
                }
            }
        }
    }

    /// The policy of admission is asked for new pages alone, and its answer counts. Pages behind
    /// the first that it refuses are refused without an answer.
    fn check_admission(&self, pages: &Pages, now: &[There], statuses: &[PutStatus]) {
        let Some(namespace) = self.ids[pages.namespace] else {
            return;
        };
        for (at, status) in statuses.iter().enumerate() {
            let is_refused = *status == PutStatus::Refused(Refusal::NotAdmitted);
            let key = &pages.keys[at];
            if pages.before[at].is_none() {
                let answers = pages.answers;
                self.leases
                    .check_admission(answers, namespace, key, *status);
            } else if pages.before[at] == now[at] {
                let name = pages.names[at];
                assert!(!is_refused, "{name:?} is stored, and the policy was asked");
            }
            if is_refused {
                return;
            }
        }
    }

    /// The result of a lookup. Other calls may have changed the index meanwhile.
    pub fn check_looked_up(&mut self, pages: &Pages, found: &[bool], is_prefix: bool) {
        let now = self.there(&pages.names);
        let is_open = self.phase == Phase::Open;
        let is_alone = self.calls.len() == 1;
        let mut is_reached = true;
        for (at, found) in found.iter().enumerate() {
            let stays = pages.before[at].is_some() && pages.before[at] == now[at];
            is_reached &= stays || !is_prefix;
            assert!(
                *found || !is_reached || !stays || !is_open,
                "a lookup misses {:?}",
                pages.names[at]
            );
            assert!(
                !found || !is_alone || pages.before[at].is_some(),
                "a lookup finds {:?}, which is not stored",
                pages.names[at]
            );
            if let Some((version, _)) = now[at].filter(|_| *found && pages.before[at] == now[at]) {
                self.check_age(pages.names[at], version, pages.age);
            }
        }
    }

    pub fn check_get(
        &mut self,
        pages: &Pages,
        at: usize,
        status: GetStatus,
        bytes: &[u8],
        deadline: Option<Instant>,
    ) {
        let name = pages.names[at];
        let before = pages.before[at];
        let now = self.there(&[name])[0];
        let world = &mut self.world;
        match status {
            GetStatus::Hit => {
                world.totals.hits += 1;
                let version = version_of(&world.oracle, bytes);
                let Some(version) = version else {
                    panic!("{name:?} is returned with wrong bytes: {before:?}, now {now:?}");
                };
                let known = world.oracle.version(version);
                assert!(
                    known.name == name,
                    "{name:?} is returned with bytes of {:?}",
                    known.name
                );
                let is_excused = !world.headless.is_empty();
                assert!(
                    is_excused || !world.oracle.was_dead(version, pages.begun),
                    "{version:?} of {name:?} was deleted before the get that returns it"
                );
                self.check_age(name, version, pages.age);
            }
            GetStatus::Miss(why) => {
                world.totals.misses += 1;
                let may_close = self.phase == Phase::Closing;
                let is_late = deadline.is_some_and(|until| until <= Instant::now());
                let is_excused =
                    self.misdirected > pages.misdirected || world.oracle.has_bad_version(name);
                let fits = match why {
                    MissReason::Absent => before.is_none() || before != now,
                    MissReason::Damaged
                    | MissReason::Unfinished
                    | MissReason::ReadError
                    | MissReason::Undecodable => {
                        let is_dropped = before.is_none() || before != now;
                        assert!(
                            is_dropped || self.misdirected > pages.misdirected,
                            "{name:?} is {why:?}, and stays in the index"
                        );
                        before.is_none() || is_excused
                    }
                    // Its tenant may have been erased since.
                    MissReason::Sealed => {
                        let is_gone = before != now || world.oracle.has_forged_version(name);
                        before.is_some() && is_gone
                    }
                    MissReason::Deadline => is_late,
                    MissReason::Closed => may_close,
                    // After a jump of the clock a read in flight looks like a silent device.
                    MissReason::Hung => world.setup.faults.clock_forward > 0.0,
                    _ => false,
                };
                assert!(
                    fits,
                    "{name:?} misses as {why:?}: {before:?} before, {now:?} now"
                );
            }
        }
    }
}

/// The version that these bytes are, if they are one as a whole.
pub fn version_of(oracle: &Oracle, bytes: &[u8]) -> Option<VersionId> {
    let word = |block: &[u8]| u64::from_le_bytes(block[..8].try_into().expect("a word"));
    let contents: Vec<Content> = bytes
        .chunks_exact(BLOCK)
        .map(|block| match block[8..] == block[..BLOCK - 8] {
            true => Content::Data(word(block)),
            false => Content::Zero,
        })
        .collect();
    let version = oracle.owner(contents.first()?)?;
    oracle.is_payload(version, &contents).then_some(version)
}
