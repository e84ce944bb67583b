//! Unix stream sockets, with the interface of the engine's `system::sockets`.
//!
//! A connection has two *ends*, each with a queue of bytes for its reader. The rules of shutdown
//! and close are those of the kernel's net/unix/af_unix.c.

use std::collections::VecDeque;
use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

pub use crate::connections::Peer;
use crate::connections::{Chunk, End, Listener, errno};
use crate::kernel::{Content, Event, Kernel, Node, with, with_if_there};
use crate::processes::{GROUP, USER, id_of};
use crate::task::{Process, Queue};
use crate::time::Instant;

/// Connections that may wait to be accepted.
const BACKLOG: usize = 128;

/// An end of a connection.
#[derive(Debug)]
pub struct UnixStream {
    end: u64,
}

/// A listening socket.
#[derive(Debug)]
pub struct UnixListener {
    listener: u64,
}

fn limit(patience: Option<Duration>) -> Option<Instant> {
    patience.and_then(|patience| Instant::now().checked_add(patience))
}

impl Kernel {
    /// Cuts a connection.
    pub(crate) fn cut_connection(&mut self) -> bool {
        let is_whole = |end: &End| !end.is_closed && !end.is_read_shut && end.process.is_some();
        let ends = self.sockets.ends.iter();
        let ends: Vec<u64> = ends
            .filter(|(_, end)| is_whole(end))
            .map(|(number, _)| *number)
            .collect();
        if ends.is_empty() {
            return false;
        }
        let end = ends[self.dice.below(ends.len())];
        self.count(Event::ConnectionCut);
        self.note(|| "a connection is cut".to_owned());
        self.sockets.shut(end);
        true
    }

    /// Ends the connections of a killed process.
    pub(crate) fn close_sockets_of(&mut self, process: Process) {
        let ends = self.sockets.ends.iter();
        let ends = ends.filter(|(_, end)| end.process == Some(process) && !end.is_closed);
        let ends: Vec<u64> = ends.map(|(number, _)| *number).collect();
        for end in ends {
            self.count(Event::ConnectionOfKilled);
            self.sockets.close(end);
        }
        let listeners = self.sockets.listeners.iter();
        let listeners = listeners.filter(|(_, listener)| listener.process == process);
        let listeners: Vec<u64> = listeners.map(|(number, _)| *number).collect();
        for listener in listeners {
            self.sockets.close_listener(listener);
        }
    }
}

/// A name for a socket.
#[derive(Debug)]
pub struct Name {
    path: PathBuf,
}

impl Name {
    /// The path to use.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A name of any length.
    ///
    /// # Errors
    /// None.
    pub fn short(directory: &Path, name: &Path) -> io::Result<Name> {
        Ok(Name {
            path: directory.join(name),
        })
    }

    /// The same.
    ///
    /// # Errors
    /// None.
    pub fn through(directory: &Path, name: &Path) -> io::Result<Name> {
        Name::short(directory, name)
    }
}

/// Binds a socket to a new file and listens on it.
///
/// # Errors
/// If the name is taken.
///
/// # Panics
/// Outside a task.
pub fn listen(socket: &Path, _user: Option<u32>, _group: Option<u32>) -> io::Result<UnixListener> {
    let process = Process::current().expect("a socket that no task binds");
    with(|kernel| {
        if kernel.names.contains_key(socket) {
            return Err(errno(libc::EADDRINUSE));
        }
        let (id, listener) = (kernel.number(), kernel.number());
        let content = Content::Socket(listener);
        kernel.names.insert(socket.to_owned(), Node { id, content });
        kernel.sockets.listeners.insert(
            listener,
            Listener {
                process,
                backlog: VecDeque::new(),
                is_shut: false,
                changed: Rc::new(Queue::new()),
            },
        );
        kernel.note(|| format!("listens on {}", socket.display()));
        Ok(UnixListener { listener })
    })
}

