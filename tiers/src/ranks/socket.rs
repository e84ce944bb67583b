//! Ranks that are processes of one machine. Rank 0 hosts the group: a thread for each of the others takes that rank's place in
//! it, so that both kinds of group break in the same ways.
//!
//! ```text
//!   rank 1 --- socket --- thread 1 --+
//!   rank 2 --- socket --- thread 2 --+-- group -- rank 0
//!   ...                              |
//! ```
//!
//! The socket's file is there only while the group gathers. It is protected by the directory it lies in, and no more.
//!
//! Faults defended against: ranks that start in any order; a rank that comes twice, or counts other than the host does; a process
//! that ends (its connection does too), in a call or outside; a host that is stopped, which the others notice after twice the
//! timeout: before, it might still say who is missing.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io::{self, BufRead, BufReader, ErrorKind};
use std::net::Shutdown;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::group::{Group, Round};
use super::threads::ThreadRank;
use super::wire::{Answer, MAGIC, Said, VERSION, receive, send};
use super::{Ranks, RanksError, Reduce, TIMEOUT_MAX, VALUES_MAX, rank_exists};

/// How often something that cannot be waited for is looked at while a group gathers.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// How long is waited for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// For all ranks to join: as long as the slowest of them takes to start.
    pub gather: Duration,
    /// For all ranks to come to a call, from the first one on.
    pub call: Duration,
}

/// One process's end of a group.
pub struct SocketRank(End);

enum End {
    Host(Host),
    Guest(Guest),
}

/// Rank 0.
struct Host {
    /// Goes first, so that nobody is left waiting for it.
    own: Option<ThreadRank>,
    /// One a guest.
    threads: Vec<(UnixStream, JoinHandle<()>)>,
}

/// Every other rank.
struct Guest {
    rank: u32,
    size: u32,
    /// For the answer to a call.
    patience: Duration,
    stream: UnixStream,
    broken: Option<RanksError>,
}

impl SocketRank {
    /// Rank 0 of `size`: opens a socket at `path` and waits for the others.
    ///
    /// # Errors
    /// No socket can be made there, or not all came in time.
    pub fn host(
        path: impl AsRef<Path>,
        size: u32,
        timeouts: Timeouts,
    ) -> Result<SocketRank, RanksError> {
        rank_exists(0, size)?;
        let Timeouts { gather, call } = timeouts.capped();
        let socket = Socket::bind(path.as_ref())?;
        let guests = socket.gather(size, gather)?;
        let group = Arc::new(Group::new(size, call));
        let mut host = Host {
            own: Some(ThreadRank::new(0, group.clone())),
            threads: Vec::new(),
        };
        for (rank, stream) in guests {
            host.serve(rank, &group, stream)
                .map_err(|error| socket.error("serving", &error))?;
        }
        Ok(SocketRank(End::Host(host)))
    }

    /// Any other rank: joins the group whose host opens the socket at `path`, and waits until it is complete.
    ///
    /// # Errors
    /// There is no host in time, it turned this rank away, or not all came.
    pub fn join(
        path: impl AsRef<Path>,
        rank: u32,
        size: u32,
        timeouts: Timeouts,
    ) -> Result<SocketRank, RanksError> {
        rank_exists(rank, size)?;
        let Timeouts { gather, call } = timeouts.capped();
        let until = Instant::now() + gather;
        let stream = connect(path.as_ref(), until)?;
        let mut guest = Guest {
            rank,
            size,
            // The host answers within one, be it to say who is missing.
            patience: call.saturating_mul(2),
            stream,
            broken: None,
        };
        let join = Said::Join {
            magic: MAGIC,
            version: VERSION,
            rank,
            size,
        };
        guest.exchange(&join, gather.saturating_mul(2))?;
        Ok(SocketRank(End::Guest(guest)))
    }
}

impl Timeouts {
    fn capped(self) -> Timeouts {
        Timeouts {
            gather: self.gather.min(TIMEOUT_MAX),
            call: self.call.min(TIMEOUT_MAX),
        }
    }
}

impl Ranks for SocketRank {
    fn rank(&self) -> u32 {
        match &self.0 {
            End::Host(_) => 0,
            End::Guest(guest) => guest.rank,
        }
    }

    fn size(&self) -> u32 {
        match &self.0 {
            End::Host(host) => host.own.as_ref().map_or(1, Ranks::size),
            End::Guest(guest) => guest.size,
        }
    }

    fn all_reduce(&mut self, reduce: Reduce, values: &mut [u64]) -> Result<(), RanksError> {
        match &mut self.0 {
            End::Host(host) => match &mut host.own {
                Some(own) => own.all_reduce(reduce, values),
                None => Err(RanksError::Gone { rank: 0 }),
            },
            End::Guest(guest) => guest.all_reduce(reduce, values),
        }
    }
}

