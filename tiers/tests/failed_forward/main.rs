//! Failed forwards as an engine sees them: through the public interface, with real bytes.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a broken expectation is the finding"
)]

mod engine;
mod restart;
#[path = "../support/mod.rs"]
mod support;

use std::sync::Arc;

use engine::{Engine, Pages, Seen};

/// Random runs of the small engine. Every fourth run starts with the L3 contents of the three runs
/// before it.
///
/// `LARDER_FORWARD_RUNS` sets the number of runs, `LARDER_FORWARD_RUN` runs one group of four.
#[test]
fn no_output_differs_from_the_uncached_run_when_forwards_fail() {
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let one = number("LARDER_FORWARD_RUN").map(|run| run / 4..run / 4 + 1);
    let groups = one.unwrap_or(0..number("LARDER_FORWARD_RUNS").unwrap_or(2000) / 4);
    let mut all = Seen::default();
    for group in groups {
        let l3 = Arc::new(Pages::default());
        for run in 4 * group..4 * group + 4 {
            let engine = Engine::new(run, group, l3.clone());
            let played = std::panic::AssertUnwindSafe(|| engine.play(60, &l3));
            let Ok(seen) = std::panic::catch_unwind(played) else {
                panic!("run {run} fails: LARDER_FORWARD_RUN={run}");
            };
            all.answers += seen.answers;
            all.restarts += seen.restarts;
            all.failed_pages += seen.failed_pages;
            all.l3_hits += seen.l3_hits;
            all.loaded += seen.loaded;
        }
    }
    let counts = [
        all.answers,
        all.restarts,
        all.failed_pages,
        all.l3_hits,
        all.loaded,
    ];
    println!("answers, restarts, failed pages, L3 hits, loaded pages: {counts:?}");
    assert!(
        !counts.contains(&0),
        "an event that never happens is not tested"
    );
}
