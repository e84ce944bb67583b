//! Virtual time: the clock, the disk that all servers share, and each server's link; the duration
//! of a cache's orders there.
//!
//! A cache performs its orders at once, with few bytes. It processes their ends when they have
//! ended here, where pages have their full size. Queues are those of the cache: it starts lookups
//! at once, reads [`READERS`] batches and writes one at a time. Its device copies loads and backups
//! one after the other, each in its own direction. The disk is shared by all transfers of the same
//! moment.
//!
//! Invariants: the clock never goes back. Events of the same moment occur in the order of planning,
//! so that every run is the same as far as the store's answers are.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use larder_tiers::cache::{READERS, Time};
use larder_tiers::core::{OpId, Order};

use super::shared::{Nanos, SharedDisk};
use crate::model::Load;

/// Nanoseconds of a second.
pub const SECOND: f64 = 1e9;

/// Time to start a copy, once a layer of a load: a few merged copies given to a stream.
const LAUNCH_NS: Nanos = 10_000;

/// The number of a server.
pub type ServerNumber = usize;

/// Speeds at full size.
#[derive(Clone, Copy, Debug)]
pub struct Speeds {
    /// Bytes of a page.
    pub page_bytes: u64,
    /// Layers of the model.
    pub layers: u32,
    /// Bytes per second of disk reads, and additional nanoseconds for each read.
    pub read: (f64, Nanos),
    /// The same for writes.
    pub write: (f64, Nanos),
    /// Bytes a second of a server's link, each way.
    pub link: f64,
}

impl Speeds {
    fn nanos(&self, pages: u32, bytes_per_second: f64) -> Nanos {
        bytes_nanos(u64::from(pages) * self.page_bytes, bytes_per_second)
    }
}

/// A time in seconds, as virtual nanoseconds.
pub fn nanos(seconds: f64) -> Nanos {
    (seconds * SECOND).ceil() as Nanos
}

/// How long it takes to move so many bytes.
pub fn bytes_nanos(bytes: u64, bytes_per_second: f64) -> Nanos {
    nanos(bytes as f64 / bytes_per_second)
}

/// An event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Event {
    /// An order of a server's cache has ended.
    OrderEnds(ServerNumber, OpId),
    /// A server has completed its prefill.
    PrefillEnds(ServerNumber),
    /// A server checks its queue again.
    Wake(ServerNumber),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Planned {
    Told(Event),
    /// A transfer ends on the disk, unless another has begun since.
    DiskEnds {
        plan: u64,
    },
}

#[derive(Clone, Copy)]
enum Line {
    Read,
    Write,
}

/// An order whose end the cache has not yet processed.
struct Flight {
    line: Option<Line>,
    /// When it was begun.
    begun: Nanos,
    /// The device or L3 has finished it.
    is_done: bool,
    /// It has ended here.
    is_over: bool,
}

/// Orders that wait for a place in a queue, and the number of places taken.
#[derive(Default)]
struct Waiting {
    taken: usize,
    orders: VecDeque<(OpId, Nanos)>,
}

#[derive(Default)]
struct Server {
    flights: HashMap<OpId, Flight>,
    reads: Waiting,
    writes: Waiting,
    /// When the link becomes free, to and from the device.
    up_free: Nanos,
    down_free: Nanos,
    loads: HashMap<OpId, Load>,
}

struct State {
    now: Nanos,
    planned: BinaryHeap<Reverse<(Nanos, u64, Planned)>>,
    plans: u64,
    disk: SharedDisk<(ServerNumber, OpId, Nanos)>,
    disk_plan: u64,
    servers: Vec<Server>,
    speeds: Speeds,
}

/// See the module. Clones share one state.
#[derive(Clone)]
pub struct Machine(Arc<Mutex<State>>);

impl Machine {
    /// A machine for this many servers, at time zero.
    pub fn new(servers: usize, speeds: Speeds) -> Machine {
        Machine(Arc::new(Mutex::new(State {
            now: 0,
            planned: BinaryHeap::new(),
            plans: 0,
            disk: SharedDisk::new(),
            disk_plan: 0,
            servers: std::iter::repeat_with(Server::default)
                .take(servers)
                .collect(),
            speeds,
        })))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The time of a server's cache.
    pub fn time_of(&self, server: ServerNumber) -> Box<dyn Time> {
        Box::new(ServerTime {
            machine: self.clone(),
            server,
        })
    }

    /// The current time.
    pub fn now(&self) -> Nanos {
        self.state().now
    }

    /// Plans an event.
    pub fn plan(&self, at: Nanos, event: Event) {
        self.state().plan(at, Planned::Told(event));
    }

    /// The next event, if it is at `until` at the latest. The clock advances to it.
    pub fn next(&self, until: Nanos) -> Option<Event> {
        let mut state = self.state();
        while let Some(Reverse((at, _, planned))) = state.planned.peek().copied() {
            if at > until {
                break;
            }
            state.planned.pop();
            state.now = at;
            match planned {
                Planned::Told(event) => {
                    if let Event::OrderEnds(server, id) = event {
                        state.order_ends(server, id);
                    }
                    return Some(event);
                }
                Planned::DiskEnds { plan } if plan == state.disk_plan => state.disk_ends(),
                Planned::DiskEnds { .. } => {}
            }
        }
        None
    }

    /// Advances the clock to `at`. Nothing occurs before.
    pub fn advance(&self, at: Nanos) {
        let mut state = self.state();
        state.now = state.now.max(at);
    }

    /// Whether the device and L3 have finished all orders of a server's cache.
    pub fn is_settled(&self, server: ServerNumber) -> bool {
        let state = self.state();
        state.servers[server]
            .flights
            .values()
            .all(|flight| flight.is_done)
    }

    /// The schedule of a load that was not requested before.
    pub fn take_load(&self, server: ServerNumber, id: OpId) -> Option<Load> {
        self.state().servers[server].loads.remove(&id)
    }

    /// Time during which the disk was busy.
    pub fn disk_busy(&self) -> Nanos {
        self.state().disk.busy()
    }
}

impl State {
    fn plan(&mut self, at: Nanos, planned: Planned) {
        self.plans += 1;
        let entry = (at.max(self.now), self.plans, planned);
        self.planned.push(Reverse(entry));
    }