impl Host {
    fn serve(&mut self, rank: u32, group: &Arc<Group>, stream: UnixStream) -> io::Result<()> {
        let end = stream.try_clone()?;
        let place = Place::new(rank, group.clone(), &stream)?;
        let thread = std::thread::Builder::new()
            .name(format!("larder-rank-{rank}"))
            .spawn(move || place.serve(stream))?;
        self.threads.push((end, thread));
        Ok(())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.own = None;
        for (stream, thread) in self.threads.drain(..) {
            // The thread reads no more; what it still answers goes out.
            let _ = stream.shutdown(Shutdown::Read);
            let _ = thread.join();
        }
    }
}

impl Guest {
    fn all_reduce(&mut self, reduce: Reduce, values: &mut [u64]) -> Result<(), RanksError> {
        if let Some(error) = &self.broken {
            return Err(error.clone());
        }
        if values.len() > VALUES_MAX {
            // The host would not read so much: told here, the others learn of it when this rank goes.
            return Err(self.broken_by(RanksError::TooLong {
                rank: self.rank,
                values: values.len(),
            }));
        }
        let call = Said::Call {
            reduce,
            values: values.to_vec(),
        };
        let reduced = self.exchange(&call, self.patience)?;
        if reduced.len() != values.len() {
            let what = format!("{} values for {}", reduced.len(), values.len());
            return Err(self.broken_by(RanksError::Garbled { rank: 0, what }));
        }
        values.copy_from_slice(&reduced);
        Ok(())
    }

    fn exchange(&mut self, said: &Said, patience: Duration) -> Answer {
        let answer = self.ask(said, patience);
        answer.map_err(|error| self.broken_by(error))
    }

    fn ask(&self, said: &Said, patience: Duration) -> Answer {
        let until = Instant::now() + patience;
        let sent = send(&self.stream, said);
        // Even where nothing could be sent: a host that has hung up left word why.
        let answer: io::Result<Answer> = receive(Until(&self.stream, until));
        answer
            .or_else(|error| sent.and(Err(error)))
            .unwrap_or_else(|error| {
                Err(match error.kind() {
                    ErrorKind::TimedOut | ErrorKind::WouldBlock => RanksError::Stalled {
                        ranks: vec![0],
                        timeout: patience,
                    },
                    _ => connection_error(0, &error),
                })
            })
    }

    /// The others are told by the end of the connection.
    fn broken_by(&mut self, error: RanksError) -> RanksError {
        let _ = self.stream.shutdown(Shutdown::Both);
        self.broken.get_or_insert(error).clone()
    }
}

/// A guest's place in the group.
struct Place {
    rank: u32,
    group: Arc<Group>,
    answers: Arc<Mutex<Answers>>,
}

/// The way back to a guest, for whoever ends a round.
struct Answers {
    stream: UnixStream,
    /// Whether the guest is in a round of which it has not been told.
    owed: bool,
}

impl Answers {
    /// What goes wrong here shows in reading.
    fn send(&mut self, answer: &Answer) {
        let _ = send(&self.stream, answer);
        self.owed = false;
    }
}

impl Place {
    fn new(rank: u32, group: Arc<Group>, stream: &UnixStream) -> io::Result<Place> {
        Ok(Place {
            rank,
            group,
            answers: Arc::new(Mutex::new(Answers {
                stream: stream.try_clone()?,
                owed: false,
            })),
        })
    }

    /// Takes part for the guest until it goes. Reads on while the guest waits, so as to see it go.
    fn serve(&self, stream: UnixStream) {
        let mut reader = BufReader::new(stream);
        self.answers.lock().send(&Ok(Vec::new()));
        let error = loop {
            match receive(&mut reader) {
                Ok(Said::Call { reduce, values }) => {
                    let round = self.come(reduce, &values);
                    if let Err(error) = self.await_next(&mut reader, round) {
                        break connection_error(self.rank, &error);
                    }
                }
                Ok(Said::Join { .. }) => {
                    break RanksError::Garbled {
                        rank: self.rank,
                        what: "a second greeting".to_owned(),
                    };
                }
                Err(error) => break connection_error(self.rank, &error),
            }
        };
        let error = self.group.break_up(error);
        let mut answers = self.answers.lock();
        if !answers.owed {
            // Last words, for a guest that is still there. One in a round is told what came of that, perhaps by somebody who
            // is just about to.
            answers.send(&Err(error));
        }
    }

    fn come(&self, reduce: Reduce, values: &[u64]) -> Round {
        let answers = self.answers.clone();
        answers.lock().owed = true;
        let reply = Box::new(move |answer| answers.lock().send(&answer));
        self.group.come(self.rank, reduce, values, reply)
    }

