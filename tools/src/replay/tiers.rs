//! A trace through all three tiers: the value of each tier.
//!
//! The trace is served with L1 alone, with L1 and L2, with all three, and with all three where L3
//! does not receive the pages that are hot above. The bytes are real, `--scale` times fewer, and
//! all found bytes are compared. Time is virtual ([`super::machine`]), of pages of full size. Times
//! to the first token are compared only if the servers can serve the offered load: otherwise the
//! queue grows as long as the trace lasts, and its times have no meaning.
//!
//! The store is `--store`, a file of size `--capacity`, divided as the pages are. The run without
//! hints to L3 has a temporary store of its own beside it. That run is left out if `--store`
//! existed before, since the two stores would differ.

use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use larder_engine::fit::page_bytes_on_disk;
use larder_engine::{PageStore, PutOptions, Store};
use larder_format::{Namespace, PageShape};
use larder_kernels::{Device, KvShape};
use larder_tiers::Config;
use larder_tiers::config::{L3Write, PrefetchPolicy, WritePolicy};
use larder_tiers::l3::{L3, StoreL3};
use larder_tiers::model::page_shape;
use serde::de::DeserializeOwned;
use tempfile::TempDir;

use super::drive::{self, Run};
use super::machine::{Machine, Speeds};
use super::model::{Compute, MODELS, Model};
use super::server::Build;
use super::tiers_report::{self, Setting, TiersReport};
use super::{ReplayArgs, check_capacity, check_namespace, create, create_missing, speed};
use crate::disk::DiskFacts;
use crate::failure::{Ending, Failure};
use crate::interrupt::Interrupt;
use crate::l1;
use crate::policy::Policy;
use crate::report;
use crate::size::ByteSize;
use crate::trace::Trace;
use crate::usage;
use crate::workload;

/// The model that names the namespace of pages that come through the tiers.
const MODEL: &str = "replay-tiers";

/// Tokens of the prompt by which a server's speed is judged.
const USUAL_TOKENS: u32 = 8192;

/// Tokens of a page at most: eight blocks.
const PAGE_TOKENS_MAX: u32 = 4096;

/// How a trace goes through all three tiers.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "All three tiers")]
pub struct TiersArgs {
    /// Size of each server's L1, which makes it a replay through all three tiers
    #[arg(long, value_name = "SIZE", requires = "l2")]
    l1: Option<ByteSize>,
    /// Size of each server's L2
    #[arg(long, value_name = "SIZE", requires = "l1")]
    l2: Option<ByteSize>,
    /// Whose pages: llama-3.1-8b, llama-3.1-70b, qwen3-32b, deepseek-v3, or the config.json of a
    /// dense model with grouped-query attention
    #[arg(long, requires = "l1", default_value = &*MODELS[0].name, value_parser = Model::named)]
    model: Arc<Model>,
    /// Tokens of a page
    #[arg(
        long,
        value_name = "TOKENS",
        requires = "l1",
        default_value_t = 64,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(PAGE_TOKENS_MAX))
    )]
    page_size: u32,
    /// When pages are copied from L1 to L2: write_through, write_through_selective or write_back
    #[arg(
        long,
        requires = "l1",
        default_value = "write_through",
        value_parser = named::<WritePolicy>
    )]
    write_policy: WritePolicy,
    /// How long a request waits for L3: best_effort, wait_complete or timeout
    #[arg(long, requires = "l1", default_value = "timeout", value_parser = named::<PrefetchPolicy>)]
    prefetch_policy: PrefetchPolicy,
    /// How many times as fast as in the trace requests come
    #[arg(long, requires = "l1", default_value_t = 1.0, value_parser = positive)]
    rate: f64,
    /// Servers, each with an L1 and an L2 of its own
    #[arg(
        long,
        value_name = "N",
        requires = "l1",
        default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=1024)
    )]
    instances: u32,
    /// How many times smaller the pages are that are really moved
    #[arg(
        long,
        value_name = "N",
        requires = "l1",
        default_value_t = 1024,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    scale: u32,
    /// GB/s between L2 and L1, each way [default: memcpy's speed here]
    #[arg(long, value_name = "GB/s", requires = "l1", value_parser = positive)]
    link: Option<f64>,
    /// TFLOP/s that a prefill reaches, all accelerators of a server together: an H200 by default
    #[arg(long, requires = "l1", default_value_t = 600.0, value_parser = positive)]
    tflops: f64,
    /// GB/s of their memory
    #[arg(
        long,
        value_name = "GB/s",
        requires = "l1",
        default_value_t = 4800.0,
        value_parser = positive
    )]
    hbm: f64,
    /// Read only pages from L3 that are expected faster than computing them
    #[arg(long, requires = "l1")]
    break_even: bool,
    /// Hold L1 on this CUDA device, by its number, rather than in the memory of the host; its link
    /// is not measured
    #[arg(long, value_name = "N", requires = "link")]
    cuda: Option<u32>,
    /// Only with all three tiers: no runs to compare with
    #[arg(long, requires = "l1")]
    only: bool,
}

