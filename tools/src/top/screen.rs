//! The picture of an answer: rows for a terminal of 80 x 24, more of them on a larger one.
//!
//! No colours: bold text, and reversed headings. Names come last in their rows, where a terminal
//! that turns text written from right to left moves nothing else.

use larder_core::counters::Counted;
use larder_store::share::{View, VolumeState};
use ratatui::Frame;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::Stylize;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Sparkline, Wrap};

use super::looks::{Rates, Seen};
use crate::owner::{answering_line, eviction_line, pacing_line, process};
use crate::shown::shown;
use crate::size::{ByteSize, Time};
use crate::stat::processes::{Processes, Row, duration};
use crate::stat::spaces::{Space, ages_line, spaces};
use crate::stat::{troubles, warnings};

/// Columns of the labels.
const LABEL: usize = 11;

/// Rows of the picture of the last seconds.
const CHART_ROWS: u16 = 3;

/// Most rows of what is wrong.
const WRONG_ROWS_MAX: u16 = 5;

/// Draws the screen.
pub fn draw(frame: &mut Frame<'_>, seen: &mut Seen) {
    let rows = [
        Constraint::Length(1),
        Constraint::Fill(1),
        Constraint::Length(1),
    ];
    let [top, middle, bottom] = Layout::vertical(rows).areas(frame.area());
    frame.render_widget(headline(seen, top.width), top);
    let help = " q ends it; arrow keys: further namespaces";
    frame.render_widget(filled(help, bottom.width).reversed(), bottom);
    match (&seen.now, &seen.failure) {
        (Some((view, processes)), _) => {
            seen.first_space = body(frame, middle, seen, view, processes);
        }
        (None, Some(failure)) => {
            let text = vec![Line::from("No answer").bold(), Line::from(shown(failure))];
            let text = Paragraph::new(text).wrap(Wrap { trim: true });
            frame.render_widget(text, middle);
        }
        (None, None) => frame.render_widget("Waiting for the owner's answer.", middle),
    }
}

/// A text over a whole row.
fn filled(text: &str, width: u16) -> String {
    format!("{text:<width$}", width = usize::from(width))
}

fn headline(seen: &Seen, width: u16) -> Line<'static> {
    let owner = match &seen.now {
        Some((view, processes)) => {
            let up = processes
                .processes
                .first()
                .and_then(|row| row.process.as_ref());
            let up = up.map_or(String::new(), |of| {
                format!(", up {}", duration(of.uptime_seconds))
            });
            format!("{}{up} ", process(view.report.pid))
        }
        None => String::new(),
    };
    let path = shown(&seen.path.to_string_lossy());
    let room = usize::from(width).saturating_sub(owner.len() + 14);
    let skipped = path.chars().count().saturating_sub(room);
    let path: String = path.chars().skip(skipped).collect();
    let left = format!(" larder top: {path}");
    let gap = usize::from(width).saturating_sub(Span::raw(&left).width() + owner.len());
    Line::from(format!("{left}{:gap$}{owner}", "")).reversed()
}

/// Draws an answer. Returns the number of namespaces above the shown ones.
fn body(
    frame: &mut Frame<'_>,
    area: Rect,
    seen: &Seen,
    view: &View,
    processes: &Processes,
) -> usize {
    let facts = facts(seen, view);
    let wrong = wrong(view);
    let wrong_text = Paragraph::new(wrong).wrap(Wrap { trim: false });
    let wrong_rows = (wrong_text.line_count(area.width) as u16).min(WRONG_ROWS_MAX);
    let listed = processes.processes.len() as u16;
    let rows = [
        Constraint::Length(facts.len() as u16),
        Constraint::Length(1 + CHART_ROWS),
        Constraint::Length(wrong_rows),
        Constraint::Max(1 + listed),
        Constraint::Min(3),
    ];
    let [top, chart, trouble, users, names] = Layout::vertical(rows).areas(area);
    frame.render_widget(Paragraph::new(facts), top);
    draw_chart(frame, chart, seen);
    frame.render_widget(wrong_text, trouble);
    frame.render_widget(Paragraph::new(table(processes, users.height)), users);
    let spaces = spaces(view);
    let room = usize::from(names.height).saturating_sub(1);
    let first = seen.first_space.min(spaces.len().saturating_sub(room));
    frame.render_widget(Paragraph::new(listing(&spaces, first, room)), names);
    first
}

fn row(label: &str, value: String) -> Line<'static> {
    Line::from(vec![
        Span::raw(format!("{label:<LABEL$}")).bold(),
        Span::raw(value),
    ])
}

