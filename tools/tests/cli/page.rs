//! docs/json.md: the section of a command has exactly the keys that the command prints.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

const PAGE: &str = include_str!("../../../docs/json.md");

/// Whose keys are those of a namespace's owner, or of S3.
const FREE: [&str; 3] = ["extra", "lifecycle", "policy"];

/// The keys of the tables, by section.
pub fn sections() -> BTreeMap<&'static str, BTreeSet<&'static str>> {
    let mut sections: BTreeMap<_, BTreeSet<_>> = BTreeMap::new();
    let mut section = "";
    for line in PAGE.lines() {
        if let Some(title) = line.strip_prefix("## ") {
            section = title.strip_prefix("larder ").unwrap_or(title);
        }
        let key = line.strip_prefix("| `").and_then(|row| row.split_once('`'));
        if let Some((key, _)) = key {
            sections.entry(section).or_default().insert(key);
        }
    }
    sections
}

/// Every key of a document, at any depth.
pub fn keys_of(value: &Value) -> BTreeSet<String> {
    match value {
        Value::Object(fields) => {
            let inner = fields
                .iter()
                .filter(|(key, _)| !FREE.contains(&key.as_str()));
            let inner = inner.flat_map(|(_, value)| keys_of(value));
            fields.keys().cloned().chain(inner).collect()
        }
        Value::Array(elements) => elements.iter().flat_map(keys_of).collect(),
        _ => BTreeSet::new(),
    }
}

/// All printed keys of a command are in its section.
#[track_caller]
pub fn knows(command: &str, keys: &BTreeSet<String>) {
    let sections = sections();
    let own = sections.get(command);
    let own = own.unwrap_or_else(|| panic!("docs/json.md has no section on {command}"));
    let known = [own, &sections[""], &sections["Findings"]];
    for key in keys {
        let is_known = known.iter().any(|section| section.contains(key.as_str()));
        assert!(
            is_known,
            "docs/json.md does not say what `{key}` of {command} is"
        );
    }
}

/// The section of a command has only printed keys, and keys that no run here can print.
#[track_caller]
pub fn is_complete(command: &str, printed: &BTreeSet<String>, absent: &[(&str, &str)]) {
    for key in &sections()[command] {
        let is_printed = printed.contains(*key) || absent.contains(&(command, key));
        assert!(
            is_printed,
            "docs/json.md has `{key}`, which {command} does not print"
        );
    }
}
