//! Callers: puts, gets, lookups, deletions and flushes. Each runs in the steps that the handle
//! takes, and steps of others come in between.

use larder_engine::catalog::{Ask, Finding, Grant, ReservationId};
use larder_engine::core::{Core, RequestId};
use larder_engine::disk::DiskError;
use larder_engine::index::{Lease, Located, SegmentId};
use larder_engine::planted;
use larder_engine::{PutStatus, SyncPolicy};
use larder_sim_runtime::medium::Content;

use crate::classes::Class;
use crate::oracle::{Name, VersionId};
use crate::world::{Epoch, Flight, Live, World};

/// Most pages written by one operation.
const MERGE: usize = 4;

/// After this many draws of namespaces that were not named in an epoch, one of them is named.
const UNNAMED_IN_A_ROW: usize = 8;

pub enum Task {
    Put(Put),
    Get(Get),
    Request(RequestId, Request),
}

#[derive(Debug)]
pub struct Put {
    pub namespace: usize,
    pub names: Vec<Name>,
    pub reservation: ReservationId,
    pub grants: Vec<Grant>,
    pub versions: Vec<Option<VersionId>>,
    /// By name: the content of the index at the beginning.
    before: Vec<Option<(VersionId, SegmentId)>>,
    submitted: bool,
    committed: bool,
    pub flights: usize,
    pub landed: Vec<(usize, bool)>,
    departed: u64,
    statuses: Option<Vec<PutStatus>>,
    again: bool,
}

/// A write of adjacent pages, by their positions in the asks.
pub struct PageWrite {
    pub asks: Vec<usize>,
    pub volume: usize,
    pub start: usize,
    pub blocks: Vec<Content>,
}

pub struct Get {
    namespace: usize,
    pages: Vec<Reading>,
    pub waiting: usize,
    /// Steps for which the pins are kept after the reads.
    hold: usize,
}

pub struct Reading {
    name: Name,
    located: Located,
    pub outcome: Option<Result<Vec<Content>, DiskError>>,
    pub misdirected: bool,
}

pub enum Request {
    Flush {
        versions: Vec<(Name, VersionId)>,
        deletions: Vec<u64>,
    },
    Delete,
}

/// Pages that have left the index, for any reason.
pub fn departed(live: &Live) -> u64 {
    let c = live.core.counters();
    c.evicted + c.deleted + c.damaged + c.unfinished
}

impl World {
    /// A random run of consecutive pages of a chain of one namespace, head first.
    pub fn draw_names(&mut self, batch: usize) -> (usize, Vec<Name>) {
        let mut at = Some(Name(self.dice.below(self.oracle.names())));
        let namespace = self
            .oracle
            .name(Name(at.map_or(0, |name| name.0)))
            .namespace;
        let mut names = Vec::new();
        while let Some(name) = at {
            names.push(name);
            at = self.oracle.name(name).parent;
        }
        names.reverse();
        // Mostly from the head, as a prefill does. Sometimes from any page.
        let from = if self.dice.chance(0.8) {
            0
        } else {
            self.dice.below(names.len())
        };
        let to = names.len().min(from + batch.max(1));
        (namespace, names[from..to].to_vec())
    }

    /// As `draw_names`, in a namespace that was named in this epoch. From time to time another one
    /// is named.
    fn draw_named(&mut self, live: &mut Live, batch: usize) -> (usize, Vec<Name>) {
        for _ in 0..UNNAMED_IN_A_ROW {
            let drawn = self.draw_names(batch);
            if live.named[drawn.0] {
                return drawn;
            }
        }
        let (namespace, names) = self.draw_names(batch);
        self.name_namespace(live, namespace);
        (namespace, names)
    }

    pub fn current(&self, live: &Epoch, name: Name) -> Option<VersionId> {
        self.current_at(live, name).map(|(version, _)| version)
    }

