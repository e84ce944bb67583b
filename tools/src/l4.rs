//! The options of an L4: a remote beneath a store that is served.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use clap::{Args, ValueEnum};
use larder_engine::survey::{Survey, SurveyOptions};
use larder_remote::agent::{Admission, Agent, AgentOptions};
use larder_remote::{Keyring, Place, RUN_TOKENS, Trust, pages_of_run};

use crate::failure::Failure;
use crate::remote::runs::{run_pages, whole_runs};
use crate::size::{self, ByteSize};

/// A remote beneath the store. See docs/remote.md.
#[derive(Args, Clone, Debug)]
pub struct L4Args {
    /// Share pages with other nodes through this remote: file:///DIRECTORY or s3://BUCKET/PREFIX
    #[arg(long, value_name = "URL")]
    l4: Option<String>,
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
    #[arg(long, value_name = "N", default_value_t = RUN_TOKENS, requires = "l4")]
    l4_run_tokens: u32,
    /// Most bytes published in 24 hours
    #[arg(long, value_name = "SIZE", default_value = "1TiB", requires = "l4")]
    l4_bytes_per_day: ByteSize,
    /// Most bytes published in a second
    #[arg(long, value_name = "SIZE", default_value = "200MiB", requires = "l4")]
    l4_bytes_per_second: ByteSize,
    /// Most requests of publications in an hour
    #[arg(long, value_name = "N", default_value_t = 100_000, requires = "l4")]
    l4_requests_per_hour: u64,
    /// Longest time that a read waits for pages of the remote
    #[arg(long, value_name = "DURATION", default_value = "500ms", requires = "l4",
        value_parser = size::duration)]
    l4_patience: Duration,
    /// Longest time of one request
    #[arg(long, value_name = "DURATION", default_value = "5s", requires = "l4",
        value_parser = size::duration)]
    l4_timeout: Duration,
    /// Time between two listings of the remote, which find the runs of other nodes
    #[arg(long, value_name = "DURATION", default_value = "5m", requires = "l4",
        value_parser = size::duration)]
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
    /// Offers the agent the runs that the store already has, on a thread of its own: a former owner
    /// may have ended before it published them. Runs are published when they are put, or never.
    ///
    /// # Errors
    /// The thread cannot be started.
    pub fn resume(&self, agent: &Arc<Agent>, path: &Path) -> io::Result<()> {
        if self.l4_admission != AdmissionArg::Through {
            return Ok(());
        }
        let (agent, path, run_tokens) = (Arc::clone(agent), path.to_owned(), self.l4_run_tokens);
        let thread = thread::Builder::new().name("larder-resume".to_owned());
        thread.spawn(move || offer_all(&agent, &path, run_tokens))?;
        Ok(())
    }
}

fn offer_all(agent: &Agent, path: &Path, run_tokens: u32) {
    let survey = match Survey::new(path, &SurveyOptions::default()) {
        Ok(survey) => survey,
        Err(error) => {
            tracing::warn!(
                %error,
                "runs that were put before this start are not published; `larder remote push` does"
            );
            return;
        }
    };
    for (at, facts) in survey.namespaces.iter().enumerate() {
        let Some(namespace) = &facts.record else {
            continue;
        };
        let pages = pages_of_run(namespace, run_tokens).get();
        let (runs, _) = whole_runs(&survey, at, pages);
        let mut runs = runs.iter().map(|run| run_pages(run));
        if !runs.all(|run| agent.offer(namespace, run)) {
            return;
        }
    }
}

/// Time in which the pages of a put are written.
const DELAY: Duration = Duration::from_secs(1);

impl L4Args {
    /// The agent of the remote; `None` without one.
    ///
    /// # Errors
    /// The remote or the keys cannot be used as they are named.
    pub fn agent(&self) -> Result<Option<Arc<Agent>>, Failure> {
        let Some(url) = &self.l4 else {
            return Ok(None);
        };
        let trust = match &self.l4_key_file {
            Some(path) => Trust::Sealed(Keyring::load(path)?),
            None if self.l4_unsigned => Trust::Unsigned,
            None => {
                return Err(Failure::usage(
                    "--l4 needs --l4-key-file FILE, as `larder remote key` makes one, or \
                     --l4-unsigned"
                        .to_owned(),
                ));
            }
        };
        let options = AgentOptions {
            place: url.clone(),
            trust,
            run_tokens: self.l4_run_tokens,
            admission: match self.l4_admission {
                AdmissionArg::Through => Admission::Through,
                AdmissionArg::SecondTouch => Admission::SecondTouch,
            },
            bytes_per_day: self.l4_bytes_per_day.0,
            bytes_per_second: self.l4_bytes_per_second.0,
            requests_per_hour: self.l4_requests_per_hour,
            patience: self.l4_patience,
            timeout: self.l4_timeout,
            prefill_rate: self.l4_prefill_rate,
            refresh: self.l4_refresh,
            delay: DELAY,
        };
        let place = Place {
            url: url.clone(),
            endpoint: self.l4_endpoint.clone(),
            ca_file: self.l4_ca_file.clone(),
        };
        let remote = place.connect()?;
        Ok(Some(Agent::new(remote, options)))
    }
}
