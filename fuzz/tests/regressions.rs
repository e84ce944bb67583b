//! Replays inputs that a fuzzer found or people wrote. `regressions/` has a directory for each
//! target. Each file there is an input that once broke a target, or that nearly could.

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
fn every_input_of_an_earlier_failure_passes() {
    for (name, body) in TARGETS {
        let Ok(inputs) = fs::read_dir(regressions().join(name)) else {
            continue;
        };
        let mut paths: Vec<PathBuf> = inputs.map(|entry| entry.unwrap().path()).collect();
        paths.sort_unstable();
        for path in paths {
            let input = fs::read(&path).unwrap();
            let passes = catch_unwind(|| body(&input)).is_ok();
            assert!(passes, "{} breaks {name}", path.display());
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
fn every_seed_passes_and_every_target_has_seeds() {
    for (name, body) in TARGETS {
        let seeds = seeds(name);
        assert!(!seeds.is_empty(), "{name} has no seed");
        for (seed, number) in seeds.iter().zip(0..) {
            let passes = catch_unwind(|| body(seed)).is_ok();
            assert!(passes, "seed {number} breaks {name}");
        }
    }
}
