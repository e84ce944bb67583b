//! A connection that does not block, and the wait for several of them.
//!
//! Invariants: a frame is given out only after its checksum was right. A connection that has ended
//! gives out the whole frames that came before its end, and then the error.

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use larder_sync::descriptors;
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use serde::de::DeserializeOwned;

use super::TransferError;
use super::wire::{HEAD_BYTES, MAGIC, MESSAGE_BYTES_MAX, Message, Name};
use crate::planted::planted;

/// No more rows are put into an outbox of this many bytes.
const OUTBOX_BYTES: usize = 256 << 10;

/// The most bytes that a turn reads, so that no connection keeps the others waiting.
const TURN_BYTES: usize = 4 << 20;

/// Bytes of a read.
const READ_BYTES: usize = 256 << 10;

/// See the module documentation.
pub(super) struct Link {
    stream: TcpStream,
    peer: String,
    name: Name,
    /// The most bytes of a frame that the other side may send.
    frame_bytes_max: usize,
    is_connecting: bool,
    needs_magic: bool,
    inbox: Vec<u8>,
    /// Bytes of the inbox that were given out.
    read: usize,
    outbox: Vec<u8>,
    /// Bytes of the outbox that were written.
    written: usize,
    /// Frames so far, in both directions.
    received: u64,
    sent: u64,
    heard: Instant,
    told: Instant,
    over: Option<TransferError>,
}

/// A frame of the other side.
pub(super) struct Frame<'l> {
    pub(super) message: Message,
    /// The rows of a chunk.
    pub(super) rows: &'l [u8],
}

impl Link {
    /// A connection to this address, which is being made.
    ///
    /// # Errors
    /// There is no socket, or no way to the address.
    pub(super) fn connect(to: SocketAddr, peer: String) -> Result<Link, TransferError> {
        let connected = || -> std::io::Result<TcpStream> {
            descriptors::cover()?;
            let family = match to {
                SocketAddr::V4(_) => AddressFamily::INET,
                SocketAddr::V6(_) => AddressFamily::INET6,
            };
            let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
            let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
            match rustix::net::connect(&socket, &to) {
                Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(TcpStream::from(socket)),
                Err(error) => Err(error.into()),
            }
        };
        let stream = connected().map_err(|error| {
            let what = format!("connecting to {peer} at {to}");
            TransferError::system(&what, &error)
        })?;
        let mut link = Link::new(stream, peer);
        link.is_connecting = true;
        link.outbox.extend_from_slice(&MAGIC);
        Ok(link)
    }

