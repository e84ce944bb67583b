//! The options of an L4: a remote beneath a store that is served.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use larder_remote::RUN_TOKENS;
use larder_remote::agent::CONNECTIONS_MAX;
pub use larder_remote::l4::{L4, L4Config, L4Error};

use crate::size::{self, ByteSize};

/// A remote beneath the store. See docs/remote.md.
#[derive(Args, Clone, Debug)]
pub struct L4Args {
    /// Share pages with other nodes through this remote: file:///DIRECTORY or s3://BUCKET/PREFIX.
    /// Several in order, the nearest first, if it is given more than once
    #[arg(long, value_name = "URL")]
    l4: Vec<String>,
    /// The URL of the S3 service, if it is not AWS
    #[arg(long, value_name = "URL", requires = "l4")]
    l4_endpoint: Option<String>,
    /// A PEM file of certificate authorities to trust instead of the system's
    #[arg(long, value_name = "FILE", requires = "l4")]
    l4_ca_file: Option<PathBuf>,
    /// The file with the key of the nodes; `larder remote key` makes one
    #[arg(
        long,
        value_name = "FILE",
        requires = "l4",
        conflicts_with = "l4_unsigned"
    )]
    l4_key_file: Option<PathBuf>,
    /// Without keys: everybody who can write to the remote can plant pages
    #[arg(long, requires = "l4")]
    l4_unsigned: bool,
    /// Which runs of pages are published
    #[arg(long, value_enum, default_value_t = AdmissionArg::SecondTouch, requires = "l4")]
    l4_admission: AdmissionArg,
    /// Tokens of a run; the same on all nodes
    #[arg(long, value_name = "N", default_value_t = RUN_TOKENS, requires = "l4",
        help_heading = "Expert settings")]
    l4_run_tokens: u32,
    /// Bytes published in 24 hours; docs/remote.md has the exact bound
    #[arg(long, value_name = "SIZE", default_value = "1TiB", requires = "l4")]
    l4_bytes_per_day: ByteSize,
    /// Most bytes published in a second
    #[arg(
        long,
        value_name = "SIZE",
        default_value = "200MiB",
        requires = "l4",
        help_heading = "Expert settings"
    )]
    l4_bytes_per_second: ByteSize,
    /// Most requests of publications and searches in an hour
    #[arg(
        long,
        value_name = "N",
        default_value_t = 100_000,
        requires = "l4",
        help_heading = "Expert settings"
    )]
    l4_requests_per_hour: u64,
    /// Most fetches at once; as many are made as lookups need
    #[arg(long, value_name = "N", default_value_t = CONNECTIONS_MAX as u64, requires = "l4",
        help_heading = "Expert settings",
        value_parser = clap::value_parser!(u64).range(1..=CONNECTIONS_MAX as u64))]
    l4_connections: u64,
    /// Longest time that a read waits for pages of the remote
    #[arg(long, value_name = "DURATION", default_value = "500ms", requires = "l4",
        value_parser = size::duration)]
    l4_patience: Duration,
    /// Longest time of one request
    #[arg(long, value_name = "DURATION", default_value = "5s", requires = "l4",
        value_parser = size::duration)]
    l4_timeout: Duration,
    /// Time between two listings of the remote, which find the runs of other nodes, and between two
    /// searches for a prefix
    #[arg(long, value_name = "DURATION", default_value = "5m", requires = "l4",
        help_heading = "Expert settings", value_parser = size::duration)]
    l4_refresh: Duration,
    /// Tokens that the engine computes in a second: pages that it computes faster than they arrive
    /// are not fetched
    #[arg(long, value_name = "N", requires = "l4")]
    l4_prefill_rate: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum AdmissionArg {
    /// Each run, when it is put
    Through,
    /// A run that is used again after it was put
    SecondTouch,
}

impl L4Args {
    /// These options as a configuration.
    pub fn config(&self) -> L4Config {
        L4Config {
            urls: self.l4.clone(),
            endpoint: self.l4_endpoint.clone(),
            ca_file: self.l4_ca_file.clone(),
            key_file: self.l4_key_file.clone(),
            is_unsigned: self.l4_unsigned,
            is_through: self.l4_admission == AdmissionArg::Through,
            run_tokens: self.l4_run_tokens,
            bytes_per_day: self.l4_bytes_per_day.0,
            bytes_per_second: self.l4_bytes_per_second.0,
            requests_per_hour: self.l4_requests_per_hour,
            connections: self.l4_connections as usize,
            patience: self.l4_patience,
            timeout: self.l4_timeout,
            refresh: self.l4_refresh,
            prefill_rate: self.l4_prefill_rate,
        }
    }
}
