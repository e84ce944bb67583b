//! The configuration in SGLang's `--hicache-storage-backend-extra-config`.
//!
//! SGLang removes some of its own keys before a backend sees them and leaves others; both kinds
//! are accepted beside Larder's.

use larder_handle::config::{Config, ConfigError};

/// Keys of SGLang: it reads them itself, or they select this backend.
const KEYS: [&str; 11] = [
    "backend_name",
    "module_path",
    "class_name",
    "interface_v1",
    "prefetch_threshold",
    "prefetch_timeout_base",
    "prefetch_timeout_per_ki_token",
    "hicache_storage_pass_prefix_keys",
    "tp_lcm_size",
    "file_storage_path",
    "allocator",
];

/// Reads the configuration that SGLang was given, as JSON.
///
/// # Errors
/// As [`Config::parse`].
pub fn parse(json: &str) -> Result<Config, ConfigError> {
    Config::parse_beside(json, &KEYS)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use std::path::PathBuf;
    use std::time::Duration;

    use super::*;
    use larder_handle::config::{OnError, Transfer};

    #[test]
    fn the_config_of_the_readme_is_read() {
        let json = r#"{"backend_name":"larder","module_path":"larder_kv.sglang",
            "class_name":"LarderHiCache","interface_v1":1,"hicache_storage_pass_prefix_keys":true,
            "path":"/nvme/larder","size":"512GiB"}"#;
        let config = parse(json).unwrap();
        assert_eq!(config.path, PathBuf::from("/nvme/larder"));
        assert_eq!(config.size, Some(512 << 30));
        assert_eq!(config.on_error, OnError::Fail);
        assert!(config.prewrite);
        assert_eq!(config.retry, Duration::from_secs(30));
        assert_eq!(config.lease, Duration::from_secs(30));
        assert_eq!(config.timeout, Duration::from_secs(5));
        assert_eq!(config.transfer, Transfer::Auto);
        assert_eq!(config.prefill_rate, None);
        let error = Config::parse(json).unwrap_err().to_string();
        assert!(error.contains("`backend_name`"), "{error}");
    }

    #[test]
    fn the_prefill_rate_is_a_number_of_tokens() {
        let rate = |value: &str| parse(&format!(r#"{{"path":"p","prefill_rate":{value}}}"#));
        assert_eq!(rate("9000").unwrap().prefill_rate.unwrap().get(), 9000);
        for wrong in ["0", "-1", "\"fast\"", "1.5"] {
            let error = rate(wrong).unwrap_err().to_string();
            assert!(error.contains("`prefill_rate`"), "{error}");
        }
    }
}
