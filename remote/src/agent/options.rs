//! The configuration of an agent.

use std::time::Duration;

use crate::keys::Trust;

/// Which runs are published.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// Each run, when its last page is put.
    Through,
    /// A run whose last page is found or touched after it was put.
    SecondTouch,
}

/// The configuration of an agent.
#[derive(Clone)]
pub struct AgentOptions {
    /// The name of the remote, for reports.
    pub place: String,
    /// The runs that the store takes, and the key that seals its own.
    pub trust: Trust,
    /// Tokens of a run; the same on all nodes.
    pub run_tokens: u32,
    /// Which runs are published.
    pub admission: Admission,
    /// Bytes published in a day. Those of a day that are left may follow on the next one.
    pub bytes_per_day: u64,
    /// Most bytes published in a second.
    pub bytes_per_second: u64,
    /// Most requests of publications and searches in an hour.
    pub requests_per_hour: u64,
    /// Most fetches at once, at most [`CONNECTIONS_MAX`](super::CONNECTIONS_MAX).
    pub connections: usize,
    /// Longest time in which a read waits for pages of the remote.
    pub patience: Duration,
    /// Longest time of one request.
    pub timeout: Duration,
    /// Tokens that the engine computes in a second: pages that it computes faster than they arrive
    /// are not fetched. Without it the patience alone decides.
    pub prefill_rate: Option<f64>,
    /// The pause after a failure of the remote, of its listing, of a run or of a search for one.
    /// Each further failure doubles it, up to `refresh`.
    pub pause: Duration,
    /// Time between two listings of the remote.
    pub refresh: Duration,
    /// Time between the note of a run and its publication, in which its pages are written.
    pub delay: Duration,
}
