//! The test of the tests: a planted bug that no run notices points to an unchecked promise.

use std::panic::{AssertUnwindSafe, catch_unwind, set_hook, take_hook};
use std::thread;

use larder_tiers::planted::{Bug, plant};

/// Plants each bug in turn. One of its first `runs` runs must panic. Threads that begin in a run
/// have its bug, too.
pub fn all_are_noticed(bugs: impl IntoIterator<Item = Bug>, runs: u64, run: impl Fn(Bug, u64)) {
    // Every detection is a panic, so only the final report is useful. Panics of other tests are
    // still printed.
    let (here, hook) = (thread::current().id(), take_hook());
    set_hook(Box::new(move |panic| {
        if thread::current().id() != here {
            hook(panic);
        }
    }));
    let mut missed = Vec::new();
    for bug in bugs {
        plant(Some(bug));
        let caught = (0..runs).find_map(|number| {
            let panic = catch_unwind(AssertUnwindSafe(|| run(bug, number))).err()?;
            let said = panic.downcast_ref::<String>().cloned();
            let said = said.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
            Some((number, said.unwrap_or_default()))
        });
        plant::<Bug>(None);
        match caught {
            None => missed.push(bug),
            Some((number, said)) => {
                let said = said.lines().next().unwrap_or_default();
                let said: String = said.chars().take(80).collect();
                println!("{:24} {:3} runs: {said}", format!("{bug:?}"), number + 1);
            }
        }
    }
    let _ = take_hook();
    assert!(missed.is_empty(), "not detected: {missed:?}");
}
