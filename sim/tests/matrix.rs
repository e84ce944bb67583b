//! The rows of the fault matrix that concern crashes, without randomness; and a check of the matrix
//! (`tests/matrix.md`) itself.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use larder_sim::Heap;
use larder_sim::exhaustive::{Counts, Limits, Part, exhaust};

#[global_allocator]
static HEAP: Heap = Heap;

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
fn row_02_any_subset_of_unsynced_blocks_keeps_flushed_content() {
    let counts = every_crash(1, 8, Part::All);
    // With fewer subsets than moments, nothing was unsynced. Without fewer images than subsets, no
    // two subsets gave the same image.
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

/// The names of all tests.
fn tests() -> BTreeSet<String> {
    let mut files = Vec::new();
    sources(&root(), &mut files);
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
    tests
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &str) -> String {
    std::fs::read_to_string(root().join(path)).unwrap()
}

/// A row of the matrix: the code names in each of its cells.
struct Row {
    number: u32,
    tests: Vec<String>,
    at_random: Vec<String>,
    counted: Vec<String>,
}

fn matrix() -> Vec<Row> {
    let matrix = read("tests/matrix.md");
    let row = |line: &str| {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        let code = |cell: &str| {
            cell.split('`')
                .skip(1)
                .step_by(2)
                .map(str::to_owned)
                .collect()
        };
        Some(Row {
            number: cells.get(1)?.parse().ok()?,
            tests: code(cells[3]),
            at_random: code(cells[4]),
            counted: code(cells[5]),
        })
    };
    matrix.lines().filter_map(row).collect()
}

#[test]
fn every_row_of_the_matrix_names_tests_that_exist() {
    let tests = tests();
    let rows = matrix();
    for row in &rows {
        let number = row.number;
        for name in &row.tests {
            let exists = tests.contains(name);
            assert!(exists, "row {number}: no test is named {name}");
        }
        let own = format!("row_{number:02}_");
        let has_own = row.tests.iter().any(|name| name.starts_with(&own));
        assert!(has_own, "row {number} has no test of its own");
    }
    assert!(rows.iter().map(|row| row.number).eq(1..=33));
    // Every test of a row is in the table.
    for test in tests.iter().filter(|test| test.starts_with("row_")) {
        assert!(
            rows.iter().any(|row| row.tests.contains(test)),
            "{test} is not in the matrix"
        );
    }
}

#[test]
fn every_test_that_the_design_names_exists() {
    let design = read("docs/design.md");
    let tests = tests();
    let named = design.lines().filter_map(|line| line.strip_prefix("- `"));
    let named = named.filter_map(|line| line.strip_suffix('`'));
    let is_test = |name: &&str| name.chars().all(|c| c == '_' || c.is_ascii_alphanumeric());
    let named: Vec<&str> = named.filter(is_test).collect();
    assert!(named.len() > 5, "{named:?}");
    for name in named {
        assert!(
            tests.contains(name),
            "docs/design.md: there is no test {name}"
        );
    }
}

#[test]
fn every_planted_bug_and_every_counter_that_the_matrix_names_exists() {
    let planted = read("engine/core/src/planted.rs");
    let counters = [
        read("engine/store/src/api/stats.rs"),
        read("engine/store/src/share/wire/report.rs"),
    ]
    .concat();
    let has = |text: &str, wanted: &str| text.lines().any(|line| line.trim().starts_with(wanted));
    let (mut bugs, mut counted) = (0, 0);
    for row in matrix() {
        let is_bug = |name: &&String| name.starts_with(|first: char| first.is_ascii_uppercase());
        for name in row.at_random.iter().filter(is_bug) {
            let exists = has(&planted, &format!("{name},"));
            assert!(exists, "row {}: no planted bug is named {name}", row.number);
            bugs += 1;
        }
        for name in &row.counted {
            let exists = has(&counters, &format!("pub {name}: "));
            assert!(exists, "row {}: nothing counts {name}", row.number);
            counted += 1;
        }
    }
    assert!(bugs > 5 && counted > 5, "{bugs} bugs, {counted} counters");
}
