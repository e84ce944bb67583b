//! The thread of a prefill process that talks to decode processes. It alone uses their connections,
//! and never waits for one of them: engines change the table, and ring its bell.
//!
//! Faults covered: a decode process that comes before its request is offered (it is parked), ends,
//! is stopped with a full socket, or sends nonsense; two that take one request.

use std::collections::VecDeque;
use std::io;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use larder_base::fork::{Private, keep_private};
use larder_base::system::files::{self, FileId, Kind};
use larder_base::system::processes;
use larder_base::system::sockets::{self, Name, UnixListener, UnixStream};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::State;
use super::desk::{Desk, Entry, Table};
use super::error::HandoverError;
use super::wire::{Inbox, Lent, MAGIC, Refusal, Take, ToDecode, ToPrefill, VERSION, frame};
use crate::planted::planted;

/// Connections at a time.
const CONNECTIONS_MAX: usize = 1024;

/// How long a connection may take until its first message.
const GREETING_WAIT: Duration = Duration::from_secs(10);

/// The pause after a failed `accept`.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// A listening socket, whose file is removed at the end.
pub(super) struct Listening {
    listener: UnixListener,
    path: PathBuf,
    file: FileId,
    _private: Private,
}

impl Drop for Listening {
    fn drop(&mut self) {
        // Another process may have put its own socket there.
        if files::look_at_name(&self.path).is_ok_and(|found| found.id == self.file) {
            let _ = files::remove(&self.path);
        }
    }
}

/// A name of the socket that fits an address.
pub(super) fn name_of(socket: &Path) -> io::Result<Name> {
    let file = socket.file_name().ok_or(io::ErrorKind::InvalidInput)?;
    let directory = socket.parent().filter(|of| !of.as_os_str().is_empty());
    Name::short(directory.unwrap_or(Path::new(".")), Path::new(file))
}

/// Listens at a path. The socket of a process that has ended is replaced.
pub(super) fn listen(socket: &Path) -> io::Result<Listening> {
    let name = name_of(socket)?;
    let bind = || sockets::listen(name.path(), None, None);
    let bound = bind().or_else(|error| {
        let is_socket = files::look_at_name(socket).is_ok_and(|found| found.kind == Kind::Socket);
        let is_left = error.kind() == io::ErrorKind::AddrInUse
            && is_socket
            && sockets::is_listening(name.path())
                .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused);
        if !is_left {
            return Err(error);
        }
        files::remove(socket)?;
        bind()
    });
    let listener = bound?;
    listener.set_nonblocking(true)?;
    Ok(Listening {
        _private: keep_private(&listener),
        file: files::look_at_name(socket)?.id,
        path: socket.to_owned(),
        listener,
    })
}

/// The purpose of a connection.
enum Role {
    /// Its first message has not come.
    New { until: Instant },
    /// Its request is not on offer yet.
    Parked(Take),
    /// It takes an offer. The tokens of each layer that were sent to it.
    Taker {
        offer: u64,
        sent: Vec<usize>,
        has_end: bool,
    },
}

struct Connection {
    number: u64,
    stream: UnixStream,
    inbox: Inbox,
    /// Frames to be sent, and whether the file of the memory is attached.
    out: VecDeque<(Vec<u8>, bool)>,
    /// Sent bytes of the first frame.
    sent: usize,
    role: Role,
    /// It ends when its frames have been sent, as far as there is room for them now.
    is_ending: bool,
    _private: Private,
}

/// Serves until the desk ends.
pub(super) fn serve(desk: &Desk, listening: &Listening) {
    let (mut connections, mut next): (Vec<Connection>, u64) = (Vec::new(), 1);
    loop {
        let until = {
            let mut table = desk.table();
            if table.is_ending {
                break;
            }
            let until = desk.expire(&mut table, Instant::now());
            for connection in &mut connections {
                connection.catch_up(desk, &mut table);
            }
            until
        };
        let mut has_emptied = false;
        connections.retain_mut(|connection| {
            let was_empty = connection.out.is_empty();
            let is_open = connection.flush(desk);
            has_emptied |= !was_empty && connection.out.is_empty();
            is_open
        });
        if has_emptied {
            // The table may have more for a connection whose frames have just been sent.
            continue;
        }
        let greetings = connections.iter().filter_map(Connection::until);
        let until = greetings.chain(until).min();
        let mut pause = None;
        match wait(desk, &listening.listener, &connections, until) {
            Ok(ready) => {
                if ready.bell {
                    let _ = rustix::io::read(&desk.bell, &mut [0; 8]);
                }
                if ready.listener {
                    pause = accept(&listening.listener, &mut connections, &mut next).err();
                }
                for (connection, is_ready) in connections.iter_mut().zip(&ready.connections) {
                    if *is_ready {
                        connection.hear(desk);
                    }
                }
            }
            Err(error) => pause = Some(error),
        }
        if pause.is_some() {
            // Out of descriptors or memory: connections wait in the queue of the socket.
            let bell = &mut [PollFd::new(&desk.bell, PollFlags::IN)];
            let _ = poll(bell, Timespec::try_from(ACCEPT_PAUSE).ok().as_ref());
        }
    }
    let mut table = desk.table();
    let all: Vec<u64> = table.offers.keys().copied().collect();
    for number in all {
        desk.over(&mut table, number, Err(HandoverError::Closed));
    }
    drop(table);
    for connection in &mut connections {
        connection.refuse(Refusal::Closed);
        connection.flush(desk);
    }
}

