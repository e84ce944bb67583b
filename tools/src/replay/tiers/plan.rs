//! The parameters of a replay through all three tiers.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use larder_format::PageShape;
use larder_kernels::{Device, KvShape};
use larder_store::fit::page_bytes_on_disk;
use larder_tiers::Config;
use larder_tiers::config::{L3Write, PrefetchPolicy, WritePolicy};
use larder_tiers::model::page_shape;
use serde::de::DeserializeOwned;

use super::machine::nanos;
use super::shared::Nanos;
use super::speed::DiskSpeed;
use crate::failure::Failure;
use crate::l1;
use crate::model::{Compute, MODELS, Model};
use crate::place;
use crate::replay::setup::Setup;
use crate::size::{ByteSize, above_zero};

/// Tokens of the prompt by which a server's speed is judged.
pub const USUAL_TOKENS: u32 = 8192;

/// Tokens of a page at most: eight blocks.
const PAGE_TOKENS_MAX: u32 = 4096;

/// Run a trace through L1, L2 and a store, with and without each of them, and check every byte
#[derive(Args, Clone, Debug)]
pub struct TiersArgs {
    #[command(flatten)]
    pub setup: Setup,
    /// The store, or a backend's directory: created when it does not exist, continued when it does
    #[arg(long, value_parser = place::parser())]
    pub store: PathBuf,
    /// Size of the store (4GiB), before it is scaled
    #[arg(long, value_name = "SIZE")]
    pub capacity: ByteSize,
    /// Size of each server's L1
    #[arg(long, value_name = "SIZE")]
    pub l1: ByteSize,
    /// Size of each server's L2
    #[arg(long, value_name = "SIZE")]
    pub l2: ByteSize,
    /// Whose pages: llama-3.1-8b, llama-3.1-70b, qwen3-32b, deepseek-v3, or a config.json
    #[arg(long, default_value = &*MODELS[0].name, value_parser = Model::named)]
    pub model: Arc<Model>,
    /// Tokens of a page
    #[arg(long, value_name = "TOKENS", default_value_t = 64,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(PAGE_TOKENS_MAX)))]
    pub page_size: u32,
    /// When pages are copied from L1 to L2: write_through, write_through_selective or write_back
    #[arg(long, default_value = "write_through", value_parser = named::<WritePolicy>)]
    pub write_policy: WritePolicy,
    /// When pages of L2 are written to L3: on_backup, selective or late
    #[arg(long, default_value = "on_backup", value_parser = named::<L3Write>)]
    pub l3_write: L3Write,
    /// How long a request waits for L3: best_effort, wait_complete or timeout
    #[arg(long, default_value = "timeout", value_parser = named::<PrefetchPolicy>)]
    pub prefetch_policy: PrefetchPolicy,
    /// How many times as fast as in the trace requests come
    #[arg(long, default_value_t = 1.0, value_parser = above_zero)]
    pub rate: f64,
    /// Servers, each with an L1 and an L2 of its own
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub instances: u32,
    /// How many times smaller the pages are that are really moved
    #[arg(long, value_name = "N", default_value_t = 1024,
        value_parser = clap::value_parser!(u32).range(1..))]
    scale: u32,
    /// GB/s between L2 and L1, each way [default: memcpy's speed here]
    #[arg(long, value_name = "GB/s", value_parser = above_zero)]
    link: Option<f64>,
    /// GB/s that a disk to be bought reads [default: those of the disk here]
    #[arg(long, value_name = "GB/s", value_parser = above_zero, requires = "disk_write")]
    disk_read: Option<f64>,
    /// GB/s that it writes
    #[arg(long, value_name = "GB/s", value_parser = above_zero, requires = "disk_read")]
    disk_write: Option<f64>,
    /// Plain bytes for each byte in the store, which has a codec: the plain size of a namespace by
    /// its size, of `larder stat`
    #[arg(long, value_name = "RATIO", default_value_t = 1.0, value_parser = codec_ratio)]
    codec_ratio: f64,
    /// Microseconds of its reads and writes besides their bytes
    #[arg(long, value_name = "US", value_parser = above_zero, requires = "disk_read")]
    disk_latency: Option<f64>,
    /// TFLOP/s that a prefill reaches, all accelerators of a server together: an H200 by default
    #[arg(long, default_value_t = 600.0, value_parser = above_zero)]
    tflops: f64,
    /// GB/s of their memory
    #[arg(long, value_name = "GB/s", default_value_t = 4800.0, value_parser = above_zero)]
    hbm: f64,
    /// Read only pages from L3 that are expected faster than computing them
    #[arg(long)]
    break_even: bool,
    /// Hold L1 on this CUDA device, by its number, rather than in the memory of the host; its link
    /// is not measured
    #[arg(long, value_name = "N", requires = "link")]
    cuda: Option<u32>,
    /// Only with all three tiers: no runs to compare with
    #[arg(long)]
    pub only: bool,
}

fn codec_ratio(text: &str) -> Result<f64, String> {
    let ratio = above_zero(text)?;
    let is_one = (1.0..=2.0).contains(&ratio);
    is_one
        .then_some(ratio)
        .ok_or_else(|| "1 to 2 is possible".to_owned())
}

/// By its name in configuration files.
fn named<T: DeserializeOwned>(name: &str) -> Result<T, String> {
    serde_json::from_value(serde_json::Value::from(name)).map_err(|error| error.to_string())
}

/// The tiers in use, in the order of the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Setting {
    /// L1 alone.
    L1,
    /// L1 and L2.
    L1L2,
    /// All three.
    All,
    /// All three, without hints to L3 about hot pages above.
    Untold,
}

