//! The output of a command on stdout: one JSON document, or lines for people.
//!
//! A JSON document is an object that opens with `schema`, the version of all documents' fields, and
//! `command`. Within a version fields are only added. A renamed or removed field, or a changed
//! meaning, raises the version. Sizes are bytes, times are seconds unless a name states otherwise.
//! Nothing else goes to stdout. `docs/json.md` lists every field and the naming rules.
//!
//! Defends against a reader that stops reading: a closed pipe ends the output, not the program. And
//! against half a document: it is complete before its first byte is written. Names that are no
//! UTF-8 have a form in it ([`paths`]): the report of a finished work must not fail for them.

use std::io::{self, Write};
use std::path::PathBuf;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde::{Serialize, Serializer};

use crate::failure::Failure;
use crate::program::is_for_people;

/// Version of the JSON documents.
pub const SCHEMA: u32 = 1;

/// Most things of a kind that are listed for people: a destroyed device has millions of faults.
pub const LISTED_MAX: usize = 1000;

/// Progress is drawn at most this often a second.
const DRAWS_PER_SECOND_MAX: u8 = 10;

/// The outcome of a command.
pub trait Report: Serialize {
    /// The command's name on the command line.
    const COMMAND: &'static str;

    /// The lines for people.
    fn lines(&self) -> Lines;
}

/// Lines for people: labelled values in two columns, headings, sentences.
#[derive(Default)]
pub struct Lines(Vec<Line>);

/// Adds values with their labels: `label => "format", arguments;`.
macro_rules! rows {
    ($lines:ident: $($label:expr => $format:literal $(, $value:expr)*;)*) => {
        $($lines.row($label, format!($format $(, $value)*));)*
    };
}
pub(crate) use rows;

enum Line {
    Row(String, String),
    Text(String),
}

impl Lines {
    /// Adds a value with its label.
    pub fn row(&mut self, label: impl Into<String>, value: impl Into<String>) -> &mut Self {
        self.0.push(Line::Row(label.into(), value.into()));
        self
    }

    /// Adds a line of text.
    pub fn text(&mut self, text: impl Into<String>) -> &mut Self {
        self.0.push(Line::Text(text.into()));
        self
    }

    /// Adds a table: a line of headings, then the rows. The first column is flush left, the others
    /// line up on the right.
    pub fn table(&mut self, headings: &[&str], rows: &[impl AsRef<[String]>]) {
        let headings: Vec<String> = headings.iter().map(|&heading| heading.to_owned()).collect();
        let rows = || std::iter::once(&headings[..]).chain(rows.iter().map(AsRef::as_ref));
        let mut widths = vec![0; headings.len()];
        for row in rows() {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = (*width).max(cell.chars().count());
            }
        }
        for row in rows() {
            let mut line = String::new();
            for (index, (cell, width)) in row.iter().zip(&widths).enumerate() {
                let cell = if index == 0 {
                    format!("{cell:<width$}")
                } else {
                    format!("  {cell:>width$}")
                };
                line.push_str(&cell);
            }
            self.text(line.trim_end());
        }
    }

    /// Adds a line for each of these things, up to a limit.
    pub fn list(&mut self, things: &str, lines: impl ExactSizeIterator<Item = String>) {
        let is_cut = lines.len() > LISTED_MAX;
        for line in lines.take(LISTED_MAX) {
            self.text(line);
        }
        if is_cut {
            self.text(format!("More {things}: --json lists all of them."));
        }
    }

    /// Writes them, values in a column.
    ///
    /// # Errors
    /// Those of `out`.
    pub fn write(&self, out: &mut dyn Write) -> io::Result<()> {
        let width = |line: &Line| {
            if let Line::Row(label, _) = line {
                label.chars().count()
            } else {
                0
            }
        };
        let width = self.0.iter().map(width).max().unwrap_or(0);
        for line in &self.0 {
            match line {
                Line::Row(label, value) => writeln!(out, "{label:<width$}  {value}")?,
                Line::Text(text) => writeln!(out, "{text}")?,
            }
        }
        Ok(())
    }
}

#[derive(Serialize)]
struct Document<'a, R> {
    schema: u32,
    command: &'static str,
    #[serde(flatten)]
    report: &'a R,
}

