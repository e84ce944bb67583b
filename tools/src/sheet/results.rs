//! The facts of a result: the JSON document of a replay, or the text of a benchmark with its
//! tables.

use std::path::Path;

use serde_json::Value;

use super::answers;
use super::chart::{self, Axis};
use super::page::{Page, Section, Table};
use super::served::percent_axis;
use super::words::words;
use crate::failure::Failure;
use crate::size::ByteSize;

/// Most bars of a chart.
const BARS_MAX: usize = 16;

/// The documents with charts.
const REPLAYS: [&str; 4] = [
    "replay store",
    "replay sizes",
    "replay policy",
    "replay tiers",
];

/// Whether a file that begins so may be a result.
pub fn may_begin(first: &[u8]) -> bool {
    // The last letter may be cut.
    let text = match std::str::from_utf8(first) {
        Err(error) if error.error_len().is_some() => return false,
        _ => String::from_utf8_lossy(first),
    };
    let is_text = !text.contains('\0');
    is_text && (text.contains("\"schema\"") || text.lines().any(|line| line.starts_with('|')))
}

/// The page of a result.
pub fn page(path: &Path, text: &str) -> Result<Page, Failure> {
    let title = format!("Larder result {}", path.display());
    match serde_json::from_str::<Value>(text) {
        Ok(document) => of_document(title, &document),
        Err(_) if tables(text).next().is_some() => of_tables(title, text),
        Err(error) => Err(Failure::usage(format!(
            "{}: neither a document nor a table: {error}",
            path.display()
        ))),
    }
}

fn of_document(title: String, document: &Value) -> Result<Page, Failure> {
    let command = document["command"].as_str().unwrap_or_default();
    let sections = match command {
        "replay store" => vec![],
        "replay sizes" => vec![sizes(document)?],
        "replay policy" => vec![policies(document)?],
        "replay tiers" => tiers(document)?,
        _ => {
            let known = REPLAYS.join(", ");
            return Err(Failure::usage(format!(
                "a document of `{command}` has no charts: {known} have"
            )));
        }
    };
    let verdict = document["verdict_reason"].as_str();
    let answers = verdict.map(|verdict| (answers::WORTH, verdict.to_owned()));
    Ok(Page {
        title,
        facts: vec![("Command", format!("larder {command}"))],
        answers: answers.into_iter().collect(),
        sections: { sections.into_iter() }
            .chain([numbers(document), words()])
            .collect(),
    })
}

fn number(of: &Value, field: &str) -> f64 {
    of[field].as_f64().unwrap_or_default()
}

fn rows<'a>(document: &'a Value, field: &str) -> &'a [Value] {
    document[field].as_array().map_or(&[], Vec::as_slice)
}

/// The plain fields of a document, under their names.
fn numbers(document: &Value) -> Section {
    let mut section = Section::new("Numbers");
    let fields = document.as_object().into_iter().flatten();
    let row = |(name, value): (&String, &Value)| {
        let value = match value {
            Value::String(text) => text.clone(),
            Value::Number(bytes) if name.ends_with("_bytes") || name.starts_with("bytes_") => bytes
                .as_u64()
                .map_or_else(|| bytes.to_string(), |of| ByteSize(of).to_string()),
            Value::Number(number) => number.to_string(),
            Value::Bool(is_so) => is_so.to_string(),
            _ => return None,
        };
        Some(vec![name.replace('_', " "), value])
    };
    let rows = fields.filter_map(row).collect();
    section.tables.push(Table::new(&["Field", "value"], rows));
    section
}

/// A hit rate by size, as a line over the powers of two.
fn hits(
    points: &[(f64, f64)],
    name: &str,
    label: &dyn Fn(f64) -> String,
) -> Result<String, Failure> {
    let places: Vec<f64> = points.iter().map(|(at, _)| *at).collect();
    let x = Axis {
        name,
        places: &places,
        label,
    };
    chart::line(points, (&x, &percent_axis("pages found")), None)
}

fn percent(rate: f64) -> String {
    format!("{:.2} %", rate * 100.0)
}

