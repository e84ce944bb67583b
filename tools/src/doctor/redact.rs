//! Removes names of customers, models and machines, and secrets, from a text.
//!
//! Two nets. Known values (the namespaces of the store, this machine's name, its paths, credentials
//! in the environment) are replaced wherever they occur. Patterns find values by the name before
//! them and by their shape: in a log they may come from anywhere. When in doubt, a text is taken
//! out: a report can do with fewer facts.

use std::sync::LazyLock;

use regex_lite::{Captures, Regex};
use serde_json::Value;

/// Shorter values are replaced only where no letter or digit is next to them.
const DISTINCT_CHARS: usize = 6;

/// Shorter values are no names: numbers and flags.
const NAME_CHARS_MIN: usize = 2;

/// Names of fields whose values are taken out.
const NAMES: &str = "(?:[\\w.-]*(?:salt|tenant|customer|model|weights|secret|passw(?:or)?d|\
     passphrase|credential|api[_-]?key|access[_-]?key|private[_-]?key|authorization|cookie|host|\
     user)[\\w.-]*|[\\w.-]*token)";

/// Kinds of text by their shape, with their replacements.
static PATTERNS: LazyLock<Vec<(Regex, String)>> = LazyLock::new(|| {
    let value = r#"(?:"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|(?:\[[a-z0-9 ]+\]|[^\s,;()\[\]{}])+)"#;
    let domains = "com|net|org|io|ai|cn|dev|cloud|internal|intranet|local|lan|corp|svc|cluster";
    let patterns: [&str; 20] = [
        // Of a URL also the path and the query.
        r#"\b([A-Za-z][A-Za-z0-9+.-]*://)[^\s"'<>]+ -> $1[address]"#,
        r"(?i)\b(bearer|basic) +[A-Za-z0-9._~+/=-]+ -> $1 [credential]",
        // Of a log line whose store is not in use any more.
        r"\b(bucket) [a-z0-9][a-z0-9.-]+: -> $1 [bucket]:",
        r"<(BucketName|Key|Resource)>[^<]*</\w+> -> [$1]",
        r"[\w./+=-]*\bv1/[0-9a-f]{32}[\w./]* -> [object]",
        r#""/[^"]*" -> "[path]""#,
        r"'/[^']*' -> '[path]'",
        r#"(^|[\s=(\[{<,"'])~?/[^\s"'\])}>,;:]+ -> $1[path]"#,
        r#"(:)/[^\s/"'\])}>,;:][^\s"'\])}>,;:]* -> $1[path]"#,
        &format!(r#"(?i)(["']?{NAMES}["']?\s*[=:]\s*){value} -> $1[redacted]"#),
        &format!(r"(?i)(\B--{NAMES}\s+){value} -> $1[redacted]"),
        r"\b(?:hf|sk|pk|gh[ops]|github_pat|glpat|xox[abps])[_-][A-Za-z0-9_-]{8,} -> [credential]",
        r"\b(?:AKIA|ASIA)[A-Z0-9]{12,} -> [credential]",
        r"\beyJ[\w-]+\.[\w-]+\.[\w-]* -> [credential]",
        r"\b[A-Za-z0-9+_-]{40,}=* -> [long word]",
        r"[\w.+-]+@[\w.-]+ -> [address]",
        r"\b\d{1,3}(?:\.\d{1,3}){3}\b -> [address]",
        r"\b(?:[0-9A-Fa-f]{1,4}:){3,7}(?::?[0-9A-Fa-f]{1,4})+\b -> [address]",
        r"\b[0-9A-Fa-f]{1,4}(?::[0-9A-Fa-f]{1,4})*::[0-9A-Fa-f]{1,4}\b -> [address]",
        &format!(r"(?i)\b(?:[a-z0-9-]+\.)+(?:{domains})\b -> [host]"),
    ];
    let read = |line: &str| {
        let (pattern, with) = line.rsplit_once(" -> ")?;
        Some((Regex::new(pattern).ok()?, with.to_owned()))
    };
    patterns.into_iter().filter_map(read).collect()
});

/// Paths of devices and of the kernel, which name nothing private.
const OPEN_PATHS: [&str; 4] = ["/dev/nvme", "/dev/sd", "/proc/", "/sys/"];

/// See the module.
#[derive(Default)]
pub(super) struct Redactor {
    /// Values with their replacements; the longest first.
    known: Vec<(String, String)>,
}

impl Redactor {
    /// Takes out a value wherever it occurs.
    pub(super) fn knows(&mut self, value: &str, kind: &str) {
        let value = value.trim();
        let is_name = value.chars().count() >= NAME_CHARS_MIN;
        if is_name && !self.known.iter().any(|(known, _)| known == value) {
            self.known.push((value.to_owned(), format!("[{kind}]")));
            self.known
                .sort_by_key(|(known, _)| std::cmp::Reverse(known.len()));
        }
    }

    pub(super) fn text(&self, text: &str) -> String {
        let mut text = text.to_owned();
        for (value, with) in &self.known {
            text = replaced(&text, value, with);
        }
        for (pattern, with) in PATTERNS.iter() {
            text = pattern
                .replace_all(&text, |found: &Captures<'_>| {
                    let whole = &found[0];
                    let path = whole.trim_start_matches(|c| c != '/');
                    let is_open = OPEN_PATHS.iter().any(|open| path.starts_with(open));
                    if is_open && with.contains("[path]") {
                        return whole.to_owned();
                    }
                    let mut new = String::new();
                    found.expand(with, &mut new);
                    new
                })
                .into_owned();
        }
        text
    }

    /// The strings and the names in a document.
    pub(super) fn document(&self, value: Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.text(&text)),
            Value::Array(list) => list.into_iter().map(|one| self.document(one)).collect(),
            Value::Object(fields) => {
                let fields = fields.into_iter();
                fields
                    .map(|(name, one)| (self.text(&name), self.document(one)))
                    .collect()
            }
            other => other,
        }
    }
}

