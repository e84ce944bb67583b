//! Lifetimes: groups have limits, clocks jump both ways, the machine sleeps, and the store is
//! closed for a while.
//!
//! Three rules are checked. The clock of the store goes on in use whatever the time of day is set
//! to; an opening goes on from it by the time of day, never back, and after a crash from the clocks
//! as they may have been noted. No page beyond its limit is returned, and none younger is absent.
//! Old pages are removed only once the kernel has stated for ten minutes that the clock is right.

use std::collections::BTreeMap;
use std::time::Duration;

use larder_core::core::Core;
use larder_engine::format::Clock;
use larder_sim_runtime::dice::Dice;
use larder_sim_runtime::processes::{boottime_ms, unix_ms};
use larder_sim_runtime::task;
use larder_sim_runtime::time::{Clocks, Instant};
use larder_store::store::LocalStore as Store;

use super::state::State;
use crate::classes::Class;
use crate::oracle::{Name, VersionId};

const SECOND: u64 = 1000;
const YEAR: i64 = 365 * 86_400 * 1000;

/// The time of day at the begin of a seed, after that of the virtual clock, and its bounds.
const AHEAD: i64 = 50 * YEAR;
const AHEAD_LEAST: i64 = 10 * YEAR;
const AHEAD_MOST: i64 = 90 * YEAR;

/// The limits of groups, in seconds.
const LIMITS: [u64; 4] = [2, 30, 700, 90_000];

/// The longest time between two looks of the store at the clocks, with the time that a look takes.
const LOOK: Duration = Duration::from_secs(75);

/// So many steps of tasks are enough for a look that is due.
const LOOK_STEPS: u64 = 1500;

/// The time after which the clock counts as right.
const SETTLED: u64 = 600 * SECOND;

/// A smaller difference of the two clocks is not noted.
const SMALL: u64 = SECOND;

/// Rounding of clocks.
const SLACK: u64 = 2;

/// A note of the clocks that the next opening may find.
#[derive(Clone, Copy, Debug)]
struct Note {
    /// The clock of the store then, at least and at most.
    store: (u64, u64),
    /// The time of day is so much ahead of it, at least and at most.
    ahead: (i64, i64),
}

/// A difference of the two clocks in a run.
#[derive(Clone, Copy, Debug)]
struct Setting {
    ahead: i64,
    /// When the time of day was set again: the moment, and the steps of tasks until then.
    ended: Option<(Instant, u64)>,
}

/// A run of the process.
#[derive(Debug)]
struct Run {
    /// The clock of the store at a moment, and when its superblocks were written at the open.
    store_ms: u64,
    boot_ms: u64,
    first_ms: u64,
    opened_boot_ms: u64,
    settings: Vec<Setting>,
    /// Since when there is a limit: then the clocks are noted in use.
    limited: Option<Instant>,
}

/// See the module.
#[derive(Debug, Default)]
pub struct Lives {
    pub on: bool,
    notes: Vec<Note>,
    run: Option<Run>,
    /// Time of day and boot time at the begin of an opening.
    begun: (u64, u64),
    /// When each version was put, at least and at most.
    puts: BTreeMap<VersionId, (u64, u64)>,
    /// Steps of tasks.
    steps: u64,
    /// Pages removed for their age so far in this run.
    expired: u64,
    /// Since when no time service keeps the clock right.
    unsynchronised: Option<Instant>,
    seen: Option<Seen>,
}

/// A look at the pages.
#[derive(Debug)]
struct Seen {
    /// Changes of the quotas before it.
    changes: u64,
    pages: BTreeMap<Name, VersionId>,
    /// Pages removed for their age before it.
    expired: u64,
    /// The clock of the store.
    at: u64,
}

impl Note {
    /// The clock of the store at a time of day between these two, at least and at most.
    fn at(&self, from: u64, to: u64) -> (u64, u64) {
        let back = |unix_ms: u64, ahead: i64| unix_ms.saturating_add_signed(-ahead);
        (
            self.store.0.max(back(from, self.ahead.1)),
            self.store.1.max(back(to, self.ahead.0)),
        )
    }
}

impl Setting {
    /// Whether the store has looked at the clocks since the setting ended.
    fn is_past(&self, steps: u64) -> bool {
        self.ended
            .is_some_and(|(moment, before)| moment.elapsed() > LOOK && steps - before > LOOK_STEPS)
    }
}

impl Run {
    /// Drops the settings that the next opening cannot find: the store has noted another one. It
    /// leaves a note that differs little.
    fn drop_noted(&mut self, steps: u64) {
        if self.limited.is_none_or(|since| since.elapsed() <= LOOK) {
            return;
        }
        let present = |of: &&Setting| !of.is_past(steps);
        let left: Vec<i64> = { self.settings.iter() }
            .filter(present)
            .map(|of| of.ahead)
            .collect();
        let is_near = |of: &Setting| left.iter().any(|ahead| ahead.abs_diff(of.ahead) < SMALL);
        self.settings.retain(is_near);
    }
}