fn sizes(document: &Value) -> Result<Section, Failure> {
    let mut section = Section::new("Hit rate by size");
    let sizes = rows(document, "sizes");
    let point = |of: &Value| {
        let bytes = number(of, "capacity_bytes").max(1.0);
        (bytes.log2(), number(of, "hit_rate") * 100.0)
    };
    let points: Vec<(f64, f64)> = sizes.iter().map(point).collect();
    let label = |at: f64| ByteSize(at.exp2().round() as u64).to_string();
    section.charts.push((
        hits(&points, "size of the store", &label)?,
        format!(
            "Pages that a store of each size found; without a limit {}",
            percent(number(document, "ceiling_hit_rate"))
        ),
    ));
    let row = |of: &Value| {
        let bytes = |field| ByteSize(number(of, field) as u64).to_string();
        vec![
            bytes("capacity_bytes"),
            percent(number(of, "hit_rate")),
            of["evicted_pages"].to_string(),
            bytes("bytes_written"),
        ]
    };
    let headings = ["Size", "pages found", "evicted pages", "written"];
    let rows = sizes.iter().map(row).collect();
    section.tables.push(Table::new(&headings, rows));
    Ok(section)
}

fn policies(document: &Value) -> Result<Section, Failure> {
    let mut section = Section::new("Hit rate by size");
    let requested = number(document, "pages_requested").max(1.0);
    let capacities = rows(document, "capacities");
    let rate = |of: &Value, field| number(of, field) / requested;
    let points: Vec<(f64, f64)> = capacities
        .iter()
        .map(|of| {
            (
                number(of, "percent").max(0.01).log2(),
                rate(of, "pages_hit") * 100.0,
            )
        })
        .collect();
    let label = |at: f64| format!("{} %", (at.exp2() * 100.0).round() / 100.0);
    section.charts.push((
        hits(&points, "size, of the different pages", &label)?,
        "Pages that the policy found at each size".to_owned(),
    ));
    let row = |of: &Value| {
        vec![
            format!("{} %", number(of, "percent")),
            percent(rate(of, "pages_hit")),
            percent(rate(of, "lru_pages_hit")),
            percent(rate(of, "optimum_pages_hit")),
            format!("{:.3}", number(of, "write_amplification")),
            format!("{:.3}", number(of, "lru_write_amplification")),
        ]
    };
    let headings = [
        "Size",
        "policy",
        "LRU",
        "optimum",
        "write amplification",
        "of LRU",
    ];
    let rows = capacities.iter().map(row).collect();
    section.tables.push(Table::new(&headings, rows));
    Ok(section)
}

fn tiers(document: &Value) -> Result<Vec<Section>, Failure> {
    let settings = rows(document, "settings");
    let name = |at: f64| {
        let setting = settings.get(at as usize);
        let name = setting.and_then(|of| of["setting"].as_str());
        name.unwrap_or_default().to_owned()
    };
    let mut tokens = Section::new("Tokens by tier");
    for (field, words) in [
        ("l1_tokens", "found in L1"),
        ("l2_tokens", "found in L2"),
        ("l3_tokens", "read from L3"),
        ("computed_tokens", "computed"),
    ] {
        let share = |of: &Value| number(of, field) * 100.0 / number(of, "input_tokens").max(1.0);
        let values: Vec<f64> = settings.iter().map(share).collect();
        if values.iter().all(|of| *of == 0.0) {
            continue;
        }
        let svg = bars(&values, "tiers", &name, &percent_axis("tokens"))?;
        tokens.charts.push((svg, format!("Tokens {words}")));
    }
    let mut times = Section::new("Time to the first token");
    if let Some(reason) = document["ttft_refused"].as_str() {
        times.text.push(reason.to_owned());
    }
    for (field, words) in [
        ("p50_seconds", "Half of the requests below"),
        ("p90_seconds", "90 % of the requests below"),
        ("p99_seconds", "99 % of the requests below"),
    ] {
        let value = |of: &Value| of["ttft"][field].as_f64();
        let values: Option<Vec<f64>> = settings.iter().map(value).collect();
        if let Some(values) = values.filter(|values| !values.is_empty()) {
            let up = chart::steps(values.iter().copied().fold(0.0, f64::max));
            let y = Axis {
                name: "seconds",
                places: &up,
                label: &|at| format!("{}", (at * 1e6).round() / 1e6),
            };
            times
                .charts
                .push((bars(&values, "tiers", &name, &y)?, words.to_owned()));
        }
    }
    Ok(vec![tokens, times])
}

