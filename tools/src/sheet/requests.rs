//! The facts of a trace.

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use larder_core::ages::BOUNDS_S;

use super::answers;
use super::chart::{self, Axis};
use super::page::{Page, Section, Table};
use super::served::{age_label, percent, percent_axis, time_chart};
use super::words::words;
use crate::failure::Failure;
use crate::interrupt::Interrupt;
use crate::plan::distances::Distances;
use crate::stat::processes::duration;
use crate::trace::Trace;

/// Points of the chart over time.
const MOMENTS: usize = 120;

/// What a model asked for.
#[derive(Default)]
struct Share {
    requests: u64,
    asked: u64,
    again: u64,
    stored: u64,
}

#[derive(Default)]
struct Facts {
    distances: Distances,
    requests: u64,
    /// Time, blocks asked for, and those of them that were stored before.
    moments: Vec<(f64, u64, u64)>,
    models: BTreeMap<String, Share>,
    block_tokens: Option<u32>,
    ages: [u64; BOUNDS_S.len() + 1],
}

impl Facts {
    fn of(path: &Path, interrupt: &Interrupt) -> Result<Facts, Failure> {
        let mut facts = Facts::default();
        let mut last_use: HashMap<u64, f64> = HashMap::new();
        for request in Trace::open(path, interrupt)? {
            let request = request?;
            let found = facts.distances.add(&request);
            let again = found.iter().flatten().count() as u64;
            let asked = found.len() as u64;
            facts.requests += 1;
            facts.block_tokens.get_or_insert(request.block_tokens());
            let model = request
                .model
                .clone()
                .unwrap_or_else(|| "(not named)".to_owned());
            let share = facts.models.entry(model).or_default();
            share.requests += 1;
            share.asked += asked;
            share.again += again;
            share.stored += request.stored() as u64;
            let Some(at) = request.timestamp else {
                continue;
            };
            facts.moments.push((at / 1000.0, asked, again));
            for block in &request.hash_ids[request.asked()] {
                let before = last_use.insert(*block, at);
                if let Some(age) = before.map(|before| (at - before).max(0.0) / 1000.0) {
                    let bucket = BOUNDS_S.partition_point(|bound| (*bound as f64) < age);
                    facts.ages[bucket] += 1;
                }
            }
        }
        facts.distances.sort();
        Ok(facts)
    }

    fn rate(&self, blocks: u64) -> f64 {
        self.distances.hits(blocks) as f64 / self.distances.blocks_asked.max(1) as f64
    }

    /// First and last moment, in seconds.
    fn span(&self) -> Option<(f64, f64)> {
        let first = self.moments.iter().map(|of| of.0).reduce(f64::min)?;
        let last = self.moments.iter().map(|of| of.0).reduce(f64::max)?;
        (last > first).then_some((first, last))
    }

    /// Sizes in blocks, doubled from one to the next: up to the size that keeps all blocks.
    fn sizes(&self) -> Vec<u64> {
        let all = self.distances.blocks().max(1);
        let last = u64::BITS - all.leading_zeros();
        (last.saturating_sub(9)..=last)
            .map(|power| 1 << power)
            .collect()
    }
}

/// The page of a trace.
pub fn page(path: &Path, interrupt: &Interrupt) -> Result<Page, Failure> {
    let facts = Facts::of(path, interrupt)?;
    let tokens = facts.block_tokens.unwrap_or(crate::trace::BLOCK_TOKENS);
    let time = facts.span().map_or_else(
        || "its requests have no times".to_owned(),
        |(first, last)| duration(last - first),
    );
    Ok(Page {
        title: format!("Larder trace {}", path.display()),
        facts: vec![
            ("Requests", format!("{}, in {time}", facts.requests)),
            (
                "Asked for",
                format!("{} blocks of {tokens} tokens", facts.distances.blocks_asked),
            ),
            (
                "Stored",
                format!("{} different blocks", facts.distances.blocks()),
            ),
        ],
        answers: questions(&facts, tokens),
        sections: vec![
            curve(&facts, tokens)?,
            over_time(&facts)?,
            ages(&facts)?,
            models(&facts),
            absent(),
            words(),
        ],
    })
}

fn questions(facts: &Facts, tokens: u32) -> Vec<(&'static str, String)> {
    let ceiling = facts.rate(u64::MAX);
    let enough = facts.sizes().into_iter();
    let enough = { enough }.find(|blocks| facts.rate(*blocks) >= ceiling - 0.05);
    let size = match (facts.distances.blocks_asked, enough) {
        (0, _) | (_, None) => "Nothing is asked for in this trace.".to_owned(),
        (_, Some(blocks)) => format!(
            "A store of {blocks} blocks ({} tokens) finds {:.1} %. No size finds more than {:.1} \
             %: the other blocks are asked for once, or before they are stored.",
            blocks * u64::from(tokens),
            facts.rate(blocks) * 100.0,
            ceiling * 100.0
        ),
    };
    let largest = facts.models.iter().max_by_key(|(_, share)| share.asked);
    let users = largest.map_or_else(
        || "No request.".to_owned(),
        |(name, share)| {
            format!(
                "{} models. Most is asked for by {name}: {} of the blocks.",
                facts.models.len(),
                percent(
                    share.asked as f64,
                    facts.distances.blocks_asked.saturating_sub(share.asked) as f64
                )
            )
        },
    );
    let stored = facts
        .span()
        .map(|(first, last)| facts.distances.puts(u64::MAX) as f64 * 86_400.0 / (last - first));
    let wear = stored.map_or_else(
        || "Not known: the requests have no times.".to_owned(),
        |blocks| {
            format!(
                "At least {blocks:.0} blocks are stored in a day. `larder plan --trace --model` \
                 has their bytes, and the life of a drive."
            )
        },
    );
    let worth = match ceiling {
        of if of < 0.02 => {
            "No: fewer than 2 % of the blocks are asked for after they are stored.".to_owned()
        }
        of => format!(
            "{:.1} % of the blocks asked for are stored before. `larder plan --trace --model \
             --size` compares their reads with their computation.",
            of * 100.0
        ),
    };
    vec![
        (answers::SIZE, size),
        (answers::USERS, users),
        (answers::WEAR, wear),
        (answers::WORTH, worth),
    ]
}

