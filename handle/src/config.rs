//! The configuration that engines share.
//!
//! Every key is known and has one type. Any other key or value is refused by name before a store is
//! touched; otherwise a typing error might be found weeks later, by a store in the wrong place or
//! of the wrong size.

pub mod l4;

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use larder_disk::probe::Want;
use larder_engine::{CodecChoice, SyncPolicy};
use larder_seal::KeySource;
use larder_store::api::WriteBudget;
use larder_tools::l4::L4Config;
use larder_tools::policy::Policy;
use larder_tools::quota;
use larder_tools::size::{self, ByteSize};
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// Larder's keys, without those of the remotes.
const KEYS: [&str; 20] = [
    "path",
    "size",
    "weights_tag",
    "on_error",
    "retry",
    "prewrite",
    "codec",
    "disk",
    "sync",
    "lease",
    "policy",
    "write_budget",
    "quota",
    "tenant",
    "key_file",
    "key_command",
    "key_credential",
    "timeout",
    "transfer",
    "prefill_rate",
];

/// Maximum `timeout`: an engine gives its storage threads about 10 s to stop.
const TIMEOUT_MAX: Duration = Duration::from_secs(8);

/// Maximum length of `tenant`: it is a text among others in the record of a namespace.
const TENANT_BYTES_MAX: usize = 1024;

/// The behaviour if no store is available at start-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnError {
    /// Refuse to start.
    Fail,
    /// Serve without a store: everything is a miss until there is one.
    Miss,
}

/// How page data is transferred between the host pool and the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Transfer {
    /// The faster of the two, measured on the first batches.
    Auto,
    /// Directly, if the pool is aligned.
    Direct,
    /// Through a buffer on huge pages.
    Bounce,
}

/// A valid configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// A directory, created if necessary, or a block device.
    pub path: PathBuf,
    /// Bytes of the store, if it must be created.
    pub size: Option<u64>,
    /// Distinguishes these weights from others with the same model name. Derived if `None`.
    pub weights_tag: Option<String>,
    /// The behaviour if no store is available at start-up.
    pub on_error: OnError,
    /// When serving without a store: the pause until the next attempt to attach. It doubles after
    /// each attempt, up to ten minutes.
    pub retry: Duration,
    /// Whether the unwritten blocks of a store are written in advance, in the background.
    pub prewrite: bool,
    /// Whether puts encode pages.
    pub codec: CodecChoice,
    /// The I/O method.
    pub disk: Want,
    /// When pages become durable.
    pub sync: SyncPolicy,
    /// How long pages stay after a lookup has reported them.
    pub lease: Duration,
    /// Which pages go first when the store is full.
    pub policy: Policy,
    /// How much the store may write.
    pub write_budget: WriteBudget,
    /// The quota of each namespace that this process opens: see [`quota::limits`].
    pub quota: Option<String>,
    /// The tenant of the pages of this process, as far as its engine names no other.
    pub tenant: Option<String>,
    /// Where the key of an encrypted store is. A store that is created with it is encrypted.
    pub key: Option<KeySource>,
    /// A batch starts no reads or writes after this time.
    pub timeout: Duration,
    /// How page data is transferred.
    pub transfer: Transfer,
    /// Tokens per second that the engine computes, for the counter of saved time. An engine that
    /// asks before each read leaves pages unread that take longer to read.
    pub prefill_rate: Option<NonZeroU32>,
    /// The remotes beneath the store.
    pub l4: L4Config,
}

/// Why a configuration is refused. Contains the key.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// The text is not a table.
    #[error("the extra config is not a table of keys and values: {0}")]
    NotATable(String),
    /// An unknown key.
    #[error("`{key}` is not a key of Larder's config; the keys are {}, {}",
        KEYS.join(", "), l4::KEYS.join(", "))]
    Unknown {
        /// The key.
        key: String,
    },
    /// A value of the wrong type, or out of range.
    #[error("`{key}`: {why}")]
    Value {
        /// The key.
        key: &'static str,
        /// The expected value.
        why: String,
    },
    /// A required key is missing.
    #[error("`{0}` is missing: {1}")]
    Missing(&'static str, &'static str),
}

/// The keys that have not been read yet.
struct Keys(Map<String, Value>);

impl Keys {
    fn take<T: DeserializeOwned>(&mut self, key: &'static str) -> Result<Option<T>, ConfigError> {
        match self.0.remove(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => {
                serde_json::from_value(value)
                    .map(Some)
                    .map_err(|error| ConfigError::Value {
                        key,
                        why: error.to_string(),
                    })
            }
        }
    }

