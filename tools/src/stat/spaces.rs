//! The namespaces of a store: their pages, reads and tokens.

use larder_core::ages::Ages;
use larder_core::counters::Counted;
use larder_store::inventory::Usage;
use larder_store::share::View;
use larder_store::spaces::{Reads, Tokens};
use serde::Serialize;

use crate::metrics::{NAMESPACES_MAX, OTHER};
use crate::report::Lines;
use crate::size::ByteSize;

/// Most namespaces with a line for people.
const LINES_MAX: usize = 16;

/// A namespace, or all further ones together.
#[derive(Serialize)]
pub struct Space {
    /// Its fingerprint, or `other`.
    pub fingerprint: String,
    /// `None` if its record is lost, and for several together.
    pub model: Option<String>,
    /// Its pages in the store, and their bytes.
    pub pages: u64,
    pub bytes: u64,
    /// The bytes of its pages without a codec.
    plain_bytes: u64,
    /// Its reads and tokens, by all processes.
    #[serde(flatten)]
    pub reads: Reads,
    pub pages_missed: u64,
}

/// The namespaces with pages, the largest ones first, then the others that were read.
pub fn spaces(view: &View) -> Vec<Space> {
    let mut spaces: Vec<Space> = Vec::new();
    for of in &view.spaces {
        let is_listed = spaces.len() < NAMESPACES_MAX;
        let Usage {
            pages,
            bytes,
            plain_bytes,
            ..
        } = of.usage;
        if !is_listed && let Some(other) = spaces.iter_mut().find(|space| space.is_other()) {
            other.pages += pages;
            other.bytes += bytes;
            other.plain_bytes += plain_bytes;
            continue;
        }
        let named = of.namespace.as_ref().filter(|_| is_listed);
        spaces.push(Space {
            model: named.map(|named| named.fields().model.clone()),
            pages,
            bytes,
            plain_bytes,
            ..Space::empty(match is_listed {
                true => of.usage.namespace.to_string(),
                false => OTHER.to_owned(),
            })
        });
    }
    for (name, reads) in view.report.totals.spaces.iter() {
        let at = spaces.iter().position(|space| space.fingerprint == name);
        let at = at.unwrap_or_else(|| {
            spaces.push(Space::empty(name.to_owned()));
            spaces.len() - 1
        });
        spaces[at].pages_missed = reads.misses.total();
        spaces[at].reads = reads;
    }
    spaces
}

impl Space {
    fn empty(fingerprint: String) -> Space {
        Space {
            fingerprint,
            model: None,
            pages: 0,
            bytes: 0,
            plain_bytes: 0,
            reads: Reads::default(),
            pages_missed: 0,
        }
    }

    fn is_other(&self) -> bool {
        self.fingerprint == OTHER
    }
}

/// A line for each of the first namespaces.
pub fn lines(spaces: &[Space], lines: &mut Lines) {
    if spaces.is_empty() {
        return;
    }
    let headings = [
        "Namespace",
        "model",
        "pages",
        "size",
        "plain",
        "hits",
        "misses",
        "asked",
        "found",
        "read",
    ];
    let row = |space: &Space| {
        let tokens = space.reads.tokens;
        vec![
            space.fingerprint.clone(),
            space.model.clone().unwrap_or_else(|| "?".to_owned()),
            space.pages.to_string(),
            ByteSize(space.bytes).to_string(),
            ByteSize(space.plain_bytes).to_string(),
            space.reads.hits.to_string(),
            space.pages_missed.to_string(),
            (tokens.found + tokens.not_found).to_string(),
            tokens.found.to_string(),
            tokens.served.to_string(),
        ]
    };
    let rows: Vec<Vec<String>> = spaces.iter().take(LINES_MAX).map(row).collect();
    lines.table(&headings, &rows);
    if spaces.len() > LINES_MAX {
        lines.text("More namespaces: --json lists all of them.");
    }
}

/// Ages in a sentence.
pub fn ages_line(ages: &Ages) -> String {
    let within = |share| match ages.within_s(share) {
        Some(seconds) => format!("at most {}", super::processes::duration(seconds as f64)),
        None => "above 30 d".to_owned(),
    };
    format!(
        "half of {} pages {}, nine in ten {}",
        ages.pages(),
        within(0.5),
        within(0.9)
    )
}

/// The tokens of all requests in a sentence.
pub fn tokens_line(tokens: &Tokens) -> String {
    let asked = tokens.found + tokens.not_found;
    if asked == 0 {
        return "no request counted".to_owned();
    }
    let share = 100.0 * tokens.found as f64 / asked as f64;
    let saved = match tokens.saved_ms {
        0 => String::new(),
        saved => format!("; {:.1} s of prefill saved", saved as f64 / 1e3),
    };
    format!(
        "{asked} asked for by {} requests, {} found ({share:.1} %), {} read{saved}",
        tokens.requests, tokens.found, tokens.served
    )
}
