//! The connections of a simulated machine, and its listening sockets.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::time::Duration;

use crate::task::{Process, Queue};

/// All sockets.
#[derive(Default)]
pub(crate) struct Sockets {
    pub(crate) ends: BTreeMap<u64, End>,
    pub(crate) listeners: BTreeMap<u64, Listener>,
}

/// Bytes in a queue, and the open file that comes with the first of them.
pub(crate) struct Chunk {
    pub(crate) bytes: VecDeque<u8>,
    pub(crate) file: Option<OwnedFd>,
}

pub(crate) struct End {
    /// `None` until the connection is accepted.
    pub(crate) process: Option<Process>,
    pub(crate) other: u64,
    pub(crate) peer: Peer,
    pub(crate) incoming: VecDeque<Chunk>,
    pub(crate) is_closed: bool,
    /// Nothing more comes in after the queued bytes.
    pub(crate) is_read_shut: bool,
    pub(crate) is_write_shut: bool,
    /// The other end was closed with bytes that it had not read.
    pub(crate) is_reset: bool,
    pub(crate) read_patience: Option<Duration>,
    pub(crate) write_patience: Option<Duration>,
    /// Tasks that wait for bytes, for room, or for the end.
    pub(crate) changed: Rc<Queue>,
}

pub(crate) struct Listener {
    pub(crate) process: Process,
    pub(crate) backlog: VecDeque<u64>,
    pub(crate) is_shut: bool,
    pub(crate) changed: Rc<Queue>,
}

/// The process at the other end of a connection.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    /// Its pid.
    pub pid: u32,
    /// Its user.
    pub user: u32,
    /// Its group.
    pub group: u32,
}

pub(crate) fn errno(number: i32) -> io::Error {
    io::Error::from_raw_os_error(number)
}

impl Sockets {
    pub(crate) fn end(&mut self, number: u64) -> io::Result<&mut End> {
        self.ends.get_mut(&number).ok_or_else(|| errno(libc::EBADF))
    }

    pub(crate) fn queued(&self, number: u64) -> usize {
        let end = self.ends.get(&number);
        end.map_or(0, |end| {
            end.incoming.iter().map(|chunk| chunk.bytes.len()).sum()
        })
    }

    pub(crate) fn wake(&self, number: u64) {
        if let Some(end) = self.ends.get(&number) {
            end.changed.wake_all();
        }
    }

    pub(crate) fn connect(
        &mut self,
        numbers: [u64; 2],
        server: Peer,
        client: Peer,
        process: Process,
    ) {
        let end = |process, other, peer| End {
            process,
            other,
            peer,
            incoming: VecDeque::new(),
            is_closed: false,
            is_read_shut: false,
            is_write_shut: false,
            is_reset: false,
            read_patience: None,
            write_patience: None,
            changed: Rc::new(Queue::new()),
        };
        let [own, other] = numbers;
        self.ends.insert(own, end(Some(process), other, server));
        self.ends.insert(other, end(None, own, client));
    }

    pub(crate) fn close(&mut self, number: u64) {
        let Some(end) = self.ends.get_mut(&number).filter(|end| !end.is_closed) else {
            return;
        };
        end.is_closed = true;
        let left_unread = !std::mem::take(&mut end.incoming).is_empty();
        let other = end.other;
        end.changed.wake_all();
        match self.ends.get_mut(&other) {
            Some(peer) if !peer.is_closed => {
                peer.is_read_shut = true;
                peer.is_write_shut = true;
                peer.is_reset |= left_unread;
                peer.changed.wake_all();
            }
            _ => {
                self.ends.remove(&other);
                self.ends.remove(&number);
            }
        }
    }

    /// Ends a connection in both directions.
    pub(crate) fn shut(&mut self, number: u64) {
        let other = self.ends.get(&number).map(|end| end.other);
        for number in [Some(number), other].into_iter().flatten() {
            if let Some(end) = self.ends.get_mut(&number) {
                end.is_read_shut = true;
                end.is_write_shut = true;
                end.changed.wake_all();
            }
        }
    }

    pub(crate) fn close_listener(&mut self, number: u64) {
        if let Some(listener) = self.listeners.remove(&number) {
            listener.changed.wake_all();
            for end in listener.backlog {
                self.close(end);
            }
        }
    }
}