fn curve(facts: &Facts, tokens: u32) -> Result<Section, Failure> {
    let sizes = facts.sizes();
    let points: Vec<(f64, f64)> = sizes
        .iter()
        .map(|blocks| ((*blocks as f64).log2(), facts.rate(*blocks) * 100.0))
        .collect();
    let places: Vec<f64> = points.iter().map(|(x, _)| *x).collect();
    let x = Axis {
        name: "size of the store, blocks",
        places: &places,
        label: &|at| short(at.exp2()),
    };
    let svg = chart::line(&points, (&x, &percent_axis("found")), None)?;
    let mut section = Section::new("Hit rate by size");
    section.charts.push((
        svg,
        "Blocks that a store of each size finds, if it evicts the least recently used ones (exact \
         stack distances)"
            .to_owned(),
    ));
    let row = |blocks: &u64| {
        vec![
            blocks.to_string(),
            (blocks * u64::from(tokens)).to_string(),
            format!("{:.2} %", facts.rate(*blocks) * 100.0),
            facts.distances.puts(*blocks).to_string(),
        ]
    };
    section.tables.push(Table::new(
        &["Blocks", "tokens", "found", "blocks put"],
        sizes.iter().map(row).collect(),
    ));
    Ok(section)
}

/// A large number, in few letters.
fn short(number: f64) -> String {
    let units = [(1e9, "G"), (1e6, "M"), (1e3, "k")];
    let unit = units.into_iter().find(|(of, _)| number >= *of);
    match unit {
        Some((of, unit)) => format!("{:.0}{unit}", number / of),
        None => format!("{number:.0}"),
    }
}

fn over_time(facts: &Facts) -> Result<Section, Failure> {
    let mut section = Section::new("Hits over time");
    let Some((first, last)) = facts.span() else {
        section.text.push("The requests have no times.".to_owned());
        return Ok(section);
    };
    let width = (last - first) / MOMENTS as f64;
    let mut moments = [(0, 0); MOMENTS];
    for (at, asked, again) in &facts.moments {
        let moment = (((at - first) / width) as usize).min(MOMENTS - 1);
        moments[moment].0 += asked;
        moments[moment].1 += again;
    }
    let asked = moments.iter().enumerate().filter(|(_, of)| of.0 > 0);
    let points: Vec<(f64, f64)> = asked
        .map(|(at, (asked, again))| (at as f64 * width, *again as f64 * 100.0 / *asked as f64))
        .collect();
    section.charts.push((
        time_chart(&points, last - first)?,
        "Blocks that were stored before, of the blocks asked for".to_owned(),
    ));
    Ok(section)
}

fn ages(facts: &Facts) -> Result<Section, Failure> {
    let mut section = Section::new("Time between two uses of a block");
    let all: u64 = facts.ages.iter().sum();
    let values = facts
        .ages
        .map(|count| count as f64 * 100.0 / all.max(1) as f64);
    let places: Vec<f64> = (0..values.len()).map(|at| at as f64).collect();
    let x = Axis {
        name: "time since the last use, at most",
        places: &places,
        label: &age_label,
    };
    let svg = chart::bars(&values, (&x, &percent_axis("uses")))?;
    section.charts.push((
        svg,
        "A store has to keep a block for this long to find it".to_owned(),
    ));
    Ok(section)
}

fn models(facts: &Facts) -> Section {
    let mut section = Section::new("Models");
    let row = |(name, share): (&String, &Share)| {
        vec![
            name.clone(),
            share.requests.to_string(),
            share.asked.to_string(),
            percent(
                share.again as f64,
                share.asked.saturating_sub(share.again) as f64,
            ),
            share.stored.to_string(),
        ]
    };
    section.tables.push(Table::new(
        &[
            "Model",
            "requests",
            "blocks asked",
            "stored before",
            "blocks stored",
        ],
        facts.models.iter().map(row).collect(),
    ));
    section
}

fn absent() -> Section {
    let mut section = Section::new("Not in a trace");
    section.text.push(
        "Wear, latencies, the remote and incidents are facts of a store: `larder report STORE` has \
         them."
            .to_owned(),
    );
    section
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn sizes_reach_the_stored_blocks_and_others_are_not_found() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let blocks: Vec<u64> = (0..90).collect();
        let line = |stored| format!("{{\"hash_ids\": {blocks:?}, \"stored\": {stored}}}\n");
        std::fs::write(file.path(), [0, 90, 90].map(line).concat()).unwrap();
        let page = page(file.path(), &Interrupt::never()).unwrap();
        let (_, size) = &page.answers[0];
        assert!(size.contains("A store of 128 blocks"), "{size}");
        assert!(size.contains("finds 33.3 %"), "{size}");
    }
}