struct Ready {
    bell: bool,
    listener: bool,
    connections: Vec<bool>,
}

/// Waits for the bell, a connection, a message, or a moment.
fn wait(
    desk: &Desk,
    listener: &UnixListener,
    connections: &[Connection],
    until: Option<Instant>,
) -> io::Result<Ready> {
    let left = until.map(|until| until.saturating_duration_since(Instant::now()));
    let left = left.and_then(|left| Timespec::try_from(left + Duration::from_micros(100)).ok());
    let fixed = [desk.bell.as_fd(), listener.as_fd()];
    let fixed = fixed.iter().map(|fd| PollFd::new(fd, PollFlags::IN));
    let flags = |connection: &Connection| match connection.out.is_empty() {
        true => PollFlags::IN,
        false => PollFlags::IN | PollFlags::OUT,
    };
    let each = connections
        .iter()
        .map(|connection| PollFd::new(&connection.stream, flags(connection)));
    let mut polled: Vec<PollFd<'_>> = fixed.chain(each).collect();
    match poll(&mut polled, left.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    let quiet = PollFlags::OUT;
    let is_ready = |fd: &PollFd<'_>| !fd.revents().difference(quiet).is_empty();
    let mut ready = polled.iter().map(is_ready);
    Ok(Ready {
        bell: ready.next().unwrap_or(false),
        listener: ready.next().unwrap_or(false),
        connections: ready.collect(),
    })
}

fn accept(
    listener: &UnixListener,
    connections: &mut Vec<Connection>,
    next: &mut u64,
) -> io::Result<()> {
    let stream = match sockets::accept(listener) {
        Ok(stream) => stream,
        Err(error)
            if matches!(
                error.kind(),
                io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
            ) =>
        {
            return Ok(());
        }
        Err(error) => return Err(error),
    };
    stream.set_nonblocking(true)?;
    let peer = sockets::peer(&stream)?;
    if peer.user != processes::user() {
        // It cannot have read the file of the socket: it got there by another way.
        return Ok(());
    }
    let mut connection = Connection {
        number: *next,
        inbox: Inbox::default(),
        out: VecDeque::new(),
        sent: 0,
        role: Role::New {
            until: Instant::now() + GREETING_WAIT,
        },
        is_ending: false,
        _private: keep_private(&stream),
        stream,
    };
    *next += 1;
    if connections.len() >= CONNECTIONS_MAX {
        connection.refuse(Refusal::Crowded);
    }
    connections.push(connection);
    Ok(())
}

/// The offer of a name, if one is open.
fn open<'t>(table: &'t mut Table, id: &str) -> Option<(u64, &'t mut Entry)> {
    let mut offers = table.offers.iter_mut();
    let found = offers.find(|(_, entry)| entry.id == id && entry.outcome.is_none());
    found.map(|(number, entry)| (*number, entry))
}

impl Connection {
    /// The moment at which it has said nothing for too long.
    fn until(&self) -> Option<Instant> {
        match self.role {
            Role::New { until } => Some(until),
            _ => None,
        }
    }

    fn send(&mut self, message: &ToDecode, has_file: bool) {
        match frame(message) {
            Ok(frame) => self.out.push_back((frame, has_file)),
            Err(_) => self.is_ending = true,
        }
    }

    fn refuse(&mut self, refusal: Refusal) {
        if !self.is_ending {
            self.send(&ToDecode::Refused(refusal), false);
            self.is_ending = true;
        }
    }

    /// Sends the changes of the table.
    fn catch_up(&mut self, desk: &Desk, table: &mut Table) {
        if self.is_ending {
            return;
        }
        match &self.role {
            Role::New { until } if *until <= Instant::now() => self.refuse(Refusal::Late),
            Role::New { .. } => {}
            Role::Parked(_) => self.take(desk, table),
            Role::Taker { offer, .. } => {
                let offer = *offer;
                self.follow(table, offer);
            }
        }
    }