    /// The connections that wait at a listener.
    pub(super) fn accept(listener: &TcpListener) -> Vec<Link> {
        let mut links = Vec::new();
        loop {
            let accepted = descriptors::cover().and_then(|()| listener.accept());
            match accepted {
                Ok((stream, from)) => {
                    if stream.set_nonblocking(true).is_ok() {
                        let mut link = Link::new(stream, from.to_string());
                        link.needs_magic = true;
                        links.push(link);
                    }
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(_) => return links,
            }
        }
    }

    fn new(stream: TcpStream, peer: String) -> Link {
        // A message waits for no other.
        let _ = stream.set_nodelay(true);
        let now = Instant::now();
        Link {
            stream,
            peer,
            name: Name::NONE,
            frame_bytes_max: MESSAGE_BYTES_MAX,
            is_connecting: false,
            needs_magic: false,
            inbox: Vec::new(),
            read: 0,
            outbox: Vec::new(),
            written: 0,
            received: 0,
            sent: 0,
            heard: now,
            told: now,
            over: None,
        }
    }

    /// Later frames are checked under this name.
    pub(super) fn call(&mut self, peer: String, name: Name) {
        (self.peer, self.name) = (peer, name);
    }

    /// The other side may send chunks with so many bytes of rows.
    pub(super) fn allow_chunks(&mut self, rows_bytes_max: usize) {
        self.frame_bytes_max = MESSAGE_BYTES_MAX + rows_bytes_max;
    }

    pub(super) fn peer(&self) -> &str {
        &self.peer
    }

    pub(super) fn is_connecting(&self) -> bool {
        self.is_connecting
    }

    pub(super) fn is_over(&self) -> bool {
        self.over.is_some()
    }

    /// Whether more rows may be queued.
    pub(super) fn has_room(&self) -> bool {
        self.outbox.len() - self.written < OUTBOX_BYTES
    }

    fn is_flushed(&self) -> bool {
        self.outbox.len() == self.written
    }

    pub(super) fn queue(&mut self, message: &Message) {
        // Without rows it cannot fail.
        let _ = self.queue_with(message, |_| Ok(()));
    }

    /// Queues a message, with rows behind it.
    ///
    /// # Errors
    /// That of `rows`: nothing is queued.
    pub(super) fn queue_with(
        &mut self,
        message: &Message,
        rows: impl FnOnce(&mut Vec<u8>) -> Result<(), TransferError>,
    ) -> Result<(), TransferError> {
        if self.is_flushed() {
            self.outbox.clear();
            self.written = 0;
        }
        let start = self.outbox.len();
        let mut frame = std::mem::take(&mut self.outbox);
        frame.extend_from_slice(&[0; HEAD_BYTES]);
        let encoded = postcard::to_extend(message, frame);
        let mut frame = encoded.map_err(|error| TransferError::system("encoding", &error))?;
        let queued = rows(&mut frame);
        if queued.is_err() {
            frame.truncate(start);
            self.outbox = frame;
            return queued;
        }
        let bytes = &frame[start + HEAD_BYTES..];
        let checksum = self.name_of(self.sent).checksum(self.sent, bytes);
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        frame[start..start + 4].copy_from_slice(&length.to_le_bytes());
        frame[start + 4..start + HEAD_BYTES].copy_from_slice(&checksum.to_le_bytes());
        self.outbox = frame;
        self.sent += 1;
        self.told = Instant::now();
        Ok(())
    }

    fn name_of(&self, frame: u64) -> Name {
        if frame == 0 { Name::NONE } else { self.name }
    }

    /// Gives a sign if the last one is older than this.
    pub(super) fn beat(&mut self, every: Duration) {
        if self.is_flushed() && self.told.elapsed() >= every {
            self.queue(&Message::Alive);
        }
    }

    /// When it has been silent for this time, if it gives no sign.
    pub(super) fn silent_at(&self, timeout: Duration) -> Instant {
        self.heard + timeout
    }

    /// # Errors
    /// The other side gave no sign for this time.
    pub(super) fn check_silence(&self, timeout: Duration) -> Result<(), TransferError> {
        if self.heard.elapsed() < timeout {
            return Ok(());
        }
        Err(TransferError::Silent {
            peer: self.peer.clone(),
            timeout,
        })
    }

    /// Writes and reads as much as is possible without a wait. The caller takes the frames before
    /// it waits: the wait does not know them.
    pub(super) fn turn(&mut self) {
        self.flush();
        if !self.is_connecting {
            self.fill();
        }
    }

    /// Writes as much as is possible without a wait.
    pub(super) fn flush(&mut self) {
        if self.is_connecting {
            if let Ok(Some(_)) | Err(_) = self.stream.take_error() {
                return self.end();
            }
            if self.stream.peer_addr().is_err() {
                return;
            }
            self.is_connecting = false;
        }
        while !self.is_flushed() {
            match self.stream.write(&self.outbox[self.written..]) {
                Ok(bytes) => self.written += bytes,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // The other side may have sent the reason before.
                Err(_) => {
                    self.written = self.outbox.len();
                    break;
                }
            }
        }
    }

    fn fill(&mut self) {
        if self.is_over() {
            return;
        }
        self.inbox.drain(..self.read);
        self.read = 0;
        if self.inbox.len() > self.frame_bytes_max + TURN_BYTES {
            // Nothing takes its frames.
            return self.end();
        }
        let until = self.inbox.len() + TURN_BYTES;
        while self.inbox.len() < until {
            let length = self.inbox.len();
            self.inbox.resize(length + READ_BYTES, 0);
            let found = self.stream.read(&mut self.inbox[length..]);
            self.inbox.truncate(length + *found.as_ref().unwrap_or(&0));
            match found {
                Ok(0) => return self.end(),
                Ok(_) => self.heard = Instant::now(),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(_) => return self.end(),
            }
        }
    }

    fn end(&mut self) {
        self.is_connecting = false;
        let peer = self.peer.clone();
        self.over.get_or_insert(TransferError::Gone { peer });
    }

    /// The next frame that has arrived whole.
    ///
    /// # Errors
    /// It is damaged; or no frame is left of a connection that has ended.
    pub(super) fn next(&mut self) -> Result<Option<Frame<'_>>, TransferError> {
        let Some(bytes) = self.whole()? else {
            return match &self.over {
                Some(error) => Err(error.clone()),
                None => Ok(None),
            };
        };
        let frame = &self.inbox[bytes];
        let (message, rows) = decoded(frame).map_err(|what| self.garbled(what))?;
        Ok(Some(Frame { message, rows }))
    }