    fn order_ends(&mut self, server: ServerNumber, id: OpId) {
        let Some(flight) = self.servers[server].flights.get_mut(&id) else {
            return;
        };
        flight.is_over = true;
        if let Some(line) = flight.line {
            self.waiting(server, line).taken -= 1;
            self.begin_waiting(server, line);
        }
    }

    fn waiting(&mut self, server: ServerNumber, line: Line) -> &mut Waiting {
        let server = &mut self.servers[server];
        match line {
            Line::Read => &mut server.reads,
            Line::Write => &mut server.writes,
        }
    }

    /// Passes orders with a place in their queue to the disk.
    fn begin_waiting(&mut self, server: ServerNumber, line: Line) {
        let (places, latency) = match line {
            Line::Read => (READERS, self.speeds.read.1),
            Line::Write => (1, self.speeds.write.1),
        };
        let now = self.now;
        let waiting = self.waiting(server, line);
        let mut begun = Vec::new();
        while waiting.taken < places
            && let Some(order) = waiting.orders.pop_front()
        {
            waiting.taken += 1;
            begun.push(order);
        }
        for (id, service) in begun {
            if let Some(flight) = self.servers[server].flights.get_mut(&id) {
                flight.begun = now;
            }
            self.disk.begin(now, service, (server, id, latency));
        }
        self.plan_disk();
    }

    fn plan_disk(&mut self) {
        self.disk_plan += 1;
        let plan = self.disk_plan;
        if let Some(at) = self.disk.next_end() {
            self.plan(at, Planned::DiskEnds { plan });
        }
    }

    fn disk_ends(&mut self) {
        if let Some((server, id, latency)) = self.disk.end(self.now) {
            self.plan(
                self.now + latency,
                Planned::Told(Event::OrderEnds(server, id)),
            );
        }
        self.plan_disk();
    }

    fn begin(&mut self, number: ServerNumber, order: &Order) {
        let (now, speeds) = (self.now, self.speeds);
        let server = &mut self.servers[number];
        let (id, line, end) = match order {
            Order::BackUp { id, l1, .. } => {
                let from = server.down_free.max(now) + LAUNCH_NS;
                server.down_free = from + speeds.nanos(l1.pages(), speeds.link);
                (*id, None, server.down_free)
            }
            Order::Load { id, l2, .. } => {
                let from = server.up_free.max(now);
                let all = speeds.nanos(l2.pages(), speeds.link);
                let layer = LAUNCH_NS + all.div_ceil(u64::from(speeds.layers));
                server.loads.insert(*id, Load { from, layer });
                server.up_free = from + layer * u64::from(speeds.layers);
                (*id, None, server.up_free)
            }
            Order::Get { id, l2, .. } => {
                let service = speeds.nanos(l2.pages(), speeds.read.0);
                server.reads.orders.push_back((*id, service));
                (*id, Some(Line::Read), 0)
            }
            // A lookup takes microseconds. With that time counted, short prompts would overtake
            // long ones of the same moment.
            Order::Exists { id, .. }
            | Order::Put {
                id,
                is_skipped: true,
                ..
            } => (*id, None, now),
            Order::Put { id, l2, .. } => {
                let service = speeds.nanos(l2.pages(), speeds.write.0);
                server.writes.orders.push_back((*id, service));
                (*id, Some(Line::Write), 0)
            }
            // A replayed model has no windows and no states.
            Order::BackUpTails { id, .. }
            | Order::GetTails { id, .. }
            | Order::PutTail { id, .. } => (*id, None, now),
            Order::Touch { .. } | Order::TouchTails { .. } => return,
        };
        let flight = Flight {
            line,
            begun: now,
            is_done: false,
            is_over: false,
        };
        server.flights.insert(id, flight);
        match line {
            Some(line) => self.begin_waiting(number, line),
            None => self.plan(end, Planned::Told(Event::OrderEnds(number, id))),
        }
    }
}

/// Time as the cache of one server knows it.
struct ServerTime {
    machine: Machine,
    server: ServerNumber,
}

impl Time for ServerTime {
    fn now_us(&mut self) -> u64 {
        self.machine.now() / 1000
    }

