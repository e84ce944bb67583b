//! The file of a recording.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use larder_store::traffic::Call;
use serde::Serialize;

use super::lines::{CallLine, LossLine, Named, RequestLine, Whole};
use crate::failure::Failure;
use crate::zstd;

/// Bytes of text that make a frame.
const FRAME_BYTES: usize = 4 << 20;

/// Longest time that text waits for a frame of its own: more is lost if this process is killed.
const FRAME_TIME: Duration = Duration::from_secs(5);

/// See the module.
pub struct Out {
    path: PathBuf,
    file: File,
    is_compressed: bool,
    text: Vec<u8>,
    written: Instant,
    bytes: u64,
    requests: u64,
    /// The time of the first line; later lines count from it.
    began_ms: Option<u64>,
    processes: Vec<u32>,
}

impl Out {
    /// Creates the file.
    pub fn create(path: &Path) -> Result<Out, Failure> {
        let failed = |error: io::Error| {
            Failure::environment(format!(
                "{}: creating the recording: {error}; name a new file in a directory that this \
                 process may write to",
                path.display()
            ))
        };
        Ok(Out {
            file: File::create_new(path).map_err(failed)?,
            path: path.to_owned(),
            is_compressed: path.extension().is_some_and(|extension| extension == "zst"),
            text: Vec::new(),
            written: Instant::now(),
            bytes: 0,
            requests: 0,
            began_ms: None,
            processes: Vec::new(),
        })
    }

    fn timestamp(&mut self, at_ms: u64) -> u64 {
        at_ms.saturating_sub(*self.began_ms.get_or_insert(at_ms))
    }

    /// Small numbers for processes, in the order of their first calls.
    fn process(&mut self, process: u32) -> u32 {
        let known = self.processes.iter().position(|known| *known == process);
        let number = known.unwrap_or_else(|| {
            self.processes.push(process);
            self.processes.len() - 1
        });
        u32::try_from(number).unwrap_or(u32::MAX)
    }

    /// A call.
    pub fn call(&mut self, named: &Named, whole: &Whole, call: &Call) -> Result<(), Failure> {
        let of = named.of.as_ref();
        let line = CallLine {
            timestamp: self.timestamp(call.at_ms),
            call: call.kind,
            process: self.process(call.process),
            namespace: &named.fingerprint,
            model: of.map(|of| of.model.as_str()),
            rank: of.map(|of| of.rank),
            ranks: of.map(|of| of.ranks),
            block_tokens: of.map(|of| of.block_tokens),
            hash_ids: &whole.pages,
            first: whole.first,
            found: call.found,
            bytes: of.map_or(0, |of| of.page_bytes * u64::from(call.found)),
        };
        self.line(&line)
    }

    /// Requests, with their times since 1970.
    pub fn requests(&mut self, requests: &[RequestLine]) -> Result<(), Failure> {
        for request in requests {
            let timestamp = self.timestamp(request.timestamp);
            self.line(&RequestLine {
                timestamp,
                hash_ids: request.hash_ids.clone(),
                model: request.model.clone(),
                ..*request
            })?;
            self.requests += 1;
        }
        Ok(())
    }

    /// How many there are.
    pub fn requests_written(&self) -> u64 {
        self.requests
    }

    /// Calls were lost.
    pub fn lost(&mut self, at_ms: u64, lost_calls: u64, lost_pages: u64) -> Result<(), Failure> {
        let line = LossLine {
            timestamp: self.timestamp(at_ms),
            lost_calls,
            lost_pages,
            gap_seconds: None,
        };
        self.line(&line)
    }

    /// There was no owner: calls of this time are not known.
    pub fn gap(&mut self, at_ms: u64, seconds: f64) -> Result<(), Failure> {
        let line = LossLine {
            timestamp: self.timestamp(at_ms),
            lost_calls: 0,
            lost_pages: 0,
            gap_seconds: Some(seconds),
        };
        self.line(&line)
    }

    fn line(&mut self, line: &impl Serialize) -> Result<(), Failure> {
        let written = serde_json::to_writer(&mut self.text, line);
        written.map_err(|error| self.failed(&error.into()))?;
        self.text.push(b'\n');
        match self.text.len() < FRAME_BYTES {
            true => Ok(()),
            false => self.flush(),
        }
    }

    /// Writes what has waited for some time.
    pub fn flush_in_time(&mut self) -> Result<(), Failure> {
        match self.written.elapsed() < FRAME_TIME {
            true => Ok(()),
            false => self.flush(),
        }
    }

    fn flush(&mut self) -> Result<(), Failure> {
        self.written = Instant::now();
        if self.text.is_empty() {
            return Ok(());
        }
        let text = std::mem::take(&mut self.text);
        let bytes = match self.is_compressed {
            true => zstd::frame(&text),
            false => text,
        };
        let written = self.file.write_all(&bytes);
        written.map_err(|error| self.failed(&error))?;
        self.bytes += bytes.len() as u64;
        Ok(())
    }

    fn failed(&self, error: &io::Error) -> Failure {
        Failure::environment(format!(
            "{}: writing the recording: {error}; the calls from here on are not recorded",
            self.path.display()
        ))
    }

    /// The bytes of the file.
    pub fn finish(mut self) -> Result<u64, Failure> {
        self.flush()?;
        Ok(self.bytes)
    }
}
