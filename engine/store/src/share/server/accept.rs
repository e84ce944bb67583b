//! The listening socket: accepts connections, and keeps the socket's file in its place.

use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use larder_base::runtime::Instant;
use larder_base::system::sockets;

use super::shared::{Listening, Shared};
use super::socket;
use crate::error::{StoreError, io_error};
use crate::share::wire::arrives;

/// Interval of the checks for the mark of a client that has gone.
pub(super) const LINGER_LOOK: Duration = Duration::from_millis(10);

/// Interval of the checks that the volumes' files and the socket's file are still in their places.
const LOOK: Duration = Duration::from_secs(1);

impl Shared {
    pub(super) fn accept(self: &Arc<Shared>) {
        let mut fails = false;
        let mut next_look = Instant::now() + LOOK;
        while !self.stop.load(Ordering::SeqCst) {
            let listener = self.listening.lock().listener.clone();
            let left = next_look.saturating_duration_since(Instant::now());
            let arrived = arrives(&*listener, Some(left)).unwrap_or(true);
            // Also while connections arrive without a pause.
            if !arrived || Instant::now() >= next_look {
                self.places.look();
                self.keep_socket();
                next_look = Instant::now() + LOOK;
            }
            if !arrived {
                continue;
            }
            let stream = match sockets::accept(&listener) {
                Ok(stream) => stream,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(_) if self.stop.load(Ordering::SeqCst) => return,
                Err(error) => {
                    // Out of descriptors or memory: new connections wait in the queue.
                    if !std::mem::replace(&mut fails, true) {
                        tracing::warn!(
                            %error,
                            "the catalog cannot accept a connection; trying again until it can"
                        );
                    }
                    self.pause(LINGER_LOOK);
                    continue;
                }
            };
            fails = false;
            let shared = self.clone();
            self.spawn("larder-client", move || shared.serve(Arc::new(stream)));
        }
    }

    /// Binds the socket again if its file has gone, which cleaners of temporary files cause.
    /// Without the file no client would find the owner. Of a displaced store it stays away: another
    /// store may be at the path, with an owner and a socket of its own.
    fn keep_socket(&self) {
        let mut listening = self.listening.lock();
        if self.stop.load(Ordering::SeqCst)
            || socket::is_bound(&self.socket, listening.bound)
            || self.places.is_first_displaced()
        {
            return;
        }
        let outcome = self.bind_again();
        let more = self.rebinds.is_due();
        match (outcome, more) {
            (Ok(again), more) => {
                *listening = again;
                if let Some(more) = more {
                    let socket = self.socket.display();
                    tracing::warn!(
                        more,
                        "{socket}: another process deleted or replaced the socket, which is bound \
                         anew; keep cleaners of temporary files away from it (logged once a minute)"
                    );
                }
            }
            (Err(error), Some(more)) => {
                tracing::warn!(
                    more,
                    "{error}; new clients cannot attach (logged once a minute)"
                );
            }
            (Err(_), None) => {}
        }
    }

    fn bind_again(&self) -> Result<Listening, StoreError> {
        let failed = |error| io_error("binding the socket anew", &self.socket, error);
        if !self.places.is_first_there()? {
            return Err(failed(io::Error::other(
                "another store lies at its path now",
            )));
        }
        socket::listen(
            &self.socket,
            self.admission.store_user(),
            self.welcome.group,
        )
        .map(Listening::new)
        .map_err(failed)
    }
}
