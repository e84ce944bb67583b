//! Connections between clients and their owner. What is sent on one arrives in order, perhaps late; what is under way when it ends is
//! lost; between two of them there is no order.

use std::collections::VecDeque;

use larder_engine::catalog::ReservationId;
use larder_engine::core::RequestId;
use larder_engine::share::ledger::Awaited;
use larder_engine::share::wire::{ClientId, Reply, Request, receive, send};

use crate::oracle::VersionId;

/// What the simulation knows of a reply that the owner does not say.
pub enum Note {
    /// The put that the reply grants, and what is to be written.
    Reserved(ReservationId, Vec<Option<VersionId>>),
    /// The reservations that have settled.
    Settled(Vec<ReservationId>),
}

/// A frame on its way.
pub struct Message {
    frame: Vec<u8>,
    pub note: Option<Note>,
    /// Messages in the order in which they were sent.
    pub number: u64,
    /// Does not arrive before this moment.
    pub due: u64,
}

impl Message {
    /// The bytes that its reader is given.
    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        let whole = receive(&mut &self.frame[..], &mut bytes);
        assert!(matches!(whole, Ok(true)), "a frame that no reader takes");
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

/// What the owner's thread of a connection waits for.
pub enum Waits {
    Settled(Vec<Awaited>),
    Room { seen: u64 },
    Request(RequestId),
}

/// A connection.
pub struct Line {
    pub client: ClientId,
    /// Its end is the client's end.
    pub is_first: bool,
    pub up: VecDeque<Message>,
    pub down: VecDeque<Message>,
    pub waits: Option<Waits>,
    /// The client's end is closed: what was sent before can still be read.
    pub left: bool,
    /// The owner's end is closed: what was sent before can still be read.
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

    /// Whether it is over at both ends.
    pub fn is_over(&self) -> bool {
        self.left && self.unserved
    }

    /// The client closes its end.
    pub fn leave(&mut self) {
        self.left = true;
        self.down.clear();
    }

    /// Push a frame at the end of a queue, not to arrive before those ahead of it.
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
