//! Configuration: the fields, their defaults, and their validation.
//!
//! Every field except the two pool sizes has a default. Unknown fields are refused, and an error
//! contains the name of its field.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

use crate::tree::EvictionOrder;

/// When pages of L1 are copied to L2.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WritePolicy {
    /// When they are first inserted.
    #[default]
    WriteThrough,
    /// When `selective_hits` requests have inserted them.
    WriteThroughSelective,
    /// When they are evicted from L1.
    WriteBack,
}

impl WritePolicy {
    /// All policies.
    pub const ALL: [WritePolicy; 3] = [
        WritePolicy::WriteThrough,
        WritePolicy::WriteThroughSelective,
        WritePolicy::WriteBack,
    ];
}

/// When pages of L2 are written to L3.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum L3Write {
    /// As soon as they are in L2. If the queue is full at that time, when no transfer is in flight.
    #[default]
    OnBackup,
    /// When they are in L2 and `selective_hits` requests have inserted them.
    Selective,
    /// When they leave the window of pages of L2 that L3 was not asked to store (`late_percent`),
    /// or leave L2, whichever is first: each with the pages before it in its chain. Pages that L3
    /// does not take then are offered again when they are used again.
    Late,
    /// Never.
    Never,
}

/// How long a request waits for its prefetch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PrefetchPolicy {
    /// No wait: the request uses the pages that have arrived when it is scheduled.
    BestEffort,
    /// Until everything has arrived.
    WaitComplete,
    /// Until everything has arrived or the timeout expires, counted from the first time the request
    /// had to wait.
    #[default]
    Timeout,
}

impl PrefetchPolicy {
    /// All policies.
    pub const ALL: [PrefetchPolicy; 3] = [
        PrefetchPolicy::BestEffort,
        PrefetchPolicy::WaitComplete,
        PrefetchPolicy::Timeout,
    ];
}

/// Prefetches from L3 to L2.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct PrefetchConfig {
    /// How long a request waits. Default: `timeout`.
    pub policy: PrefetchPolicy,
    /// Minimum number of tokens for a prefetch: fewer missing tokens are computed. Default: 256, as
    /// in HiCache. An engine with slow prefills or short prompts lowers it, down to one page.
    pub threshold_tokens: u32,
    /// Base waiting time of `timeout`, in microseconds. Default: 1,000,000.
    pub timeout_base_us: u64,
    /// Additional waiting time per 1,024 tokens, in microseconds. Default: 250,000.
    pub timeout_per_1024_tokens_us: u64,
    /// Maximum share of L2 for prefetches in progress, in percent. A longer prefetch is cut to the
    /// pages that are left. Default: 50.
    pub l2_percent_max: u32,
    /// Pages per read batch. A prefetch can end between two batches. Default: 128.
    pub batch_pages: u32,
    /// Prefill speed in tokens per second. If set, a hit is read from L3 only if the read is
    /// expected to be faster than the prefill. Default: not set.
    pub break_even_tokens_per_second: Option<NonZeroU32>,
    /// Maximum number of attempts per request, for [`Retries`](crate::core::Retries). Default: 8.
    pub attempts_max: u32,
    /// Scheduling passes between two attempts. Default: 8.
    pub retry_passes: u32,
}

impl Default for PrefetchConfig {
    fn default() -> Self {
        PrefetchConfig {
            policy: PrefetchPolicy::default(),
            threshold_tokens: 256,
            timeout_base_us: 1_000_000,
            timeout_per_1024_tokens_us: 250_000,
            l2_percent_max: 50,
            batch_pages: 128,
            break_even_tokens_per_second: None,
            attempts_max: 8,
            retry_passes: 8,
        }
    }
}

/// The kind of pages that only the end of a prefix needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TailKind {
    /// The rows of the last tokens of a prefix.
    Window {
        /// Their number.
        tokens: u32,
    },
    /// The state behind a prefix.
    State {
        /// States are kept at each border of so many pages. 1: at every border where a forward
        /// ends.
        every: u32,
    },
}

/// A pool of pages that only the end of a prefix needs: a sliding window, or states.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TailConfig {
    /// The kind of its pages.
    pub kind: TailKind,
    /// Pages of its device pool, without the padding page (page 0). A running request needs the
    /// pages of its window and of its forward, or one state.
    pub l1_pages: u32,
    /// Pages of its host pool, without the padding page (page 0); 0 for none.
    pub l2_pages: u32,
}

