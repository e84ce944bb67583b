//! A connection from its greeting to its end.

use std::io::{self, BufReader, Read};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use larder_base::fork::keep_private;
use larder_base::ids::{ClientId, NamespaceId};
use larder_base::planted;
use larder_base::runtime::Instant;
use larder_base::system::sockets::UnixStream;

use super::answer::{self, Answer, Desk, Greeting, Later};
use super::ledger::Awaited;
use super::session::Session;
use super::shared::Shared;
use super::tally::pid_of;
use crate::protocol::POLICIES;
use crate::share::keys::keys_of;
use crate::share::pass::Giving;
use crate::share::wire::{Failure, Reply, Request, WireError, arrives, parse, receive, send};

/// Limit for the greeting of a new connection. Before the greeting the connection belongs to no
/// session that could hang up on it.
const GREETING_PATIENCE: Duration = Duration::from_secs(2);

/// Longest wait for arriving pages that one request may ask for.
const ARRIVE_PATIENCE_MAX: Duration = Duration::from_secs(60);

/// Buffers longer than this are not kept for the next message.
const BUFFER_KEPT_BYTES: usize = 256 << 10;

/// A connection after its greeting.
struct Greeted {
    session: Arc<Session>,
    connection: u64,
    is_first: bool,
}

/// Reads until a fixed moment, however few bytes each read returns.
struct Until<'a> {
    stream: &'a UnixStream,
    until: Instant,
}

impl Read for Until<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        let left = self.until.saturating_duration_since(Instant::now());
        if !arrives(self.stream, Some(left))? {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.stream.read(bytes)
    }
}

/// How a connection ends without an error.
enum Ending {
    /// The client hung up between two messages.
    InOrder,
    /// The client sent an invalid request.
    Nonsense,
}

impl Shared {
    /// Admits the peer of a connection; else returns the reply to its greeting.
    fn admit(&self, stream: &UnixStream) -> Result<(), Reply> {
        self.admission.admit(stream).map_err(|denial| {
            if let Some(more) = self.denials.is_due() {
                tracing::warn!(
                    more,
                    "a process was denied the store: {denial} (logged once a minute)"
                );
            }
            Reply::Failed(Failure::Denied(denial))
        })
    }

    /// Serves one connection to its end.
    pub(super) fn serve(&self, stream: Arc<UnixStream>) {
        let _private = keep_private(&*stream);
        let mut buffer = Vec::new();
        let Some(Greeted {
            session,
            connection,
            is_first,
        }) = self.greet(&stream, &mut buffer)
        else {
            return;
        };
        let outcome = self.serve_requests(&session, &stream, &mut buffer);
        if let Err(error) = &outcome {
            tracing::debug!(%error, client = session.id.0, "a connection to the catalog ended");
        }
        if !matches!(outcome, Ok(Ending::InOrder)) {
            // Unread messages of this connection are lost: the client must not wait for their
            // effects.
            session.hang_up();
        }
        session.connections.lock().open.remove(&connection);
        if is_first {
            session.told.lock().end();
        }
        drop(stream);
        if is_first && !planted!(KeptSession) {
            self.leave(&session);
        }
    }

