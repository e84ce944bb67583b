//! The objects that a command leaves out.

use larder_remote::{RunName, Unreadable};
use serde::Serialize;

use crate::report::Lines;

/// Objects that could not be looked at, read, written or removed, while the remote itself answers.
#[derive(Default, Serialize)]
#[serde(transparent)]
pub struct LeftOut(Vec<Row>);

#[derive(Serialize)]
struct Row {
    /// `null` if it is no object: a directory of objects.
    run: Option<String>,
    reason: String,
}

impl LeftOut {
    pub fn add(&mut self, run: &RunName, reason: impl Into<String>) {
        self.0.push(Row {
            run: Some(run.to_string()),
            reason: reason.into(),
        });
    }

    /// A listing could not look at this.
    pub fn listed(&mut self, object: Unreadable) {
        self.0.push(Row {
            run: object.run.map(|run| run.to_string()),
            reason: object.reason,
        });
    }

    pub fn append(&mut self, mut others: LeftOut) {
        self.0.append(&mut others.0);
    }

    /// The runs among them.
    pub fn runs(&self) -> impl Iterator<Item = RunName> {
        let names = self.0.iter().filter_map(|row| row.run.as_ref());
        names.filter_map(|name| name.parse().ok())
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn lines(&self, lines: &mut Lines) {
        if self.0.is_empty() {
            return;
        }
        lines.row("Left out", self.0.len().to_string());
        let line = |row: &Row| {
            let run = row.run.as_ref().map(|run| format!("{run}: "));
            format!("{}{}", run.unwrap_or_default(), row.reason)
        };
        lines.list("objects", self.0.iter().map(line));
    }
}
