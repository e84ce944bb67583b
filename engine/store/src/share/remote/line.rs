//! One connection to an owner, and its buffer.

use std::io::{self, BufReader};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use larder_base::fork::{Private, keep_private};
use larder_base::runtime::{Instant, descriptors};
use larder_base::system::sockets::{self, UnixStream};

use crate::share::pass::Taking;
use crate::share::wire::{
    Reply, Request, WireError, arrives, parse, parse_greeting, receive, send,
};
use crate::volume::socket::{short_name, socket_path};

/// Limit for a reply that the owner sends without waiting for anything.
pub(super) const ANSWER_PATIENCE: Duration = Duration::from_secs(2);

/// How long the thread polls for a fast reply before it sleeps. Waking up costs more than most
/// replies take if the sleeping CPU has to be woken too.
const POLL_TIME: Duration = Duration::from_micros(50);

/// See the module.
pub(super) struct Line {
    /// Buffered: messages sent together are read together.
    reader: BufReader<Taking>,
    pub(super) buffer: Vec<u8>,
    /// Keeps the connection private to this process.
    pub(super) private: Private,
}

impl Line {
    pub(super) fn connect(path: &Path) -> io::Result<Line> {
        let name = short_name(&socket_path(path))?;
        // Once a reply has begun to arrive, the rest follows soon. A stopped owner accepts neither
        // requests nor, in the end, connections.
        let stream = sockets::connect(name.path(), ANSWER_PATIENCE)?;
        let private = keep_private(&stream);
        let stream = Arc::new(stream);
        Ok(Line {
            reader: BufReader::new(Taking { stream, file: None }),
            buffer: Vec::new(),
            private,
        })
    }

    pub(super) fn stream(&self) -> &Arc<UnixStream> {
        &self.reader.get_ref().stream
    }

    /// Whether a reply, or the end of the connection, arrives within `patience`.
    pub(super) fn has_reply(&self, patience: Duration) -> io::Result<bool> {
        Ok(!self.reader.buffer().is_empty() || arrives(self.stream(), Some(patience))?)
    }

    pub(super) fn send(&mut self, request: &Request<'_>) -> Result<(), WireError> {
        send(
            &mut &*self.reader.get_ref().stream,
            &mut self.buffer,
            request,
        )
    }

    /// Sends a request that is answered without waiting, and receives the reply.
    pub(super) fn ask(&mut self, request: &Request<'_>) -> Result<Reply, WireError> {
        self.send(request)?;
        self.poll_for_reply()?;
        self.receive(ANSWER_PATIENCE).map(|(reply, _)| reply)
    }

    /// The same, with the file that comes with the reply.
    pub(super) fn ask_for_file(
        &mut self,
        request: &Request<'_>,
    ) -> Result<(Reply, Option<OwnedFd>), WireError> {
        descriptors::cover()?;
        self.send(request)?;
        self.poll_for_reply()?;
        self.receive(ANSWER_PATIENCE)
    }

    /// Polls for a reply for a moment, without sleeping. Yields, so that the owner's thread goes
    /// first if it was woken on this CPU.
    fn poll_for_reply(&self) -> io::Result<()> {
        let until = Instant::now() + POLL_TIME;
        loop {
            larder_base::runtime::thread::yield_now();
            if self.has_reply(Duration::ZERO)? || Instant::now() >= until {
                return Ok(());
            }
        }
    }

    /// Sends a greeting, and receives the reply.
    pub(super) fn greet(&mut self, hello: &Request<'_>) -> Result<Reply, WireError> {
        self.send(hello)?;
        self.poll_for_reply()?;
        let (reply, _) = self.receive_with(ANSWER_PATIENCE, |frame| parse_greeting(frame))?;
        Ok(reply)
    }

    /// Receives the next reply, with the file that comes with it, if it arrives within `patience`.
    pub(super) fn receive(
        &mut self,
        patience: Duration,
    ) -> Result<(Reply, Option<OwnedFd>), WireError> {
        self.receive_with(patience, |frame| parse(frame))
    }

    fn receive_with(
        &mut self,
        patience: Duration,
        parse: impl FnOnce(&[u8]) -> Result<Reply, WireError>,
    ) -> Result<(Reply, Option<OwnedFd>), WireError> {
        if !self.has_reply(patience)? {
            return Err(io::Error::from(io::ErrorKind::TimedOut).into());
        }
        if !receive(&mut self.reader, &mut self.buffer)? {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        let reply = parse(&self.buffer)?;
        self.buffer.clear();
        self.buffer.shrink_to(256 << 10);
        Ok((reply, self.reader.get_mut().file.take()))
    }
}

/// Why an owner is silent, and the remedy.
pub(super) fn silence(is_stopped: Option<bool>) -> &'static str {
    match is_stopped {
        Some(true) => {
            "it is stopped (SIGSTOP or a debugger): let it go on (`kill -CONT`), or end the \
             debugger"
        }
        Some(false) => {
            "it is overloaded or hung: look at the load of its machine and at the kernel's log \
             (dmesg), and try again"
        }
        None => "it is stopped, overloaded or hung: let it go on (`kill -CONT`), or try again",
    }
}

/// The pid of the process at the other end; `None` in another pid namespace.
pub(super) fn pid_of(stream: &UnixStream) -> Option<u32> {
    let peer = sockets::peer(stream).ok()?;
    Some(peer.pid).filter(|pid| *pid != 0)
}