    /// The same, and the segment of the page.
    pub fn current_at(&self, live: &Epoch, name: Name) -> Option<(VersionId, SegmentId)> {
        let info = self.oracle.name(name);
        let found = live.index.locate(live.slots[info.namespace]?, &info.key)?;
        let version = self.oracle.find(name, found.checksum)?;
        Some((version, found.place.segment))
    }

    /// Starts a task for an idle client.
    pub fn begin_task(&mut self, live: &mut Live, client: usize) {
        let what = self.dice.below(1000);
        let batch = self.setup.batch;
        match what {
            0..450 => {
                let count = 1 + self.dice.below(batch);
                let (namespace, names) = self.draw_named(live, count);
                self.begin_put(live, client, namespace, names, false);
            }
            450..700 => self.begin_get(live, client),
            700..800 => self.look_up(live),
            800..840 => {
                let (namespace, names) = self.draw_named(live, 64);
                let keys: Vec<_> = names
                    .iter()
                    .map(|name| self.oracle.name(*name).key)
                    .collect();
                live.index.touch(live.slot(namespace), &keys);
            }
            840..880 => self.begin_delete(live, client),
            880..883 => self.begin_clear(live, client),
            883..930 => self.begin_flush(live, client),
            _ => {}
        }
    }

    pub fn begin_put(
        &mut self,
        live: &mut Live,
        client: usize,
        namespace: usize,
        names: Vec<Name>,
        again: bool,
    ) {
        let asks = self.draw_asks(&names);
        let mut put = self.reserve(live, namespace, names, &asks);
        put.again = again;
        self.note(put.reservation.0, || format!("client {client} {put:?}"));
        live.clients[client] = Some(Task::Put(put));
    }

    /// The request to the core for these pages: mostly with their parents.
    pub fn draw_asks(&mut self, names: &[Name]) -> Vec<Ask> {
        let knows_parents = self.dice.chance(0.9);
        names
            .iter()
            .map(|name| {
                let info = self.oracle.name(*name);
                Ask {
                    key: info.key,
                    parent: info
                        .parent
                        .filter(|_| knows_parents)
                        .map(|parent| self.oracle.name(parent).key),
                    depth: info.depth,
                }
            })
            .collect()
    }

    /// Reserves space for pages. Each granted page becomes a version of its own.
    pub fn reserve(
        &mut self,
        live: &mut Live,
        namespace: usize,
        names: Vec<Name>,
        asks: &[Ask],
    ) -> Put {
        let slot = live.slot(namespace);
        let before = names.iter().map(|name| self.current_at(live, *name));
        let before = before.collect();
        let left = departed(live);
        let reserved_at = self.clock;
        let (reservation, grants) = self.with_core(live, |core| core.reserve(slot, asks));
        assert_eq!(grants.len(), asks.len());
        let space = self.setup.namespaces[namespace].clone();
        let versions: Vec<Option<VersionId>> = names
            .iter()
            .zip(&grants)
            .map(|(name, grant)| {
                matches!(grant, Grant::Write(_))
                    .then(|| self.oracle.write(*name, reserved_at, &space))
            })
            .collect();
        Put {
            namespace,
            names,
            reservation,
            grants,
            versions,
            before,
            submitted: false,
            committed: false,
            flights: 0,
            landed: Vec::new(),
            departed: left,
            statuses: None,
            again: false,
        }
    }