    /// Takes the offer that it waits for, if it is there.
    fn take(&mut self, desk: &Desk, table: &mut Table) {
        let Role::Parked(take) = &self.role else {
            return;
        };
        let Some((number, entry)) = open(table, &take.id) else {
            return;
        };
        if entry.taker.is_some() {
            return self.refuse(Refusal::Taken);
        }
        if entry.prompt.as_bytes() != &take.prompt && !planted!(AnyPrompt) {
            return self.refuse(Refusal::Prompt);
        }
        entry.taker = Some(self.number);
        let lent = Lent {
            memory: desk.name,
            blocks: desk.memory.blocks(),
            from: u32::try_from(entry.from).unwrap_or(u32::MAX),
            loan: entry.loan.clone(),
        };
        let has_file = take.memory != Some(desk.name);
        self.role = Role::Taker {
            offer: number,
            sent: vec![0; entry.layers.len()],
            has_end: false,
        };
        desk.tell();
        self.send(&ToDecode::Lent(lent), has_file);
        self.follow(table, number);
    }

    /// Sends the layers that have come into the memory, and then the end.
    fn follow(&mut self, table: &Table, offer: u64) {
        let Some(entry) = table.offers.get(&offer) else {
            return self.refuse(Refusal::Cancelled);
        };
        match entry.state() {
            State::Failed(HandoverError::Late { .. }) => return self.refuse(Refusal::Late),
            State::Failed(_) => return self.refuse(Refusal::Cancelled),
            // Its answer was processed.
            State::Success => {
                self.is_ending = true;
                return;
            }
            State::Waiting | State::Transferring => {}
        }
        // One message has all that has changed while another one could not be sent.
        if !self.out.is_empty() {
            return;
        }
        let Role::Taker { sent, has_end, .. } = &mut self.role else {
            return;
        };
        let mut layers = Vec::new();
        for ((layer, tokens), sent) in (0..).zip(&entry.layers).zip(sent) {
            // The tokens before the first one in the memory need no message.
            if *tokens > entry.from.max(*sent) {
                *sent = *tokens;
                layers.push((layer, u32::try_from(*tokens).unwrap_or(u32::MAX)));
            }
        }
        let mut messages = Vec::new();
        if !layers.is_empty() {
            messages.push(ToDecode::Layers(layers));
        }
        if let Some((token, data)) = &entry.end
            && !*has_end
            && entry.missing().is_none()
        {
            *has_end = true;
            let mut token = *token;
            if planted!(TokenOfAnother) {
                let ends = table.offers.values().filter_map(|entry| entry.end.as_ref());
                token = ends.map(|end| end.0).next_back().unwrap_or(token);
            }
            let data = data.clone();
            messages.push(ToDecode::End { token, data });
        }
        for message in messages {
            self.send(&message, false);
        }
    }

    /// Sends as much as there is room for. False if the connection has ended.
    fn flush(&mut self, desk: &Desk) -> bool {
        while let Some((frame, has_file)) = self.out.front() {
            let file = (*has_file && self.sent == 0).then(|| desk.memory.file());
            match sockets::send(&self.stream, &frame[self.sent..], file) {
                Ok(bytes) if self.sent + bytes == frame.len() => {
                    self.out.pop_front();
                    self.sent = 0;
                }
                Ok(bytes) => self.sent += bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(_) => {
                    self.lost(desk);
                    return false;
                }
            }
        }
        !self.is_ending
    }

    /// The decode process has ended, or sent nonsense.
    fn lost(&mut self, desk: &Desk) {
        if let Role::Taker { offer, .. } = self.role
            && !planted!(ForgetsTheDead)
        {
            desk.over(&mut desk.table(), offer, Err(HandoverError::Gone));
        }
        self.is_ending = true;
        self.out.clear();
    }

    /// Reads and processes messages.
    fn hear(&mut self, desk: &Desk) {
        let is_open = self.inbox.read(&self.stream).unwrap_or(false);
        loop {
            match self.inbox.next() {
                Ok(Some(message)) => self.process(desk, message),
                Ok(None) => break,
                Err(error) => {
                    if let Role::Taker { offer, .. } = self.role {
                        desk.over(&mut desk.table(), offer, Err(error));
                    }
                    return self.lost(desk);
                }
            }
        }
        if !is_open {
            self.lost(desk);
        }
    }

    fn process(&mut self, desk: &Desk, message: ToPrefill) {
        match (message, &self.role) {
            (ToPrefill::Take(take), Role::New { .. }) => {
                if (take.magic, take.version) != (MAGIC, VERSION) {
                    self.refuse(Refusal::Version(VERSION));
                } else if take.namespace != desk.cache.namespace() {
                    self.refuse(Refusal::Namespace);
                } else {
                    self.role = Role::Parked(take);
                }
            }
            (ToPrefill::Returned, Role::Taker { offer, has_end, .. }) if *has_end => {
                desk.over(&mut desk.table(), *offer, Ok(()));
                self.is_ending = true;
            }
            _ => self.lost(desk),
        }
    }
}