/// The complete configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Tokens per page. Default: 1.
    #[serde(default = "one")]
    pub page_tokens: u32,
    /// Pages of the device pool, without the padding page (page 0).
    pub l1_pages: u32,
    /// Pages of the host pool, without the padding page (page 0); 0 for none. With an L3 and
    /// `write_through`, at least `l1_pages`.
    pub l2_pages: u32,
    /// Bytes per page, all layers and parts. Used for limits in bytes.
    pub page_bytes: u64,
    /// The eviction order. Default: `lru`.
    #[serde(default)]
    pub eviction: EvictionOrder,
    /// When pages are copied from L1 to L2. Default: `write_through`.
    #[serde(default)]
    pub write_policy: WritePolicy,
    /// Hits after which `write_through_selective` copies to L2 and `l3_write = selective` writes to
    /// L3. Default: 2.
    #[serde(default = "two")]
    pub selective_hits: u32,
    /// When pages are written to L3. Default: `on_backup`.
    #[serde(default)]
    pub l3_write: L3Write,
    /// The window of `l3_write = late`: the maximum share of L2 for pages that L3 was not asked to
    /// store, in percent. Default: 50.
    #[serde(default = "fifty")]
    pub late_percent: u32,
    /// Maximum number of bytes queued for L3, and never more than half of L2. Pages above the limit
    /// wait, tail last, until no transfer is in flight. Default: 1 GiB.
    #[serde(default = "gibibyte")]
    pub l3_queue_bytes_max: u64,
    /// Whether this rank writes to L3. With MLA all ranks hold the same bytes, and one rank writes
    /// them. Default: true.
    #[serde(default = "yes")]
    pub writes_l3: bool,
    /// Minimum number of tokens for a load from L2. Fewer tokens are recomputed. Default: 10.
    #[serde(default = "ten")]
    pub load_threshold_tokens: u32,
    /// Maximum number of loads in flight. Default: 8.
    #[serde(default = "eight")]
    pub loads_max: u32,
    /// Prefetches.
    #[serde(default)]
    pub prefetch: PrefetchConfig,
    /// Maximum number of distinct tokens beyond the vocabulary (placeholders of images). Default:
    /// 16,777,216.
    #[serde(default = "sixteen_million")]
    pub wide_tokens_max: u32,
    /// Whether events are collected. Default: false.
    #[serde(default)]
    pub events: bool,
    /// The pools of windows and states of a hybrid model. They are copied to L2 and L3 as soon as
    /// their forwards have ended, under every policy but `l3_write = never`, and evicted least
    /// recently used first. Default: none.
    #[serde(default)]
    pub tails: Vec<TailConfig>,
}

fn one() -> u32 {
    1
}

fn two() -> u32 {
    2
}

fn eight() -> u32 {
    8
}

fn ten() -> u32 {
    10
}

fn sixteen_million() -> u32 {
    1 << 24
}

fn fifty() -> u32 {
    50
}

fn gibibyte() -> u64 {
    1 << 30
}

fn yes() -> bool {
    true
}

/// A field whose value is not valid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field} = {value}: {wrong}")]
pub struct ConfigError {
    /// The name of the field, including its table.
    pub field: &'static str,
    /// The value.
    pub value: u64,
    /// The problem, and the valid values.
    pub wrong: &'static str,
}

/// Whether a field makes sense, its name, its value, and the problem if it does not.
type Check = (bool, &'static str, u64, &'static str);

fn first_wrong(checks: &[Check]) -> Result<(), ConfigError> {
    match checks.iter().find(|(makes_sense, ..)| !makes_sense) {
        None => Ok(()),
        Some(&(_, field, value, wrong)) => Err(ConfigError {
            field,
            value,
            wrong,
        }),
    }
}

impl Config {
    /// The defaults, for pools of these sizes in pages.
    #[must_use]
    pub fn new(page_tokens: u32, page_bytes: u64, l1_pages: u32, l2_pages: u32) -> Config {
        Config {
            page_tokens,
            l1_pages,
            l2_pages,
            page_bytes,
            eviction: EvictionOrder::default(),
            write_policy: WritePolicy::default(),
            selective_hits: two(),
            l3_write: L3Write::default(),
            late_percent: fifty(),
            l3_queue_bytes_max: gibibyte(),
            writes_l3: yes(),
            load_threshold_tokens: ten(),
            loads_max: eight(),
            prefetch: PrefetchConfig::default(),
            wide_tokens_max: sixteen_million(),
            events: false,
            tails: Vec::new(),
        }
    }

