//! The whole runs of a store, read without opening it.

use std::collections::{HashMap, HashSet};

use larder_format::KeyPrefix;
use larder_offline::survey::{Page, RecordId, Survey};

use crate::run::{RunPage, whole_run};

/// A run: its pages in the order of their chain.
pub type Run = Vec<(RecordId, Page)>;

/// The whole runs of a namespace, those of a chain in its order, and the number of pages in none.
#[must_use]
pub fn whole_runs(survey: &Survey, namespace: usize, run_pages: u32) -> (Vec<Run>, u64) {
    let order = survey.chain_order(namespace);
    let pages = order.iter().map(|&id| (id, survey.page_of(id)));
    let by_key: HashMap<KeyPrefix, (RecordId, Page)> = pages
        .map(|(id, page)| (page.key.prefix(), (id, page)))
        .collect();
    let runs = order.iter().filter_map(|&id| {
        let place = |(_, page): &(RecordId, Page)| (page.parent, page.depth);
        let last = (id, survey.page_of(id));
        whole_run(last, run_pages, place, |key| by_key.get(&key).copied())
    });
    let runs: Vec<Run> = runs.collect();
    let in_runs = runs.iter().flatten().map(|(_, page)| page.key.prefix());
    let in_runs: HashSet<KeyPrefix> = in_runs.collect();
    let left_out = order.len() - in_runs.len();
    (runs, left_out as u64)
}

/// The pages of a run for its object.
#[must_use]
pub fn run_pages(run: &[(RecordId, Page)]) -> Vec<RunPage> {
    let page = |(_, page): &(RecordId, Page)| RunPage {
        key: page.key,
        parent: page.parent.map(|parent| parent.padded()),
        depth: page.depth,
    };
    run.iter().map(page).collect()
}
