//! Stores, agents and objects for the time of a measurement.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use larder_engine::beneath::Beneath;
use larder_engine::format::{Namespace, PageKey};
use larder_engine::random::random_bytes;
use larder_engine::{
    CreateOptions, NamespaceId, OpenOptions, PageStore, PutOptions, Store, create,
};
use larder_remote::agent::{Admission, Agent, AgentOptions, FETCHES, PUBLICATIONS};
use larder_remote::s3::S3;
use larder_remote::{Place, Remote, RunPage, Trust};

use super::BenchArgs;
use super::pairs::Sample;
use crate::failure::Failure;
use crate::usage::Meter;
use crate::workload::{self, Link, PageBuffers};

const PAGE_TOKENS: u32 = 1;

/// Longest wait of a put for space.
const PUT_WAIT: Duration = Duration::from_secs(30);

/// Longest time of a measured step.
const STEP_MAX: Duration = Duration::from_mins(10);

/// Interval at which an agent is asked for its progress: a thousandth of a step.
const LOOK: Duration = Duration::from_millis(5);

const SEGMENT_BYTES: u64 = 64 << 20;

/// Segments of a store besides those of its pages.
const SEGMENTS_FREE: u64 = 12;

/// The place of the objects, and a client of it.
pub struct Objects {
    client: S3,
    place: Place,
    trust: Trust,
    timeout: Duration,
    run_bytes: u64,
    runs: u64,
    rounds: u32,
}

impl Objects {
    /// Below a name of its own within the remote.
    pub fn new(args: &BenchArgs) -> Result<Objects, Failure> {
        let unique: [u8; 8] = random_bytes()
            .map_err(|error| Failure::environment(format!("random bytes: {error}")))?;
        let unique = u64::from_le_bytes(unique);
        let url = args.place.url.trim_end_matches('/');
        let place = Place {
            url: format!("{url}/bench-{unique:016x}"),
            endpoint: args.place.endpoint.clone(),
            ca_file: args.place.ca_file.clone(),
        };
        Ok(Objects {
            client: place.bucket()?,
            place,
            trust: args.trust.load()?,
            timeout: args.place.timeout,
            run_bytes: args.run_bytes.0,
            runs: args.runs,
            rounds: args.rounds,
        })
    }

    /// The names of a round's objects of the client alone.
    pub fn names(&self, round: u32) -> Vec<String> {
        let name = |run| format!("alone/{round}-{run}");
        (0..self.runs).map(name).collect()
    }

    pub fn put_alone(&self, names: &[String]) -> Result<Sample, Failure> {
        let bytes = usize::try_from(self.run_bytes).unwrap_or(usize::MAX);
        let content = vec![0x5a; bytes];
        Sample::of(self.bytes(), || {
            let until = Instant::now() + STEP_MAX;
            Ok(self.client.put_alone(names, content, PUBLICATIONS, until)?)
        })
    }

    pub fn get_alone(&self, names: &[String]) -> Result<Sample, Failure> {
        let until = Instant::now() + STEP_MAX;
        Sample::of(self.bytes(), || {
            let got = self.client.get_alone(names, FETCHES, until)?;
            match got == self.bytes() {
                true => Ok(()),
                false => Err(Failure::environment(format!(
                    "the server returned {got} bytes"
                ))),
            }
        })
    }

    /// Bytes of a round.
    fn bytes(&self) -> u64 {
        self.run_bytes * self.runs
    }

    /// Removes all of them.
    pub fn remove(&self) -> Result<(), Failure> {
        let until = || Instant::now() + self.timeout;
        for round in 0..self.rounds {
            self.client.remove_alone(&self.names(round), until())?;
        }
        let mut runs = Vec::new();
        let mut each = |object: larder_remote::Listed| {
            runs.push(object.run);
            ControlFlow::Continue(())
        };
        self.client.list(None, &mut each, until())?;
        for run in runs {
            self.client.remove(&run, until())?;
        }
        Ok(())
    }

