#![allow(clippy::unwrap_used)]

use larder_format::Fingerprint;
use larder_store::curve::SpaceCurve;
use larder_store::inventory::{Space as Known, Usage};

use super::*;

const PAGES: u64 = 10_000_000;

/// The answer of an owner of so many pages, with more namespaces than are listed.
fn view() -> View {
    let mut report = Report::default();
    report.stats.pages = PAGES;
    report.stats.usable_bytes = PAGES << 22;
    report.stats.taken_bytes = PAGES << 22;
    report.totals.counts.hits = u64::MAX;
    report.totals.store.evicted = u64::MAX;
    report.totals.latencies.device_read.record(1, u64::MAX);
    report.history.row_seconds = 40.0;
    report.history.rows = vec![HistoryRow::default(); 200];
    report.history.rows[7].found_tokens = PAGES;
    report.history.rows[7].read_bytes = u64::MAX;
    report.curve.size_bytes = PAGES << 22;
    let space = |number: u64| SpaceCurve {
        fingerprint: format!("{number:032x}"),
        pages_requested: PAGES,
        hit_rates: vec![0.5; FACTORS.len()],
        own_hit_rates: vec![0.625; FACTORS.len()],
        miniature_hit_rate: Some(0.5),
        read_bytes: vec![PAGES; FACTORS.len()],
        is_rough: false,
    };
    report.curve.spaces = (0..64).map(space).collect();
    let known = |number: u16| {
        let mut digest = [0; 16];
        digest[..2].copy_from_slice(&number.to_le_bytes());
        Known {
            usage: Usage {
                namespace: Fingerprint::from_bytes(digest),
                pages: PAGES / 1000,
                bytes: PAGES << 12,
                plain_bytes: PAGES << 12,
            },
            namespace: None,
        }
    };
    View {
        report,
        spaces: (0..1000).map(known).collect(),
    }
}

#[test]
fn a_store_of_ten_million_pages_has_a_page_of_the_usual_size() {
    let html = page(Path::new("/store"), &view()).unwrap().html();
    assert!(html.len() < 200_000, "{}", html.len());
    assert!(
        html.contains("10000000, ") && html.contains("38.1 TiB"),
        "{html}"
    );
    assert_eq!(html.matches("<svg ").count(), 5, "{html}");
}
