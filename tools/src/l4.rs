//! The options of an L4: a remote beneath a store that is served.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use clap::{Args, ValueEnum};
use larder_engine::survey::{Survey, SurveyOptions};
use larder_engine::{OpenOptions, PageStore, Store};
use larder_remote::agent::{Admission, Agent, AgentOptions, Levels};
use larder_remote::{KeyError, Keyring, Place, PlaceError, RUN_TOKENS, Trust, pages_of_run};

use crate::remote::runs::{run_pages, whole_runs};
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
    #[arg(long, value_name = "N", default_value_t = RUN_TOKENS, requires = "l4")]
    l4_run_tokens: u32,
    /// Most bytes published in 24 hours
    #[arg(long, value_name = "SIZE", default_value = "1TiB", requires = "l4")]
    l4_bytes_per_day: ByteSize,
    /// Most bytes published in a second
    #[arg(long, value_name = "SIZE", default_value = "200MiB", requires = "l4")]
    l4_bytes_per_second: ByteSize,
    /// Most requests of publications and searches in an hour
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
    /// Time between two listings of the remote, which find the runs of other nodes, and between two
    /// searches for a prefix
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

/// The remotes beneath a store, and their agents' configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct L4Config {
    /// Their URLs, the nearest first.
    pub urls: Vec<String>,
    /// The URL of the S3 service, if it is not AWS.
    pub endpoint: Option<String>,
    /// A PEM file of certificate authorities to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// The file with the key of the nodes.
    pub key_file: Option<PathBuf>,
    /// Works without keys.
    pub is_unsigned: bool,
    /// Whether each run is published when it is put, or a run that is used again.
    pub is_through: bool,
    /// Tokens of a run; the same on all nodes.
    pub run_tokens: u32,
    /// Most bytes published in 24 hours, to each remote.
    pub bytes_per_day: u64,
    /// Most bytes published in a second, to each remote.
    pub bytes_per_second: u64,
    /// Most requests of publications and searches in an hour, to each remote.
    pub requests_per_hour: u64,
    /// Longest time that a read waits for pages of a remote.
    pub patience: Duration,
    /// Longest time of one request.
    pub timeout: Duration,
    /// Time between two listings, and between two searches for a prefix.
    pub refresh: Duration,
    /// Tokens that the engine computes in a second, if it is known.
    pub prefill_rate: Option<f64>,
}

impl Default for L4Config {
    fn default() -> L4Config {
        L4Config {
            urls: Vec::new(),
            endpoint: None,
            ca_file: None,
            key_file: None,
            is_unsigned: false,
            is_through: false,
            run_tokens: RUN_TOKENS,
            bytes_per_day: 1 << 40,
            bytes_per_second: 200 << 20,
            requests_per_hour: 100_000,
            patience: Duration::from_millis(500),
            timeout: Duration::from_secs(5),
            refresh: Duration::from_mins(5),
            prefill_rate: None,
        }
    }
}

/// Time in which the pages of a put are written.
const DELAY: Duration = Duration::from_secs(1);

/// Why the remotes of a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum L4Error {
    /// No key, and no word that none is wanted.
    #[error(
        "l4 needs a key file (--l4-key-file, l4_key_file), as `larder remote key` makes one, or \
         the word that it works unsigned (--l4-unsigned, l4_unsigned)"
    )]
    NoKey,
    /// The key file.
    #[error(transparent)]
    Key(#[from] KeyError),
    /// A remote.
    #[error(transparent)]
    Place(#[from] PlaceError),
}

impl L4Config {
    /// The agents of the remotes; `None` without a remote. Nothing is requested yet.
    ///
    /// # Errors
    /// The remotes or the keys cannot be used as they are named.
    pub fn connect(&self) -> Result<Option<L4>, L4Error> {
        if self.urls.is_empty() {
            return Ok(None);
        }
        let trust = match &self.key_file {
            Some(path) => Trust::Sealed(Keyring::load(path)?),
            None if self.is_unsigned => Trust::Unsigned,
            None => return Err(L4Error::NoKey),
        };
        let agent = |url: &String| {
            let place = Place {
                url: url.clone(),
                endpoint: self.endpoint.clone(),
                ca_file: self.ca_file.clone(),
            };
            let remote = place.connect()?;
            Ok(Agent::new(remote, self.options(url, trust.clone())))
        };
        let agents: Result<Vec<Arc<Agent>>, PlaceError> = self.urls.iter().map(agent).collect();
        Ok(Some(L4 {
            levels: Arc::new(Levels(agents?)),
            resumed_tokens: self.is_through.then_some(self.run_tokens),
        }))
    }

    fn options(&self, url: &str, trust: Trust) -> AgentOptions {
        AgentOptions {
            place: url.to_owned(),
            trust,
            run_tokens: self.run_tokens,
            admission: match self.is_through {
                true => Admission::Through,
                false => Admission::SecondTouch,
            },
            bytes_per_day: self.bytes_per_day,
            bytes_per_second: self.bytes_per_second,
            requests_per_hour: self.requests_per_hour,
            patience: self.patience,
            timeout: self.timeout,
            prefill_rate: self.prefill_rate,
            refresh: self.refresh,
            delay: DELAY,
        }
    }
}

/// The agents of the remotes beneath one store, in order.
pub struct L4 {
    levels: Arc<Levels>,
    /// Tokens of a run, if runs of a former owner are to be published.
    resumed_tokens: Option<u32>,
}

impl L4 {
    /// These options, over the remotes.
    pub fn beneath(&self, options: OpenOptions) -> OpenOptions {
        options.over(self.levels.clone())
    }

    /// Starts to work for the store that was opened over the remotes, by its first volume.
    ///
    /// # Errors
    /// A thread cannot be started.
    pub fn start(&self, store: &Arc<Store>, volume: &Path) -> io::Result<()> {
        let store: Arc<dyn PageStore> = store.clone();
        for (at, agent) in self.levels.0.iter().enumerate() {
            agent.remember_beside(volume, at == 0);
            agent.start(&store)?;
            if let Some(run_tokens) = self.resumed_tokens {
                let (agent, volume) = (Arc::clone(agent), volume.to_owned());
                let thread = thread::Builder::new().name("larder-resume".to_owned());
                thread.spawn(move || offer_all(&agent, &volume, run_tokens))?;
            }
        }
        Ok(())
    }

    /// Ends the work. Waits at most two seconds for requests in progress.
    pub fn close(&self) {
        thread::scope(|scope| {
            for agent in &self.levels.0 {
                scope.spawn(|| agent.close());
            }
        });
    }
}

/// Offers an agent the runs that the store has when its use begins: a former owner may have ended
/// before it published them.
fn offer_all(agent: &Agent, path: &Path, run_tokens: u32) {
    if !agent.wait_for_use() {
        return;
    }
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
            patience: self.l4_patience,
            timeout: self.l4_timeout,
            refresh: self.l4_refresh,
            prefill_rate: self.l4_prefill_rate,
        }
    }
}
