//! What a fuzzer once found, and what people thought of, replayed. A directory under `regressions/` for each target; a file in it
//! is an input that once broke something, or that nearly could.

#![allow(clippy::unwrap_used)]

use std::fs;
use std::panic::catch_unwind;
use std::path::{Path, PathBuf};

use larder_fuzz::seeds::seeds;
use larder_fuzz::{TARGETS, Target};

fn regressions() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("regressions")
}

#[test]
fn every_input_that_once_broke_something_is_taken() {
    for (name, body) in TARGETS {
        let Ok(inputs) = fs::read_dir(regressions().join(name)) else {
            continue;
        };
        let mut paths: Vec<PathBuf> = inputs.map(|entry| entry.unwrap().path()).collect();
        paths.sort_unstable();
        for path in paths {
            let input = fs::read(&path).unwrap();
            let taken = catch_unwind(|| body(&input)).is_ok();
            assert!(taken, "{} breaks {name}", path.display());
        }
    }
}

#[test]
fn every_directory_of_inputs_belongs_to_a_target() {
    for entry in fs::read_dir(regressions()).unwrap() {
        let name = entry.unwrap().file_name();
        let is_known = |(target, _): &Target| name == *target;
        assert!(TARGETS.iter().any(is_known), "no target is called {name:?}");
    }
}

#[test]
fn every_seed_is_taken_and_every_target_has_some() {
    for (name, body) in TARGETS {
        let seeds = seeds(name);
        assert!(!seeds.is_empty(), "{name} has no seed");
        for (seed, number) in seeds.iter().zip(0..) {
            let taken = catch_unwind(|| body(seed)).is_ok();
            assert!(taken, "seed {number} breaks {name}");
        }
    }
}
