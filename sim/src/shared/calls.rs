//! A client's calls, in the steps that the handle takes over a remote catalog. A put reserves,
//! writes, commits and reports finished writes, window after window, and waits for all of them. A
//! get pins, reads, verifies, reports its findings and unpins.

use larder_engine::catalog::{Finding, Grant, ReservationId};
use larder_engine::index::{Located, SegmentId};
use larder_engine::planted;
use larder_engine::share::keys::blob;
use larder_engine::share::wire::{ClientId, Failure, LandedPut, PlaceGrant, Reply, Request, parse};

use super::Company;
use super::client::Client;
use super::lines::Note;
use super::seat::map_of;
use crate::classes::Class;
use crate::oracle::{Name, VersionId};
use crate::world::{ForeignWrite, Live, World};

/// Most windows of a put.
const WINDOWS_MAX: usize = 3;

pub enum Task {
    /// A single request with an answer.
    Ask(u64),
    Put(Put),
    Get(Get),
}

pub struct Put {
    namespace: usize,
    /// Names of the windows that are not reserved yet, last first.
    rest: Vec<Vec<Name>>,
    pub windows: Vec<Window>,
    /// The connection that the put uses from its first to its last step.
    line: u64,
    /// An answer is expected.
    waits: bool,
}

/// Pages that a put reserves together.
#[derive(Default)]
pub struct Window {
    pub id: u64,
    names: Vec<Name>,
    /// The owner's number for it.
    number: Option<u64>,
    core: Option<ReservationId>,
    grants: Vec<Grant>,
    versions: Vec<Option<VersionId>>,
    submitted: bool,
    committed: bool,
    told: bool,
    outstanding: usize,
    landed: Vec<(u32, bool)>,
}

pub struct Get {
    namespace: usize,
    names: Vec<Name>,
    pub line: Option<u64>,
    pages: Vec<(Name, Located)>,
    read: usize,
    findings: Vec<(Name, Located, Finding)>,
    /// Steps for which it does nothing.
    hold: usize,
    /// Its pins have not been taken back.
    pub is_kept: bool,
}

impl Window {
    /// A write has ended.
    pub fn landed(&mut self, asks: &[usize], good: bool) {
        self.outstanding -= 1;
        self.landed
            .extend(asks.iter().map(|ask| (*ask as u32, good)));
    }
}

impl Put {
    fn is_landed(&self) -> bool {
        self.windows.iter().all(|window| window.outstanding == 0)
    }
}

impl Task {
    /// The connection on which the task waits for an answer, or which it occupies.
    pub fn line(&self) -> Option<u64> {
        match self {
            Task::Ask(line) => Some(*line),
            Task::Put(put) => Some(put.line),
            Task::Get(get) => get.line,
        }
    }
}

impl Company {
    pub fn begin(&mut self, world: &mut World, slot: usize, at: usize) {
        let attachment = self.clients[slot].attachment();
        let (may_put, is_hasty) = (attachment.may_put, attachment.is_hasty);
        if !may_put && !is_hasty {
            return;
        }
        if world.fault(self.odds.astray) {
            self.go_astray(world, slot);
        }
        let what = world.dice.below(100);
        let (namespace, names) = match what {
            0..45 => {
                let count = 1 + world.dice.below(world.setup.batch);
                world.draw_names(count)
            }
            _ => world.draw_names(16),
        };
        let keys: Vec<_> = names
            .iter()
            .map(|name| world.oracle.name(*name).key)
            .collect();
        let keys = blob(&keys).to_vec();
        let number = self.slots[namespace].0;
        let task = match what {
            0..45 => {
                if !may_put {
                    world.count(Class::HastyPut);
                }
                self.idle_line(world, slot).map(|line| {
                    let count = 1 + world.dice.below(names.len().min(WINDOWS_MAX));
                    let windows = names.chunks(names.len().div_ceil(count));
                    let mut put = Put {
                        namespace,
                        rest: windows.rev().map(<[Name]>::to_vec).collect(),
                        windows: Vec::new(),
                        line,
                        waits: false,
                    };
                    self.reserve(world, slot, &mut put);
                    Task::Put(put)
                })
            }
            45..75 => {
                let pin = Request::Pin {
                    namespace: number,
                    keys: &keys,
                };
                let hold = if world.dice.chance(0.3) {
                    world.dice.below(40)
                } else {
                    0
                };
                self.ask(world, slot, &pin).map(|line| {
                    Task::Get(Get {
                        namespace,
                        names,
                        line: Some(line),
                        pages: Vec::new(),
                        read: 0,
                        findings: Vec::new(),
                        hold,
                        is_kept: true,
                    })
                })
            }
            _ => {
                let namespace = number;
                let request = match what {
                    75..80 => Request::LongestPrefix {
                        namespace,
                        keys: &keys,
                    },
                    80..84 => Request::Contains {
                        namespace,
                        keys: &keys,
                    },
                    84..88 => Request::Delete {
                        namespace,
                        keys: &keys[..keys.len().min(64)],
                    },
                    88..92 => Request::Flush,
                    92..94 => Request::Room,
                    94 => Request::Clear { namespace },
                    95..97 => Request::WaitForRoom {
                        seen: 0,
                        patience_ms: 10,
                    },
                    _ => {
                        let touch = Request::Touch {
                            namespace,
                            keys: &keys,
                        };
                        self.tell(world, slot, &touch);
                        return;
                    }
                };
                self.ask(world, slot, &request).map(Task::Ask)
            }
        };
        self.clients[slot].tasks[at] = task;
    }

