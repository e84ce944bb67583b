//! A trace in memory, with small numbers in place of its hash ids.

use std::collections::HashMap;
use std::path::Path;

use larder_format::PageKey;

use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::trace::Trace;
use crate::workload;

/// One request.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    pub at_ms: u64,
    pub output_tokens: Option<u32>,
    /// 0: not known.
    pub stop: u32,
    /// Its last block is not full.
    pub is_partial: bool,
    first: usize,
    count: usize,
}

/// See the module.
pub struct Requests {
    requests: Vec<Request>,
    blocks: Vec<u32>,
    /// By block.
    keys: Vec<PageKey>,
}

impl Requests {
    pub fn read(path: &Path, limit: usize, interrupt: &Interrupt) -> Result<Requests, Failure> {
        let mut numbers: HashMap<u64, u32> = HashMap::new();
        let mut all = Requests {
            requests: Vec::new(),
            blocks: Vec::new(),
            keys: Vec::new(),
        };
        let mut now = 0;
        for request in Trace::open(path, interrupt)?.take(limit) {
            let request = request?;
            let first = all.blocks.len();
            for id in &request.hash_ids {
                let number = *numbers.entry(*id).or_insert_with(|| {
                    all.keys.extend(workload::chain(&[*id]));
                    (all.keys.len() - 1) as u32
                });
                all.blocks.push(number);
            }
            // A trace is in the order of its requests; a time without a stamp stands still.
            now = request.timestamp.map_or(now, |at| now.max(at as u64));
            let full = request
                .input_length
                .map(|tokens| tokens / u64::from(request.block_tokens()));
            all.requests.push(Request {
                at_ms: now,
                output_tokens: request.output_length,
                stop: request.stop.unwrap_or(0),
                is_partial: full.is_some_and(|full| full < request.hash_ids.len() as u64),
                first,
                count: request.hash_ids.len(),
            });
        }
        Ok(all)
    }

    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Request> + ExactSizeIterator {
        self.requests.iter()
    }

    /// The blocks of a request.
    pub fn blocks(&self, request: &Request) -> &[u32] {
        &self.blocks[request.first..][..request.count]
    }

    /// Their keys.
    pub fn keys(&self, request: &Request) -> Vec<PageKey> {
        let blocks = self.blocks(request).iter();
        blocks.map(|block| self.keys[*block as usize]).collect()
    }

    /// References to blocks.
    pub fn references(&self) -> u64 {
        self.blocks.len() as u64
    }

    /// Different blocks.
    pub fn distinct(&self) -> usize {
        self.keys.len()
    }
}