fn set_time(ahead_ms: i64) {
    let ahead_ms = ahead_ms.clamp(AHEAD_LEAST, AHEAD_MOST);
    Clocks {
        ahead_ms,
        ..Clocks::get()
    }
    .set();
}

/// A while, from less than a second to a day.
fn draw_while(dice: &mut Dice) -> u64 {
    let most = dice.pick(&[
        SECOND,
        5 * SECOND,
        40 * SECOND,
        800 * SECOND,
        86_400 * SECOND,
    ]);
    dice.between(1, most)
}

fn draw_jump(dice: &mut Dice) -> i64 {
    let most = dice.pick(&[500, 5_000, 100_000, 7_200_000, 30 * 86_400_000, YEAR]);
    let jump = dice.between(0, most.cast_unsigned()).cast_signed();
    if dice.chance(0.5) { jump } else { -jump }
}

/// The machine sleeps, or a while passes: all clocks but the virtual one go on.
fn pass(ms: u64) {
    let clocks = Clocks::get();
    Clocks {
        ahead_ms: clocks.ahead_ms + ms.cast_signed(),
        asleep_ms: clocks.asleep_ms + ms,
        ..clocks
    }
    .set();
}

impl Lives {
    pub fn new(on: bool) -> Lives {
        if on {
            set_time(AHEAD);
        }
        Lives {
            on,
            ..Lives::default()
        }
    }

    /// The limit of a quota.
    pub fn draw_limit(&self, dice: &mut Dice) -> Option<u64> {
        (self.on && dice.chance(0.6)).then(|| dice.pick(&LIMITS))
    }

    /// The clock of the store.
    pub fn now(&self) -> u64 {
        let run = self.run.as_ref();
        run.map_or(0, |run| run.store_ms + boottime_ms() - run.boot_ms)
    }

    /// The process begins. Meanwhile time has passed, and the time of day was set.
    pub fn begin(&mut self, dice: &mut Dice) {
        if !self.on {
            return;
        }
        if dice.chance(0.5) {
            pass(draw_while(dice));
        }
        if dice.chance(0.5) {
            set_time(Clocks::get().ahead_ms + draw_jump(dice));
        }
        self.unsynchronised = (!Clocks::get().is_synchronised).then(Instant::now);
        self.begun = (unix_ms(), boottime_ms());
        self.seen = None;
        self.expired = 0;
    }

    fn range(&self) -> Option<(u64, u64)> {
        let now = unix_ms();
        let ranges = self.notes.iter().map(|note| note.at(self.begun.0, now));
        ranges.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)))
    }

    /// A store was opened with this clock.
    pub fn opened(&mut self, clock: Clock, is_exact: bool, is_limited: bool) {
        if !self.on {
            return;
        }
        let took = boottime_ms() - self.begun.1;
        if let Some((least, most)) = self.range().filter(|_| is_exact) {
            let range = least.saturating_sub(SLACK)..=most + took + SLACK;
            assert!(
                range.contains(&clock.store_ms),
                "the clock of the store is {clock:?} at an open, and not in {range:?}: {:?}",
                self.notes
            );
        }
        let boot_ms = boottime_ms();
        let ahead = clock.unix_ms.cast_signed() - clock.store_ms.cast_signed();
        self.run = Some(Run {
            store_ms: clock.store_ms,
            boot_ms,
            first_ms: clock.store_ms.saturating_sub(took),
            opened_boot_ms: boot_ms,
            settings: vec![Setting { ahead, ended: None }],
            limited: is_limited.then(Instant::now),
        });
        self.notes.clear();
    }

    /// The quotas have changed.
    pub fn limited(&mut self, is_limited: bool) {
        let steps = self.steps;
        if let Some(run) = &mut self.run {
            if !is_limited {
                run.drop_noted(steps);
            }
            run.limited = is_limited.then(|| run.limited.unwrap_or_else(Instant::now));
        }
    }

    /// Whether the store has looked at the clocks since the time of day was set.
    pub fn has_looked(&self) -> bool {
        let is_seen = |of: &Setting| of.ended.is_none() || of.is_past(self.steps);
        self.run.as_ref().is_none_or(|run| {
            let is_noted = run.limited.is_none_or(|since| since.elapsed() > LOOK);
            is_noted && run.settings.iter().all(is_seen)
        })
    }

    /// The process is killed, or the power is lost.
    pub fn crash(&mut self) {
        if !self.on {
            return;
        }
        let now = self.now();
        for put in self.puts.values_mut().filter(|put| put.1 == u64::MAX) {
            put.1 = now.max(put.0);
        }
        match self.run.take() {
            Some(mut run) => {
                run.drop_noted(self.steps);
                let notes = run.settings.iter().map(|of| Note {
                    store: (run.first_ms, now),
                    ahead: (of.ahead, of.ahead),
                });
                self.notes = notes.collect();
            }
            // It may have noted the clocks, or not.
            None => {
                if let Some((least, most)) = self.range() {
                    let unix = (self.begun.0.cast_signed(), unix_ms().cast_signed());
                    self.notes.push(Note {
                        store: (least, most),
                        ahead: (unix.0 - most.cast_signed(), unix.1 - least.cast_signed()),
                    });
                }
            }
        }
    }

    /// The store was closed in order.
    pub fn closed(&mut self) {
        let now = self.now();
        if let Some(run) = self.run.take() {
            let ahead = run.settings.last().map_or(0, |of| of.ahead);
            self.notes = vec![Note {
                store: (run.first_ms, now),
                ahead: (ahead, ahead),
            }];
        }
    }

    /// A put of these versions begins.
    pub fn putting(&mut self, versions: &[VersionId]) {
        if self.on {
            let now = self.now();
            let begun = versions.iter().map(|version| (*version, (now, u64::MAX)));
            self.puts.extend(begun);
        }
    }

    /// It has ended.
    pub fn put(&mut self, versions: &[VersionId]) {
        if self.on {
            let now = self.now();
            for version in versions {
                if let Some(put) = self.puts.get_mut(version) {
                    put.1 = now;
                }
            }
        }
    }

    /// Whether a version is beyond a limit of so many seconds at a moment, for certain.
    fn is_old(&self, version: VersionId, limit: u64, at: u64) -> bool {
        let put = self.puts.get(&version);
        put.is_some_and(|(_, latest)| at.saturating_sub(*latest) >= limit * SECOND)
    }

    /// Whether it is within the limit for certain.
    fn is_young(&self, version: VersionId, limit: u64, at: u64) -> bool {
        let put = self.puts.get(&version);
        put.is_some_and(|(first, _)| at.saturating_sub(*first) + SECOND + SLACK < limit * SECOND)
    }
}

