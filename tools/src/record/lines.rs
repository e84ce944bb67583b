//! The lines of a trace, and the namespaces that they name.

use std::collections::HashMap;

use larder_base::system::processes;
use larder_format::{BLOCK_BYTES, Fingerprint, Namespace, NamespaceFields, Rank};
use larder_store::share::tape::Tape;
use larder_store::traffic::{Call, Kind};
use serde::Serialize;

use super::parents::Parents;

/// Milliseconds since 1970.
pub fn now_ms() -> u64 {
    (processes::unix_seconds() * 1000.0) as u64
}

/// A namespace.
#[derive(Clone, Debug)]
pub struct Named {
    pub fingerprint: String,
    /// Namespaces that differ in their ranks alone have one group.
    pub group: usize,
    /// Unknown if its record is lost.
    pub of: Option<Of>,
}

/// The facts in its record.
#[derive(Clone, Debug)]
pub struct Of {
    pub model: String,
    pub rank: u32,
    pub ranks: u32,
    pub block_tokens: u32,
    /// Bytes of a page on the device.
    pub page_bytes: u64,
}

impl Of {
    fn new(namespace: &Namespace) -> Of {
        let NamespaceFields { tp, pp, cp, .. } = namespace.fields();
        Of {
            model: namespace.fields().model.clone(),
            rank: tp.rank() + tp.size() * (pp.rank() + pp.size() * cp.rank()),
            ranks: tp.size() * pp.size() * cp.size(),
            block_tokens: namespace.fields().page_tokens,
            page_bytes: u64::from(namespace.shape().page_blocks()) * BLOCK_BYTES as u64,
        }
    }
}

/// The namespaces of a recording, in the order of their first calls.
#[derive(Default)]
pub struct Spaces {
    numbers: HashMap<[u8; 16], usize>,
    named: Vec<Named>,
    groups: HashMap<String, usize>,
    /// The links of pages, by group.
    parents: Vec<Parents>,
}

impl Spaces {
    /// The number of a namespace. Unknown ones are asked for.
    pub fn of(&mut self, fingerprint: [u8; 16], tape: &Tape) -> usize {
        if let Some(number) = self.numbers.get(&fingerprint) {
            return *number;
        }
        let records = tape.namespaces().unwrap_or_default();
        self.name(fingerprint, &records)
    }

    fn name(&mut self, fingerprint: [u8; 16], records: &[Namespace]) -> usize {
        let asked = Fingerprint::from_bytes(fingerprint);
        let record = records.iter().find(|record| record.fingerprint() == asked);
        let group = match record {
            Some(record) => group(record.fields()),
            None => asked.to_string(),
        };
        let next = self.groups.len();
        let group = *self.groups.entry(group).or_insert(next);
        if group == self.parents.len() {
            self.parents.push(Parents::default());
        }
        let number = self.named.len();
        self.numbers.insert(fingerprint, number);
        self.named.push(Named {
            fingerprint: asked.to_string(),
            group,
            of: record.map(Of::new),
        });
        number
    }

    pub fn named(&self, number: usize) -> &Named {
        &self.named[number]
    }

    /// The whole chain of a call.
    pub fn whole(&mut self, number: usize, call: &Call) -> Whole {
        let parents = &mut self.parents[self.named[number].group];
        if call.kind != Kind::Get {
            parents.learn(call.parent, &call.pages);
        }
        let (pages, first) = parents.whole(&call.pages);
        Whole { pages, first }
    }
}

/// The name of all ranks of a model together.
fn group(fields: &NamespaceFields) -> String {
    let alone = NamespaceFields {
        tp: Rank::ALONE,
        pp: Rank::ALONE,
        cp: Rank::ALONE,
        ..fields.clone()
    };
    format!("{alone:?}")
}

/// A chain, and how many of its pages come before those of the call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Whole {
    pub pages: Vec<u64>,
    pub first: usize,
}

/// A call.
#[derive(Serialize)]
pub struct CallLine<'a> {
    pub timestamp: u64,
    pub call: Kind,
    pub process: u32,
    pub namespace: &'a str,
    pub model: Option<&'a str>,
    pub rank: Option<u32>,
    pub ranks: Option<u32>,
    pub block_tokens: Option<u32>,
    pub hash_ids: &'a [u64],
    pub first: usize,
    pub found: u32,
    pub bytes: u64,
}

/// A request.
#[derive(Debug, PartialEq, Serialize)]
pub struct RequestLine {
    pub timestamp: u64,
    pub input_length: u64,
    pub hash_ids: Vec<u64>,
    pub block_tokens: u32,
    pub tier: &'static str,
    pub model: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub asked: Option<(usize, usize)>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stored: Option<usize>,
}

/// Calls were lost here.
#[derive(Serialize)]
pub struct LossLine {
    pub timestamp: u64,
    pub lost_calls: u64,
    pub lost_pages: u64,
    /// The time without an owner.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gap_seconds: Option<f64>,
}
