//! The facts of a trace, a running store, or a number of tokens a day.

use std::path::Path;

use larder_base::system::processes;
use larder_store::curve::FACTORS;
use larder_store::share;

use super::distances::Distances;
use super::{Costs, Quantiles, room};
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::model::{Load, prefill_end};
use crate::owner::unserved;
use crate::trace::{Request, Trace};

/// Milliseconds of a day.
const DAY_MS: f64 = 86_400_000.0;

/// Bytes written for each byte put, in a store of so many segments that has no room left. From 24
/// segments on it follows the chat trace in stores that keep a tenth of its blocks (LRU below 160
/// segments) within 0.04. With fewer segments a smaller part of the room is for pages.
fn full_amplification(segments: u64) -> f64 {
    match segments {
        ..24 => 1.2,
        _ => 1.06 + 8.5 / segments.max(32) as f64,
    }
}

/// The same in a store that is not full.
const EMPTY_AMPLIFICATION: f64 = 1.01;

/// The facts for a plan.
pub struct Found {
    pub page_tokens: u32,
    pub capacity_bytes: u64,
    /// Of the capacity, for pages.
    pub usable_bytes: u64,
    pub bytes_put_per_day: f64,
    pub write_amplification: f64,
    pub hit_rate: Option<f64>,
    pub double_hit_rate: Option<f64>,
    pub ceiling_hit_rate: Option<f64>,
    pub tokens_read_per_day: Option<f64>,
    pub saved_seconds_per_day: Option<f64>,
    pub(super) computed_ttft: Option<Quantiles>,
    pub(super) stored_ttft: Option<Quantiles>,
}

/// The size of a store that keeps so many pages of all ranks.
fn size_of(costs: &Costs<'_>, pages: f64, page_tokens: u32) -> Result<u64, Failure> {
    let all = (pages.ceil() as u64).max(1);
    let all = all.saturating_mul(u64::from(costs.copies));
    room::size(all, costs.page_bytes(page_tokens)).ok_or_else(|| {
        Failure::usage("no store is so large: give fewer --days, or another --page-size")
    })
}

/// Bytes and days alone.
pub fn of_tokens(costs: &Costs<'_>, tokens_per_day: u64) -> Result<Found, Failure> {
    let (page_tokens, days) = (costs.args.page_size, costs.args.days.unwrap_or(1.0));
    let pages_per_day = tokens_per_day as f64 / f64::from(page_tokens);
    let capacity_bytes = match costs.args.size {
        Some(size) => size.0,
        None => size_of(costs, pages_per_day * days, page_tokens)?,
    };
    let page_bytes = costs.page_bytes(page_tokens) * u64::from(costs.copies);
    Ok(Found {
        page_tokens,
        capacity_bytes,
        usable_bytes: costs.pages(capacity_bytes, page_tokens) * page_bytes,
        bytes_put_per_day: pages_per_day * page_bytes as f64,
        write_amplification: full_amplification(costs.segments(capacity_bytes, page_tokens)),
        hit_rate: None,
        double_hit_rate: None,
        ceiling_hit_rate: None,
        tokens_read_per_day: None,
        saved_seconds_per_day: None,
        computed_ttft: None,
        stored_ttft: None,
    })
}

/// A request of a trace: its blocks asked for, with their distances, and the tokens before them.
struct Asked {
    distances: Vec<Option<u32>>,
    tokens: u64,
    past: u64,
}

/// The hits of an LRU store on a trace, which is taken as a part of a day.
pub fn of_trace(costs: &Costs<'_>, path: &Path, interrupt: &Interrupt) -> Result<Found, Failure> {
    let (mut distances, mut requests) = (Distances::default(), Vec::new());
    let mut block_tokens = None;
    let (mut first_ms, mut last_ms) = (f64::INFINITY, 0.0_f64);
    for request in Trace::open(path, interrupt)? {
        let request = request?;
        let tokens = *block_tokens.get_or_insert(request.block_tokens());
        if request.block_tokens() != tokens {
            return Err(Failure::usage(format!(
                "{}: it has blocks of {tokens} tokens and blocks of {}, of different models; plan \
                 for each of them alone (each line states its `block_tokens`)",
                path.display(),
                request.block_tokens()
            )));
        }
        if let Some(at) = request.timestamp {
            (first_ms, last_ms) = (first_ms.min(at), last_ms.max(at));
        }
        let found = distances.add(&request);
        if !found.is_empty() {
            requests.push(asked(&request, found));
        }
    }
    distances.sort();
    if last_ms <= first_ms || distances.blocks_asked == 0 {
        return Err(Failure::usage(format!(
            "{}: its requests have no times: a plan needs bytes a day; give a trace with \
             `timestamp` in each line",
            path.display()
        )));
    }
    let page_tokens = block_tokens.unwrap_or(costs.args.page_size);
    let per_day = DAY_MS / (last_ms - first_ms);
    let capacity_bytes = match costs.args.size {
        Some(size) => size.0,
        None => {
            let new = distances.puts(u64::MAX) as f64 * per_day;
            size_of(costs, new * costs.args.days.unwrap_or(1.0), page_tokens)?
        }
    };
    let pages = costs.pages(capacity_bytes, page_tokens);
    let page_bytes = costs.page_bytes(page_tokens) * u64::from(costs.copies);
    let puts = distances.puts(pages);
    let rate = |pages| distances.hits(pages) as f64 / distances.blocks_asked as f64;
    let times = times(costs, &requests, pages, page_tokens);
    let saved = times.as_ref().map(|(computed, stored)| {
        (computed.iter().sum::<f64>() - stored.iter().sum::<f64>()) * per_day
    });
    let (computed, stored) = times.unzip();
    Ok(Found {
        page_tokens,
        capacity_bytes,
        usable_bytes: pages * page_bytes,
        bytes_put_per_day: (puts * page_bytes) as f64 * per_day,
        write_amplification: match puts > pages {
            true => full_amplification(costs.segments(capacity_bytes, page_tokens)),
            false => EMPTY_AMPLIFICATION,
        },
        hit_rate: Some(rate(pages)),
        double_hit_rate: Some(rate(costs.pages(capacity_bytes * 2, page_tokens))),
        ceiling_hit_rate: Some(rate(u64::MAX)),
        tokens_read_per_day: Some(
            (distances.hits(pages) * u64::from(page_tokens)) as f64 * per_day,
        ),
        saved_seconds_per_day: saved,
        computed_ttft: computed.and_then(Quantiles::of),
        stored_ttft: stored.and_then(Quantiles::of),
    })
}