/// A part of a sum in percent.
fn percent(part: f64, rest: f64) -> String {
    match part + rest {
        sum if sum > 0.0 => format!("{:.1} %", 100.0 * part / sum),
        _ => "-".to_owned(),
    }
}

fn facts(seen: &Seen, view: &View) -> Vec<Line<'static>> {
    let (report, totals) = (&view.report, &view.report.totals);
    let stats = &report.stats;
    let now = seen.rates.front().copied().unwrap_or_default();
    let size = |bytes| ByteSize(bytes).to_string();
    let speed = |bytes: f64| format!("{}/s", ByteSize(bytes as u64));
    let Rates {
        tokens_found,
        tokens_not_found,
        ..
    } = now;
    let tokens = totals.spaces.total().tokens;
    let bound = |name: &larder_base::latency::Buckets| match name.bound(0.99) {
        _ if name.count() == 0 => "-".to_owned(),
        Some(bound) => Time(bound).to_string(),
        None => "over 10 s".to_owned(),
    };
    let times = &totals.latencies;
    let mut lines = vec![
        row(
            "Pages",
            format!(
                "{}, {}; {} of {} usable in use",
                stats.pages,
                size(stats.live_bytes),
                size(stats.taken_bytes),
                size(stats.usable_bytes)
            ),
        ),
        row(
            "Hits",
            format!(
                "{} of the pages read now, {} in all; tokens {}, {}",
                percent(now.hits, now.misses),
                percent(
                    totals.counts.hits as f64,
                    totals.counts.misses.total() as f64
                ),
                percent(tokens_found, tokens_not_found),
                percent(tokens.found as f64, tokens.not_found as f64)
            ),
        ),
        row(
            "Now",
            format!(
                "{:.0} pages/s read, {}; {:.0} pages/s put, {}; {:.0}/s evicted",
                now.hits,
                speed(now.read_bytes),
                now.put_pages,
                speed(now.put_bytes),
                now.evicted
            ),
        ),
        row(
            "Disk",
            format!(
                "{}; 99 % of reads below {}, writes {}, syncs {}",
                stats.disk.split(':').next().unwrap_or_default(),
                bound(&times.device_read),
                bound(&times.device_write),
                bound(&times.device_sync)
            ),
        ),
        row(
            "Queue",
            format!(
                "{} pages being read, {} puts in flight; 99 % of writes wait below {}",
                report.reads_in_flight,
                report.puts_in_flight,
                us(stats.put_wait_latency.p99_us)
            ),
        ),
    ];
    lines.extend(volumes(view));
    lines.push(row(
        "Evictions",
        format!("{}; {}", stats.evicted, eviction_line(stats)),
    ));
    let ages = totals.ages.total().evicted;
    lines.push(row(
        "  ages",
        match ages.pages() {
            0 => "none known yet".to_owned(),
            _ => ages_line(&ages),
        },
    ));
    lines.push(row("Pacing", pacing_line(stats)));
    lines.push(row("Remote", remote(view)));
    lines
}

fn us(us: f64) -> String {
    Time(std::time::Duration::from_secs_f64(us / 1e6)).to_string()
}

/// The volume that answers worst, and the number of the others.
fn volumes(view: &View) -> Option<Line<'static>> {
    let rank = |state| match state {
        VolumeState::Answering => 0,
        VolumeState::Slow => 1,
        VolumeState::Hung => 2,
    };
    let volumes = &view.report.answering_volumes;
    let worst = volumes.iter().max_by_key(|volume| rank(volume.state))?;
    let others = match volumes.len() {
        1 => String::new(),
        all => format!("1 of {all}: "),
    };
    let p99 = match worst.p99_seconds {
        0.0 => "idle for 10 s".to_owned(),
        seconds => format!("99 % below {seconds} s for 10 s"),
    };
    let device = match worst.device.as_str() {
        "" => shown(&worst.path.to_string_lossy()),
        device => shown(device),
    };
    Some(row(
        "Volume",
        format!(
            "{others}{}, oldest {:.1} s, {p99}; {device}",
            worst.state.as_str(),
            worst.oldest_seconds
        ),
    ))
}

fn remote(view: &View) -> String {
    let Some(l4) = &view.report.beneath else {
        return "none".to_owned();
    };
    let of = |name: &str| l4.counts.get(name).copied().unwrap_or_default();
    format!(
        "{} published, {} fetched, {} waiting; {}; {}",
        ByteSize(of("published_bytes")),
        ByteSize(of("fetched_bytes")),
        of("waiting_runs"),
        l4.state,
        shown(&l4.place)
    )
}