/// By its name in configuration files.
fn named<T: DeserializeOwned>(name: &str) -> Result<T, String> {
    serde_json::from_value(serde_json::Value::from(name)).map_err(|error| error.to_string())
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number.is_finite() && number > 0.0 => Ok(number),
        _ => Err("a number above 0 is needed".to_owned()),
    }
}

/// The parameters of a replay, all of them valid.
pub struct Plan<'a> {
    /// The arguments.
    pub args: &'a TiersArgs,
    /// Each server's pools.
    pub l1: ByteSize,
    /// See `l1`.
    pub l2: ByteSize,
    /// Of full size.
    pub page: KvShape,
    /// As they are really moved.
    pub scaled: KvShape,
}

impl TiersArgs {
    /// The plan of a replay through all three tiers, if one was requested.
    ///
    /// # Errors
    /// There are no such pages.
    pub fn plan(&self) -> Result<Option<Plan<'_>>, Failure> {
        let (Some(l1), Some(l2)) = (self.l1, self.l2) else {
            return Ok(None);
        };
        Ok(Some(Plan {
            args: self,
            l1,
            l2,
            page: self.model.page(self.page_size)?,
            scaled: self.model.scaled_page(self.page_size, self.scale)?,
        }))
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Tokens of a page.
    pub fn page_size(&self) -> u32 {
        self.page_size
    }

    /// Servers.
    pub fn instances(&self) -> u32 {
        self.instances
    }

    /// The factor by which requests come faster than in the trace.
    pub fn rate(&self) -> f64 {
        self.rate
    }

    /// The policies of writes and prefetches.
    pub fn policies(&self) -> (WritePolicy, PrefetchPolicy) {
        (self.write_policy, self.prefetch_policy)
    }

    /// Bytes per second of the link, unless it is measured.
    pub fn link(&self) -> Option<f64> {
        self.link.map(|gigabytes| gigabytes * 1e9)
    }

    fn compute(&self) -> Compute {
        Compute {
            flops: self.tflops * 1e12,
            memory_bytes_per_second: self.hbm * 1e9,
        }
    }

    fn device(&self) -> Result<Arc<dyn Device>, Failure> {
        l1::device(self.cuda)
    }
}

impl Plan<'_> {
    /// The pools of a setting, in pages.
    fn pages(&self, setting: Setting) -> Result<(u32, u32), Failure> {
        let page_bytes = u64::from(self.page.page_bytes());
        let pages = |name: &str, size: ByteSize| {
            let pages = u32::try_from(size.0 / page_bytes).ok();
            pages.filter(|pages| *pages > 0).ok_or_else(|| {
                Failure::usage(format!(
                    "{name} {size} holds {} pages of {}, it must hold 1 to 2^32 - 3; choose \
                     another size",
                    size.0 / page_bytes,
                    ByteSize(page_bytes)
                ))
            })
        };
        let l2 = pages("--l2", self.l2)?;
        Ok((
            pages("--l1", self.l1)?,
            if setting.has_l2() { l2 } else { 0 },
        ))
    }

    fn config(&self, setting: Setting) -> Result<Config, Failure> {
        let (l1, l2) = self.pages(setting)?;
        let page_bytes = u64::from(self.scaled.page_bytes());
        let mut config = Config::new(self.args.page_size, page_bytes, l1, l2);
        config.write_policy = self.args.write_policy;
        config.prefetch.policy = self.args.prefetch_policy;
        if self.args.break_even {
            config.prefetch.break_even_tokens_per_second = self.tokens_per_second();
        }
        if !setting.has_l3() {
            config.l3_write = L3Write::Never;
        }
        // Pages are smaller than they stand for. The other limit, half of L2, is the relevant one.
        config.l3_queue_bytes_max = u64::MAX;
        let checked = config.check().and_then(|()| match setting.has_l3() {
            true => config.check_with_l3(),
            false => Ok(()),
        });
        checked.map_err(|error| Failure::usage(error.to_string()))?;
        Ok(config)
    }

    /// Tokens of a prompt of usual length that a server computes per second.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rate within 32 bits, or cut off there"
    )]
    fn tokens_per_second(&self) -> Option<NonZeroU32> {
        let model = &self.args.model;
        let layer = model.layer_seconds(&self.args.compute(), USUAL_TOKENS.into(), 0);
        let seconds = layer * f64::from(model.layers);
        NonZeroU32::new((f64::from(USUAL_TOKENS) / seconds) as u32)
    }

    /// The scaled size of a store of this many bytes.
    fn scaled_bytes(&self, bytes: u64) -> Result<u64, Failure> {
        let (page, scaled) = (on_disk(&self.page)?, on_disk(&self.scaled)?);
        let bytes = u128::from(bytes) * u128::from(page_bytes_on_disk(&scaled))
            / u128::from(page_bytes_on_disk(&page));
        Ok(u64::try_from(bytes).unwrap_or(u64::MAX))
    }
}

