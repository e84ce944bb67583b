//! The rows of the fault matrix that are about crashes, without chance; and whether the matrix (`tests/matrix.md`) is true.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use larder_sim::exhaustive::{Counts, Limits, Part, exhaust};

fn every_crash(operations: usize, blocks: usize, part: Part) -> Counts {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let limits = Limits {
        operations,
        blocks,
        part,
    };
    exhaust(limits, threads).unwrap_or_else(|why| panic!("{why}"))
}

#[test]
fn row_02_any_subset_of_unsynced_blocks_keeps_what_was_flushed() {
    let counts = every_crash(1, 8, Part::All);
    // More subsets than moments, or nothing was unsynced; fewer images than subsets, or nothing was the same twice.
    assert!(
        counts.moments > 100 && counts.subsets > 20 * counts.moments,
        "{counts:?}"
    );
    assert!(counts.images < counts.subsets, "{counts:?}");
}

#[test]
fn row_12_a_crash_at_every_step_of_two_operations_keeps_the_promises() {
    let counts = every_crash(2, 5, Part::Young);
    assert!(counts.scripts > 400 && counts.moments > 1000, "{counts:?}");
}

#[test]
fn row_13_a_crash_at_every_step_of_reclaim_leaves_the_old_copy_or_the_new() {
    let counts = every_crash(2, 5, Part::Reclaim);
    assert!(counts.moments > 100, "{counts:?}");
}

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let name = path
            .file_name()
            .unwrap_or_default()
            .to_string_lossy()
            .into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            sources(&path, found);
        } else if name.ends_with(".rs") {
            found.push(path);
        }
    }
}

#[test]
fn every_row_of_the_matrix_names_tests_that_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut files = Vec::new();
    sources(&root, &mut files);
    let mut tests = BTreeSet::new();
    for file in files {
        let text = std::fs::read_to_string(file).unwrap();
        let mut is_test = false;
        for line in text.lines().map(str::trim) {
            let name = line
                .strip_prefix("fn ")
                .and_then(|rest| rest.split('(').next());
            if let Some(name) = name.filter(|_| is_test) {
                tests.insert(name.to_owned());
            }
            is_test = line == "#[test]" || is_test && line.starts_with('#');
        }
    }
    let matrix = std::fs::read_to_string(root.join("tests/matrix.md")).unwrap();
    let mut rows = BTreeSet::new();
    for line in matrix.lines() {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let Some(number) = cells.get(1).and_then(|cell| cell.parse::<u32>().ok()) else {
            continue;
        };
        rows.insert(number);
        let named: Vec<&str> = cells[3].split('`').skip(1).step_by(2).collect();
        for name in &named {
            assert!(
                tests.contains(*name),
                "row {number}: no test is named {name}"
            );
        }
        let own = format!("row_{number:02}_");
        assert!(
            named.iter().any(|name| name.starts_with(&own)),
            "row {number} has no test of its own"
        );
    }
    assert!(rows.into_iter().eq(1..=25));
    // And none is missing from the table.
    for test in tests.iter().filter(|test| test.starts_with("row_")) {
        assert!(
            matrix.contains(&format!("`{test}`")),
            "{test} is not in the matrix"
        );
    }
}
