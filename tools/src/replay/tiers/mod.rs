//! A trace through all three tiers: the value of each tier.
//!
//! The trace is served with L1 alone, with L1 and L2, with all three, and with all three where L3
//! does not receive the pages that are hot above. The bytes are real, `--scale` times fewer, and
//! all found bytes are compared. Time is virtual ([`machine`]), of pages of full size. Times
//! to the first token are compared only if the servers can serve the offered load: otherwise the
//! queue grows as long as the trace lasts, and its times have no meaning.
//!
//! The store is `--store`, a file of size `--capacity`, divided as the pages are. The run without
//! hints to L3 has a temporary store of its own beside it. That run is left out if `--store`
//! existed before, since the two stores would differ.
//!
//! A module imports only modules below it.
//!
//! | module | content |
//! |---|---|
//! | `report` | the document and its lines |
//! | `plan` | the parameters, and the tiers of each run |
//! | `drive` | one run of a trace through servers, in virtual time |
//! | `server` | one of them: its cache, its queue, its prefills |
//! | `outcome` | the result of a run |
//! | `speed` | the measured speed of the disk and the memory |
//! | `machine` | virtual time: clock, disk and links, for the servers' caches |
//! | `shared` | a disk that several transfers share |

mod drive;
mod machine;
mod outcome;
mod plan;
mod report;
mod server;
mod shared;
mod speed;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use larder_engine::{CreateOptions, OpenOptions, PageStore, Store};
use larder_format::Namespace;
use larder_kernels::Device;
use larder_store::fit::page_bytes_on_disk;

use larder_tiers::l3::{L3, StoreL3};
use tempfile::TempDir;

use super::setup::{check_capacity, check_namespace, create, create_missing};
use crate::disk::DiskFacts;
use crate::failure::{Ending, Failure};
use crate::interrupt::Interrupt;
use crate::open::patient;
use crate::place::directory_of;
use crate::policy::Policy;
use crate::report as output;
use crate::trace::L3 as L3_TRACE;
use crate::usage;
use crate::workload;
use drive::Run;
use machine::{Machine, Speeds};
pub use plan::TiersArgs;
use plan::{Plan, Setting, on_disk};
use report::{Cost, StoreFigures, TiersReport};
use server::Build;

/// The model that names the namespace of pages that come through the tiers.
const MODEL: &str = "replay-tiers";

/// Runs it.
pub fn run(args: &TiersArgs, interrupt: &Interrupt) -> Result<Ending, Failure> {
    let started = Instant::now();
    let (plan, trace) = (args.plan()?, &args.setup.trace);
    // All errors in the arguments are reported before anything is created.
    if trace.exists() && !trace.is_file() {
        return Err(Failure::usage(format!(
            "{}: not a file; it is read more than once: give a file",
            trace.display()
        )));
    }
    let mut requests = args.setup.requests(interrupt)?;
    if let Some(Ok(first)) = requests.peek()
        && first.tier.as_deref() == Some(L3_TRACE)
    {
        return Err(Failure::usage(format!(
            "{}: a recording of L3, which lacks what L1 and L2 served: `larder replay store` takes \
             it",
            trace.display()
        )));
    }
    drop(requests);
    plan.config(Setting::All)?;
    let device = args.device()?;
    let store_bytes = plan.scaled_bytes()?;
    let scaled = on_disk(&plan.scaled)?;
    let options = CreateOptions::new(store_bytes).with(|o| {
        o.page_bytes = Some(page_bytes_on_disk(&scaled));
    });
    let is_new = create_missing(&args.store, &options, &scaled)
        .map_err(|failure| failure.with_hint("the store is scaled as its pages are: --scale"))?;
    if !args.store.is_file() {
        return Err(Failure::usage(format!(
            "{}: not a file; the disk is measured beside the store, which a device has no place \
             for: give a file on it",
            args.store.display()
        )));
    }
    let untold = (is_new && !args.only)
        .then(|| Untold::new(&args.store, &options))
        .transpose()?;
    let shape = on_disk(&plan.page)?;
    let measured = match args.disk() {
        Some(given) => given,
        None => speed::disk(directory_of(&args.store), &shape, interrupt)?,
    };
    let measured = args.of_plain(measured);
    if interrupt.is_raised() {
        return Ok(Ending::Interrupted);
    }
    let speeds = Speeds {
        page_bytes: u64::from(plan.page.page_bytes()),
        layers: plan.page.layers(),
        read: measured.read,
        write: measured.write,
        link: args.link().unwrap_or_else(speed::memcpy),
    };
    let mut replay = Replay {
        plan: &plan,
        interrupt,
        device,
        speeds,
        runs: Vec::new(),
        store: StoreFigures::default(),
    };
    replay.all(store_bytes, untold)?;
    let report = TiersReport::new(&args.store, &plan, &speeds, replay.store, &replay.runs, {
        let seconds = started.elapsed().as_secs_f64();
        Cost {
            seconds,
            cpu_seconds: usage::cpu_time().as_secs_f64(),
            peak_rss_bytes: usage::peak_rss_bytes(),
            interrupted: interrupt.is_raised(),
        }
    });
    output::print(&report, args.setup.json)?;
    Ok(report.ending())
}