impl State {
    /// The limit of a namespace's pages now; zero without one. `None` while it may change.
    fn limit(&self, namespace: usize) -> Option<u64> {
        let in_force = self.quotas.in_force.as_ref()?;
        let name = format!("model {namespace}");
        let mut own = in_force.iter().filter(|spec| spec.group.name == name);
        Some(own.next().and_then(|spec| spec.max_age_s).unwrap_or(0))
    }

    /// A store was opened.
    pub fn check_clock(&mut self, store: &Store) {
        let faults = &self.world.setup.faults;
        let is_exact = !faults.spoils()
            && !faults.misleads()
            && !faults.fail_writes()
            && faults.superblock_error == 0.0
            && !self.world.has_outage;
        let in_force = self.quotas.in_force.iter().flatten();
        let is_limited = { in_force }.any(|spec| spec.max_age_s.is_some());
        self.lives.opened(store.clock(), is_exact, is_limited);
    }

    /// The clocks may jump, and time passes.
    pub fn disturb_clocks(&mut self) {
        if !self.lives.on || self.world.calm {
            return;
        }
        let State { world, leases, .. } = self;
        let dice = &mut world.dice;
        if dice.chance(0.06) {
            let ms = draw_while(dice);
            pass(ms);
            leases.sleep();
            world.note(ms, || format!("the machine sleeps for {ms} ms"));
        }
        let dice = &mut world.dice;
        if dice.chance(0.05) {
            let jump = draw_jump(dice);
            self.set_time(jump);
        }
        let State { world, lives, .. } = self;
        let dice = &mut world.dice;
        if dice.chance(0.06) {
            let clocks = Clocks::get();
            let is_synchronised = !clocks.is_synchronised;
            Clocks {
                is_synchronised,
                ..clocks
            }
            .set();
            lives.unsynchronised = (!is_synchronised).then(Instant::now);
        }
        if world.dice.chance(0.08) {
            task::advance(Duration::from_secs(61));
        }
    }

    fn set_time(&mut self, jump: i64) {
        let State { world, lives, .. } = self;
        let before = Clocks::get().ahead_ms;
        set_time(before + jump);
        let jump = Clocks::get().ahead_ms - before;
        if let Some(run) = &mut lives.run
            && let Some(last) = run.settings.last_mut()
        {
            let ahead = last.ahead + jump;
            last.ended = Some((Instant::now(), lives.steps));
            run.settings.push(Setting { ahead, ended: None });
        }
        world.count(Class::TimeSet);
        world.note(0, || format!("the time of day is set by {jump} ms"));
    }