/// Whether there is room for one more connection: then the new end.
fn try_connect(socket: &Path) -> io::Result<Result<UnixStream, Rc<Queue>>> {
    let process = Process::current().expect("a connection that no task makes");
    with(|kernel| {
        let node = kernel
            .names
            .get(socket)
            .ok_or_else(|| errno(libc::ENOENT))?;
        let Content::Socket(number) = node.content else {
            return Err(errno(libc::ECONNREFUSED));
        };
        let listener = kernel.sockets.listeners.get(&number);
        let Some(listener) = listener.filter(|listener| !listener.is_shut) else {
            kernel.count(Event::ConnectionRefused);
            return Err(errno(libc::ECONNREFUSED));
        };
        if listener.backlog.len() >= BACKLOG {
            return Ok(Err(listener.changed.clone()));
        }
        let peer = |process: Process| Peer {
            pid: id_of(process),
            user: USER,
            group: GROUP,
        };
        let (server, client) = (peer(listener.process), peer(process));
        let numbers = [kernel.number(), kernel.number()];
        kernel.sockets.connect(numbers, server, client, process);
        if let Some(listener) = kernel.sockets.listeners.get_mut(&number) {
            listener.backlog.push_back(numbers[1]);
            listener.changed.wake_all();
        }
        Ok(Ok(UnixStream { end: numbers[0] }))
    })
}

/// Connects to a listening socket. Accepting the connection, each read and each write may take
/// `patience`.
///
/// # Errors
/// Not found, refused, or [`io::ErrorKind::WouldBlock`] after the patience.
pub fn connect(socket: &Path, patience: Duration) -> io::Result<UnixStream> {
    let until = limit(Some(patience));
    loop {
        match try_connect(socket)? {
            Ok(stream) => {
                with(|kernel| {
                    let end = kernel.sockets.end(stream.end)?;
                    end.read_patience = Some(patience);
                    end.write_patience = Some(patience);
                    Ok::<(), io::Error>(())
                })?;
                return Ok(stream);
            }
            Err(changed) => {
                if !changed.wait("room for a connection", until) {
                    return Err(errno(libc::EAGAIN));
                }
            }
        }
    }
}

/// Whether a process listens on a socket.
///
/// # Errors
/// Not found, or refused.
pub fn is_listening(socket: &Path) -> io::Result<()> {
    try_connect(socket).map(drop)
}

/// Accepts a connection.
///
/// # Errors
/// After [`stop_listening`].
pub fn accept(listener: &UnixListener) -> io::Result<UnixStream> {
    listener.accept().map(|(stream, _)| stream)
}

/// Ends all waits for connections on a listening socket, for good.
pub fn stop_listening(listener: &UnixListener) {
    with(|kernel| {
        if let Some(listener) = kernel.sockets.listeners.get_mut(&listener.listener) {
            listener.is_shut = true;
            listener.changed.wake_all();
        }
    });
}

impl UnixListener {
    /// Waits for a connection.
    ///
    /// # Errors
    /// After [`stop_listening`].
    pub fn accept(&self) -> io::Result<(UnixStream, Peer)> {
        let process = Process::current();
        loop {
            let changed = with(|kernel| {
                let listener = kernel.sockets.listeners.get_mut(&self.listener);
                let listener = listener.ok_or_else(|| errno(libc::EBADF))?;
                if let Some(end) = listener.backlog.pop_front() {
                    listener.changed.wake_all();
                    let accepted = kernel.sockets.end(end)?;
                    accepted.process = process;
                    let peer = accepted.peer;
                    return Ok(Ok((UnixStream { end }, peer)));
                }
                if listener.is_shut {
                    return Err(errno(libc::EINVAL));
                }
                Ok(Err(listener.changed.clone()))
            })?;
            match changed {
                Ok(accepted) => return Ok(accepted),
                Err(changed) => changed.wait("a connection", None),
            };
        }
    }
}

impl Drop for UnixListener {
    fn drop(&mut self) {
        with_if_there(|kernel| kernel.sockets.close_listener(self.listener));
    }
}

impl Drop for UnixStream {
    fn drop(&mut self) {
        with_if_there(|kernel| kernel.sockets.close(self.end));
    }
}

/// A socket that a task can wait for.
pub trait Pollable {
    /// Whether it has data, a connection or an end; else the queue to wait in.
    fn poll_now(&self) -> Result<(), Rc<Queue>>;
}