    /// An agent without limits, and with this budget.
    fn agent(&self, run_tokens: u32, bytes_per_day: u64) -> Result<Arc<Agent>, Failure> {
        let options = AgentOptions {
            place: self.place.url.clone(),
            trust: self.trust.clone(),
            run_tokens,
            admission: Admission::SecondTouch,
            bytes_per_day,
            bytes_per_second: u64::MAX,
            requests_per_hour: u64::MAX,
            patience: STEP_MAX,
            timeout: self.timeout,
            prefill_rate: None,
            refresh: Duration::from_hours(24),
            delay: Duration::ZERO,
        };
        Ok(Agent::new(self.place.connect()?, options))
    }
}

/// A chain in the source store.
pub struct Chain {
    links: Vec<Link>,
}

impl Chain {
    fn keys(&self) -> Vec<PageKey> {
        self.links.iter().map(|link| link.key).collect()
    }
}

/// The stores: runs go from the first to the second.
pub struct Scratch {
    directory: tempfile::TempDir,
    source: Arc<Store>,
    namespace: Namespace,
    buffers: PageBuffers,
    /// Pages of a run.
    run_pages: u32,
    runs: u64,
    run_bytes: u64,
    seed: u64,
    /// Runs that were published.
    published: u64,
}

impl Scratch {
    pub fn new(args: &BenchArgs) -> Result<Scratch, Failure> {
        let (run_bytes, page_bytes) = (args.run_bytes.0, args.page_bytes.0);
        let run_pages = run_bytes.checked_div(page_bytes).unwrap_or(0);
        if run_pages == 0 || !run_bytes.is_multiple_of(page_bytes) {
            let reason = "--run-bytes is no multiple of --page-bytes";
            return Err(Failure::usage(reason.to_owned()));
        }
        let shape = workload::shape(args.page_bytes, 1)?;
        let namespace = workload::namespace("remote-bench", PAGE_TOKENS, shape)?;
        let directory = tempfile::tempdir_in(&args.directory).map_err(|error| {
            let directory = args.directory.display();
            Failure::environment(format!("{directory}: {error}; choose another directory"))
        })?;
        let seed: [u8; 8] = random_bytes()
            .map_err(|error| Failure::environment(format!("random bytes: {error}")))?;
        let bytes = run_bytes * args.runs * u64::from(args.rounds);
        let source = make(directory.path().join("source"), bytes)?;
        make(directory.path().join("sink"), bytes)?;
        let slots = usize::try_from(run_pages * args.runs).unwrap_or(usize::MAX);
        Ok(Scratch {
            source: Arc::new(Store::open(&source, OpenOptions::default())?),
            directory,
            namespace,
            buffers: PageBuffers::new(&shape, slots)?,
            run_pages: u32::try_from(run_pages).unwrap_or(u32::MAX),
            runs: args.runs,
            run_bytes,
            seed: u64::from_le_bytes(seed),
            published: 0,
        })
    }

    /// Puts new pages into the source store.
    pub fn put_chain(&mut self, number: u64) -> Result<Chain, Failure> {
        let pages = u64::from(self.run_pages) * self.runs;
        let keys = workload::chain_after(&[self.seed, number], pages);
        let links = workload::links(&keys);
        let id = self.source.namespace(&self.namespace)?;
        put(
            &mut self.buffers,
            &self.source,
            id,
            &links,
            &mut Meter::default(),
        )?;
        self.source.flush()?;
        Ok(Chain { links })
    }