impl Setting {
    /// Its name in documents.
    pub fn name(self) -> &'static str {
        match self {
            Setting::L1 => "L1",
            Setting::L1L2 => "L1+L2",
            Setting::All => "L1+L2+L3",
            Setting::Untold => "L3 not told",
        }
    }

    /// Whether there is an L2.
    pub fn has_l2(self) -> bool {
        self != Setting::L1
    }

    /// Whether there is an L3.
    pub fn has_l3(self) -> bool {
        matches!(self, Setting::All | Setting::Untold)
    }
}

/// The parameters of a replay, all of them valid.
pub struct Plan<'a> {
    /// The arguments.
    pub args: &'a TiersArgs,
    /// Of full size.
    pub page: KvShape,
    /// As they are really moved.
    pub scaled: KvShape,
}

impl TiersArgs {
    /// The plan of the replay.
    ///
    /// # Errors
    /// There are no such pages.
    pub fn plan(&self) -> Result<Plan<'_>, Failure> {
        Ok(Plan {
            args: self,
            page: self.model.page(self.page_size)?,
            scaled: self.model.scaled_page(self.page_size, self.scale)?,
        })
    }

    /// Bytes per second of the link, unless it is measured.
    pub fn link(&self) -> Option<f64> {
        self.link.map(|gigabytes| gigabytes * 1e9)
    }

    /// The speed of a server.
    pub fn compute(&self) -> Compute {
        Compute {
            flops: self.tflops * 1e12,
            memory_bytes_per_second: self.hbm * 1e9,
        }
    }

    /// The disk to be bought, unless the one here is measured.
    pub fn disk(&self) -> Option<DiskSpeed> {
        let latency = nanos(self.disk_latency.unwrap_or(0.0) / 1e6);
        let speed = |gigabytes: f64| (gigabytes * 1e9, latency);
        let both = self.disk_read.zip(self.disk_write);
        both.map(|(read, write)| DiskSpeed {
            read: speed(read),
            write: speed(write),
        })
    }

    /// The speed of plain bytes on a disk of this speed.
    pub fn of_plain(&self, disk: DiskSpeed) -> DiskSpeed {
        let plain = |(bytes, latency): (f64, Nanos)| (bytes * self.codec_ratio, latency);
        DiskSpeed {
            read: plain(disk.read),
            write: plain(disk.write),
        }
    }

    /// The device that holds L1.
    pub fn device(&self) -> Result<Arc<dyn Device>, Failure> {
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
        let l2 = pages("--l2", self.args.l2)?;
        Ok((
            pages("--l1", self.args.l1)?,
            if setting.has_l2() { l2 } else { 0 },
        ))
    }

    /// The cache of a server.
    pub fn config(&self, setting: Setting) -> Result<Config, Failure> {
        let (l1, l2) = self.pages(setting)?;
        let page_bytes = u64::from(self.scaled.page_bytes());
        let mut config = Config::new(self.args.page_size, page_bytes, l1, l2);
        config.write_policy = self.args.write_policy;
        config.prefetch.policy = self.args.prefetch_policy;
        if self.args.break_even {
            config.prefetch.break_even_tokens_per_second = self.tokens_per_second();
        }
        config.l3_write = match setting.has_l3() {
            true => self.args.l3_write,
            false => L3Write::Never,
        };
        // Pages are smaller than they stand for. The other limit, half of L2, is the relevant one.
        config.l3_queue_bytes_max = u64::MAX;
        let checked = config.check().and_then(|()| match setting.has_l3() {
            true => config.check_with_l3(),
            false => Ok(()),
        });
        checked.map_err(|error| Failure::usage(in_options(&error.to_string())))?;
        Ok(config)
    }

    /// Tokens of a prompt of usual length that a server computes per second.
    fn tokens_per_second(&self) -> Option<NonZeroU32> {
        let model = &self.args.model;
        let layer = model.layer_seconds(&self.args.compute(), USUAL_TOKENS.into(), 0);
        let seconds = layer * f64::from(model.layers);
        NonZeroU32::new((f64::from(USUAL_TOKENS) / seconds) as u32)
    }

    /// The scaled size of the store.
    pub fn scaled_bytes(&self) -> Result<u64, Failure> {
        let (page, scaled) = (on_disk(&self.page)?, on_disk(&self.scaled)?);
        let plain = (self.args.capacity.0 as f64 * self.args.codec_ratio) as u64;
        let bytes = u128::from(plain) * u128::from(page_bytes_on_disk(&scaled))
            / u128::from(page_bytes_on_disk(&page));
        Ok(u64::try_from(bytes).unwrap_or(u64::MAX))
    }
}

/// An error about the cache's settings, in the options of a replay.
fn in_options(error: &str) -> String {
    let options = [
        ("page_tokens", "--page-size"),
        ("l1_pages", "--l1"),
        ("l2_pages = ", "pages in --l2 = "),
        ("l2_pages", "--l2"),
        ("write_policy = ", "--write-policy "),
        (
            "prefetch.threshold_tokens = ",
            "least tokens of a prefetch = ",
        ),
        (" or prefetch.l2_percent_max", ""),
        ("late_percent = ", "percent of L2 that is written late = "),
        ("; set write_policy", "; set --write-policy"),
        (
            " = write_through, or another l3_write",
            " write_through, or another --l3-write",
        ),
    ];
    options
        .into_iter()
        .fold(error.to_owned(), |text, (field, option)| {
            text.replace(field, option)
        })
}

/// A page as the store keeps it.
pub fn on_disk(shape: &KvShape) -> Result<PageShape, Failure> {
    page_shape(shape)
        .map_err(|error| Failure::usage(format!("{error}; choose another --page-size or --scale")))
}