impl Pollable for UnixStream {
    fn poll_now(&self) -> Result<(), Rc<Queue>> {
        with(|kernel| match kernel.sockets.ends.get(&self.end) {
            Some(end) if end.incoming.is_empty() && !end.is_read_shut && !end.is_reset => {
                Err(end.changed.clone())
            }
            _ => Ok(()),
        })
    }
}

impl Pollable for UnixListener {
    fn poll_now(&self) -> Result<(), Rc<Queue>> {
        with(
            |kernel| match kernel.sockets.listeners.get(&self.listener) {
                Some(listener) if listener.backlog.is_empty() && !listener.is_shut => {
                    Err(listener.changed.clone())
                }
                _ => Ok(()),
            },
        )
    }
}

impl<T: Pollable> Pollable for &T {
    fn poll_now(&self) -> Result<(), Rc<Queue>> {
        (**self).poll_now()
    }
}

impl<T: Pollable> Pollable for std::sync::Arc<T> {
    fn poll_now(&self) -> Result<(), Rc<Queue>> {
        (**self).poll_now()
    }
}

/// Whether a signal ends a wait that is about to begin.
fn is_interrupted() -> bool {
    with(|kernel| kernel.strikes(Event::Signal, kernel.odds.signal))
}

/// Waits until a stream has data or ends, or a listener has a connection, at most `patience`. False
/// after the limit.
///
/// # Errors
/// A signal.
pub fn poll(socket: &impl Pollable, patience: Option<Duration>) -> io::Result<bool> {
    let until = limit(patience);
    loop {
        let Err(changed) = socket.poll_now() else {
            return Ok(true);
        };
        if until.is_some_and(|until| until <= Instant::now()) {
            return Ok(false);
        }
        if is_interrupted() {
            return Err(errno(libc::EINTR));
        }
        if !changed.wait("data on a socket", until) {
            with(|kernel| kernel.count(Event::SocketTimeout));
            return Ok(socket.poll_now().is_ok());
        }
    }
}

/// The peer of a connection.
///
/// # Errors
/// For a closed one.
pub fn peer(stream: &UnixStream) -> io::Result<Peer> {
    with(|kernel| kernel.sockets.end(stream.end).map(|end| end.peer))
}

/// The groups of a peer besides its primary one: none.
///
/// # Errors
/// None.
pub fn further_groups(_peer: &UnixStream) -> io::Result<Vec<u32>> {
    Ok(Vec::new())
}

impl Kernel {
    /// Takes queued bytes. `None` if there are none, and more may come.
    fn take(
        &mut self,
        number: u64,
        bytes: &mut [u8],
    ) -> io::Result<Option<(usize, Option<OwnedFd>)>> {
        let has_short = self.odds.socket_short > 0.0;
        let Some(chunk) = self.sockets.end(number)?.incoming.front() else {
            let end = self.sockets.end(number)?;
            if std::mem::take(&mut end.is_reset) {
                return Err(errno(libc::ECONNRESET));
            }
            return Ok(end.is_read_shut.then_some((0, None)));
        };
        let mut count = chunk.bytes.len().min(bytes.len());
        if has_short && count > 1 && self.strikes(Event::SocketShort, self.odds.socket_short) {
            count = 1 + self.dice.below(count);
        }
        let end = self.sockets.end(number)?;
        let chunk = end.incoming.front_mut().ok_or_else(|| errno(libc::EIO))?;
        let file = chunk.file.take();
        for (out, byte) in bytes.iter_mut().zip(chunk.bytes.drain(..count)) {
            *out = byte;
        }
        if chunk.bytes.is_empty() {
            end.incoming.pop_front();
        }
        let other = end.other;
        self.sockets.wake(other);
        Ok(Some((count, file)))
    }