    /// Publishes the runs of a chain.
    pub fn publish(&mut self, objects: &Objects, chain: &Chain) -> Result<Sample, Failure> {
        let agent = objects.agent(self.run_pages, u64::MAX)?;
        start(&agent, &self.source)?;
        // Its first listing, which fetches an object for the speed.
        self.wait_for_listing(&agent)?;
        let run_pages = self.run_pages as usize;
        let runs = chain.links.chunks(run_pages).map(|run| {
            let page = |link: &Link| RunPage {
                key: link.key,
                parent: link.parent,
                depth: link.depth,
            };
            run.iter().map(page).collect::<Vec<_>>()
        });
        let runs: Vec<Vec<RunPage>> = runs.collect();
        let bytes = self.run_bytes * self.runs;
        let sample = Sample::of(bytes, || {
            for run in runs {
                agent.offer(&self.namespace, run);
            }
            reach(&agent, "published_runs", self.runs)
        });
        agent.close();
        self.published += self.runs;
        sample
    }

    /// Waits until the agent knows all runs, and the speed of the remote if there are any.
    fn wait_for_listing(&self, agent: &Agent) -> Result<(), Failure> {
        reach(agent, "known_runs", self.published)?;
        match self.published {
            0 => Ok(()),
            _ => reach(agent, "speed_bytes_per_s", 1),
        }
    }

    /// Fetches the runs of a chain into the second store, and checks all bytes.
    pub fn fetch(&mut self, objects: &Objects, chain: &Chain) -> Result<Sample, Failure> {
        let agent = objects.agent(self.run_pages, u64::MAX)?;
        let options = OpenOptions::default().over(agent.clone());
        let path = self.directory.path().join("sink");
        let store = Arc::new(Store::open(&path, options)?);
        let outcome = start(&agent, &store).and_then(|()| self.fetch_into(&agent, &store, chain));
        agent.close();
        let closed = store.close();
        let sample = outcome?;
        closed?;
        Ok(sample)
    }

    fn fetch_into(
        &mut self,
        agent: &Agent,
        store: &Store,
        chain: &Chain,
    ) -> Result<Sample, Failure> {
        let id = store.namespace(&self.namespace)?;
        self.wait_for_listing(agent)?;
        let keys = chain.keys();
        let bytes = self.run_bytes * self.runs;
        let sample = Sample::of(bytes, || {
            let promised = store.longest_prefix(id, &keys);
            agent.wait(
                self.namespace.fingerprint(),
                &keys,
                Instant::now() + STEP_MAX,
            );
            match promised == keys.len() {
                true => Ok(()),
                false => Err(Failure::environment(format!(
                    "{promised} of {} pages were promised: {}",
                    keys.len(),
                    agent.report().state
                ))),
            }
        })?;
        let batch = self.run_pages as usize;
        let statuses = self
            .buffers
            .get(store, id, &keys, batch, &mut Meter::default());
        let right = |(slot, key): (usize, &PageKey)| {
            statuses[slot].is_hit() && self.buffers.holds(slot, key)
        };
        match keys.iter().enumerate().all(right) {
            true => Ok(sample),
            false => Err(Failure::environment(
                "pages that were fetched are missing or wrong; `larder remote verify` tells more"
                    .to_owned(),
            )),
        }
    }

    /// Two stores, the second over an idle agent.
    pub fn idle(&mut self, objects: &Objects, runs: u64) -> Result<Idle<'_>, Failure> {
        // Nothing is published.
        let agent = objects.agent(self.run_pages, 0)?;
        let runs = runs.min(self.runs);
        let make = |name: &str| make(self.directory.path().join(name), 4 * runs * self.run_bytes);
        let plain = Store::open(&make("plain")?, OpenOptions::default())?;
        let options = OpenOptions::default().over(agent.clone());
        let over = Arc::new(Store::open(&make("over")?, options)?);
        start(&agent, &over)?;
        self.wait_for_listing(&agent)?;
        Ok(Idle {
            pages: u64::from(self.run_pages) * runs,
            scratch: self,
            plain: Arc::new(plain),
            over,
            agent,
        })
    }

    pub fn close(self) -> Result<(), Failure> {
        self.source.close()?;
        let failed = |error: std::io::Error| Failure::environment(format!("scratch: {error}"));
        self.directory.close().map_err(failed)
    }
}

