//! The traffic of a served store: its recording.
#![allow(clippy::unwrap_used)]

#[path = "../../../tests/support/mod.rs"]
mod support;

mod curve;
mod plan;
mod record;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use larder_format::{Namespace, PageShape};
use support::{larder, text};

/// A process that is killed with the test.
pub struct Process(pub Child);

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts a command and waits for its first line.
pub fn begun(mut command: Command) -> Process {
    let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
    let told = child.stdout.take().unwrap();
    BufReader::new(told).read_line(&mut String::new()).unwrap();
    Process(child)
}

/// An owner of the store, who keeps it.
pub fn serve(store: &Path) -> Process {
    begun(larder(&["serve", text(store)]))
}

/// A namespace of small pages.
pub fn namespace() -> Namespace {
    let shape = PageShape::new(&[16 << 10]).unwrap();
    let builder = Namespace::builder("tiny", "w1", 64, shape);
    builder.build().unwrap()
}