    /// The first message of a connection.
    fn greet(&self, stream: &Arc<UnixStream>, buffer: &mut Vec<u8>) -> Option<Greeted> {
        let until = Instant::now() + GREETING_PATIENCE;
        if !receive(&mut Until { stream, until }, buffer).ok()? {
            return None;
        }
        let greeting = answer::greeting(buffer, &self.welcome.protocol)
            .and_then(|greeting| self.admit(stream).map(|()| greeting).map_err(Some));
        let greeting = match greeting {
            Ok(greeting) => greeting,
            Err(last_reply) => {
                if let Some(reply) = last_reply {
                    let _ = send(&mut &**stream, buffer, &reply);
                }
                return None;
            }
        };
        let (session, is_first, reply) = match greeting {
            Greeting::Further(client, secret) => {
                let session = self.sessions.lock().get(&client).cloned();
                let session = session.filter(|session| session.secret == secret)?;
                (session, false, Reply::Done)
            }
            Greeting::First(agreed) => {
                self.places.look();
                let id = ClientId(self.next_client.fetch_add(1, Ordering::Relaxed));
                let session = Arc::new(Session::new(id, self.welcome.run, agreed, pid_of(stream)));
                session.told.lock().begin(stream);
                let welcome = self.welcome.for_client(&session);
                self.sessions.lock().insert(session.id, session.clone());
                (session, true, Reply::Welcome(welcome))
            }
        };
        let connection = session.add(stream);
        let sent = connection.is_some() && send(&mut &**stream, buffer, &reply).is_ok();
        if !sent || self.stop.load(Ordering::SeqCst) {
            if is_first {
                self.leave(&session);
            }
            return None;
        }
        Some(Greeted {
            session,
            connection: connection?,
            is_first,
        })
    }

    fn serve_requests(
        &self,
        session: &Arc<Session>,
        stream: &UnixStream,
        buffer: &mut Vec<u8>,
    ) -> Result<Ending, WireError> {
        let mut out = Vec::new();
        // Buffered: messages sent together are read together.
        let mut reader = BufReader::new(stream);
        loop {
            if reader.buffer().is_empty() {
                arrives(stream, None)?;
            }
            if !receive(&mut reader, buffer)? {
                return Ok(Ending::InOrder);
            }
            let reply = match parse(buffer) {
                Ok(request) => self.reply(session, request),
                Err(error @ WireError::Unknown(_)) => Some(self.unsupported(session, &error)),
                Err(error) => return Err(error),
            };
            let Some(reply) = reply else {
                continue;
            };
            if let Reply::Namespace(id, ..) = reply {
                self.named(session, NamespaceId(id));
            }
            let ends = matches!(reply, Reply::Failed(Failure::Protocol(_)));
            let pipe = match &reply {
                Reply::Keys(keys) => self.store.pass_keys(&keys.slots),
                _ => None,
            };
            let file = match reply {
                Reply::Area => self.reads.staging().map(|staging| staging.area.file()),
                Reply::Common => self.store.data.board.share(),
                _ => pipe.as_ref().map(AsFd::as_fd),
            };
            let mut along = Giving { stream, file };
            send(&mut along, &mut out, &reply)?;
            if ends {
                return Ok(Ending::Nonsense);
            }
            for buffer in [&mut *buffer, &mut out] {
                buffer.clear();
                buffer.shrink_to(BUFFER_KEPT_BYTES);
            }
        }
    }

    /// The reply to a message of a later release.
    fn unsupported(&self, session: &Session, error: &WireError) -> Reply {
        if let Some(more) = self.unknown.is_due() {
            tracing::warn!(
                more,
                "a client of release {} was refused: {error}; upgrade this process (logged once a \
                 minute)",
                session.agreed.release
            );
        }
        Reply::Failed(Failure::Unsupported)
    }

    /// Hands a request to the part that answers it; `None` for requests without a reply.
    fn reply(&self, session: &Arc<Session>, request: Request<'_>) -> Option<Reply> {
        if matches!(request, Request::Own) {
            // An owner that keeps the store ends only when its caller closes it.
            if !self.keeps_ownership {
                self.bell.ask(session.id);
            }
            return None;
        }
        if matches!(request, Request::Common) {
            return Some(match self.store.data.board.share() {
                Some(_) => Reply::Common,
                None => Reply::Done,
            });
        }
        if let Request::Arrive {
            namespace,
            keys,
            patience_ms,
        } = request
        {
            return Some(self.arrive(NamespaceId(namespace), keys, patience_ms));
        }
        if let Request::UseBeneath { is_used } = request {
            return Some(Reply::Count(self.store.local.use_beneath(is_used).into()));
        }
        if let Request::Quotas(change) = request {
            return Some(match self.store.change_quotas(&change) {
                Ok(report) => Reply::Quotas(Box::new(report)),
                Err(error) => Reply::Failed(error.into()),
            });
        }
        if let Request::Record { salt } = request {
            return Some(self.record(session, salt));
        }
        if let Request::Forgotten { number } = request {
            session.forgotten.answer(number);
            return None;
        }
        if let Request::Erase {
            tenant,
            patience_ms,
        } = request
        {
            let until = Instant::now() + Duration::from_millis(patience_ms.into());
            return Some(match self.erase(tenant, until) {
                Ok(erasure) => Reply::Erased(Box::new(erasure)),
                Err(error) => Reply::Failed(error.into()),
            });
        }
        if let Request::Keys { namespace, use_of } = request {
            return Some(self.lend(session, NamespaceId(namespace), use_of));
        }
        let request = self.follow_hints(session, request)?;
        let noted = self.noted(&request);
        let reply = self.decide(session, request);
        if let Some(noted) = noted {
            self.note(session, &noted, reply.as_ref());
        }
        reply
    }