    /// Reads a word or a quantity with `read`.
    fn read<T>(
        &mut self,
        key: &'static str,
        read: impl FnOnce(&str) -> Result<T, String>,
    ) -> Result<Option<T>, ConfigError> {
        let text: Option<String> = self.take(key)?;
        text.map(|text| read(&text).map_err(|why| ConfigError::Value { key, why }))
            .transpose()
    }

    /// Reads one of some words.
    fn choose<T: Copy>(
        &mut self,
        key: &'static str,
        words: &[(&str, T)],
    ) -> Result<T, ConfigError> {
        let chosen = self.read(key, |text| {
            let word = words.iter().find(|(word, _)| *word == text);
            word.map(|(_, meaning)| *meaning).ok_or_else(|| {
                let all: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
                format!("`{text}` is not one of {}", all.join(", "))
            })
        })?;
        // The first word is the default.
        Ok(chosen.unwrap_or(words[0].1))
    }

    /// Bytes: a number, or a text such as `512GiB`.
    fn size(&mut self, key: &'static str) -> Result<Option<u64>, ConfigError> {
        let wrong = |why: String| ConfigError::Value { key, why };
        match self.take::<Value>(key)? {
            None => Ok(None),
            Some(Value::String(text)) => match text.parse::<ByteSize>() {
                Ok(size) => Ok(Some(size.0)),
                Err(error) => Err(wrong(error.to_string())),
            },
            Some(Value::Number(number)) if number.as_u64().is_some() => Ok(number.as_u64()),
            Some(other) => Err(wrong(format!(
                "{other} is not a size: write bytes or a text such as \"512GiB\""
            ))),
        }
    }

    /// A time: seconds, or a text such as `500ms`.
    fn duration(&mut self, key: &'static str) -> Result<Option<Duration>, ConfigError> {
        let wrong = |why: String| ConfigError::Value { key, why };
        match self.take::<Value>(key)? {
            None => Ok(None),
            Some(Value::String(text)) => size::duration(&text).map(Some).map_err(wrong),
            Some(Value::Number(number)) => number
                .as_f64()
                .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
                .filter(|time| *time <= size::DURATION_MAX)
                .map(Some)
                .ok_or_else(|| {
                    let why = "is not a number of seconds, or is more than 100 years";
                    wrong(format!("{number} {why}"))
                }),
            Some(other) => Err(wrong(format!(
                "{other} is not a time: write seconds or a text such as \"500ms\""
            ))),
        }
    }
}

/// Where the key is that at most one of the keys of a configuration names.
///
/// # Errors
/// Several name one.
pub fn key_source(
    file: Option<PathBuf>,
    command: Option<String>,
    credential: bool,
) -> Result<Option<KeySource>, ConfigError> {
    let file = file.map(KeySource::File);
    let command = command.map(KeySource::Command);
    let credential = credential.then_some(KeySource::Credential);
    let mut named = [file, command, credential].into_iter().flatten();
    match (named.next(), named.next()) {
        (key, None) => Ok(key),
        _ => Err(ConfigError::Value {
            key: "key_file",
            why: "give one of key_file, key_command and key_credential".to_owned(),
        }),
    }
}

/// Why a text is not the name of a tenant.
fn misnamed(tenant: &str) -> Option<String> {
    let why = match tenant {
        "" => "is empty: leave it out for pages without a tenant",
        _ if tenant.chars().any(char::is_control) => "holds a control character",
        _ if tenant.len() > TENANT_BYTES_MAX => "is longer than 1,024 bytes",
        _ => return None,
    };
    Some(why.to_owned())
}

impl Config {
    /// Resolves a relative `path` against the working directory. Returns a warning if the path was
    /// relative.
    pub fn resolve(&mut self) -> Option<String> {
        if self.path.is_absolute() {
            return None;
        }
        let path = std::path::absolute(&self.path).ok()?;
        let remark = format!(
            "`path` {} is relative: here it is {}, and in a process with another working \
             directory another; give an absolute path",
            self.path.display(),
            path.display()
        );
        self.path = path;
        Some(remark)
    }