fn asked(request: &Request, distances: Vec<Option<u32>>) -> Asked {
    let block = u64::from(request.block_tokens());
    let (asked, end) = (request.asked(), request.hash_ids.len());
    let past = asked.start as u64 * block;
    let tokens = match request.input_length {
        Some(tokens) if asked.end == end => tokens.saturating_sub(past),
        _ => asked.len() as u64 * block,
    };
    Asked {
        distances,
        tokens: tokens.max(1),
        past,
    }
}

/// The time to the first token of each request, computed and with the store. `None` without the
/// speed of the disk.
fn times(
    costs: &Costs<'_>,
    requests: &[Asked],
    pages: u64,
    page_tokens: u32,
) -> Option<(Vec<f64>, Vec<f64>)> {
    costs.args.disk_read?;
    let (model, compute) = (&costs.args.model, costs.compute());
    let nanos = |seconds: f64| (seconds * 1e9) as u64;
    let both = requests.iter().map(|request| {
        let computed = model.prefill_seconds(&compute, request.tokens, request.past);
        let has = |distance: &&Option<u32>| distance.is_some_and(|of| u64::from(of) < pages);
        let found = request.distances.iter().take_while(has).count() as u64;
        let found = (found * u64::from(page_tokens)).min(request.tokens - 1);
        if found == 0 {
            return (computed, computed);
        }
        let read = costs.read_seconds(found).unwrap_or(0.0);
        let layers = u64::from(model.layers);
        let latency = nanos(costs.args.disk_latency / 1e6);
        let load = Load {
            from: latency,
            layer: nanos(read).saturating_sub(latency) / layers,
        };
        let left = request.tokens - found;
        let layer = model.layer_seconds(&compute, left, request.past + found);
        let end = prefill_end(0, model.layers, nanos(layer), Some(load));
        (computed, end as f64 / 1e9)
    });
    Some(both.unzip())
}

/// The curve and the counters of a running store.
pub fn of_store(costs: &Costs<'_>, path: &Path) -> Result<Found, Failure> {
    let view = share::view(path).map_err(|error| unserved(path, error))?;
    let (stats, curve) = (&view.report.stats, &view.report.curve);
    let seconds = processes::unix_seconds() - view.report.started_unix_s;
    let put_per_day = stats.bytes_put as f64 * 86_400.0 / seconds.max(1.0);
    let of = view
        .spaces
        .iter()
        .filter_map(|space| space.namespace.as_ref());
    let page_tokens = of.map(|of| of.fields().page_tokens).next();
    let total = curve.total();
    let at = |factor: f64| {
        let place = FACTORS.iter().position(|of| *of == factor);
        place.filter(|_| total.pages_requested > 0)
    };
    let rate = |factor| at(factor).and_then(|place| total.as_evicted().get(place).copied());
    let read = at(1.0).and_then(|place| total.read_bytes.get(place));
    let read_per_day = read.map(|bytes| *bytes as f64 * 86_400.0 / curve.seconds.max(1.0));
    let token_bytes = costs.token_bytes().max(1) as f64;
    let tokens = read_per_day.map(|bytes| bytes / token_bytes);
    let gain = costs
        .read_ms()
        .map(|read| (costs.prefill_ms() - read) / 1e6);
    // A store of another size has the same part of it for pages.
    let usable_part = stats.usable_bytes as f64 / (stats.capacity_bytes as f64).max(1.0);
    let capacity_bytes = match (costs.args.size, costs.args.days) {
        (Some(size), _) => size.0,
        (None, Some(days)) => (put_per_day * days / usable_part.max(0.01)) as u64,
        (None, None) => stats.capacity_bytes,
    };
    let is_present = capacity_bytes == stats.capacity_bytes;
    Ok(Found {
        page_tokens: page_tokens.unwrap_or(costs.args.page_size),
        capacity_bytes,
        usable_bytes: (capacity_bytes as f64 * usable_part) as u64,
        bytes_put_per_day: put_per_day,
        write_amplification: stats.write_amplification().max(1.0),
        hit_rate: rate(1.0).filter(|_| is_present),
        double_hit_rate: rate(2.0).filter(|_| is_present),
        ceiling_hit_rate: None,
        tokens_read_per_day: tokens.filter(|_| is_present),
        saved_seconds_per_day: tokens
            .zip(gain)
            .map(|(tokens, gain)| tokens * gain)
            .filter(|_| is_present),
        computed_ttft: None,
        stored_ttft: None,
    })
}