    /// The same for requests about pages and counters.
    fn decide(&self, session: &Arc<Session>, request: Request<'_>) -> Option<Reply> {
        self.answer_reads(session, request)
            .or_else(|request| self.answer_books(session, request))
            .or_else(|request| self.empty(session, request))
            .or_else(|request| self.take_counts(session, request))
            .unwrap_or_else(|request| self.answer(session, request))
    }

    /// Waits for pages that are on their way from beneath the store.
    fn arrive(&self, namespace: NamespaceId, keys: &[u8], patience_ms: u32) -> Reply {
        let Some(keys) = keys_of(keys) else {
            return Reply::Failed(Failure::Protocol("keys are 32 bytes each".to_owned()));
        };
        let patience = Duration::from_millis(patience_ms.into()).min(ARRIVE_PATIENCE_MAX);
        match self
            .store
            .local
            .arrive(namespace, keys, Instant::now() + patience)
        {
            Some(some_stored) => Reply::Count(u64::from(some_stored)),
            None => Reply::Done,
        }
    }

    /// `None` for requests without a reply.
    fn answer(&self, session: &Session, request: Request<'_>) -> Option<Reply> {
        let desk = Desk {
            catalog: self.store.catalog(),
            map: &self.map,
            marks: &self.probes,
            share_bytes: self.share_bytes(),
            is_sealed: self.store.is_sealed(),
        };
        let begins = matches!(
            request,
            Request::Reserve { .. } | Request::ReserveHinted { .. } | Request::Pin { .. }
        );
        let marks = matches!(request, Request::Marked);
        let answer = desk.answer(&session.ledger, request);
        if begins {
            self.watch.call();
        }
        if marks {
            self.tell_all();
        }
        let reply = match answer {
            Answer::Reply(reply) => reply,
            Answer::Nothing => return None,
            Answer::Later(later) => self.answer_later(session, later),
        };
        Some(match session.agreed.has(POLICIES) {
            true => reply,
            false => answer::without_policies(reply),
        })
    }

    /// Does the waiting that a request asks for.
    fn answer_later(&self, session: &Session, later: Later) -> Reply {
        let catalog = self.store.catalog();
        match later {
            Later::Settled(puts) => {
                let outcome = |put: Awaited| {
                    let reservation = put.reservation;
                    (
                        put,
                        reservation.map_or_else(Vec::new, |id| catalog.wait(id)),
                    )
                };
                let outcomes = puts.into_iter().map(outcome).collect();
                answer::settled(&session.ledger, outcomes)
            }
            Later::Room { seen, patience } => {
                catalog.wait_for_room(seen, Instant::now() + patience);
                Reply::Room {
                    room: catalog.room(),
                }
            }
            Later::Delete(namespace, keys) => answer::count(catalog.delete(namespace, &keys)),
            Later::Clear(namespace) => answer::count(catalog.clear_namespace(namespace)),
            Later::Flush => answer::done(catalog.flush()),
            Later::Report => Reply::Stats(Box::new(self.report())),
        }
    }
}