    /// At the end of half of the seeds with limits, the time of day is set once more. Returns
    /// whether it was.
    pub fn set_the_last_time(&mut self) -> bool {
        let is_limited = self
            .lives
            .run
            .as_ref()
            .is_some_and(|run| run.limited.is_some());
        let is_set = self.lives.on && is_limited && self.world.dice.chance(0.5);
        if is_set {
            let jump = draw_jump(&mut self.world.dice);
            self.set_time(jump);
        }
        is_set
    }

    /// No page beyond its limit was returned by a call that began at this moment of the store's
    /// clock, after so many changes of the quotas.
    pub fn check_age(&mut self, name: Name, version: VersionId, (at, changes): (u64, u64)) {
        if !self.lives.on || self.quotas.count != changes {
            return;
        }
        let namespace = self.world.oracle.name(name).namespace;
        let limit = self.limit(namespace).filter(|limit| *limit > 0);
        assert!(
            !limit.is_some_and(|limit| self.lives.is_old(version, limit, at)),
            "{version:?} of {name:?} is returned beyond its limit of {limit:?} s: put at {:?}, now \
             {at}",
            self.lives.puts.get(&version)
        );
    }

    /// Runs after each step of a task: pages are removed only while the clock counts as right.
    pub fn check_removals(&mut self) {
        if !self.lives.on {
            return;
        }
        self.lives.steps += 1;
        let Some(expired) = self.try_core(|core: &Core| core.counters().store.expired) else {
            return;
        };
        let before = std::mem::replace(&mut self.lives.expired, expired);
        if expired == before {
            return;
        }
        self.world
            .tally
            .count_many(Class::OldPageRemoved, expired - before);
        let opened = self.lives.run.as_ref().map(|run| run.opened_boot_ms);
        let is_settled = opened.is_some_and(|opened| boottime_ms() - opened >= SETTLED);
        let is_right = { self.lives.unsynchronised }.is_none_or(|since| since.elapsed() <= LOOK);
        assert!(
            is_settled && is_right,
            "pages are removed, and the clock is not known to be right"
        );
    }

    /// No young page is absent, and none was removed.
    pub fn check_young(&mut self) {
        if !self.lives.on {
            return;
        }
        let faults = &self.world.setup.faults;
        let may_lack_times = faults.spoils() || faults.misleads() || faults.outage > 0.0;
        let (Some(epoch), false) = (&self.epoch, may_lack_times) else {
            return;
        };
        let Some(expired) = self.try_core(|core: &Core| core.counters().store.expired) else {
            return;
        };
        let at = self.lives.now();
        let namespaces = self.world.namespaces_by_slot(epoch);
        let mut pages = BTreeMap::new();
        let mut hidden = 0;
        self.world.each_page(&epoch.index, &namespaces, |name, version, _, _| {
            pages.insert(name, version);
            let info = self.world.oracle.name(name);
            let slot = epoch.slots[info.namespace];
            let is_found = slot.is_some_and(|slot| epoch.index.has(slot, info.key.prefix()));
            hidden += u64::from(!is_found);
            // The times of pages whose namespace is being named may have to be read first.
            let is_named = self.ids[info.namespace].is_some();
            let limit = self.limit(info.namespace).filter(|_| is_named);
            let is_young = limit == Some(0)
                || limit.is_some_and(|limit| self.lives.is_young(version, limit, at));
            assert!(
                is_found || !is_young,
                "{version:?} of {name:?} is absent within its limit of {limit:?} s: put at {:?}, \
                 now {at}",
                self.lives.puts.get(&version)
            );
        });
        let may_be_old = |name: Name, version: VersionId| {
            let limit = self.limit(self.world.oracle.name(name).namespace);
            limit.is_none_or(|limit| limit > 0 && !self.lives.is_young(version, limit, at))
        };
        if let Some(before) = &self.lives.seen
            && before.changes == self.quotas.count
        {
            let has_left = |name: Name, version: VersionId| pages.get(&name) != Some(&version);
            let gone = before.pages.iter();
            let gone = gone.filter(|(name, version)| {
                has_left(**name, **version) && may_be_old(**name, **version)
            });
            let came = self.lives.puts.iter().filter(|(version, (_, latest))| {
                let name = self.world.oracle.version(**version).name;
                let is_new = before.pages.get(&name) != Some(*version) && *latest >= before.at;
                is_new && has_left(name, **version) && may_be_old(name, **version)
            });
            let gone = (gone.count() + came.count()) as u64;
            let removed = expired - before.expired;
            assert!(
                removed <= gone,
                "{removed} pages were removed for their age, and {gone} old ones have left"
            );
        }
        self.world.tally.count_many(Class::OldPageHidden, hidden);
        self.lives.seen = Some(Seen {
            changes: self.quotas.count,
            pages,
            expired,
            at,
        });
    }
}
