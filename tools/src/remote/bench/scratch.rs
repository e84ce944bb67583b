//! The stores of a measurement, and their agents.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_base::random::random_bytes;
use larder_engine::format::{Namespace, PageKey, StoreId};

use larder_engine::{CreateOptions, NamespaceId, OpenOptions, PageStore, Store, create};
use larder_remote::agent::Agent;
use larder_remote::run::open;
use larder_remote::{Draft, RunPage};
use larder_store::beneath::{Beneath, BeneathReport};

use super::BenchArgs;
use super::bare::{Bare, Runs};
use super::objects::{Objects, STEP_MAX};
use super::pairs::{Sample, Stop};
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::usage::Meter;
use crate::workload::{self, Link, PageBuffers};

const PAGE_TOKENS: u32 = 1;

/// The namespace of bare publications.
const BARE: &str = "remote-bench-bare";

/// Interval at which a wait looks for a signal.
const LOOK: Duration = Duration::from_millis(100);

/// Segments of a store: of large runs, and of small ones.
const SEGMENT_BYTES: u64 = 64 << 20;
const SMALL_SEGMENT_BYTES: u64 = 16 << 20;

/// Segments of a store besides those of its pages.
const SEGMENTS_FREE: u64 = 12;

/// Runs that are encrypted and opened.
const SEALED_RUNS: u64 = 8;

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
    /// Publishes runs of the source.
    publisher: Arc<Agent>,
    namespace: Namespace,
    pub(super) bare: Bare,
    buffers: PageBuffers,
    /// Pages of a run.
    run_pages: u32,
    runs: u64,
    run_bytes: u64,
    seed: u64,
    /// Runs that were published.
    published: u64,
    interrupt: Interrupt,
}

