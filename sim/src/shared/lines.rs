//! Connections between clients and their owner. Messages on one connection arrive in order, perhaps
//! late. Messages in flight at its end are lost. There is no order between two connections.

use std::collections::VecDeque;

use larder_engine::catalog::ReservationId;
use larder_engine::core::RequestId;
use larder_engine::share::ledger::Awaited;
use larder_engine::share::wire::{ClientId, Reply, Request, receive, send};

use crate::oracle::VersionId;

/// Facts about a reply that the reply itself does not contain.
pub enum Note {
    /// The put that the reply grants, and the versions to write.
    Reserved(ReservationId, Vec<Option<VersionId>>),
    /// The reservations that have settled.
    Settled(Vec<ReservationId>),
}

/// A frame on its way.
pub struct Message {
    frame: Vec<u8>,
    pub note: Option<Note>,
    /// Order in which messages were sent.
    pub number: u64,
    /// Does not arrive before this moment.
    pub due: u64,
}

impl Message {
    /// The bytes that the reader gets.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let whole = receive(&mut &self.frame[..], &mut bytes);
        assert!(matches!(whole, Ok(true)), "a frame that readers reject");
        bytes
    }
}

/// A request as it is sent.
pub fn request_frame(request: &Request<'_>) -> Vec<u8> {
    let mut frame = Vec::new();
    send(&mut frame, &mut Vec::new(), request).expect("a request that can be sent");
    frame
}

/// A reply as it is sent.
pub fn reply_frame(reply: &Reply) -> Vec<u8> {
    let mut frame = Vec::new();
    send(&mut frame, &mut Vec::new(), reply).expect("a reply that can be sent");
    frame
}

/// The event for which the owner's thread of a connection waits.
pub enum Waits {
    Settled(Vec<Awaited>),
    Room { seen: u64 },
    Request(RequestId),
}

/// A connection.
pub struct Line {
    pub client: ClientId,
    /// The end of this connection is the client's end.
    pub is_first: bool,
    pub up: VecDeque<Message>,
    pub down: VecDeque<Message>,
    pub waits: Option<Waits>,
    /// The client's end is closed: earlier messages can still be read.
    pub left: bool,
    /// The owner's end is closed: earlier messages can still be read.
    pub hung_up: bool,
    /// The owner's thread has ended.
    pub unserved: bool,
}

impl Line {
    pub fn new(client: ClientId, is_first: bool) -> Line {
        Line {
            client,
            is_first,
            up: VecDeque::new(),
            down: VecDeque::new(),
            waits: None,
            left: false,
            hung_up: false,
            unserved: false,
        }
    }

    /// Whether both ends are done.
    pub fn is_over(&self) -> bool {
        self.left && self.unserved
    }

    /// The client closes its end.
    pub fn leave(&mut self) {
        self.left = true;
        self.down.clear();
    }

    /// Appends a frame to a queue. It does not arrive before the frames ahead of it.
    pub fn push(queue: &mut VecDeque<Message>, message: Message) {
        let ahead = queue.back().map_or(0, |last| last.due);
        queue.push_back(Message {
            due: message.due.max(ahead),
            ..message
        });
    }

    pub fn message(frame: Vec<u8>, note: Option<Note>, number: u64, due: u64) -> Message {
        Message {
            frame,
            note,
            number,
            due,
        }
    }
}
