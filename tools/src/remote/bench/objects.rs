//! The objects of a measurement, and a client of them.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use larder_base::random::random_bytes;
use larder_remote::agent::{Admission, Agent, AgentOptions, PUBLICATIONS};
use larder_remote::s3::{MARK, S3};
use larder_remote::{Listed, Place, Remote, Trust, Unreadable};

use super::pairs::{Sample, Stop};
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::remote::place::{PlaceArgs, TrustArgs};
use crate::workload::Words;

/// Longest time of a measured step.
pub(super) const STEP_MAX: Duration = Duration::from_mins(10);

/// The place of the objects, and a client of it.
pub struct Objects {
    pub(super) client: S3,
    place: Place,
    pub(super) trust: Trust,
    timeout: Duration,
    run_bytes: u64,
    runs: u64,
    /// Fetches at once, by all ways.
    pub(super) connections: usize,
    /// Rounds whose objects of the client alone may be there.
    rounds: AtomicU32,
    pub(super) interrupt: Interrupt,
}

impl Objects {
    /// Runs of so many bytes, below a name of its own within the remote.
    pub fn new(
        (at, trust): (&PlaceArgs, &TrustArgs),
        connections: usize,
        (runs, run_bytes): (u64, u64),
        interrupt: &Interrupt,
    ) -> Result<Objects, Failure> {
        let unique: [u8; 8] = random_bytes()
            .map_err(|error| Failure::environment(format!("random bytes: {error}")))?;
        let unique = u64::from_le_bytes(unique);
        let url = at.url.trim_end_matches('/');
        let place = Place {
            url: format!("{url}/bench-{unique:016x}"),
            endpoint: at.endpoint.clone(),
            ca_file: at.ca_file.clone(),
            retries: 0,
            parts: 8,
        };
        let (client, trust) = (place.bucket()?, trust.load()?);
        client.mark(Instant::now() + at.timeout)?;
        Ok(Objects {
            client,
            place,
            trust,
            timeout: at.timeout,
            run_bytes,
            runs,
            connections,
            rounds: AtomicU32::new(0),
            interrupt: interrupt.clone(),
        })
    }

    /// The names of a round's objects of the client alone.
    fn names(&self, round: u32) -> Vec<String> {
        let name = |run| format!("alone/{round}-{run}");
        (0..self.runs).map(name).collect()
    }

    /// Puts the objects of a round by the client alone. Their bytes are of the kind that pages
    /// have: a server may compress others, and write less.
    pub fn put_alone(&self, round: u32) -> Result<Sample, Stop> {
        let bytes = usize::try_from(self.run_bytes).unwrap_or(usize::MAX);
        let mut content = vec![0; bytes];
        Words::named([u64::from(round), u64::MAX, 0, 0]).fill(&mut content);
        self.rounds.store(round + 1, Ordering::Relaxed);
        Sample::of(self.bytes(), || {
            let (until, names) = (Instant::now() + STEP_MAX, self.names(round));
            let put =
                self.client
                    .put_alone(&names, content, PUBLICATIONS, until, self.is_stopped())?;
            put.ok_or(Stop::Interrupted)
        })
    }

    /// Gets the objects of a round by the client alone.
    pub fn get_alone(&self, round: u32) -> Result<Sample, Stop> {
        let (until, names) = (Instant::now() + STEP_MAX, self.names(round));
        Sample::of(self.bytes(), || {
            let got = self
                .client
                .get_alone(&names, self.connections, until, self.is_stopped())?;
            match got.ok_or(Stop::Interrupted)? {
                got if got == self.bytes() => Ok(()),
                got => {
                    let reason = format!("the server returned {got} bytes");
                    Err(Failure::environment(reason).into())
                }
            }
        })
    }

    fn is_stopped(&self) -> impl Fn() -> bool + Send + Sync + 'static {
        let interrupt = self.interrupt.clone();
        move || interrupt.is_raised()
    }

    /// Bytes of a round.
    fn bytes(&self) -> u64 {
        self.run_bytes * self.runs
    }

    /// Removes all of them.
    pub fn remove(&self) -> Result<(), Failure> {
        let until = || Instant::now() + self.timeout;
        for round in 0..self.rounds.load(Ordering::Relaxed) {
            self.client.remove_alone(&self.names(round), until())?;
        }
        let mut runs = Vec::new();
        let mut each = |object: Result<Listed, Unreadable>| {
            runs.extend(object.map(|object| object.run));
            ControlFlow::Continue(())
        };
        let mut part = || ControlFlow::Continue(());
        self.client.list(None, &mut part, &mut each, self.timeout)?;
        for run in runs {
            self.client.remove(&run, until())?;
        }
        Ok(self.client.remove_alone(&[MARK.to_owned()], until())?)
    }

    /// An agent without limits, and with this budget.
    pub fn agent(&self, run_tokens: u32, bytes_per_day: u64) -> Result<Arc<Agent>, Failure> {
        let options = AgentOptions {
            place: self.place.url.clone(),
            trust: self.trust.clone(),
            run_tokens,
            admission: Admission::SecondTouch,
            bytes_per_day,
            bytes_per_second: u64::MAX,
            requests_per_hour: u64::MAX,
            connections: self.connections,
            patience: STEP_MAX,
            timeout: self.timeout,
            prefill_rate: None,
            pause: Duration::from_secs(5),
            refresh: Duration::from_hours(24),
            delay: Duration::ZERO,
        };
        Ok(Agent::new(self.place.connect()?, options))
    }
}