impl Scratch {
    pub fn new(
        args: &BenchArgs,
        objects: &Objects,
        interrupt: &Interrupt,
    ) -> Result<Scratch, Stop> {
        let (run_bytes, page_bytes) = (args.run_bytes.0, args.page_bytes.0);
        let run_pages = run_bytes.checked_div(page_bytes).unwrap_or(0);
        if run_pages == 0 || !run_bytes.is_multiple_of(page_bytes) {
            let reason = "--run-bytes is no multiple of --page-bytes";
            return Err(Failure::usage(reason.to_owned()).into());
        }
        let shape = workload::shape(args.page_bytes, 1)?;
        let namespace = workload::namespace("remote-bench", PAGE_TOKENS, shape)?;
        let directory = tempfile::tempdir_in(&args.directory).map_err(|error| {
            let directory = args.directory.display();
            Failure::environment(format!(
                "{directory}: making a directory in it: {error}; choose another directory"
            ))
        })?;
        let seed: [u8; 8] = random_bytes()
            .map_err(|error| Failure::environment(format!("random bytes: {error}")))?;
        let bytes = run_bytes * args.runs * u64::from(args.rounds);
        let source = make(directory.path().join("source"), bytes, interrupt)?;
        make(directory.path().join("sink"), bytes, interrupt)?;
        let bare = Bare::new(directory.path(), run_bytes)?;
        let slots = usize::try_from(run_pages * args.runs).unwrap_or(usize::MAX);
        let run_pages = u32::try_from(run_pages).unwrap_or(u32::MAX);
        let buffers = PageBuffers::new(&shape, slots)?;
        let publisher = objects.agent(run_pages, u64::MAX)?;
        let options = OpenOptions::default().over(publisher.clone());
        let source = Arc::new(Store::open(&source, options)?);
        start(&publisher, &source)?;
        Ok(Scratch {
            source,
            publisher,
            directory,
            namespace,
            bare,
            buffers,
            run_pages,
            runs: args.runs,
            run_bytes,
            seed: u64::from_le_bytes(seed),
            published: 0,
            interrupt: interrupt.clone(),
        })
    }

    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Puts new pages into the source store, and as many bytes into the file of bare publications.
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
        self.bare.write(number, self.runs)?;
        Ok(Chain { links })
    }

    /// Encrypts some runs, and opens them, in memory that has been used.
    pub fn encryption(&self, objects: &Objects) -> Result<(Sample, Sample), Stop> {
        let keys = workload::chain_after(&[self.seed], u64::from(self.run_pages));
        let pages = pages_of(&workload::links(&keys));
        let make = || {
            let trust = objects.trust.clone();
            let draft = Draft::new(self.namespace.clone(), pages.clone(), trust)?;
            let name = draft.name().ok_or_else(|| {
                Failure::environment("a run without pages cannot be encrypted".to_owned())
            })?;
            let object = draft
                .finish(StoreId::from_bytes([0; 16]), 0)
                .map_err(|error| Failure::environment(format!("making an object: {error}")))?;
            Ok::<_, Stop>((name, object))
        };
        let (name, object) = make()?;
        let bytes = SEALED_RUNS * self.run_bytes;
        let mut copy = object.to_vec();
        let verify = Sample::of(bytes, || {
            (0..SEALED_RUNS).try_for_each(|_| {
                // An object is decrypted in place.
                copy.copy_from_slice(&object);
                match open(&mut copy, &name, &objects.trust).fault {
                    None => Ok(()),
                    Some(fault) => Err(Failure::environment(fault.to_string())),
                }
            })
        });
        let verify = verify?;
        drop(object);
        let seal = Sample::of(bytes, || {
            (0..SEALED_RUNS).try_for_each(|_| make().map(drop))
        });
        Ok((seal?, verify))
    }

    /// Publishes the runs of a chain.
    pub fn publish(&mut self, chain: &Chain) -> Result<Sample, Stop> {
        let run_pages = self.run_pages as usize;
        let runs: Vec<Vec<RunPage>> = chain.links.chunks(run_pages).map(pages_of).collect();
        let (agent, goal) = (&self.publisher, self.published + self.runs);
        let sample = Sample::of(self.run_bytes * self.runs, || {
            for run in runs {
                agent.offer(&self.namespace, run);
            }
            self.reach(agent, |count| {
                let dropped = ["queue", "budget", "absent", "failed"];
                let dropped = dropped.map(|why| count(&format!("dropped_{why}_runs")));
                let dropped: u64 = dropped.iter().sum();
                count("published_runs") + count("present_runs") + dropped >= goal
            })
        })?;
        let counts = agent.report().counts;
        if counts.get("published_runs") != Some(&goal) {
            let reason = format!("runs were not published: {counts:?}");
            return Err(Failure::environment(reason).into());
        }
        self.published = goal;
        Ok(sample)
    }

    /// The runs of a round's bare publications.
    pub fn bare_runs(&self, round: u32) -> Result<Runs, Failure> {
        let pages = u64::from(self.run_pages) * self.runs;
        let keys = workload::chain_after(&[self.seed, u64::from(round)], pages);
        let links = workload::links(&keys);
        let runs = links.chunks(self.run_pages as usize).map(pages_of);
        Ok(Runs {
            namespace: workload::namespace(BARE, PAGE_TOKENS, *self.namespace.shape())?,
            pages: runs.collect(),
        })
    }

    /// Waits until the counters of an agent are so.
    fn reach(
        &self,
        agent: &Agent,
        is_so: impl Fn(&dyn Fn(&str) -> u64) -> bool,
    ) -> Result<(), Stop> {
        let until = Instant::now() + STEP_MAX;
        let holds = |report: &BeneathReport| {
            is_so(&|name| report.counts.get(name).copied().unwrap_or_default())
        };
        while !agent.wait_for(Instant::now() + LOOK, holds) {
            let report = agent.report();
            if !report.works || Instant::now() > until {
                let reason = format!("the remote: {}", report.state);
                return Err(Failure::environment(reason).into());
            }
            if self.interrupt.is_raised() {
                return Err(Stop::Interrupted);
            }
        }
        Ok(())
    }

    /// Waits until the agent knows all runs, and the speed of the remote if there are any.
    fn wait_for_listing(&self, agent: &Agent) -> Result<(), Stop> {
        self.reach(agent, |count| {
            let is_measured = count("speed_bytes_per_s") > 0 || self.published == 0;
            count("listings") > 0 && count("known_runs") >= self.published && is_measured
        })
    }

    /// Fetches the runs of a chain into the second store, and checks all bytes.
    pub fn fetch(&mut self, objects: &Objects, chain: &Chain) -> Result<Sample, Stop> {
        let agent = objects.agent(self.run_pages, u64::MAX)?;
        let options = OpenOptions::default().over(agent.clone());
        let path = self.directory.path().join("sink");
        let store = Arc::new(Store::open(&path, options)?);
        let started = start(&agent, &store).map_err(Stop::from);
        let outcome = started.and_then(|()| self.fetch_into(&agent, &store, chain));
        agent.close();
        let closed = store.close();
        let sample = outcome?;
        closed?;
        Ok(sample)
    }

    fn fetch_into(&mut self, agent: &Agent, store: &Store, chain: &Chain) -> Result<Sample, Stop> {
        let id = store.namespace(&self.namespace)?;
        self.wait_for_listing(agent)?;
        let keys = chain.keys();
        let bytes = self.run_bytes * self.runs;
        let sample = Sample::of(bytes, || {
            let promised = store.longest_prefix(id, &keys);
            self.reach(agent, |count| count("arriving_runs") == 0)?;
            match promised == keys.len() {
                true => Ok(()),
                false => {
                    let (all, state) = (keys.len(), agent.report().state);
                    let reason = format!("{promised} of {all} pages were promised: {state}");
                    Err(Stop::from(Failure::environment(reason)))
                }
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
            false => Err(Stop::from(Failure::environment(
                "pages that were fetched are missing or wrong; `larder remote verify` tells more",
            ))),
        }
    }

    /// Two stores, the second over an idle agent.
    pub fn idle(&mut self, objects: &Objects, runs: u64) -> Result<Idle<'_>, Stop> {
        // Nothing is published.
        let agent = objects.agent(self.run_pages, 0)?;
        let runs = runs.min(self.runs);
        let make = |name: &str| {
            let (path, bytes) = (self.directory.path().join(name), 4 * runs * self.run_bytes);
            make(path, bytes, &self.interrupt)
        };
        let plain = Store::open(&make("plain")?, OpenOptions::default())?;
        let options = OpenOptions::default().over(agent.clone());
        let over = Arc::new(Store::open(&make("over")?, options)?);
        let started = start(&agent, &over).map_err(Stop::from);
        let listed = started.and_then(|()| {
            // The speed is measured with a run of a namespace in use.
            over.namespace(&self.namespace)?;
            self.wait_for_listing(&agent)
        });
        let idle = Idle {
            pages: u64::from(self.run_pages) * runs,
            scratch: self,
            plain: Arc::new(plain),
            over,
            agent,
        };
        if let Err(stop) = listed {
            idle.close()?;
            return Err(stop);
        }
        Ok(idle)
    }

    pub fn close(self) -> Result<(), Failure> {
        self.publisher.close();
        self.source.close()?;
        let failed = |error: std::io::Error| {
            Failure::environment(format!("removing the directory of the bench: {error}"))
        };
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
    pub fn pair(&mut self, number: u32) -> Result<(Local, Local), Stop> {
        if self.scratch.interrupt.is_raised() {
            return Err(Stop::Interrupted);
        }
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
fn make(path: PathBuf, bytes: u64, interrupt: &Interrupt) -> Result<PathBuf, Stop> {
    let segment_bytes = match bytes < 2 * SEGMENT_BYTES {
        true => SMALL_SEGMENT_BYTES,
        false => SEGMENT_BYTES,
    };
    let segments = bytes.div_ceil(segment_bytes) * 5 / 4 + SEGMENTS_FREE;
    let progress = |_, _| interrupt.flow();
    let options = CreateOptions::new(segments * segment_bytes).with(|o| {
        o.segment_size = Some(segment_bytes);
        o.prewrite = true;
        o.progress = Some(&progress);
    });
    match create(&path, &options) {
        Ok(_) => Ok(path),
        Err(_) if interrupt.is_raised() => Err(Stop::Interrupted),
        Err(error) => Err(error.into()),
    }
}

/// The pages of a run.
fn pages_of(links: &[Link]) -> Vec<RunPage> {
    let page = |link: &Link| RunPage {
        key: link.key,
        parent: link.parent,
        depth: link.depth,
    };
    links.iter().map(page).collect()
}

/// Waits until the file system of a directory has written all that it holds in memory.
pub fn settle(directory: &Path) -> Result<(), Failure> {
    let file = File::open(directory).and_then(|file| Ok(rustix::fs::syncfs(&file)?));
    file.map_err(|error| {
        Failure::environment(format!(
            "{}: syncing the file system: {error}",
            directory.display()
        ))
    })
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
    let statuses = buffers.put(store, id, links, 16, meter);
    match statuses.iter().find(|status| !status.is_present()) {
        None => Ok(()),
        Some(status) => Err(Failure::environment(format!(
            "a scratch store takes no page: {status:?}"
        ))),
    }
}
