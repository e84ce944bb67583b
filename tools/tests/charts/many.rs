//! The screen and the page of a store of many pages, whose index is real. Its disk drops the bytes
//! of pages. `LARDER_MANY_PAGES=10000000` with `LARDER_MANY_DEVICE=/dev/loopN`, over a sparse file,
//! is a large one.

use std::sync::Arc;
use std::time::Instant;

use larder_disk::{Action, Buffer, Choice, Disk, Done, Op, Piece};
use larder_format::SEGMENTS_OFFSET;
use larder_store::api::DiskWrapper;

use super::page::{charts_are_readable, drawn, has};
use super::support::{directory, ends, json, text};
use super::terminal::Terminal;
use super::*;

const PAGES: u64 = 100_000;

/// Pages of a put.
const BATCH: u64 = 1024;

/// A disk that drops writes into segments.
struct Hollow(Arc<dyn Disk>);

impl Disk for Hollow {
    unsafe fn submit(&self, ops: Vec<Op>) {
        let is_dropped = |op: &Op| match op.action {
            Action::Write { offset, .. } => offset >= SEGMENTS_OFFSET,
            _ => false,
        };
        let (dropped, kept): (Vec<Op>, Vec<Op>) = ops.into_iter().partition(is_dropped);
        // SAFETY: the same contract.
        unsafe { self.0.submit(kept) };
        for op in dropped {
            let buffer = match op.action {
                Action::Write {
                    buffer: Buffer::Owned(memory),
                    ..
                } => Some(memory),
                _ => None,
            };
            op.sink.done(vec![Done {
                tag: op.tag,
                result: Ok(()),
                buffer,
            }]);
        }
    }

    unsafe fn register(&self, memory: &[Piece]) -> String {
        // SAFETY: the same contract.
        unsafe { self.0.register(memory) }
    }

    fn choice(&self) -> &Choice {
        self.0.choice()
    }

    fn shutdown(&self) {
        self.0.shutdown();
    }
}

/// Puts chains of 4 KiB pages of 64 namespaces.
fn fill(store: &Store, pages: u64) {
    let shape = PageShape::new(&[4096]).unwrap();
    let bytes = [7; 4096];
    let parts = [IoSlice::new(&bytes)];
    let namespaces = (0..64).map(|at| {
        let name = format!("{at} {}", STRANGE[at % STRANGE.len()]);
        let namespace = Namespace::builder(&name, "w1", 16, shape).build().unwrap();
        store.namespace(&namespace).unwrap()
    });
    let namespaces: Vec<_> = namespaces.collect();
    for first in (0..pages).step_by(BATCH as usize) {
        let chain = chain(1 + first / BATCH, BATCH.min(pages - first));
        let parents = std::iter::once(None).chain(chain.iter().copied().map(Some));
        let pages: Vec<PutPage<'_>> = { chain.iter().zip(parents).zip(0..) }
            .map(|((key, parent), depth)| PutPage {
                key: *key,
                parent,
                depth,
                parts: &parts,
            })
            .collect();
        let namespace = namespaces[(first / BATCH) as usize % namespaces.len()];
        let patience = PutOptions::waiting(std::time::Duration::from_secs(120));
        let statuses = store.put(namespace, &pages, patience);
        assert!(statuses.iter().all(|status| status.is_present()));
        assert_eq!(store.longest_prefix(namespace, &chain), chain.len());
    }
}

#[test]
fn a_store_of_many_pages_is_shown_in_the_usual_time_and_memory() {
    let pages = std::env::var("LARDER_MANY_PAGES").map_or(PAGES, |of| of.parse().unwrap());
    let directory = directory();
    let device = std::env::var_os("LARDER_MANY_DEVICE");
    let path = device.map_or_else(|| directory.path().join("store"), Into::into);
    let size = (pages * 4096 * 5 / 4 + (1 << 29)).to_string();
    json(&["create", text(&path), "--size", &size]);
    let options = OpenOptions::default().with(|o| {
        o.disk_wrapper = Some(DiskWrapper::new(|disk| Arc::new(Hollow(disk))));
    });
    let store = Store::attach(&path, options).unwrap();
    let begun = Instant::now();
    fill(&store, pages);
    println!(
        "{pages} pages put in {:.1} s",
        begun.elapsed().as_secs_f64()
    );

    let begun = Instant::now();
    let top = Terminal::of(&["top", text(&path), "--every", "100ms"], (24, 80));
    top.shows(&["larder top", &format!("{pages}, "), " of 64 "]);
    drop(top);
    println!("the screen after {:.2} s", begun.elapsed().as_secs_f64());

    let begun = Instant::now();
    let out = directory.path().join("report.html");
    ends(&["report", text(&path), "-o", text(&out)], 0);
    println!("the report after {:.2} s", begun.elapsed().as_secs_f64());
    let html = std::fs::read_to_string(&out).unwrap();
    assert!(html.len() < 200_000, "{}", html.len());
    if let Some(seen) = drawn(&out, &[]) {
        charts_are_readable(&seen, 1);
        has(&seen, &[&format!("{pages}, "), "Is it too small?"]);
    }
    store.close().unwrap();
}