    fn begin_get(&mut self, live: &mut Live, client: usize) {
        let (namespace, names) = self.draw_named(live, 16);
        let keys: Vec<_> = names
            .iter()
            .map(|name| self.oracle.name(*name).key)
            .collect();
        let found = live.index.pin(live.slot(namespace), &keys);
        let mut pages = Vec::new();
        for (name, located) in names.into_iter().zip(found) {
            let Some(located) = located else {
                self.totals.misses += 1;
                continue;
            };
            *live.pins.entry(located.place.segment).or_default() += 1;
            let version = self
                .oracle
                .find(name, located.checksum)
                .expect("a pinned page has a checksum that was never put");
            assert!(
                !self.is_undead(version, located.place),
                "{version:?} of {name:?} was deleted, and is read"
            );
            let (volume, start) = self.address(located.place);
            let count = self.oracle.version(version).blocks as usize;
            let flight = Flight::Read {
                client,
                at: pages.len(),
                volume,
                start,
                count,
            };
            self.launch(live, flight);
            pages.push(Reading {
                name,
                located,
                outcome: None,
                misdirected: false,
            });
        }
        if pages.is_empty() {
            return;
        }
        let hold = if self.dice.chance(0.1) {
            self.dice.below(300)
        } else {
            self.dice.below(3)
        };
        self.note(client as u64, || {
            let names: Vec<Name> = pages.iter().map(|page| page.name).collect();
            format!("client {client} gets {names:?}")
        });
        live.clients[client] = Some(Task::Get(Get {
            namespace,
            waiting: pages.len(),
            pages,
            hold,
        }));
    }

    fn look_up(&mut self, live: &mut Live) {
        let (namespace, names) = self.draw_named(live, 64);
        let keys: Vec<_> = names
            .iter()
            .map(|name| self.oracle.name(*name).key)
            .collect();
        let lease = Lease {
            now_ms: self.now_ms,
            duration_ms: self.setup.lease_ms,
            blocks_per_page: self.setup.namespaces[namespace].shape().page_blocks(),
        };
        let mut orphans = Vec::new();
        let slot = live.slot(namespace);
        if self.dice.chance(0.5) {
            let found = live.index.longest_prefix(slot, &keys, lease, &mut orphans);
            for (at, name) in names.iter().enumerate().take(found + 1) {
                let is_there = self.current(live, *name).is_some();
                assert_eq!(is_there, at < found, "longest_prefix returned {found}");
            }
        } else {
            let found = live.index.contains(slot, &keys, lease, &mut orphans);
            for (name, found) in names.iter().zip(found) {
                assert_eq!(self.current(live, *name).is_some(), found);
            }
        }
        if !orphans.is_empty() {
            self.with_core(live, |core| core.adopt(&orphans, &mut { usize::MAX }));
        }
    }

    fn begin_delete(&mut self, live: &mut Live, client: usize) {
        let count = 1 + self.dice.below(4);
        let (namespace, names) = self.draw_named(live, count);
        let (request, _) = self.delete(live, namespace, &names);
        live.clients[client] = Some(Task::Request(request, Request::Delete));
    }

    fn begin_clear(&mut self, live: &mut Live, client: usize) {
        let namespace = self.dice.below(self.setup.namespaces.len());
        if !live.named[namespace] {
            return;
        }
        let (request, _) = self.clear(live, namespace);
        live.clients[client] = Some(Task::Request(request, Request::Delete));
    }

    pub fn begin_flush(&mut self, live: &mut Live, client: usize) {
        let (request, flush) = self.flush(live);
        live.clients[client] = Some(Task::Request(request, flush));
    }

    /// Deletes pages. Returns how many were present.
    pub fn delete(
        &mut self,
        live: &mut Live,
        namespace: usize,
        names: &[Name],
    ) -> (RequestId, u64) {
        let keys: Vec<_> = names
            .iter()
            .map(|name| self.oracle.name(*name).key)
            .collect();
        let slot = live.slot(namespace);
        self.leave(live, names, |core, request| {
            core.delete(request, slot, &keys)
        })
    }

    /// Clears a namespace. Returns how many pages were present.
    pub fn clear(&mut self, live: &mut Live, namespace: usize) -> (RequestId, u64) {
        let names = self.oracle.names_of(namespace);
        let slot = live.slot(namespace);
        let steps = self.dice.below(3);
        self.leave(live, &names, |core, request| {
            let (mut found, mut from) = (0, Some(0));
            for _ in 0..steps {
                let Some(step) = from else { break };
                let (some, next) = core.clear_some(slot, step);
                found += some;
                from = next;
            }
            found + core.clear(request, slot)
        })
    }

