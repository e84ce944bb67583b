//! Long objects are fetched in parts, on several connections.
#![cfg(feature = "s3")]
#![allow(clippy::unwrap_used)]

mod common;

use std::time::Instant;

use common::server::{Server, place, with_credentials};
use common::*;
use larder_remote::{Place, RemoteError, RunName};

/// Above the length from which an object is fetched in parts.
const LONG: usize = 20 << 20;

fn name_of_one() -> RunName {
    RunName {
        namespace: namespace("model").fingerprint(),
        last: chain(1, 1)[0],
    }
}

/// Bytes that differ from those at any multiple of a MiB.
fn contents(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|at| (at % 251) as u8).collect()
}

#[test]
fn a_long_object_arrives_as_it_is_in_parts() {
    if !with_credentials("a_long_object_arrives_as_it_is_in_parts") {
        return;
    }
    let server = Server::start();
    let remote = Place {
        parts: 8,
        ..place(&server)
    };
    let remote = remote.connect().unwrap();
    let run = name_of_one();
    let fetched = |bytes_max: usize| remote.fetch(&run, bytes_max, Instant::now() + LATE);
    // The last length ends in the middle of a part. Its limit is above it.
    for (bytes, bytes_max) in [(LONG, LONG), (LONG - 12_345, LONG)] {
        let object = contents(bytes);
        server.put(&format!("p/{run}"), object.clone());
        let before = server.gets();
        assert!(fetched(bytes_max).unwrap().unwrap()[..] == object[..]);
        assert_eq!(
            server.gets() - before,
            remote.requests_of_fetch(bytes_max) as u64
        );
        assert!(server.gets() - before > 1);
    }
    // No byte of an object beyond its limit is taken.
    server.put(&format!("p/{run}"), contents(LONG));
    let begin = remote.begin_of(&run, 100, Instant::now() + LATE);
    assert!(begin.unwrap().unwrap()[..] == contents(100)[..]);
    assert!(matches!(fetched(1000), Err(RemoteError::TooLong { .. })));
}