    /// The bytes of the next frame in the inbox.
    fn whole(&mut self) -> Result<Option<std::ops::Range<usize>>, TransferError> {
        if self.needs_magic {
            let Some(found) = self.inbox.get(self.read..self.read + MAGIC.len()) else {
                return Ok(None);
            };
            if found != MAGIC {
                return Err(self.garbled("another greeting".to_owned()));
            }
            self.read += MAGIC.len();
            self.needs_magic = false;
        }
        let Some((head, rest)) = self.inbox[self.read..].split_first_chunk::<HEAD_BYTES>() else {
            return Ok(None);
        };
        let [a, b, c, d, checksum @ ..] = head;
        let length = u32::from_le_bytes([*a, *b, *c, *d]) as usize;
        if length > self.frame_bytes_max {
            return Err(self.garbled(format!("a frame of {length} bytes")));
        }
        let Some(bytes) = rest.get(..length) else {
            return Ok(None);
        };
        let expected = self.name_of(self.received).checksum(self.received, bytes);
        if expected != u64::from_le_bytes(*checksum) && !planted!(ChunkUnchecked) {
            return Err(self.garbled("a frame whose checksum is wrong".to_owned()));
        }
        let start = self.read + HEAD_BYTES;
        self.read = start + length;
        self.received += 1;
        Ok(Some(start..start + length))
    }

    /// An error about bytes of the other side.
    pub(super) fn garbled(&self, what: String) -> TransferError {
        TransferError::Garbled {
            peer: self.peer.clone(),
            what,
        }
    }
}

fn decoded<T: DeserializeOwned>(bytes: &[u8]) -> Result<(T, &[u8]), String> {
    postcard::take_from_bytes(bytes).map_err(|error| format!("an invalid message ({error})"))
}

/// Wakes a thread that waits for links.
pub(super) struct Waker(OwnedFd);

impl Waker {
    /// # Errors
    /// There is no descriptor.
    pub(super) fn new() -> Result<Waker, TransferError> {
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let made = descriptors::cover();
        let made = made.and_then(|()| Ok(rustix::event::eventfd(0, flags)?));
        let made = made.map_err(|error| TransferError::system("making an eventfd", &error))?;
        Ok(Waker(made))
    }

    pub(super) fn wake(&self) {
        // A full counter wakes, too.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    fn clear(&self) {
        let _ = rustix::io::read(&self.0, &mut [0_u8; 8]);
    }
}

/// Waits until a link can go on, the waker is called, the listener has a connection, or the time is
/// over.
pub(super) fn wait<'l>(
    waker: &Waker,
    listener: Option<BorrowedFd<'l>>,
    links: impl IntoIterator<Item = &'l Link>,
    until: Instant,
) {
    let mut all = vec![PollFd::new(&waker.0, PollFlags::IN)];
    all.extend(listener.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)));
    for link in links.into_iter().filter(|link| !link.is_over()) {
        let mut events = PollFlags::IN;
        if link.is_connecting || !link.is_flushed() {
            events |= PollFlags::OUT;
        }
        all.push(PollFd::from_borrowed_fd(link.stream.as_fd(), events));
    }
    let left = until.saturating_duration_since(Instant::now());
    let left = Timespec::try_from(left).ok();
    // After an interrupt the caller looks, and waits again.
    let _ = rustix::event::poll(&mut all, left.as_ref());
    waker.clear();
}

/// Lets the last messages of some links arrive: a socket that is closed with unread bytes would
/// discard them. Ends when the other sides have ended, or after this time.
pub(super) fn linger(mut links: Vec<Link>, waker: &Waker, most: Duration) {
    let until = Instant::now() + most;
    let mut is_shut = vec![false; links.len()];
    while Instant::now() < until && links.iter().any(|link| !link.is_over()) {
        for (link, is_shut) in links.iter_mut().zip(&mut is_shut) {
            link.turn();
            link.inbox.clear();
            link.read = 0;
            if !*is_shut && link.is_flushed() && !link.is_connecting {
                let _ = link.stream.shutdown(Shutdown::Write);
                *is_shut = true;
            }
        }
        wait(waker, None, &links, until);
    }
}