    fn leave(
        &mut self,
        live: &mut Live,
        names: &[Name],
        command: impl FnOnce(&mut Core, RequestId) -> u64,
    ) -> (RequestId, u64) {
        let count = |world: &World, live: &Live| {
            let there = |name: &&Name| world.current(live, **name).is_some();
            names.iter().filter(there).count() as u64
        };
        let there = count(self, live);
        let is_refused = live.core.read_only_volumes().len() == self.setup.volumes.len();
        let request = self.new_request();
        self.clock += 1;
        if !is_refused {
            self.oracle.delete(names, request.0, self.clock);
        }
        self.note(request.0, || format!("{request:?} deletes {names:?}"));
        let found = self.with_core(live, |core| command(core, request));
        if is_refused {
            assert_eq!(found, 0, "a refused deletion deletes");
            assert_eq!(count(self, live), there, "a refused deletion deletes");
        } else {
            assert_eq!(found, there, "a deletion reports a wrong number of pages");
        }
        self.totals.deleted += found;
        (request, found)
    }

    /// Starts a flush. Returns also the content that the flush will promise.
    pub fn flush(&mut self, live: &mut Live) -> (RequestId, Request) {
        let versions = self
            .snapshot(&live.index, &self.namespaces_by_slot(live))
            .into_iter()
            .map(|(name, (version, ..))| (name, version))
            .collect();
        let deletions = self.oracle.acked_deletions();
        let request = self.new_request();
        self.note(request.0, || format!("{request:?} flushes"));
        self.with_core(live, |core| core.flush(request));
        let flush = Request::Flush {
            versions,
            deletions,
        };
        (request, flush)
    }

    pub fn new_request(&mut self) -> RequestId {
        self.next_request += 1;
        RequestId(self.next_request)
    }

    // ---- going on

    pub fn go_on(&mut self, live: &mut Live, client: usize) {
        match live.clients[client].take() {
            Some(Task::Put(put)) => self.go_on_putting(live, client, put),
            Some(Task::Get(get)) => self.go_on_getting(live, client, get),
            other => live.clients[client] = other,
        }
    }

    fn go_on_putting(&mut self, live: &mut Live, client: usize, mut put: Put) {
        if !put.submitted {
            put.submitted = true;
            self.submit(
                live,
                Some(client),
                &put.grants.clone(),
                &put.versions.clone(),
                &mut put.flights,
            );
        } else if !put.committed {
            put.committed = true;
            let checksums: Vec<Option<u64>> = put
                .versions
                .iter()
                .map(|version| {
                    let version = (*version)?;
                    let given_up = self.strikes(Class::GaveUp, self.setup.faults.give_up);
                    live.failures += u64::from(given_up);
                    (!given_up).then(|| self.oracle.version(version).checksum)
                })
                .collect();
            self.with_core(live, |core| core.commit(put.reservation, &checksums));
        } else if !put.landed.is_empty() && put.flights == 0 {
            let landed = std::mem::take(&mut put.landed);
            self.note(put.reservation.0, || {
                format!("{:?} landed {landed:?}", put.reservation)
            });
            self.with_core(live, |core| core.landed(put.reservation, &landed));
        }
        if put.committed && put.flights == 0 && put.landed.is_empty() && put.statuses.is_some() {
            let statuses = put.statuses.take().unwrap_or_default();
            let failed: Vec<Name> = put
                .names
                .iter()
                .zip(&statuses)
                .filter(|(_, status)| matches!(status, PutStatus::Failed(_)))
                .map(|(name, _)| *name)
                .collect();
            if !failed.is_empty() && !put.again {
                self.begin_put(live, client, put.namespace, failed, true);
            }
            return;
        }
        live.clients[client] = Some(Task::Put(put));
    }