    /// Reads the keys of the remotes alone, as JSON.
    ///
    /// # Errors
    /// As [`Config::parse`].
    pub fn parse_l4(json: &str) -> Result<L4Config, ConfigError> {
        let table = serde_json::from_str(json);
        let mut keys = Keys(
            table.map_err(|error: serde_json::Error| ConfigError::NotATable(error.to_string()))?,
        );
        let l4 = l4::take(&mut keys, None)?;
        match keys.0.into_iter().next() {
            Some((key, _)) => Err(ConfigError::Unknown { key }),
            None => Ok(l4),
        }
    }

    /// Reads a configuration, as JSON.
    ///
    /// # Errors
    /// An unknown key, a value of a wrong type, or a missing key. The error contains the key.
    pub fn parse(json: &str) -> Result<Config, ConfigError> {
        Config::parse_beside(json, &[])
    }

    /// Reads a configuration among keys of an engine, as JSON.
    ///
    /// # Errors
    /// As [`Config::parse`].
    pub fn parse_beside(json: &str, engines_keys: &[&str]) -> Result<Config, ConfigError> {
        let table: Map<String, Value> = serde_json::from_str(json)
            .map_err(|error| ConfigError::NotATable(error.to_string()))?;
        let mut keys = Keys(table);
        for key in engines_keys {
            keys.0.remove(*key);
        }
        let is_known = |key: &str| KEYS.contains(&key) || l4::KEYS.contains(&key);
        if let Some(key) = keys.0.keys().find(|key| !is_known(key)) {
            return Err(ConfigError::Unknown { key: key.clone() });
        }
        let path: String = keys.take("path")?.ok_or(ConfigError::Missing(
            "path",
            "the directory of the store on the NVMe disk, or a block device",
        ))?;
        if path.is_empty() {
            let why = "is empty".to_owned();
            return Err(ConfigError::Value { key: "path", why });
        }
        // A shell would expand it; here a directory of that name would be created.
        if path.starts_with('~') {
            let why = format!("`{path}` begins with `~`: give an absolute path");
            return Err(ConfigError::Value { key: "path", why });
        }
        let prefill_rate: Option<NonZeroU32> = keys.take("prefill_rate")?;
        let weights_tag: Option<String> = keys.take("weights_tag")?;
        if weights_tag.as_deref() == Some("") {
            let why = "is empty: leave it out to have it derived".to_owned();
            let key = "weights_tag";
            return Err(ConfigError::Value { key, why });
        }
        let tenant: Option<String> = keys.take("tenant")?;
        if let Some(why) = tenant.as_deref().and_then(misnamed) {
            let key = "tenant";
            return Err(ConfigError::Value { key, why });
        }
        let timeout = keys.duration("timeout")?.unwrap_or(Duration::from_secs(5));
        if timeout.is_zero() || timeout > TIMEOUT_MAX {
            let why = format!("must be above 0 and at most {} s", TIMEOUT_MAX.as_secs());
            let key = "timeout";
            return Err(ConfigError::Value { key, why });
        }
        let retry = keys.duration("retry")?.unwrap_or(Duration::from_secs(30));
        if retry.is_zero() {
            let (key, why) = ("retry", "must be above 0".to_owned());
            return Err(ConfigError::Value { key, why });
        }
        Ok(Config {
            path: PathBuf::from(path),
            size: keys.size("size")?,
            weights_tag,
            on_error: keys.choose(
                "on_error",
                &[("fail", OnError::Fail), ("miss", OnError::Miss)],
            )?,
            retry,
            prewrite: keys.take("prewrite")?.unwrap_or(true),
            codec: keys.read("codec", str::parse)?.unwrap_or_default(),
            disk: keys
                .read("disk", |word| word.parse().map_err(|e| format!("{e}")))?
                .unwrap_or_default(),
            sync: keys.choose(
                "sync",
                &[
                    ("interval", SyncPolicy::default()),
                    ("relaxed", SyncPolicy::Relaxed),
                    ("always", SyncPolicy::Always),
                ],
            )?,
            lease: keys.duration("lease")?.unwrap_or(Duration::from_secs(30)),
            policy: keys
                .read("policy", |word| word.parse().map_err(|e| format!("{e}")))?
                .unwrap_or_default(),
            write_budget: keys.read("write_budget", str::parse)?.unwrap_or_default(),
            quota: keys.read("quota", |text| {
                quota::limits(text, "any").map(|_| text.to_owned())
            })?,
            tenant,
            key: key_source(
                keys.take("key_file")?,
                keys.take("key_command")?,
                keys.take("key_credential")?.unwrap_or(false),
            )?,
            timeout,
            transfer: keys.choose(
                "transfer",
                &[
                    ("auto", Transfer::Auto),
                    ("direct", Transfer::Direct),
                    ("bounce", Transfer::Bounce),
                ],
            )?,
            prefill_rate,
            l4: l4::take(&mut keys, prefill_rate.map(|rate| rate.get().into()))?,
        })
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn keys_of_an_engine_are_unknown_without_it() {
        let json = r#"{"path":"p","allocator":"numa"}"#;
        assert!(Config::parse_beside(json, &["allocator"]).is_ok());
        let error = Config::parse(json).unwrap_err().to_string();
        assert!(error.contains("`allocator`"), "{error}");
    }

    #[test]
    fn every_key_is_in_the_list_with_its_reason_and_no_other() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/options.md");
        let text = std::fs::read_to_string(path).unwrap();
        let (_, rows) = text.split_once("\n## Keys\n").unwrap();
        let keys = rows.lines().filter_map(|row| row.strip_prefix("| `"));
        let mut listed: Vec<_> = keys.map(|row| row.split_once('`').unwrap().0).collect();
        let mut known = [&KEYS[..], &l4::KEYS].concat();
        listed.sort_unstable();
        known.sort_unstable();
        assert_eq!(listed, known);
    }