    /// Waits for the first byte of the guest's next call, or its end; has the round expire when its time is up.
    fn await_next(&self, reader: &mut BufReader<UnixStream>, round: Round) -> io::Result<()> {
        let timeout = self.group.timeout().max(Duration::from_millis(1));
        reader.get_ref().set_read_timeout(Some(timeout))?;
        let came = reader.fill_buf().map(drop);
        reader.get_ref().set_read_timeout(None)?;
        match came {
            Err(error) if is_late(&error) => {
                self.group.expire(round);
                Ok(())
            }
            other => other,
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.group.break_up(RanksError::Gone { rank: self.rank });
    }
}

/// Whether a read ended because its time was up.
fn is_late(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::TimedOut | ErrorKind::WouldBlock)
}

fn connection_error(rank: u32, error: &io::Error) -> RanksError {
    match error.kind() {
        ErrorKind::InvalidData => RanksError::Garbled {
            rank,
            what: error.to_string(),
        },
        _ => RanksError::Gone { rank },
    }
}

/// A listening socket whose file goes when it does.
struct Socket {
    listener: UnixListener,
    path: PathBuf,
}

impl Drop for Socket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

impl Socket {
    fn bind(path: &Path) -> Result<Socket, RanksError> {
        let bound = UnixListener::bind(path).or_else(|error| {
            // A host that was killed while its group gathered leaves the file; nobody answers there.
            let nobody = UnixStream::connect(path)
                .is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused);
            if error.kind() != ErrorKind::AddrInUse || !nobody {
                return Err(error);
            }
            std::fs::remove_file(path)?;
            UnixListener::bind(path)
        });
        let bound = bound.and_then(|listener| {
            listener.set_nonblocking(true)?;
            Ok(listener)
        });
        Ok(Socket {
            listener: bound.map_err(|error| socket_error("listening at", path, &error))?,
            path: path.to_owned(),
        })
    }

    /// Waits until all guests are there.
    fn gather(
        &self,
        size: u32,
        timeout: Duration,
    ) -> Result<BTreeMap<u32, UnixStream>, RanksError> {
        let until = Instant::now() + timeout;
        let mut guests = BTreeMap::new();
        while guests.len() + 1 < size as usize {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    // One that is turned away learns why; the place is still free for another.
                    let _ = admit(stream, size, until, &mut guests);
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    if Instant::now() >= until {
                        let missing = |rank: &u32| !guests.contains_key(rank);
                        return Err(RanksError::Stalled {
                            ranks: (1..size).filter(missing).collect(),
                            timeout,
                        });
                    }
                    std::thread::sleep(LOOK_AGAIN);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(self.error("accepting at", &error)),
            }
        }
        Ok(guests)
    }

    fn error(&self, what: &str, error: &io::Error) -> RanksError {
        socket_error(what, &self.path, error)
    }
}

/// Hears who it is, and keeps the stream or says why not.
fn admit(
    stream: UnixStream,
    size: u32,
    until: Instant,
    guests: &mut BTreeMap<u32, UnixStream>,
) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    let Said::Join {
        magic,
        version,
        rank,
        size: its_size,
    } = receive(Until(&stream, until))?
    else {
        return Ok(());
    };
    let why = if (magic, version) != (MAGIC, VERSION) {
        format!("it speaks version {version}, rank 0 speaks {VERSION}")
    } else if its_size != size {
        format!("it counts {its_size} ranks, rank 0 counts {size}")
    } else if rank == 0 || rank >= size {
        format!("rank 0 waits for ranks 1 to {}", size - 1)
    } else if let Entry::Vacant(place) = guests.entry(rank) {
        stream.set_read_timeout(None)?;
        place.insert(stream);
        return Ok(());
    } else {
        "there is one already".to_owned()
    };
    let away: Answer = Err(RanksError::TurnedAway { rank, why });
    send(&stream, &away)
}

/// Finds the host, which may not be there yet.
fn connect(path: &Path, until: Instant) -> Result<UnixStream, RanksError> {
    loop {
        match UnixStream::connect(path) {
            Ok(stream) => return Ok(stream),
            Err(error) => {
                let early = matches!(
                    error.kind(),
                    ErrorKind::NotFound | ErrorKind::ConnectionRefused | ErrorKind::WouldBlock
                );
                if !early || Instant::now() >= until {
                    return Err(socket_error("connecting to", path, &error));
                }
            }
        }
        std::thread::sleep(LOOK_AGAIN);
    }
}

fn socket_error(what: &str, path: &Path, error: &io::Error) -> RanksError {
    RanksError::Socket {
        what: what.to_owned(),
        path: path.display().to_string(),
        why: error.to_string(),
    }
}

/// Reads that end at a moment, however little comes each time.
struct Until<'a>(&'a UnixStream, Instant);

impl io::Read for Until<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let left = self.1.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        self.0.set_read_timeout(Some(left))?;
        io::Read::read(&mut self.0, into)
    }
}