    /// Starts the writes of granted pages, adjacent ones together.
    pub fn submit(
        &mut self,
        live: &mut Live,
        client: Option<usize>,
        grants: &[Grant],
        versions: &[Option<VersionId>],
        flights: &mut usize,
    ) {
        for write in self.writes_of(grants, versions) {
            *flights += 1;
            let flight = Flight::Data {
                client,
                asks: write.asks,
                volume: write.volume,
                start: write.start,
                blocks: write.blocks,
            };
            self.launch(live, flight);
        }
    }

    /// The writes of granted pages, adjacent ones together.
    pub fn writes_of(&self, grants: &[Grant], versions: &[Option<VersionId>]) -> Vec<PageWrite> {
        let mut writes: Vec<PageWrite> = Vec::new();
        for (ask, (grant, version)) in grants.iter().zip(versions).enumerate() {
            let (Grant::Write(extent), Some(version)) = (grant, version) else {
                continue;
            };
            let payload = self.oracle.payload(*version);
            let (volume, start) = self.address(extent.place);
            assert_eq!(extent.volume, volume);
            assert_eq!(extent.offset, (start * crate::setup::BLOCK) as u64);
            match writes.last_mut() {
                Some(last)
                    if last.volume == volume
                        && last.start + last.blocks.len() == start
                        && last.asks.len() < MERGE =>
                {
                    last.asks.push(ask);
                    last.blocks.extend(payload);
                }
                _ => writes.push(PageWrite {
                    asks: vec![ask],
                    volume,
                    start,
                    blocks: payload,
                }),
            }
        }
        writes
    }

    fn go_on_getting(&mut self, live: &mut Live, client: usize, mut get: Get) {
        let waits = get.waiting > 0 && !planted!(LateRead);
        if waits || get.hold > 0 && !self.calm {
            get.hold = get.hold.saturating_sub(1);
            live.clients[client] = Some(Task::Get(get));
            return;
        }
        let slot = live.slot(get.namespace);
        for page in &get.pages {
            // With `LateRead` a get does not wait for missing reads.
            let Some(outcome) = &page.outcome else {
                continue;
            };
            let key = self.oracle.name(page.name).key;
            let finding = self.judge(page.name, &page.located, outcome, page.misdirected);
            if finding != Finding::Good || page.located.unproven {
                let place = page.located.place;
                self.with_core(live, |core| core.found(slot, &key, place, finding));
            }
        }
        for page in &get.pages {
            let segment = page.located.place.segment;
            if let Some(pins) = live.pins.get_mut(&segment) {
                *pins -= 1;
            }
            if live.index.unpin(segment) {
                self.with_core(live, |core| core.unpinned(segment));
            }
        }
    }

    /// The result of reading a page. A bad one must be excused by a fault (`may_fail`).
    pub fn judge(
        &mut self,
        name: Name,
        located: &Located,
        outcome: &Result<Vec<Content>, DiskError>,
        may_fail: bool,
    ) -> Finding {
        let version = self
            .oracle
            .find(name, located.checksum)
            .expect("a page is read with a checksum that was never put");
        let is_whole = |blocks: &Vec<Content>| self.oracle.is_payload(version, blocks);
        let finding = match outcome {
            Ok(blocks) if is_whole(blocks) || planted!(SkippedChecksum) => Finding::Good,
            Ok(_) => Finding::Mismatch,
            Err(_) => Finding::Unreadable,
        };
        let is_right = outcome.as_ref().is_ok_and(is_whole);
        assert!(
            finding != Finding::Good || is_right,
            "{version:?} of {name:?} is returned with wrong bytes"
        );
        let known = self.oracle.version(version);
        let may_fail = may_fail || known.rotten || known.dropped || known.torn;
        assert!(
            finding == Finding::Good || may_fail,
            "{version:?} of {name:?} at {:?} reads as {finding:?}",
            located.place
        );
        if finding == Finding::Good {
            self.totals.hits += 1;
        } else {
            self.totals.misses += 1;
        }
        if finding != Finding::Good || located.unproven {
            self.note(version.0 as u64, || {
                format!("{version:?} is found {finding:?}")
            });
        }
        finding
    }