    /// Sends a message about a finished put, or about a put that a previous owner granted.
    fn go_astray(&mut self, world: &mut World, slot: usize) {
        let client = &mut self.clients[slot];
        let ended = client.attachment().ended.clone();
        let number = if ended.is_empty() || world.dice.chance(0.7) {
            // Numbers of an epoch begin above all numbers of earlier epochs.
            world.dice.below(40) as u64
        } else {
            world.dice.pick(&ended)
        };
        world.count(Class::AstrayMessage);
        let reservation = number;
        let request = if world.dice.chance(0.5) {
            Request::Landed {
                puts: vec![LandedPut {
                    reservation,
                    pages: (0..4).map(|at| (at, true)).collect(),
                }],
            }
        } else {
            Request::Commit {
                reservation,
                checksums: vec![None; 4],
            }
        };
        self.tell(world, slot, &request);
    }

    pub fn go_on_putting(&mut self, world: &mut World, slot: usize, at: usize, mut put: Put) {
        let is_lost = self.clients[slot].attachment().is_lost;
        if is_lost {
            // The call ends when the device has released its memory.
            if !put.is_landed() {
                self.clients[slot].tasks[at] = Some(Task::Put(put));
            }
            return;
        }
        if !put.waits {
            let may_tell = put.rest.is_empty() || world.dice.chance(0.5);
            let mut windows = std::mem::take(&mut put.windows);
            let did = windows
                .iter_mut()
                .any(|window| self.go_on_with(world, slot, put.line, window, may_tell));
            put.windows = windows;
            if !did && !put.rest.is_empty() {
                self.reserve(world, slot, &mut put);
            } else if !did && put.is_landed() {
                let reservations = put.windows.iter().filter_map(|window| window.number);
                let wait = Request::Wait {
                    reservations: reservations.collect(),
                };
                put.waits = self.send(world, slot, put.line, &wait);
            }
        }
        self.clients[slot].tasks[at] = Some(Task::Put(put));
    }

    /// Requests the extents of a put's next window.
    fn reserve(&mut self, world: &mut World, slot: usize, put: &mut Put) {
        let names = put.rest.pop().expect("a window to reserve");
        let asks = world.draw_asks(&names);
        let links = asks
            .iter()
            .map(|ask| (ask.parent.map(|parent| *parent.as_bytes()), ask.depth));
        let keys: Vec<_> = asks.iter().map(|ask| ask.key).collect();
        let reserve = Request::Reserve {
            namespace: self.slots[put.namespace].0,
            keys: blob(&keys),
            links: links.collect(),
        };
        put.waits = self.send(world, slot, put.line, &reserve);
        self.next_task += 1;
        put.windows.push(Window {
            id: self.next_task,
            names,
            ..Window::default()
        });
    }