/// Two stores that are compared.
pub struct Idle<'a> {
    scratch: &'a mut Scratch,
    plain: Arc<Store>,
    over: Arc<Store>,
    agent: Arc<Agent>,
    pages: u64,
}

/// New pages that were put, then read.
#[derive(Clone, Copy)]
pub struct Local {
    pub put: Sample,
    pub get: Sample,
}

impl Idle<'_> {
    /// Measures both stores: the one or the other first, in turns.
    pub fn pair(&mut self, number: u32) -> Result<(Local, Local), Failure> {
        let (plain, over) = (Arc::clone(&self.plain), Arc::clone(&self.over));
        if number.is_multiple_of(2) {
            let measured = self.measure(&plain, number)?;
            Ok((measured, self.measure(&over, number)?))
        } else {
            let measured = self.measure(&over, number)?;
            Ok((self.measure(&plain, number)?, measured))
        }
    }

    fn measure(&mut self, store: &Store, number: u32) -> Result<Local, Failure> {
        let Scratch {
            namespace,
            buffers,
            run_pages,
            seed,
            run_bytes,
            ..
        } = &mut *self.scratch;
        let id = store.namespace(namespace)?;
        let keys = workload::chain_after(&[*seed, u64::MAX, u64::from(number)], self.pages);
        let links = workload::links(&keys);
        let (mut puts, mut gets) = (Meter::default(), Meter::default());
        put(buffers, store, id, &links, &mut puts)?;
        store.flush()?;
        let statuses = buffers.get(store, id, &keys, *run_pages as usize, &mut gets);
        if !statuses.iter().all(|status| status.is_hit()) {
            return Err(Failure::environment(
                "a page that was put is missing".to_owned(),
            ));
        }
        let bytes = self.pages / u64::from(*run_pages) * *run_bytes;
        let sample = |meter: &Meter| Sample {
            bytes,
            wall: Duration::from_secs_f64(meter.seconds()),
            cpu: Duration::from_secs_f64(meter.cpu_seconds()),
        };
        Ok(Local {
            put: sample(&puts),
            get: sample(&gets),
        })
    }

    pub fn close(self) -> Result<(), Failure> {
        self.agent.close();
        self.over.close()?;
        self.plain.close()?;
        Ok(())
    }
}

/// A store with room for so many bytes of pages.
fn make(path: PathBuf, bytes: u64) -> Result<PathBuf, Failure> {
    let segments = bytes.div_ceil(SEGMENT_BYTES) * 5 / 4 + SEGMENTS_FREE;
    let options = CreateOptions::new(segments * SEGMENT_BYTES).with(|o| {
        o.segment_size = Some(SEGMENT_BYTES);
        o.prewrite = true;
    });
    create(&path, &options)?;
    Ok(path)
}

fn start(agent: &Arc<Agent>, store: &Arc<Store>) -> Result<(), Failure> {
    let store: Arc<dyn PageStore> = store.clone();
    agent.start(&store).map_err(|error| Failure::thread(&error))
}

fn put(
    buffers: &mut PageBuffers,
    store: &Store,
    id: NamespaceId,
    links: &[Link],
    meter: &mut Meter,
) -> Result<(), Failure> {
    let options = PutOptions::waiting(PUT_WAIT);
    let statuses = buffers.put(store, id, links, 16, options, meter);
    match statuses.iter().find(|status| !status.is_present()) {
        None => Ok(()),
        Some(status) => Err(Failure::environment(format!(
            "a scratch store takes no page: {status:?}"
        ))),
    }
}

/// Waits until a counter of an agent has at least this value.
fn reach(agent: &Agent, name: &str, value: u64) -> Result<(), Failure> {
    let until = Instant::now() + STEP_MAX;
    loop {
        let report = agent.report();
        if report.counts.get(name).is_some_and(|count| *count >= value) {
            return Ok(());
        }
        if !report.works || Instant::now() > until {
            return Err(Failure::environment(format!(
                "the remote: {}",
                report.state
            )));
        }
        thread::sleep(LOOK);
    }
}
