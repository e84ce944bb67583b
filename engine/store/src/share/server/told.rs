//! The connection over which a client is sent totals.

use std::sync::Arc;

use larder_base::system::sockets::{self, UnixStream};

use crate::totals::Totals;

/// The first connection of a client, as far as totals go over it.
#[derive(Default)]
pub(super) struct Told {
    stream: Option<Arc<UnixStream>>,
    /// Bytes of the last message that the client had no room for.
    rest: Vec<u8>,
    /// The last message.
    last: Totals,
}

impl Told {
    /// Messages go over this connection.
    pub(super) fn begin(&mut self, stream: &Arc<UnixStream>) {
        self.stream = Some(stream.clone());
    }

    /// No more messages go over it.
    pub(super) fn end(&mut self) {
        self.stream = None;
    }

    /// Sends the rest of the last message, then this one. Leaves bytes for which there is no room.
    pub(super) fn send(&mut self, totals: &Totals, frame: &[u8]) {
        if !self.send_rest() || self.last == *totals {
            return;
        }
        self.last.clone_from(totals);
        self.rest = frame.to_vec();
        self.send_rest();
    }

    /// Sends a message after all others.
    pub(super) fn send_last(&mut self, frame: &[u8]) {
        self.rest.extend_from_slice(frame);
        self.send_rest();
    }

    /// Whether nothing is left.
    fn send_rest(&mut self) -> bool {
        let Some(stream) = &self.stream else {
            return false;
        };
        while !self.rest.is_empty() {
            match sockets::send_now(stream, &self.rest) {
                Ok(count) => drop(self.rest.drain(..count)),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                // No room, or the connection ends, which its thread notices.
                Err(_) => return false,
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;
    use crate::share::wire::{Reply, parse, receive, send};

    fn frame(hits: u64) -> (Totals, Vec<u8>) {
        let mut totals = Totals::default();
        totals.counts.hits = hits;
        let mut frame = Vec::new();
        let reply = Reply::Totals(Box::new(totals.clone()));
        send(&mut Vec::new(), &mut frame, &reply).unwrap();
        (totals, frame)
    }

    /// The totals in the next message.
    fn next(stream: &UnixStream) -> u64 {
        let mut buffer = Vec::new();
        assert!(receive(&mut &*stream, &mut buffer).unwrap());
        match parse(&buffer).unwrap() {
            Reply::Totals(totals) => totals.counts.hits,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_client_that_reads_nothing_is_not_waited_for_and_gets_whole_messages_later() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut told = Told::default();
        told.begin(&Arc::new(ours));
        let mut sent = 0;
        while told.rest.is_empty() {
            sent += 1;
            let (totals, frame) = frame(sent);
            told.send(&totals, &frame);
        }
        let (totals, later) = frame(sent + 1);
        told.send(&totals, &later);
        for hits in 1..sent {
            assert_eq!(next(&theirs), hits);
        }
        told.send(&totals, &later);
        assert_eq!(next(&theirs), sent);
        assert_eq!(next(&theirs), sent + 1);
        // The same totals once more are not sent.
        told.send(&totals, &later);
        told.end();
        drop(told);
        assert!(!receive(&mut &theirs, &mut Vec::new()).unwrap());
    }
}
