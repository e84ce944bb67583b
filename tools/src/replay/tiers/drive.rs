//! One run of a trace through servers, in virtual time.
//!
//! Requests arrive at the trace's times, divided by `--rate`. Each goes to the server with the
//! fewest tokens still to be answered. Distribution by hash would keep the turns of a conversation
//! on one server. But the trace names no conversations, and all its requests begin with the same
//! block, so there is nothing to hash. Distribution by load is also the harder case for L1 and L2,
//! and the use case of an L3 below all servers.

use indicatif::ProgressBar;

use super::machine::{Event, Machine, nanos};
use super::outcome::Served;
use super::server::{Build, Server};
use super::shared::Nanos;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::trace::{Request, TraceError};

/// The result of a run.
pub struct Run {
    /// All servers together.
    pub served: Served,
    /// From the first arrival to the last.
    pub span: Nanos,
    /// Time during which the disk was busy.
    pub disk_busy: Nanos,
    /// The end of all work.
    pub ended: Nanos,
}

/// The requests to come.
struct Arrivals<I> {
    requests: I,
    rate: f64,
    /// Milliseconds of the first.
    origin: Option<f64>,
    /// Arrival of the newest.
    newest: Nanos,
    count: u64,
}

impl<I: Iterator<Item = Result<Request, TraceError>>> Arrivals<I> {
    fn next(&mut self) -> Result<Option<(Nanos, Request)>, Failure> {
        let Some(request) = self.requests.next().transpose()? else {
            return Ok(None);
        };
        self.count += 1;
        let timestamp = request.timestamp.filter(|time| time.is_finite());
        let timestamp = timestamp.ok_or_else(|| {
            Failure::usage(format!(
                "request {} of the trace has no timestamp, without which it cannot be replayed \
                 through tiers; replay it \
                 against the store alone with `larder replay store`",
                self.count
            ))
        })?;
        let since = timestamp - *self.origin.get_or_insert(timestamp);
        // A request dated back arrives when it is read.
        self.newest = self.newest.max(nanos((since / 1e3 / self.rate).max(0.0)));
        Ok(Some((self.newest, request)))
    }
}

/// Serves all requests, or serves until the operator asks for an end.
///
/// # Errors
/// The trace cannot be read, there is no memory, or a device or cache is broken.
pub fn run(
    requests: impl Iterator<Item = Result<Request, TraceError>>,
    rate: f64,
    servers: (usize, &Build<'_>),
    machine: &Machine,
    watch: (&Interrupt, &ProgressBar),
) -> Result<Run, Failure> {
    let (count, build) = servers;
    let (interrupt, bar) = watch;
    let mut servers = (0..count)
        .map(|number| Server::new(number, machine, build))
        .collect::<Result<Vec<_>, _>>()?;
    let mut arrivals = Arrivals {
        requests,
        rate,
        origin: None,
        newest: 0,
        count: 0,
    };
    let mut coming = arrivals.next()?;
    loop {
        let until = coming.as_ref().map_or(Nanos::MAX, |(at, _)| *at);
        let number = if let Some(event) = machine.next(until) {
            happened(&mut servers, event)
        } else if let Some((at, request)) = coming.take() {
            machine.advance(at);
            let number = least_loaded(&servers);
            servers[number].arrive(request)?;
            bar.inc(1);
            if !interrupt.is_raised() {
                coming = arrivals.next()?;
            }
            number
        } else {
            break;
        };
        let server = &mut servers[number];
        server.settle()?;
        server.look()?;
        server.settle()?;
    }
    let left: usize = servers.iter().map(Server::backlog).sum();
    if left > 0 {
        return Err(Failure::environment(format!(
            "{left} tokens wait and nothing is under way: a defect of the replay; please report it \
             with its command line"
        )));
    }
    let ended = machine.now();
    let mut served = Served::default();
    for server in servers {
        server.close(&mut served);
    }
    Ok(Run {
        served,
        span: arrivals.newest,
        disk_busy: machine.disk_busy(),
        ended,
    })
}

/// Passes an event to its server.
fn happened(servers: &mut [Server], event: Event) -> usize {
    match event {
        Event::PrefillEnds(number) => {
            servers[number].prefill_ended();
            number
        }
        Event::OrderEnds(number, _) | Event::Wake(number) => number,
    }
}

fn least_loaded(servers: &[Server]) -> usize {
    let loads = servers.iter().map(Server::backlog).enumerate();
    let least = loads.min_by_key(|(_, backlog)| *backlog);
    least.map_or(0, |(number, _)| number)
}