    fn begun(&mut self, order: &Order) {
        self.machine.state().begin(self.server, order);
    }

    fn read_us(&mut self, id: OpId, _measured: u64) -> u64 {
        let state = self.machine.state();
        let flight = state.servers[self.server].flights.get(&id);
        flight.map_or(0, |flight| (state.now - flight.begun) / 1000)
    }

    fn is_over(&mut self, id: OpId) -> bool {
        let mut state = self.machine.state();
        let flights = &mut state.servers[self.server].flights;
        let Some(flight) = flights.get_mut(&id) else {
            return true;
        };
        flight.is_done = true;
        let is_over = flight.is_over;
        if is_over {
            flights.remove(&id);
        }
        is_over
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use larder_tiers::runs::{L2, Runs};

    use super::*;

    fn pages(count: u32) -> Runs<L2> {
        Runs::of_pages(&(1..=count).collect::<Vec<_>>())
    }

    fn speeds() -> Speeds {
        Speeds {
            page_bytes: 1_000_000,
            layers: 10,
            read: (1e9, 5),
            write: (5e8, 7),
            link: 1e10,
        }
    }

    fn get(number: u32, count: u32) -> Order {
        Order::Get {
            id: OpId(number),
            keys: Vec::new(),
            l2: pages(count),
        }
    }

    fn events(machine: &Machine) -> Vec<(Nanos, Event)> {
        let next = || {
            let event = machine.next(Nanos::MAX)?;
            Some((machine.now(), event))
        };
        std::iter::from_fn(next).collect()
    }

    #[test]
    fn reads_of_two_servers_share_the_disk_and_end_after_its_latency() {
        let machine = Machine::new(2, speeds());
        for server in 0..2 {
            machine.time_of(server).begun(&get(3, 1));
        }
        assert_eq!(
            events(&machine),
            [
                (2_000_005, Event::OrderEnds(0, OpId(3))),
                (2_000_005, Event::OrderEnds(1, OpId(3)))
            ]
        );
        assert_eq!(machine.disk_busy(), 2_000_000);
    }

    #[test]
    fn a_cache_reads_no_more_batches_at_once_than_it_has_threads() {
        let machine = Machine::new(1, speeds());
        let mut time = machine.time_of(0);
        for number in 0..=u32::try_from(READERS).unwrap() {
            time.begun(&get(number, 1));
        }
        let ends: Vec<Nanos> = events(&machine).iter().map(|(at, _)| *at).collect();
        // Four share the disk. The fifth has it alone when the first has been answered.
        let together = u64::try_from(READERS).unwrap() * 1_000_000 + 5;
        assert_eq!(ends[..READERS], vec![together; READERS]);
        assert_eq!(ends[READERS], together + 1_000_000 + 5);
    }

    #[test]
    fn a_load_goes_layer_by_layer_behind_the_load_before_it() {
        let machine = Machine::new(1, speeds());
        let mut time = machine.time_of(0);
        let load = |number| Order::Load {
            id: OpId(number),
            l2: pages(10),
            l1: Runs::default(),
            tails: Vec::new(),
            after: larder_tiers::core::Fence::default(),
        };
        time.begun(&load(1));
        time.begun(&load(2));
        let layer = 100_000 + LAUNCH_NS;
        let loads = [1, 2].map(|number| machine.take_load(0, OpId(number)).unwrap());
        assert_eq!(loads[0], Load { from: 0, layer });
        let from = 10 * layer;
        assert_eq!(loads[1], Load { from, layer });
        let ends = events(&machine);
        assert_eq!(ends[1], (2 * from, Event::OrderEnds(0, OpId(2))));
    }

    #[test]
    fn an_order_is_over_when_it_has_ended_here_and_there() {
        let machine = Machine::new(1, speeds());
        let mut time = machine.time_of(0);
        time.begun(&get(1, 1));
        assert!(!machine.is_settled(0));
        assert!(!time.is_over(OpId(1)));
        assert!(machine.is_settled(0));
        assert_eq!(machine.next(10), None);
        machine.advance(10);
        assert!(!time.is_over(OpId(1)));
        assert!(machine.next(Nanos::MAX).is_some());
        assert!(time.is_over(OpId(1)));
    }

    #[test]
    fn what_happens_at_one_moment_happens_in_the_order_in_which_it_was_planned() {
        let machine = Machine::new(1, speeds());
        machine.plan(7, Event::PrefillEnds(0));
        machine.plan(7, Event::Wake(0));
        machine.plan(3, Event::Wake(0));
        assert_eq!(
            events(&machine),
            [
                (3, Event::Wake(0)),
                (7, Event::PrefillEnds(0)),
                (7, Event::Wake(0))
            ]
        );
    }
}