    /// Checks every field.
    ///
    /// # Errors
    /// The first field that is not valid.
    pub fn check(&self) -> Result<(), ConfigError> {
        let prefetch = &self.prefetch;
        let (l1, l2) = (u64::from(self.l1_pages), u64::from(self.l2_pages));
        let page_tokens = u64::from(self.page_tokens);
        let page_limit = u64::from(u32::MAX) - 1;
        let percent = u64::from(prefetch.l2_percent_max);
        let queue = self.l3_queue_bytes_max;
        let is_selective = self.write_policy == WritePolicy::WriteThroughSelective
            || self.l3_write == L3Write::Selective;
        let hits = u64::from(self.selective_hits);
        let batch = u64::from(prefetch.batch_pages);
        let checks = [
            (
                (1..=4096).contains(&page_tokens),
                "page_tokens",
                page_tokens,
                "a page has 1 to 4096 tokens",
            ),
            (
                (1..page_limit).contains(&l1),
                "l1_pages",
                l1,
                "the device pool has 1 to 2^32 - 3 pages",
            ),
            (
                l2 < page_limit,
                "l2_pages",
                l2,
                "the host pool has at most 2^32 - 3 pages",
            ),
            (
                self.page_bytes > 0,
                "page_bytes",
                self.page_bytes,
                "a page has bytes",
            ),
            (
                !is_selective || hits > 0,
                "selective_hits",
                hits,
                "the selective policies wait for at least one hit",
            ),
            (
                self.l3_write == L3Write::Never || queue >= self.page_bytes,
                "l3_queue_bytes_max",
                queue,
                "not one page fits; raise it to page_bytes or more, or set l3_write = never",
            ),
            (
                self.late_percent <= 100,
                "late_percent",
                u64::from(self.late_percent),
                "it is a percentage from 0 to 100",
            ),
            (
                self.loads_max >= 3,
                "loads_max",
                u64::from(self.loads_max),
                "at least three loads are in flight at once",
            ),
            (
                (1..=100).contains(&percent),
                "prefetch.l2_percent_max",
                percent,
                "it is a percentage from 1 to 100",
            ),
            (
                batch > 0,
                "prefetch.batch_pages",
                batch,
                "a batch has at least one page",
            ),
        ];
        first_wrong(&checks)?;
        self.tails.iter().try_for_each(|tail| self.check_tail(tail))
    }

    fn check_tail(&self, tail: &TailConfig) -> Result<(), ConfigError> {
        let (l1, l2) = (u64::from(tail.l1_pages), u64::from(tail.l2_pages));
        let page_limit = u64::from(u32::MAX) - 1;
        let needed = self.trailing_pages(tail.kind) as u64 + 1;
        let least = match tail.kind {
            TailKind::Window { tokens } => tokens,
            TailKind::State { every } => every,
        };
        first_wrong(&[
            (
                least > 0,
                "tails.kind",
                least.into(),
                "a window has at least one token, and states are at least one page apart",
            ),
            (
                (needed..page_limit).contains(&l1),
                "tails.l1_pages",
                l1,
                "the device pool has the pages of one window and one more, or two states",
            ),
            (
                l2 < page_limit,
                "tails.l2_pages",
                l2,
                "the host pool has at most 2^32 - 3 pages",
            ),
        ])
    }

    /// Number of pages at the end of a prefix that a pool of this kind needs.
    pub(crate) fn trailing_pages(&self, kind: TailKind) -> usize {
        match kind {
            TailKind::Window { tokens } => tokens.div_ceil(self.page_tokens) as usize,
            TailKind::State { .. } => 1,
        }
    }

    /// Checks the fields that matter only with an L3 below, in addition to [`Config::check`].
    ///
    /// # Errors
    /// The first field under which pages would never be written to L3, or never read from it.
    pub fn check_with_l3(&self) -> Result<(), ConfigError> {
        let (l1, l2) = (u64::from(self.l1_pages), u64::from(self.l2_pages));
        let is_written = self.l3_write != L3Write::Never;
        let is_inclusive = is_written && self.write_policy == WritePolicy::WriteThrough;
        let is_late = self.l3_write == L3Write::Late;
        let threshold = self.prefetch.threshold_tokens;
        let share = l2 * u64::from(self.prefetch.l2_percent_max) / 100;
        let checks = [
            (
                l2 > 0,
                "l2_pages",
                l2,
                "pages reach L3 only through L2; raise it, or leave L3 out",
            ),
            (
                !is_inclusive || l2 >= l1,
                "l2_pages",
                l2,
                "with write_through all pages of L1 are in L2, too, on their way to L3; raise it \
                 to l1_pages or more, or set write_policy = write_back",
            ),
            (
                !is_late || self.write_policy != WritePolicy::WriteBack,
                "late_percent",
                u64::from(self.late_percent),
                "with write_back a page comes to L2 before those before it in its chain, without \
                 which late never writes it; set write_policy = write_through, or another l3_write",
            ),
            (
                self.pages_of(threshold) as u64 <= share,
                "prefetch.threshold_tokens",
                u64::from(threshold),
                "prefetches may not take so many pages of L2; lower it, or raise l2_pages or \
                 prefetch.l2_percent_max",
            ),
        ];
        first_wrong(&checks)
    }