    pub fn read_done(
        get: &mut Get,
        at: usize,
        outcome: Result<Vec<Content>, DiskError>,
        misdirected: bool,
    ) {
        get.waiting -= 1;
        get.pages[at].outcome = Some(outcome);
        get.pages[at].misdirected = misdirected;
    }

    // ---- answers

    /// Records answers in the step in which they arrive.
    pub fn hear(&mut self, live: &mut Live) {
        for client in 0..live.clients.len() {
            match live.clients[client].take() {
                Some(Task::Put(mut put)) => {
                    if let Some(statuses) = live.settled.remove(&put.reservation) {
                        self.hear_statuses(live, &put, &statuses);
                        put.statuses = Some(statuses);
                    }
                    live.clients[client] = Some(Task::Put(put));
                }
                Some(Task::Request(id, request)) => match live.finished.remove(&id) {
                    Some(result) => self.hear_result(live, id, &request, result.is_ok()),
                    None => live.clients[client] = Some(Task::Request(id, request)),
                },
                other => live.clients[client] = other,
            }
        }
    }

    pub fn hear_statuses(&mut self, live: &Live, put: &Put, statuses: &[PutStatus]) {
        assert_eq!(
            statuses.len(),
            put.names.len(),
            "not one status for each page"
        );
        let is_still = departed(live) == put.departed;
        let always = self.setup.sync == SyncPolicy::Always;
        for (at, status) in statuses.iter().enumerate() {
            let fits = match put.grants[at] {
                Grant::Write(_) => matches!(status, PutStatus::Stored | PutStatus::Failed(_)),
                Grant::Settles => matches!(status, PutStatus::Duplicate | PutStatus::Failed(_)),
                Grant::Refused(why) => *status == PutStatus::Refused(why),
            };
            assert!(
                fits,
                "{:?} was granted, and settles as {status:?}",
                put.grants[at]
            );
            match status {
                PutStatus::Stored => self.totals.stored += 1,
                PutStatus::Duplicate => self.totals.duplicates += 1,
                PutStatus::Refused(_) => self.totals.refused += 1,
                PutStatus::Failed(_) => {
                    self.totals.failed += 1;
                    assert!(live.failures > 0, "a put fails without a fault");
                }
                other => panic!("an unknown status {other:?}"),
            }
            if !status.is_present() {
                continue;
            }
            let now = self.current(live, put.names[at]);
            assert!(
                now.is_some() || !is_still,
                "{:?} is reported as {status:?} and is missing",
                put.names[at]
            );
            let Some(version) = now else { continue };
            // A version that a crash cut short is present because the version before it is lost
            // already.
            let before = put.before[at].filter(|(before, _)| {
                let before = self.oracle.version(*before);
                is_still && before.durable && !before.torn
            });
            let meant = put.versions[at].or(put.before[at].map(|(before, _)| before));
            let always = always && meant == Some(version);
            if always || before.is_some_and(|(before, _)| before != version) {
                let version = self.oracle.version_mut(version);
                version.durable = true;
                version.in_place_of = before.filter(|_| !always);
                version.dropped &= !(always && *status == PutStatus::Stored);
            }
        }
    }

    pub fn hear_result(&mut self, live: &Live, id: RequestId, request: &Request, good: bool) {
        match request {
            Request::Delete if good => {
                self.oracle
                    .deleted(id.0, self.setup.sync == SyncPolicy::Always);
            }
            Request::Delete => {}
            Request::Flush {
                versions,
                deletions,
            } => {
                self.totals.flushes += u64::from(good);
                assert!(good || live.failures > 0, "a flush fails without a fault");
                if !good {
                    return;
                }
                for (name, version) in versions {
                    if self.current(live, *name) == Some(*version) {
                        let version = self.oracle.version_mut(*version);
                        // A version that a crash cut short stays so, and was never promised.
                        version.durable = !version.torn;
                        version.in_place_of = None;
                        version.dropped = false;
                    }
                }
                self.oracle.deletions_durable(deletions);
            }
        }
    }
}
