//! One connection to an owner, and its buffer.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::ANSWER_PATIENCE;
use crate::share::pass::Taking;
use crate::share::server::{short_path, socket_path, unix_socket};
use crate::share::wire::{Reply, Request, WireError, arrives, parse, receive, send};

/// How long an answer that takes the owner no time is looked for before the thread sleeps: to be woken costs more than most of
/// them, where the processor that it slept on has to be woken too.
const LOOKED_FOR: Duration = Duration::from_micros(50);

/// See the module.
pub(super) struct Line {
    pub(super) stream: Arc<UnixStream>,
    pub(super) buffer: Vec<u8>,
}

impl Line {
    pub(super) fn connect(path: &Path) -> io::Result<Line> {
        let (_directory, short) = short_path(&socket_path(path))?;
        let stream = UnixStream::from(unix_socket()?);
        // What has begun to arrive goes on arriving; an owner that has stopped takes neither requests nor, in the end, connections.
        stream.set_read_timeout(Some(ANSWER_PATIENCE))?;
        stream.set_write_timeout(Some(ANSWER_PATIENCE))?;
        rustix::net::connect(&stream, &rustix::net::SocketAddrUnix::new(short)?)?;
        Ok(Line {
            stream: Arc::new(stream),
            buffer: Vec::new(),
        })
    }

    pub(super) fn tell(&mut self, request: &Request<'_>) -> Result<(), WireError> {
        send(&mut &*self.stream, &mut self.buffer, request)
    }

    /// Asks what takes no time to answer.
    pub(super) fn ask(&mut self, request: &Request<'_>) -> Result<Reply, WireError> {
        self.ask_for_file(request).map(|(reply, _)| reply)
    }

    /// The same, with the file that comes with the answer.
    pub(super) fn ask_for_file(
        &mut self,
        request: &Request<'_>,
    ) -> Result<(Reply, Option<OwnedFd>), WireError> {
        self.tell(request)?;
        self.look_for_answer()?;
        self.hear(ANSWER_PATIENCE)
    }

    /// Waits for an answer without sleeping, for a moment. The owner's thread goes first if it was woken on this CPU.
    fn look_for_answer(&self) -> io::Result<()> {
        let until = Instant::now() + LOOKED_FOR;
        loop {
            std::thread::yield_now();
            if arrives(&self.stream, Some(Duration::ZERO))? || Instant::now() >= until {
                return Ok(());
            }
        }
    }

    /// The next answer, with the file that comes with it, if it comes within `patience`.
    pub(super) fn hear(
        &mut self,
        patience: Duration,
    ) -> Result<(Reply, Option<OwnedFd>), WireError> {
        if !arrives(&self.stream, Some(patience))? {
            return Err(io::Error::from(io::ErrorKind::TimedOut).into());
        }
        let mut taking = Taking {
            stream: &self.stream,
            file: None,
        };
        if !receive(&mut taking, &mut self.buffer)? {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        let reply = parse(&self.buffer)?;
        self.buffer.clear();
        self.buffer.shrink_to(256 << 10);
        Ok((reply, taking.file))
    }
}