    /// The next step of a window, if it can take one.
    fn go_on_with(
        &mut self,
        world: &mut World,
        slot: usize,
        line: u64,
        window: &mut Window,
        may_tell: bool,
    ) -> bool {
        let Some(reservation) = window.number else {
            return false;
        };
        if !window.submitted {
            window.submitted = true;
            self.submit(world, slot, window);
        } else if !window.committed {
            window.committed = true;
            let checksum = |version: VersionId| world.oracle.version(version).checksum;
            let checksums = window.versions.iter().map(|version| version.map(checksum));
            let commit = Request::Commit {
                reservation,
                checksums: checksums.collect(),
            };
            self.send(world, slot, line, &commit);
        } else if window.outstanding == 0 && !window.told && may_tell {
            window.told = true;
            let landed = Request::Landed {
                puts: vec![LandedPut {
                    reservation,
                    pages: std::mem::take(&mut window.landed),
                }],
            };
            self.send(world, slot, line, &landed);
        } else {
            return false;
        }
        true
    }

    /// Starts the writes of the granted pages.
    fn submit(&mut self, world: &mut World, slot: usize, window: &mut Window) {
        let client = self.clients[slot].attachment().id;
        for write in world.writes_of(&window.grants, &window.versions) {
            window.outstanding += 1;
            let due = world.moment + world.draw_delay();
            world.foreign.push(ForeignWrite {
                client,
                task: window.id,
                write,
                due,
                is_orphan: false,
            });
        }
    }

    pub fn go_on_getting(
        &mut self,
        world: &mut World,
        live: Option<&mut Live>,
        slot: usize,
        at: usize,
        mut get: Get,
    ) {
        let attachment = self.clients[slot].attachment();
        let (id, is_lost) = (attachment.id, attachment.is_lost);
        if get.line.is_some() {
            // Without an answer every page is a miss.
            if !is_lost {
                self.clients[slot].tasks[at] = Some(Task::Get(get));
            }
            return;
        }
        if get.hold > 0 && !world.calm {
            get.hold -= 1;
        } else if let Some((name, located)) = get.pages.get(get.read).copied() {
            get.read += 1;
            let finding = self.read(world, id, get.is_kept, name, &located);
            if finding != Finding::Good || located.unproven {
                get.findings.push((name, located, finding));
            }
        } else if is_lost {
            return;
        } else if !get.findings.is_empty() {
            if self.tell_findings(world, slot, &get) {
                get.findings.clear();
            }
        } else {
            let segments: Vec<SegmentId> = get
                .pages
                .iter()
                .map(|(_, located)| located.place.segment)
                .collect();
            let unpin = Request::Unpin {
                segments: segments.clone(),
            };
            if self.tell(world, slot, &unpin) {
                if get.is_kept {
                    self.stop_reading(live, id, Some(&segments));
                }
                return;
            }
        }
        self.clients[slot].tasks[at] = Some(Task::Get(get));
    }

    fn tell_findings(&mut self, world: &mut World, slot: usize, get: &Get) -> bool {
        let key = |name: &Name| world.oracle.name(*name).key;
        let keys: Vec<_> = get.findings.iter().map(|(name, ..)| key(name)).collect();
        let findings = get.findings.iter();
        let verified = Request::Verified {
            namespace: self.slots[get.namespace].0,
            keys: blob(&keys),
            findings: findings
                .map(|(_, located, finding)| (located.place, *finding))
                .collect(),
        };
        self.tell(world, slot, &verified)
    }

    /// Reads a page and verifies it. If the owner no longer keeps the page pinned for this client,
    /// its blocks may have been reused.
    fn read(
        &self,
        world: &mut World,
        id: ClientId,
        is_kept: bool,
        name: Name,
        located: &Located,
    ) -> Finding {
        let (volume, start) = world.address(located.place);
        let version = world.oracle.find(name, located.checksum);
        let version = version.expect("a page was found with a checksum that was never put");
        let count = world.oracle.version(version).blocks as usize;
        let (misdirected, from) = world.read_from(volume, start, count);
        let outcome = world.disk.read(volume, from, count);
        let is_there = self.office.as_ref().is_some_and(|office| {
            let session = office.sessions.get(&id);
            session.is_some_and(|session| !session.ledger.is_gone())
        });
        let is_kept = is_kept && is_there;
        if let Ok(blocks) = &outcome
            && !is_kept
        {
            let is_right = world.oracle.is_payload(version, blocks);
            assert!(
                is_right || !planted!(StaleExtent),
                "{version:?} of {name:?} is returned with wrong bytes"
            );
            if !is_right {
                world.count(Class::StaleExtent);
            }
        }
        world.judge(name, located, &outcome, misdirected || !is_kept)
    }

