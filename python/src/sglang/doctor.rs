//! `larder doctor --sglang CONFIG`: the keys that SGLang reads.

use std::path::PathBuf;

use larder_disk::probe::{Fact, Level};
use serde_json::{Map, Value};

use super::config;
use crate::doctor;

/// The facts about a configuration that SGLang is given: see [`doctor::examine`].
#[must_use]
pub fn examine(json: &str, page_bytes: Option<u64>) -> (Vec<Fact>, Option<PathBuf>) {
    let table: Map<String, Value> = serde_json::from_str(json).unwrap_or_default();
    doctor::examine(config::parse(json), keys(&table), page_bytes, true)
}

/// Checks SGLang's own keys.
fn keys(table: &Map<String, Value>) -> Vec<Fact> {
    let mut facts = Vec::new();
    let mut add = |level, what: String| {
        facts.push(Fact::new("SGLang", level, what));
    };
    for (key, value) in [
        ("backend_name", None),
        ("module_path", Some("larder_kv.sglang")),
        ("class_name", Some("LarderHiCache")),
    ] {
        let found = table.get(key).and_then(Value::as_str);
        let wrong = found.is_none() || value.is_some() && found != value;
        if wrong {
            let what = value.map_or("must be a text, such as \"larder\"".to_owned(), |value| {
                format!("must be \"{value}\"")
            });
            add(Level::Fail, format!("`{key}` {what}"));
        }
    }
    if table.get("interface_v1").and_then(Value::as_u64) != Some(1) {
        let what = "without `interface_v1`: 1, SGLang makes two more copies of every page";
        add(Level::Warn, what.to_owned());
    }
    match table.get("hicache_storage_pass_prefix_keys") {
        Some(Value::Bool(true)) => {}
        None | Some(Value::Bool(false)) => add(
            Level::Warn,
            "without `hicache_storage_pass_prefix_keys`: true, the parent of the first page of a \
             node is unknown until it is looked up"
                .to_owned(),
        ),
        Some(_) => add(
            Level::Fail,
            "`hicache_storage_pass_prefix_keys` must be true or false".to_owned(),
        ),
    }
    // A wrong value is named with the rest of the configuration.
    let rate = table.get("prefill_rate").and_then(Value::as_u64);
    let has_fault = !facts.is_empty();
    if let Some(rate) = rate {
        let what = format!(
            "stored pages are read only if that takes less time than computing {rate} tokens per \
             second"
        );
        facts.push(Fact::ok("prefill_rate", what));
    }
    if !has_fault {
        facts.push(Fact::ok("SGLang", "its own keys are as they should be"));
    }
    facts
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    const GOOD: &str = r#"{"backend_name":"larder","module_path":"larder_kv.sglang",
        "class_name":"LarderHiCache","interface_v1":1,"hicache_storage_pass_prefix_keys":true}"#;

    fn levels(json: &str) -> Vec<Level> {
        let facts = keys(&serde_json::from_str(json).unwrap());
        facts.iter().map(|fact| fact.level).collect()
    }

    #[test]
    fn each_wrong_key_of_sglang_is_a_line() {
        assert_eq!(levels(GOOD), [Level::Ok]);
        let wrong_class = GOOD.replace("LarderHiCache", "Larder");
        assert_eq!(levels(&wrong_class), [Level::Fail]);
        assert_eq!(levels(&GOOD.replace("true", "1")), [Level::Fail]);
        let rate = GOOD.replace("}", ",\"prefill_rate\":9000}");
        assert_eq!(levels(&rate), [Level::Ok; 2]);
        assert_eq!(levels(&GOOD.replace("true", "false")), [Level::Warn]);
        let copies = GOOD.replace("\"interface_v1\":1", "\"interface_v1\":0");
        assert_eq!(levels(&copies), [Level::Warn]);
        let none = [vec![Level::Fail; 3], vec![Level::Warn; 2]].concat();
        assert_eq!(levels("{}"), none);
    }

    #[test]
    fn keys_of_sglang_stand_beside_those_of_larder() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let mut table: Map<String, Value> = serde_json::from_str(GOOD).unwrap();
        table.insert("path".to_owned(), path.display().to_string().into());
        table.insert("size".to_owned(), "256MiB".into());
        let (facts, look) = examine(&Value::from(table).to_string(), None);
        let failed = facts.iter().any(|fact| fact.level == Level::Fail);
        assert!(!failed, "{facts:?}");
        assert!(facts.iter().any(|fact| fact.name == "SGLang"), "{facts:?}");
        assert_eq!(look.as_deref(), Some(directory.path()));
    }
}