    #[test]
    fn sizes_and_times_may_be_numbers_or_texts() {
        let read = |json: &str| Config::parse(json).unwrap();
        assert_eq!(read(r#"{"path":"p","size":1048576}"#).size, Some(1 << 20));
        assert_eq!(read(r#"{"path":"p","size":"1MiB"}"#).size, Some(1 << 20));
        assert_eq!(
            read(r#"{"path":"p","timeout":2.5}"#).timeout,
            Duration::from_millis(2500)
        );
        assert_eq!(
            read(r#"{"path":"p","timeout":"250ms"}"#).timeout,
            Duration::from_millis(250)
        );
    }

    #[test]
    fn errors_contain_the_name_of_the_key() {
        let wrong = [
            (r#"{"path":"p","sise":"1GiB"}"#, "sise"),
            (r#"{"size":"1GiB"}"#, "path"),
            (r#"{"path":7}"#, "path"),
            (r#"{"path":""}"#, "path"),
            (r#"{"path":"~"}"#, "path"),
            (r#"{"path":"~/larder"}"#, "path"),
            (r#"{"path":"~somebody/larder"}"#, "path"),
            (r#"{"path":"p","size":"1GB"}"#, "size"),
            (r#"{"path":"p","size":-1}"#, "size"),
            (r#"{"path":"p","size":[1]}"#, "size"),
            (r#"{"path":"p","weights_tag":7}"#, "weights_tag"),
            (r#"{"path":"p","weights_tag":""}"#, "weights_tag"),
            (r#"{"path":"p","on_error":"ignore"}"#, "on_error"),
            (r#"{"path":"p","on_error":true}"#, "on_error"),
            (r#"{"path":"p","retry":0}"#, "retry"),
            (r#"{"path":"p","prewrite":"on"}"#, "prewrite"),
            (r#"{"path":"p","retry":"soon"}"#, "retry"),
            (r#"{"path":"p","disk":"nvme"}"#, "disk"),
            (r#"{"path":"p","sync":1}"#, "sync"),
            (r#"{"path":"p","lease":"long"}"#, "lease"),
            (r#"{"path":"p","policy":"mru"}"#, "policy"),
            (r#"{"path":"p","lease":1e19}"#, "lease"),
            (r#"{"path":"p","timeout":60}"#, "timeout"),
            (r#"{"path":"p","timeout":0}"#, "timeout"),
            (r#"{"path":"p","timeout":-1}"#, "timeout"),
            (r#"{"path":"p","transfer":"fast"}"#, "transfer"),
            (r#"{"path":"p","key_file":7}"#, "key_file"),
            (
                r#"{"path":"p","key_file":"k","key_command":"c"}"#,
                "key_file",
            ),
            (r#"{"path":"p","key_credential":1}"#, "key_credential"),
            (r#"{"path":"p","tenant":7}"#, "tenant"),
            (r#"{"path":"p","tenant":""}"#, "tenant"),
            (r#"{"path":"p","tenant":"a\n"}"#, "tenant"),
        ];
        for (json, key) in wrong {
            let error = Config::parse(json).unwrap_err().to_string();
            assert!(error.contains(&format!("`{key}`")), "{json}: {error}");
        }
        assert!(matches!(
            Config::parse("[1]").unwrap_err(),
            ConfigError::NotATable(_)
        ));
    }
}