/// A text without a value. A short value counts as one only as a whole word.
fn replaced(text: &str, value: &str, with: &str) -> String {
    let is_distinct = value.chars().count() >= DISTINCT_CHARS;
    let mut new = String::with_capacity(text.len());
    let mut from = 0;
    for (at, found) in text.match_indices(value) {
        let before = text[..at].chars().next_back();
        let after = text[at + found.len()..].chars().next();
        let is_word = ![before, after]
            .into_iter()
            .flatten()
            .any(char::is_alphanumeric);
        if is_distinct || is_word {
            new.push_str(&text[from..at]);
            new.push_str(with);
            from = at + found.len();
        }
    }
    new.push_str(&text[from..]);
    new
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_pattern_is_one() {
        assert_eq!(PATTERNS.len(), 20);
    }

    #[test]
    fn values_are_found_by_their_names_and_by_their_shapes() {
        let redactor = Redactor::default();
        for (text, expected) in [
            ("cache_salt=ab12 pages=7", "cache_salt=[redacted] pages=7"),
            ("tenant: 'a, b' ok", "tenant: [redacted] ok"),
            (
                r#"{"model_path": "x \" y", "n": 1}"#,
                r#"{"model_path": [redacted], "n": 1}"#,
            ),
            (
                "run --model org/name --page-bytes 1",
                "run --model [redacted] --page-bytes 1",
            ),
            (
                "s3://id:key@bucket.example/x?sig=1 failed",
                "s3://[address] failed",
            ),
            (
                "Authorization: Bearer abc.def",
                "Authorization: [redacted] [credential]",
            ),
            ("with hf_0123456789abcdef", "with [credential]"),
            ("opened /srv/acme/model.bin: ok", "opened [path]: ok"),
            ("reading \"/srv/a b/c\" failed", "reading \"[path]\" failed"),
            (
                "client 10.1.2.3 and fe80::1 of gpu7.acme.internal",
                "client [address] and [address] of [host]",
            ),
            (
                "access is denied: bucket acme-pages: <BucketName>acme-pages</BucketName>",
                "access is denied: bucket [bucket]: [BucketName]",
            ),
            (
                "acme/prod/v1/0123456789abcdef0123456789abcdef/7f/ab.run not found",
                "[object] not found",
            ),
            (
                "release 0.1.0 at 12:34:56, /dev/nvme0n1",
                "release 0.1.0 at 12:34:56, /dev/nvme0n1",
            ),
            (
                "larder_store::share::monitor: took over",
                "larder_store::share::monitor: took over",
            ),
        ] {
            assert_eq!(redactor.text(text), expected);
        }
    }

    #[test]
    fn known_values_are_replaced_wherever_they_are_and_short_ones_as_words() {
        let mut redactor = Redactor::default();
        redactor.knows("acme-large", "model");
        redactor.knows("acme", "tenant");
        redactor.knows("", "nothing");
        let text = redactor.text("xacme-largey acme acmeology");
        assert_eq!(text, "x[model]y [tenant] acmeology");
        let document = serde_json::json!({"acme": ["acme-large", 7]});
        let expected = serde_json::json!({"[tenant]": ["[model]", 7]});
        assert_eq!(redactor.document(document), expected);
    }
}