/// Bars with a label each.
fn bars(
    values: &[f64],
    name: &str,
    label: &dyn Fn(f64) -> String,
    y: &Axis<'_>,
) -> Result<String, Failure> {
    let places: Vec<f64> = (0..values.len()).map(|at| at as f64).collect();
    let x = Axis {
        name,
        places: &places,
        label,
    };
    chart::bars(values, (&x, y))
}

/// The cells of a line of a table; `None` for other lines.
fn cells(line: &str) -> Option<Vec<String>> {
    let inner = line.trim().strip_prefix('|')?.strip_suffix('|')?;
    Some(
        inner
            .split('|')
            .map(|cell| cell.trim().to_owned())
            .collect(),
    )
}

/// The tables of a text: headings and rows.
fn tables(text: &str) -> impl Iterator<Item = (Vec<String>, Vec<Vec<String>>)> {
    let lines: Vec<&str> = text.lines().collect();
    let is_table = |line: &&str| cells(line).is_some();
    let groups = lines.chunk_by(|one, two| is_table(one) == is_table(two));
    let tables: Vec<_> = groups
        .filter_map(|group| {
            let mut rows = group.iter().filter_map(|line| cells(line));
            let (headings, rule) = (rows.next()?, rows.next()?);
            let is_rule = rule
                .iter()
                .all(|of| !of.is_empty() && of.trim_matches(['-', ':']).is_empty());
            is_rule.then(|| (headings, rows.collect::<Vec<_>>()))
        })
        .collect();
    tables.into_iter()
}

/// The number at the begin of a cell, and the rest.
fn leading(cell: &str) -> Option<(f64, &str)> {
    let end =
        cell.find(|letter: char| !letter.is_ascii_digit() && !['.', ',', '-'].contains(&letter));
    let (number, rest) = cell.split_at(end.unwrap_or(cell.len()));
    let number = number.replace(',', "").parse().ok()?;
    Some((number, rest.trim()))
}

fn of_tables(title: String, text: &str) -> Result<Page, Failure> {
    let mut sections = Vec::new();
    for (headings, rows) in tables(text) {
        let mut section = Section::new(headings.first().map_or("Table", String::as_str));
        for (at, heading) in headings.iter().enumerate().skip(1) {
            section.charts.extend(column(heading, &rows, at)?);
        }
        let headings: Vec<&str> = headings.iter().map(String::as_str).collect();
        section.tables.push(Table::new(&headings, rows));
        sections.push(section);
    }
    let is_other = |line: &&str| cells(line).is_none() && !line.trim().is_empty();
    let mut remarks = Section::new("Remarks");
    remarks.text = text.lines().filter(is_other).map(str::to_owned).collect();
    sections.push(remarks);
    Ok(Page {
        title,
        sections,
        ..Page::default()
    })
}

/// Bars of a column whose cells begin with numbers from 0 on, all in one unit.
fn column(
    heading: &str,
    rows: &[Vec<String>],
    at: usize,
) -> Result<Option<(String, String)>, Failure> {
    let found: Option<Vec<(f64, &str)>> = rows
        .iter()
        .map(|row| row.get(at).and_then(|cell| leading(cell)))
        .collect();
    let Some(found) = found.filter(|of| (1..=BARS_MAX).contains(&of.len())) else {
        return Ok(None);
    };
    let unit = |rest: &str| {
        rest.split([' ', ',', '(', '['])
            .next()
            .unwrap_or_default()
            .to_owned()
    };
    let units: Vec<String> = found.iter().map(|(_, rest)| unit(rest)).collect();
    let is_plain = found
        .iter()
        .all(|(number, _)| number.is_finite() && *number >= 0.0);
    let most = found.iter().map(|(number, _)| *number).fold(0.0, f64::max);
    if !is_plain || most == 0.0 || units.iter().any(|of| *of != units[0]) {
        return Ok(None);
    }
    let up = chart::steps(most);
    let y = Axis {
        name: if units[0].is_empty() {
            "number"
        } else {
            &units[0]
        },
        places: &up,
        label: &|at| format!("{}", (at * 1e6).round() / 1e6),
    };
    let values: Vec<f64> = found.iter().map(|(number, _)| *number).collect();
    let row = |at: f64| format!("{}", at as usize + 1);
    let svg = bars(&values, "row of the table", &row, &y)?;
    Ok(Some((svg, heading.to_owned())))
}