    /// Number of pages for this many tokens, rounded up, at least one.
    pub(crate) fn pages_of(&self, tokens: u32) -> usize {
        (tokens as usize).div_ceil(self.page_tokens as usize).max(1)
    }

    /// Maximum number of pages of L2 that L3 was not asked to store, if it is written late.
    pub(crate) fn window_pages(&self) -> usize {
        let pages = u64::from(self.l2_pages) * u64::from(self.late_percent) / 100;
        usize::try_from(pages).unwrap_or(usize::MAX)
    }

    /// Maximum number of pages queued for L3. They are held in L2, and half of L2 stays free of
    /// them, so that a slow L3 does not prevent backups of L1.
    pub(crate) fn put_pages_max(&self) -> usize {
        let bytes = self.l3_queue_bytes_max / self.page_bytes;
        let half = u64::from(self.l2_pages).div_ceil(2);
        usize::try_from(bytes.min(half)).unwrap_or(usize::MAX)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn the_defaults_are_valid_and_need_only_two_sizes() {
        let text = r#"{ "l1_pages": 100, "l2_pages": 200, "page_bytes": 4096 }"#;
        let config: Config = serde_json::from_str(text).unwrap();
        assert_eq!(config, Config::new(1, 4096, 100, 200));
        config.check().unwrap();
    }

    #[test]
    fn every_invalid_field_is_reported_by_name() {
        let good = Config::new(64, 4096, 100, 200);
        type Spoil = fn(&mut Config);
        let cases: [(&str, Spoil); 10] = [
            ("page_tokens", |config| config.page_tokens = 0),
            ("l1_pages", |config| config.l1_pages = 0),
            ("l2_pages", |config| config.l2_pages = u32::MAX),
            ("page_bytes", |config| config.page_bytes = 0),
            ("selective_hits", |config| {
                config.write_policy = WritePolicy::WriteThroughSelective;
                config.selective_hits = 0;
            }),
            ("l3_queue_bytes_max", |config| {
                config.l3_queue_bytes_max = 4095;
            }),
            ("late_percent", |config| config.late_percent = 101),
            ("loads_max", |config| config.loads_max = 2),
            ("prefetch.l2_percent_max", |config| {
                config.prefetch.l2_percent_max = 101;
            }),
            ("prefetch.batch_pages", |config| {
                config.prefetch.batch_pages = 0;
            }),
        ];
        for (field, spoil) in cases {
            let mut config = good.clone();
            spoil(&mut config);
            let error = config.check().unwrap_err();
            assert_eq!(error.field, field);
            assert!(error.to_string().starts_with(field));
        }
    }

    #[test]
    fn configurations_under_which_no_page_reaches_or_leaves_l3_are_refused() {
        let good = Config::new(64, 4096, 100, 100);
        good.check_with_l3().unwrap();
        type Spoil = fn(&mut Config);
        let cases: [(&str, Spoil); 5] = [
            ("late_percent", |config| {
                config.l3_write = L3Write::Late;
                config.write_policy = WritePolicy::WriteBack;
            }),
            ("l2_pages", |config| config.l2_pages = 0),
            ("l2_pages", |config| config.l2_pages = 99),
            ("prefetch.threshold_tokens", |config| {
                config.prefetch.threshold_tokens = 51 * 64;
            }),
            ("prefetch.threshold_tokens", |config| {
                config.prefetch.l2_percent_max = 3;
            }),
        ];
        for (field, spoil) in cases {
            let mut config = good.clone();
            spoil(&mut config);
            config.check().unwrap();
            assert_eq!(config.check_with_l3().unwrap_err().field, field);
        }
        let mut write_back = good;
        write_back.l2_pages = 20;
        write_back.write_policy = WritePolicy::WriteBack;
        write_back.check_with_l3().unwrap();
    }

    #[test]
    fn an_unknown_field_is_refused_by_name() {
        let text = r#"{ "l1_pages": 1, "l2_pages": 2, "page_bytes": 4096, "page_size": 3 }"#;
        let error = serde_json::from_str::<Config>(text).unwrap_err();
        assert!(error.to_string().contains("page_size"), "{error}");
    }
}