/// The store of the run without hints to L3. It is removed with its directory.
struct Untold {
    path: PathBuf,
    _directory: TempDir,
}

impl Untold {
    fn new(store: &Path, options: &CreateOptions<'_>) -> Result<Untold, Failure> {
        let hint = "for a run to compare with; --only does without";
        let directory = tempfile::tempdir_in(directory_of(store)).map_err(|error| {
            Failure::environment(format!(
                "{}: making a directory beside it: {error}",
                store.display()
            ))
            .with_hint(hint)
        })?;
        let path = directory.path().join("store");
        create(&path, options).map_err(|failure| failure.with_hint(hint))?;
        Ok(Untold {
            path,
            _directory: directory,
        })
    }
}

struct Replay<'a> {
    plan: &'a Plan<'a>,
    interrupt: &'a Interrupt,
    device: Arc<dyn Device>,
    speeds: Speeds,
    runs: Vec<(Setting, Run)>,
    store: StoreFigures,
}

impl Replay<'_> {
    fn all(&mut self, store_bytes: u64, untold: Option<Untold>) -> Result<(), Failure> {
        // Errors of the store appear at once.
        self.with_store(&self.plan.args.store, Setting::All, store_bytes)?;
        if let Some(untold) = untold {
            self.with_store(&untold.path, Setting::Untold, store_bytes)?;
        }
        if !self.plan.args.only {
            self.drive(Setting::L1, None)?;
            self.drive(Setting::L1L2, None)?;
        }
        self.runs.sort_by_key(|(setting, _)| *setting);
        Ok(())
    }

    /// Runs with a store, and closes it.
    fn with_store(&mut self, path: &Path, setting: Setting, bytes: u64) -> Result<(), Failure> {
        if self.interrupt.is_raised() {
            return Ok(());
        }
        let policy = Policy::default();
        let options = OpenOptions::default().with(|o| o.eviction = policy.maker());
        let store = Arc::new(Store::open(path, options)?);
        let outcome = self.run_on(&store, path, setting, bytes);
        let closed = store.close();
        outcome?;
        closed?;
        Ok(())
    }

    fn run_on(
        &mut self,
        store: &Arc<Store>,
        path: &Path,
        setting: Setting,
        bytes: u64,
    ) -> Result<(), Failure> {
        check_capacity(store, path, self.plan.args.capacity.0, bytes)?;
        let shape = on_disk(&self.plan.scaled)?;
        let namespace = workload::model_namespace(MODEL, &self.plan.scaled)?;
        check_namespace(store, path, &namespace)?;
        let before = store.stats();
        let pages = before.usable_pages(page_bytes_on_disk(&shape));
        let l3 = self.l3(store, &namespace)?;
        self.drive(setting, Some((&l3, &**store)))?;
        let after = store.stats();
        if setting == Setting::All {
            self.store = StoreFigures {
                pages_before: before.pages,
                usable_pages: pages,
                evicted_pages: after.evicted,
                damaged_pages: after.damaged,
                disk: DiskFacts::of(&after.disk),
            };
        } else {
            self.store.damaged_pages += after.damaged;
        }
        Ok(())
    }

    fn l3(&self, store: &Arc<Store>, namespace: &Namespace) -> Result<Arc<dyn L3>, Failure> {
        let shared: Arc<dyn PageStore> = store.clone();
        Ok(Arc::new(
            StoreL3::new(shared, namespace)?.with_puts(patient()),
        ))
    }

    fn drive(
        &mut self,
        setting: Setting,
        l3: Option<(&Arc<dyn L3>, &dyn PageStore)>,
    ) -> Result<(), Failure> {
        if self.interrupt.is_raised() {
            return Ok(());
        }
        let asked = self.plan.args;
        let build = Build {
            config: &self.plan.config(setting)?,
            shape: &self.plan.scaled,
            device: &self.device,
            l3,
            model: &asked.model,
            compute: asked.compute(),
            tells_warmth: setting != Setting::Untold,
        };
        let requests = asked.setup.requests(self.interrupt)?;
        let bar = output::progress(
            asked.setup.limit,
            "{msg}: {pos} requests, {per_sec}, {elapsed}",
        );
        bar.set_message(setting.name());
        let servers = asked.instances as usize;
        let machine = Machine::new(servers, self.speeds);
        let watch = (self.interrupt, &bar);
        let run = drive::run(requests, asked.rate, (servers, &build), &machine, watch)?;
        bar.finish_and_clear();
        self.runs.push((setting, run));
        Ok(())
    }
}