    /// Queues bytes for the other end. `None` if there is no room.
    fn give(
        &mut self,
        number: u64,
        bytes: &[u8],
        file: &mut Option<OwnedFd>,
    ) -> io::Result<Option<usize>> {
        let end = self.sockets.end(number)?;
        let other = end.other;
        if end.is_write_shut {
            return Err(errno(libc::EPIPE));
        }
        let room = self
            .odds
            .socket_bytes
            .saturating_sub(self.sockets.queued(other));
        let mut count = bytes.len().min(room);
        if count == 0 && !bytes.is_empty() {
            return Ok(None);
        }
        if count > 1 && self.strikes(Event::SocketShort, self.odds.socket_short) {
            count = 1 + self.dice.below(count);
        }
        let reader = self.sockets.end(other)?;
        let bytes = &bytes[..count];
        match reader.incoming.back_mut().filter(|_| file.is_none()) {
            Some(last) => last.bytes.extend(bytes),
            None => reader.incoming.push_back(Chunk {
                bytes: bytes.iter().copied().collect(),
                file: file.take(),
            }),
        }
        reader.changed.wake_all();
        Ok(Some(count))
    }
}

/// Writes bytes with an open file attached to the first of them, or without one.
///
/// # Errors
/// As the system's.
pub fn send(stream: &UnixStream, bytes: &[u8], file: Option<BorrowedFd<'_>>) -> io::Result<usize> {
    let mut file = file.map(|file| file.try_clone_to_owned()).transpose()?;
    let mut until = None;
    loop {
        let sent = with(|kernel| kernel.give(stream.end, bytes, &mut file))?;
        if let Some(count) = sent {
            return Ok(count);
        }
        let (changed, patience) = waiting(stream, |end| end.write_patience)?;
        let until = *until.get_or_insert_with(|| limit(patience));
        if !changed.wait("room on a socket", until) {
            with(|kernel| kernel.count(Event::SocketTimeout));
            return Err(errno(libc::EAGAIN));
        }
    }
}

/// Writes bytes as far as there is room for them at this moment.
///
/// # Errors
/// As the system's; [`io::ErrorKind::WouldBlock`] without room.
pub fn send_now(stream: &UnixStream, bytes: &[u8]) -> io::Result<usize> {
    with(|kernel| kernel.give(stream.end, bytes, &mut None))?.ok_or_else(|| errno(libc::EAGAIN))
}

/// The queue of an end, and a limit for its waits.
fn waiting(
    stream: &UnixStream,
    patience: impl FnOnce(&End) -> Option<Duration>,
) -> io::Result<(Rc<Queue>, Option<Duration>)> {
    with(|kernel| {
        let end = kernel.sockets.end(stream.end)?;
        Ok((end.changed.clone(), patience(end)))
    })
}

/// Reads bytes, and takes the open file that is attached to them.
///
/// # Errors
/// As the system's.
pub fn receive(stream: &UnixStream, bytes: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut until = None;
    loop {
        if bytes.is_empty() {
            return Ok((0, None));
        }
        if let Some(taken) = with(|kernel| kernel.take(stream.end, bytes))? {
            return Ok(taken);
        }
        if is_interrupted() {
            return Err(errno(libc::EINTR));
        }
        let (changed, patience) = waiting(stream, |end| end.read_patience)?;
        let until = *until.get_or_insert_with(|| limit(patience));
        if !changed.wait("bytes on a socket", until) {
            with(|kernel| kernel.count(Event::SocketTimeout));
            return Err(errno(libc::EAGAIN));
        }
    }
}

impl Read for &UnixStream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        receive(self, bytes).map(|(count, _)| count)
    }
}

impl Write for &UnixStream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        send(self, bytes, None)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl UnixStream {
    /// Limits each read.
    ///
    /// # Errors
    /// For a closed one.
    pub fn set_read_timeout(&self, patience: Option<Duration>) -> io::Result<()> {
        with(|kernel| {
            kernel.sockets.end(self.end)?.read_patience = patience;
            Ok(())
        })
    }

    /// Ends a connection in both directions. Queued bytes can still be read.
    ///
    /// # Errors
    /// For a closed one.
    ///
    /// # Panics
    /// For one direction alone.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        assert_eq!(how, Shutdown::Both, "one direction is never shut alone");
        with(|kernel| {
            kernel.sockets.end(self.end)?;
            kernel.sockets.shut(self.end);
            Ok(())
        })
    }
}