/// Pages read in each of the last seconds, the newest one on the right.
fn draw_chart(frame: &mut Frame<'_>, area: Rect, seen: &Seen) {
    let rows = [Constraint::Length(1), Constraint::Fill(1)];
    let [title, chart] = Layout::vertical(rows).areas(area);
    let shown = seen.rates.iter().take(usize::from(chart.width));
    let hits: Vec<u64> = shown.map(|rates| rates.hits as u64).collect();
    let most = hits.iter().max().copied().unwrap_or_default();
    let heading = format!(
        "Hits by second: the last {} looks, the newest on the right, at most {most}",
        hits.len()
    );
    frame.render_widget(Line::from(heading).bold(), title);
    let chart_of = Sparkline::default()
        .data(hits)
        .direction(ratatui::widgets::RenderDirection::RightToLeft);
    frame.render_widget(chart_of, chart);
}

/// The troubles, the worst ones first.
fn wrong(view: &View) -> Vec<Line<'static>> {
    let report = &view.report;
    let late = report.answering_volumes.iter();
    let hung = late.filter(|volume| volume.state == VolumeState::Hung);
    let hung: Vec<String> = hung.map(answering_line).collect();
    let mut others = troubles(report);
    others.retain(|trouble| !hung.contains(trouble));
    let all = hung.into_iter().chain(others).chain(warnings(report));
    let lines: Vec<Line<'static>> = all.map(|line| row("Wrong now", shown(&line))).collect();
    match lines.is_empty() {
        true => vec![row("Wrong now", "nothing".to_owned())],
        false => lines,
    }
}

fn table(processes: &Processes, height: u16) -> Vec<Line<'static>> {
    let all = processes.processes.len();
    let room = usize::from(height).saturating_sub(1);
    let heading = match all > room {
        true => format!("Processes, {room} of {all}"),
        false => format!("Processes ({all})"),
    };
    let line = |row: &Row| {
        let process = row.process.as_ref();
        let pid = process.and_then(|of| of.pid);
        let rates = row.rates.as_ref();
        let speed = |bytes: Option<f64>| {
            bytes.map_or_else(
                || "-".to_owned(),
                |bytes| ByteSize(bytes as u64).to_string(),
            )
        };
        cells(
            &pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string()),
            &[
                row.hit_rate
                    .map_or_else(|| "-".to_owned(), |rate| percent(rate, 1.0 - rate)),
                rates.map_or_else(
                    || "-".to_owned(),
                    |rates| format!("{:.0}", rates.pages_hit_per_second),
                ),
                speed(rates.map(|rates| rates.read_bytes_per_second)),
                speed(rates.map(|rates| rates.put_bytes_per_second)),
            ],
            &shown(&row.label("")),
        )
    };
    let columns = ["hit rate", "hits/s", "read/s", "put/s"].map(str::to_owned);
    let mut lines = vec![Line::from(cells(&heading, &columns, "name")).bold()];
    lines.extend(
        processes
            .processes
            .iter()
            .take(room)
            .map(line)
            .map(Line::from),
    );
    lines
}

fn listing(spaces: &[Space], first: usize, room: usize) -> Vec<Line<'static>> {
    let shown_to = spaces.len().min(first + room);
    let heading = match (first, spaces.len()) {
        (_, 0) => "Namespaces: none".to_owned(),
        (0, all) if all <= room => format!("Namespaces ({all})"),
        (first, all) => format!("Namespaces {}-{shown_to} of {all}", first + 1),
    };
    let line = |space: &Space| {
        let tokens = space.reads.tokens;
        cells(
            &space.fingerprint.chars().take(12).collect::<String>(),
            &[
                percent(space.reads.hits as f64, space.pages_missed as f64),
                percent(tokens.found as f64, tokens.not_found as f64),
                space.pages.to_string(),
                ByteSize(space.bytes).to_string(),
            ],
            &shown(space.model.as_deref().unwrap_or("?")),
        )
    };
    let columns = ["hit rate", "tokens", "pages", "size"].map(str::to_owned);
    let mut lines = vec![Line::from(cells(&heading, &columns, "model")).bold()];
    let some = spaces.iter().skip(first).take(room);
    lines.extend(some.map(line).map(Line::from));
    lines
}

/// A row of a table: the first column and the last one flush left.
fn cells(first: &str, others: &[String; 4], last: &str) -> String {
    let [a, b, c, d] = others;
    format!("{first:<24}{a:>9}{b:>10}{c:>11}{d:>11}  {last}")
}
