//! The remotes beneath a store, by configuration alone.
//!
//! [`L4Config`] names the remotes and their limits. [`L4Config::connect`] makes their agents, the
//! store is opened over them ([`L4::beneath`]), and they start to work ([`L4::start`]).

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use larder_base::fork::Origin;
use larder_base::runtime::{Instant, thread};
use larder_engine::{OpenOptions, PageStore, Store};
use larder_offline::survey::{Sealed, Survey, SurveyOptions};
use larder_seal::WrappingKey;

use crate::agent::{Admission, Agent, AgentOptions, CLOSE_PATIENCE, CONNECTIONS_MAX, Levels};
use crate::error::PlaceError;
use crate::keys::{KeyError, Keyring, Trust};
use crate::place::Place;
use crate::run::{RUN_TOKENS, pages_of_run};
use crate::stored::{run_pages, whole_runs};

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
    /// Bytes published in 24 hours, to each remote. Those of a day that are left may follow on the
    /// next one.
    pub bytes_per_day: u64,
    /// Most bytes published in a second, to each remote.
    pub bytes_per_second: u64,
    /// Most requests of publications and searches in an hour, to each remote.
    pub requests_per_hour: u64,
    /// Most fetches at once, from each remote.
    pub connections: usize,
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
            connections: CONNECTIONS_MAX,
            patience: Duration::from_millis(500),
            timeout: Duration::from_secs(5),
            refresh: Duration::from_mins(5),
            prefill_rate: None,
        }
    }
}

/// Most connections of a fetch of one run. A server may limit each of them.
const PARTS: usize = 8;

/// Time in which the pages of a put are written.
const DELAY: Duration = Duration::from_secs(1);

/// The pause after a failure. A second one is tried again after 15 s.
const PAUSE: Duration = Duration::from_secs(5);

/// Why the remotes of a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum L4Error {
    /// No key, and no word that none is wanted.
    #[error(
        "l4 needs a key file (--l4-key-file, l4_key_file), as `larder remote key` makes one, or \
         the word that it works unsigned (--l4-unsigned, l4_unsigned)"
    )]
    NoKey,
    /// A number or a time, by its key.
    #[error("{0} (--{option}) must be above 0", option = .0.replace('_', "-"))]
    NotPositive(&'static str),
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
        if let Some(key) = self.not_positive() {
            return Err(L4Error::NotPositive(key));
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
                retries: 0,
                parts: PARTS,
            };
            let remote = place.connect()?;
            Ok(Agent::new(remote, self.options(url, trust.clone())))
        };
        let agents: Result<Vec<Arc<Agent>>, PlaceError> = self.urls.iter().map(agent).collect();
        Ok(Some(L4 {
            levels: Arc::new(Levels(agents?)),
            resumed_tokens: self.is_through.then_some(self.run_tokens),
            wrapping: OnceLock::new(),
            origin: Origin::here(),
        }))
    }

    /// The key of a number or a time that must be above 0, and is not.
    #[must_use]
    pub fn not_positive(&self) -> Option<&'static str> {
        let is_rate = |rate: f64| rate.is_finite() && rate > 0.0;
        let settings = [
            ("l4_run_tokens", self.run_tokens > 0),
            ("l4_connections", self.connections > 0),
            ("l4_timeout", !self.timeout.is_zero()),
            ("l4_refresh", !self.refresh.is_zero()),
            ("l4_prefill_rate", self.prefill_rate.is_none_or(is_rate)),
        ];
        let wrong = settings.into_iter().find(|(_, is_right)| !is_right);
        wrong.map(|(key, _)| key)
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
            connections: self.connections,
            patience: self.patience,
            timeout: self.timeout,
            prefill_rate: self.prefill_rate,
            pause: PAUSE,
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
    /// The key of the store, if it is encrypted.
    wrapping: OnceLock<WrappingKey>,
    origin: Origin,
}

impl L4 {
    /// These options, over the remotes.
    pub fn beneath(&self, options: OpenOptions) -> OpenOptions {
        if let Some(key) = &options.wrapping {
            self.wrapping.get_or_init(|| key.clone());
        }
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
                let sealed = self.wrapping.get().cloned();
                let sealed = sealed.map_or(Sealed::Refused, Sealed::Unlocked);
                thread.spawn(move || offer_all(&agent, &volume, sealed, run_tokens))?;
            }
        }
        Ok(())
    }

    /// Ends the work. Waits at most two seconds for requests in progress. Does nothing in a forked
    /// child: its agents have no threads, their locks may be held for ever, and the memory of puts
    /// is the parent's.
    pub fn close(&self) {
        if self.origin.is_inherited() {
            return;
        }
        // All agents end at once. No thread is started for it: there may be none left.
        let until = Instant::now() + CLOSE_PATIENCE;
        let stopped: Vec<bool> = self.levels.0.iter().map(|agent| agent.stop()).collect();
        for (agent, was_open) in self.levels.0.iter().zip(stopped) {
            agent.end(was_open, until);
        }
    }
}

impl Drop for L4 {
    fn drop(&mut self) {
        self.close();
    }
}

/// Offers an agent the runs that the store has when its use begins: a former owner may have ended
/// before it published them.
fn offer_all(agent: &Agent, path: &Path, sealed: Sealed, run_tokens: u32) {
    if !agent.wait_for_use() {
        return;
    }
    let options = SurveyOptions {
        sealed,
        ..SurveyOptions::default()
    };
    let survey = match Survey::new(path, &options) {
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
        let namespace = namespace.plain();
        let pages = pages_of_run(&namespace, run_tokens).get();
        let (runs, _) = whole_runs(&survey, at, pages);
        let mut runs = runs.iter().map(|run| run_pages(run));
        if !runs.all(|run| agent.offer(&namespace, run)) {
            return;
        }
    }
}
