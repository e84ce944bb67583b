//! The keys of the remotes beneath the store (docs/remote.md). They have the names and defaults of
//! the options of `larder serve`.

use larder_tools::l4::L4Config;
use serde_json::Value;

use super::{ConfigError, Keys};

/// The key with the remotes. All others need it.
pub const L4: &str = "l4";

/// Its keys.
pub const KEYS: [&str; 15] = [
    L4,
    "l4_endpoint",
    "l4_ca_file",
    "l4_key_file",
    "l4_unsigned",
    "l4_admission",
    "l4_run_tokens",
    "l4_bytes_per_day",
    "l4_bytes_per_second",
    "l4_requests_per_hour",
    "l4_connections",
    "l4_patience",
    "l4_timeout",
    "l4_refresh",
    "l4_prefill_rate",
];

/// Takes the keys of the remotes. `prefill_rate` is the engine's, for a config without its own.
pub(super) fn take(keys: &mut Keys, prefill_rate: Option<f64>) -> Result<L4Config, ConfigError> {
    let urls = urls(keys)?;
    if urls.is_empty() {
        let lonely = KEYS.into_iter().find(|key| keys.0.contains_key(*key));
        return match lonely {
            None => Ok(L4Config::default()),
            Some(key) => Err(wrong(key, "needs `l4`, the remote")),
        };
    }
    let defaults = L4Config::default();
    let config = L4Config {
        urls,
        endpoint: keys.take("l4_endpoint")?,
        ca_file: keys.take("l4_ca_file")?,
        key_file: keys.take("l4_key_file")?,
        is_unsigned: keys.take("l4_unsigned")?.unwrap_or(false),
        is_through: keys.choose(
            "l4_admission",
            &[("second-touch", false), ("through", true)],
        )?,
        run_tokens: keys.take("l4_run_tokens")?.unwrap_or(defaults.run_tokens),
        bytes_per_day: keys
            .size("l4_bytes_per_day")?
            .unwrap_or(defaults.bytes_per_day),
        bytes_per_second: keys
            .size("l4_bytes_per_second")?
            .unwrap_or(defaults.bytes_per_second),
        requests_per_hour: keys
            .take("l4_requests_per_hour")?
            .unwrap_or(defaults.requests_per_hour),
        connections: keys.take("l4_connections")?.unwrap_or(defaults.connections),
        patience: keys.duration("l4_patience")?.unwrap_or(defaults.patience),
        timeout: keys.duration("l4_timeout")?.unwrap_or(defaults.timeout),
        refresh: keys.duration("l4_refresh")?.unwrap_or(defaults.refresh),
        prefill_rate: keys.take("l4_prefill_rate")?.or(prefill_rate),
    };
    if let Some(key) = config.not_positive() {
        return Err(wrong(key, "must be above 0"));
    }
    match (&config.key_file, config.is_unsigned) {
        (Some(_), false) | (None, true) => Ok(config),
        (Some(_), true) => Err(wrong("l4_unsigned", "excludes `l4_key_file`")),
        (None, false) => Err(wrong(
            "l4_key_file",
            "is missing: `larder remote key FILE` makes one for all nodes; or set `l4_unsigned`: \
             then everybody who can write to the remote can plant pages",
        )),
    }
}

/// One URL, or several in order.
fn urls(keys: &mut Keys) -> Result<Vec<String>, ConfigError> {
    let urls: Option<Vec<Value>> = match keys.take(L4)? {
        None => None,
        Some(Value::Array(urls)) => Some(urls),
        Some(url) => Some(vec![url]),
    };
    let url = |url: Value| match url {
        Value::String(url) if url.contains("://") => Ok(url),
        _ => Err(wrong(
            L4,
            "is not s3://BUCKET/PREFIX or file:///DIRECTORY, or a list of them",
        )),
    };
    urls.into_iter().flatten().map(url).collect()
}

fn wrong(key: &'static str, why: &str) -> ConfigError {
    ConfigError::Value {
        key,
        why: why.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::path::PathBuf;
    use std::time::Duration;

    use super::*;
    use crate::config::Config;

    fn l4(keys: &str) -> Result<L4Config, ConfigError> {
        let json = format!(r#"{{"path":"p"{keys}}}"#);
        Config::parse(&json).map(|config| config.l4)
    }

    #[test]
    fn a_remote_is_configured_by_keys_alone() {
        assert_eq!(l4("").unwrap(), L4Config::default());
        let read = l4(
            r#","l4":"s3://b/p","l4_key_file":"/k","l4_bytes_per_day":"2GiB",
            "l4_patience":0.25,"l4_admission":"through""#,
        );
        let read = read.unwrap();
        assert_eq!(read.urls, ["s3://b/p"]);
        assert_eq!(read.key_file, Some(PathBuf::from("/k")));
        assert_eq!(read.bytes_per_day, 2 << 30);
        assert_eq!(read.patience, Duration::from_millis(250));
        assert!(read.is_through);
        assert_eq!(read.refresh, L4Config::default().refresh);
        let two = l4(r#","l4":["file:///mnt/a","s3://b"],"l4_unsigned":true"#).unwrap();
        assert_eq!(two.urls, ["file:///mnt/a", "s3://b"]);
    }

    #[test]
    fn errors_contain_the_name_of_the_key() {
        let wrong = [
            (r#","l4":7"#, "l4"),
            (r#","l4":["a"]"#, "l4"),
            (r#","l4":"s3://b""#, "l4_key_file"),
            (r#","l4_key_file":"k""#, "l4_key_file"),
            (
                r#","l4":"s3://b","l4_key_file":"k","l4_unsigned":true"#,
                "l4_unsigned",
            ),
            (r#","l4":"s3://b","l4_unsigned":"yes""#, "l4_unsigned"),
            (
                r#","l4":"s3://b","l4_unsigned":true,"l4_run_tokens":0"#,
                "l4_run_tokens",
            ),
            (
                r#","l4":"s3://b","l4_unsigned":true,"l4_refresh":0"#,
                "l4_refresh",
            ),
            (
                r#","l4":"s3://b","l4_unsigned":true,"l4_patience":1e19"#,
                "l4_patience",
            ),
            (
                r#","l4":"s3://b","l4_unsigned":true,"l4_admission":"all""#,
                "l4_admission",
            ),
            (
                r#","l4":"s3://b","l4_unsigned":true,"l4_prefill_rate":0"#,
                "l4_prefill_rate",
            ),
            (
                r#","l4":"s3://b","l4_unsigned":true,"l4_bytes_per_day":"1GB""#,
                "l4_bytes_per_day",
            ),
        ];
        for (keys, key) in wrong {
            let error = l4(keys).unwrap_err().to_string();
            assert!(error.contains(&format!("`{key}`")), "{keys}: {error}");
        }
    }
}