    // ---- answers

    /// A client reads an answer.
    pub fn hear_reply(&mut self, world: &mut World, number: u64) {
        let line = self.lines.get_mut(&number).expect("a line");
        let id = line.client;
        let Some(message) = line.down.pop_front() else {
            return;
        };
        let bytes = message.bytes();
        let reply: Reply = parse(&bytes).expect("a reply that was sent");
        let of = |client: &Client| client.id() == Some(id);
        let slot = self
            .clients
            .iter()
            .position(of)
            .expect("a client of the connection");
        if matches!(reply, Reply::Failed(Failure::Protocol(_))) {
            panic!("{id:?} gets a protocol error: {reply:?}");
        }
        let attachment = self.clients[slot].attachment();
        if attachment.marking == Some(number) {
            attachment.marking = None;
            attachment.may_put = true;
            return;
        }
        let waits = |task: &Option<Task>| task.as_ref().and_then(Task::line) == Some(number);
        let at = self.clients[slot].tasks.iter().position(waits);
        let at = at.expect("an answer that no task waits for");
        match (self.clients[slot].tasks[at].take(), reply) {
            (Some(Task::Put(put)), reply) => {
                let put = self.hear_put(world, slot, put, reply, message.note);
                self.clients[slot].tasks[at] = put.map(Task::Put);
            }
            (Some(Task::Get(mut get)), Reply::Pinned(pages)) => {
                get.line = None;
                let found = get.names.iter().zip(pages);
                get.pages = found
                    .filter_map(|(name, page)| {
                        let page = page?;
                        let located = Located {
                            place: page.place,
                            checksum: page.checksum,
                            unproven: page.unproven,
                        };
                        Some((*name, located))
                    })
                    .collect();
                world.totals.misses += (get.names.len() - get.pages.len()) as u64;
                self.clients[slot].tasks[at] = (!get.pages.is_empty()).then_some(Task::Get(get));
            }
            (Some(Task::Ask(_)), _) => {}
            (_, reply) => panic!("{id:?} gets the wrong answer {reply:?}"),
        }
    }

    fn hear_put(
        &mut self,
        world: &mut World,
        slot: usize,
        mut put: Put,
        reply: Reply,
        note: Option<Note>,
    ) -> Option<Put> {
        put.waits = false;
        match (reply, note) {
            (
                Reply::Reserved {
                    reservation,
                    grants,
                },
                note,
            ) => {
                let map = map_of(world);
                let window = put.windows.last_mut().expect("a window was requested");
                window.number = Some(reservation);
                let grants = grants.into_iter().map(|grant| match grant {
                    PlaceGrant::Write(place) => Grant::Write(map.extent(place)),
                    PlaceGrant::Settles => Grant::Settles,
                    PlaceGrant::Refused(why) => Grant::Refused(why),
                });
                window.grants = grants.collect();
                window.versions = vec![None; window.grants.len()];
                if let Some(Note::Reserved(core, versions)) = note {
                    window.core = Some(core);
                    window.versions = versions;
                }
                let is_refused = |grant: &Grant| matches!(grant, Grant::Refused(_));
                if window.grants.iter().any(is_refused) {
                    put.rest.clear();
                }
                Some(put)
            }
            (Reply::Settled(statuses), note) => {
                let pages: usize = put.windows.iter().map(|window| window.names.len()).sum();
                assert_eq!(statuses.len(), pages, "not one status for each page");
                if let Some(Note::Settled(settled)) = note {
                    let cores = put.windows.iter().filter_map(|window| window.core);
                    let cores: Vec<_> = cores.collect();
                    assert_eq!(cores, settled, "a client gets the statuses of another put");
                }
                let numbers = put.windows.iter().filter_map(|window| window.number);
                self.clients[slot].attachment().ended.extend(numbers);
                None
            }
            (reply, _) => panic!("a put gets the wrong answer {reply:?}"),
        }
    }
}