/// Prints a report on stdout, as JSON or for people.
///
/// # Errors
/// If stdout cannot be written, unless its reader is gone.
pub fn print<R: Report>(report: &R, json: bool) -> Result<(), Failure> {
    print_on(report, json, &mut io::stdout().lock())
}

/// Prints a report elsewhere, for a command with other output on stdout.
///
/// # Errors
/// If `out` cannot be written, unless its reader is gone.
pub fn print_on<R: Report>(report: &R, json: bool, out: &mut dyn Write) -> Result<(), Failure> {
    written(write(report, json, out).and_then(|()| out.flush()))
}

/// Prints a text on stdout.
///
/// # Errors
/// If stdout cannot be written, unless its reader is gone.
pub fn print_text(text: &str) -> Result<(), Failure> {
    let mut out = io::stdout().lock();
    written(out.write_all(text.as_bytes()).and_then(|()| out.flush()))
}

/// A reader that is gone wants no more.
fn written(outcome: io::Result<()>) -> Result<(), Failure> {
    match outcome {
        Err(error) if error.kind() != io::ErrorKind::BrokenPipe => Err(Failure::environment(
            format!("writing the report: {error}; it is lost"),
        )),
        _ => Ok(()),
    }
}

/// A report as JSON, for another document.
///
/// # Errors
/// If a value of the report has no form in JSON.
pub fn document<R: Report>(report: &R) -> Result<serde_json::Value, Failure> {
    serde_json::to_value(document_of(report))
        .map_err(|error| Failure::environment(format!("making a JSON document: {error}")))
}

fn document_of<R: Report>(report: &R) -> Document<'_, R> {
    Document {
        schema: SCHEMA,
        command: R::COMMAND,
        report,
    }
}

fn write<R: Report>(report: &R, json: bool, out: &mut dyn Write) -> io::Result<()> {
    if !json {
        return report.lines().write(out);
    }
    let document = serde_json::to_string_pretty(&document_of(report))?;
    writeln!(out, "{document}")
}

/// The form of a field with paths: text, with U+FFFD for bytes that are no UTF-8.
///
/// # Errors
/// Those of the serializer.
pub fn paths<S: Serializer>(field: &impl Paths, serializer: S) -> Result<S::Ok, S::Error> {
    field.text().serialize(serializer)
}

/// A field with paths.
pub trait Paths {
    /// Its text.
    fn text(&self) -> impl Serialize;
}

impl Paths for PathBuf {
    fn text(&self) -> impl Serialize {
        self.to_string_lossy()
    }
}

impl Paths for Option<PathBuf> {
    fn text(&self) -> impl Serialize {
        self.as_ref().map(Paths::text)
    }
}

impl Paths for Vec<PathBuf> {
    fn text(&self) -> impl Serialize {
        self.iter().map(Paths::text).collect::<Vec<_>>()
    }
}

/// `1 page`, `2 pages`.
pub fn count(number: u64, thing: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {thing}{plural}")
}

/// A progress bar on stderr, drawn only on a terminal and for people. Without a known `total` it
/// counts.
pub fn progress(total: Option<u64>, template: &str) -> ProgressBar {
    let target = match is_for_people() {
        true => ProgressDrawTarget::stderr_with_hz(DRAWS_PER_SECOND_MAX),
        false => ProgressDrawTarget::hidden(),
    };
    let bar = ProgressBar::with_draw_target(total, target);
    bar.set_style(
        ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()),
    );
    bar
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[derive(Serialize)]
    struct Sample {
        pages: u64,
    }

    impl Report for Sample {
        const COMMAND: &'static str = "sample";

        fn lines(&self) -> Lines {
            let mut lines = Lines::default();
            lines
                .text("A sample")
                .row("pages", self.pages.to_string())
                .row("a longer label", "x");
            lines
        }
    }

    fn printed(json: bool) -> String {
        let mut out = Vec::new();
        write(&Sample { pages: 3 }, json, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn documents_open_with_their_schema_and_command() {
        let document: serde_json::Value = serde_json::from_str(&printed(true)).unwrap();
        assert_eq!(
            document,
            serde_json::json!({"schema": SCHEMA, "command": "sample", "pages": 3})
        );
        assert!(printed(true).starts_with("{\n  \"schema\": 1,"));
    }

    #[test]
    fn rows_line_up() {
        assert_eq!(
            printed(false),
            "A sample\npages           3\na longer label  x\n"
        );
    }
}
