//! The CPU time of calls of a store on the calling thread, for `scripts/bench-python`: the same
//! calls as there, without Python. Prints one JSON object: nanoseconds by call and batch.
//!
//! Usage: `calls DIRECTORY PAGES ROUNDS`, with the pages that the script has put.

use std::error::Error;
use std::io::{IoSlice, IoSliceMut};
use std::sync::Arc;

use larder_engine::{AlignedBuf, PutOptions};
use larder_format::{Namespace, PageKey, PageShape};
use larder_handle::chain::Chain;
use larder_handle::config::Config;
use larder_handle::store::{Handle, Space};
use rustix::time::{ClockId, clock_gettime};

const PAGE: usize = 4096;

fn thread_nanos() -> i64 {
    let now = clock_gettime(ClockId::ThreadCPUTime);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

/// The median over the rounds.
fn median(rounds: usize, mut call: impl FnMut()) -> i64 {
    let mut took: Vec<i64> = (0..rounds)
        .map(|_| {
            let begun = thread_nanos();
            call();
            thread_nanos() - begun
        })
        .collect();
    took.sort_unstable();
    took[rounds / 2]
}

fn space(directory: &str) -> Result<Space, Box<dyn Error>> {
    let config = serde_json::json!({"path": directory, "prewrite": false});
    let config = Config::parse(&config.to_string())?;
    let handle = Arc::new(Handle::attach(&config, None, false)?);
    Ok(handle.space(
        Namespace::builder("bench", "w", 1, PageShape::new(&[u32::try_from(PAGE)?])?)
            .elements("d", "l")
            .build()?,
    )?)
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, directory, pages, rounds] = &arguments[..] else {
        return Err("usage: calls DIRECTORY PAGES ROUNDS".into());
    };
    let (pages, rounds): (u32, usize) = (pages.parse()?, rounds.parse()?);
    let space = space(directory)?;
    // As `scripts/bench-python` makes them.
    let key = |at: u32| {
        let mut bytes = [0; 32];
        bytes[..4].copy_from_slice(&at.wrapping_mul(0x9e37_79b1).to_be_bytes());
        bytes[28..].copy_from_slice(&at.to_be_bytes());
        PageKey::from_bytes(bytes)
    };
    let keys: Vec<PageKey> = (0..pages).map(key).collect();
    let mut memory = AlignedBuf::zeroed(PAGE * keys.len())?;
    let mut found = serde_json::Map::new();
    for batch in [1, keys.len()] {
        let keys = &keys[..batch];
        let mut say = |name: &str, nanos: i64| {
            found.insert(format!("{name} {batch}"), nanos.into());
        };
        say(
            "contains",
            median(rounds, || assert!(space.contains(keys, None)[0] == 0)),
        );
        say(
            "longest_prefix",
            median(rounds, || assert!(space.longest_prefix(keys) == batch)),
        );
        let chain = Some(Chain::default());
        say(
            "put (duplicates)",
            median(rounds, || {
                let memory: Vec<_> = memory.chunks(PAGE).take(batch).map(IoSlice::new).collect();
                assert!(space.put(keys, chain, &memory, PutOptions::default(), None)[0] == 1);
            }),
        );
        say(
            "get",
            median(rounds, || {
                let pages = memory.chunks_mut(PAGE).take(batch);
                let mut memory: Vec<_> = pages.map(IoSliceMut::new).collect();
                assert!(space.get(keys, &mut memory, None)[0] == 0);
            }),
        );
    }
    println!("{}", serde_json::Value::Object(found));
    space.handle.close()?;
    Ok(())
}