/// A page as the store keeps it.
fn on_disk(shape: &KvShape) -> Result<PageShape, Failure> {
    page_shape(shape)
        .map_err(|error| Failure::usage(format!("{error}; choose another --page-size or --scale")))
}

/// Runs it.
pub fn run(args: &ReplayArgs, plan: &Plan<'_>, interrupt: &Interrupt) -> Result<Ending, Failure> {
    let started = Instant::now();
    // All errors in the arguments are reported before anything is created.
    if args.trace.exists() && !args.trace.is_file() {
        return Err(Failure::usage(format!(
            "{}: not a file; it is read more than once: give a file",
            args.trace.display()
        )));
    }
    drop(Trace::open(&args.trace, interrupt)?);
    plan.config(Setting::All)?;
    let device = plan.args.device()?;
    let store_bytes = plan.scaled_bytes(args.capacity())?;
    let is_new = create_missing(args, store_bytes, &on_disk(&plan.scaled)?)
        .map_err(|failure| failure.with_hint("the store is scaled as its pages are: --scale"))?;
    if !args.store.is_file() {
        return Err(Failure::usage(format!(
            "{}: not a file; the disk is measured beside the store, which a device has no place \
             for: give a file on it",
            args.store.display()
        )));
    }
    let untold = (is_new && !plan.args.only)
        .then(|| Untold::new(args, store_bytes))
        .transpose()?;
    let shape = on_disk(&plan.page)?;
    let measured = speed::disk(beside(&args.store), &shape, &args.open, interrupt)?;
    if interrupt.is_raised() {
        return Ok(Ending::Interrupted);
    }
    let speeds = Speeds {
        page_bytes: u64::from(plan.page.page_bytes()),
        layers: plan.page.layers(),
        read: measured.read,
        write: measured.write,
        link: plan.args.link().unwrap_or_else(speed::memcpy),
    };
    let mut replay = Replay {
        args,
        plan,
        interrupt,
        device,
        speeds,
        runs: Vec::new(),
        store: tiers_report::StoreFigures::default(),
    };
    replay.all(store_bytes, untold)?;
    let report = TiersReport::new(&args.store, plan, &speeds, replay.store, &replay.runs, {
        let seconds = started.elapsed().as_secs_f64();
        tiers_report::Cost {
            seconds,
            cpu_seconds: usage::cpu_time().as_secs_f64(),
            peak_rss_bytes: usage::peak_rss_bytes(),
            interrupted: interrupt.is_raised(),
        }
    });
    report::print(&report, args.json)?;
    Ok(report.ending())
}

/// The store of the run without hints to L3. It is removed with its directory.
struct Untold {
    path: PathBuf,
    _directory: TempDir,
}

impl Untold {
    fn new(args: &ReplayArgs, bytes: u64) -> Result<Untold, Failure> {
        let hint = "for a run to compare with; --only does without";
        let directory = tempfile::tempdir_in(beside(&args.store)).map_err(|error| {
            Failure::environment(format!("{}: {error}", args.store.display())).with_hint(hint)
        })?;
        let path = directory.path().join("store");
        create(args, &path, bytes, false).map_err(|failure| failure.with_hint(hint))?;
        Ok(Untold {
            path,
            _directory: directory,
        })
    }
}

/// The directory of a store.
pub(super) fn beside(store: &Path) -> &Path {
    let directory = store.parent().filter(|path| !path.as_os_str().is_empty());
    directory.unwrap_or(Path::new("."))
}

struct Replay<'a> {
    args: &'a ReplayArgs,
    plan: &'a Plan<'a>,
    interrupt: &'a Interrupt,
    device: Arc<dyn Device>,
    speeds: Speeds,
    runs: Vec<(Setting, Run)>,
    store: tiers_report::StoreFigures,
}

impl Replay<'_> {
    fn all(&mut self, store_bytes: u64, untold: Option<Untold>) -> Result<(), Failure> {
        // Errors of the store appear at once.
        self.with_store(&self.args.store, Setting::All, store_bytes)?;
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
        let options = self
            .args
            .open
            .options()
            .with(|o| o.eviction = policy.maker());
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
        check_capacity(self.args, store, bytes)?;
        let shape = on_disk(&self.plan.scaled)?;
        let namespace = workload::model_namespace(MODEL, &self.plan.scaled)?;
        check_namespace(store, path, &namespace)?;
        let before = store.stats();
        let pages = before.usable_pages(page_bytes_on_disk(&shape));
        let l3 = self.l3(store, &namespace)?;
        self.drive(setting, Some((&l3, &**store)))?;
        let after = store.stats();
        if setting == Setting::All {
            self.store = tiers_report::StoreFigures {
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
        let puts = PutOptions::waiting(self.args.wait);
        Ok(Arc::new(StoreL3::new(shared, namespace)?.with_puts(puts)))
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
        let limit = self.args.limit.map_or(usize::MAX, |limit| {
            usize::try_from(limit).unwrap_or(usize::MAX)
        });
        let requests = Trace::open(&self.args.trace, self.interrupt)?.take(limit);
        let bar = report::progress(
            self.args.limit,
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
