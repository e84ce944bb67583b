//! Ranks that are processes of one machine. Rank 0 hosts the group. In rank 0, one thread per other
//! rank represents that rank in the group, so groups of threads and of processes break in the same
//! ways.
//!
//! ```text
//!   rank 1 --- socket --- thread 1 --+
//!   rank 2 --- socket --- thread 2 --+-- group -- rank 0
//!   ...                              |
//! ```
//!
//! The file of the socket exists only while the group gathers. Its only protection is the directory
//! that contains it.
//!
//! Faults covered: ranks that start in any order; a rank that joins twice, or expects another group
//! size; a process that ends, during a call or outside (its connection ends too); a stopped host,
//! which the other ranks detect after twice the timeout, because before that the host may still
//! report the missing ranks.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io::{self, BufRead, BufReader, ErrorKind};
use std::net::Shutdown;
use std::os::unix::fs::FileTypeExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use larder_sync::{Mutex, descriptors};

use super::group::{Group, Round};
use super::threads::ThreadRank;
use super::wire::{Answer, MAGIC, Message, VERSION, receive, send};
use super::{Ranks, RanksError, Reduce, TIMEOUT_MAX, VALUES_MAX, rank_exists};

/// Poll interval while a group gathers.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// The timeouts of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// For all ranks to join: at least the start time of the slowest rank.
    pub gather: Duration,
    /// For all ranks to join a call, counted from the first.
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
    /// Dropped first, so that no rank waits for it.
    own: Option<ThreadRank>,
    /// One thread per guest.
    threads: Vec<(UnixStream, JoinHandle<()>)>,
}

/// A rank other than 0.
struct Guest {
    rank: u32,
    size: u32,
    /// Maximum wait for the answer to a call.
    patience: Duration,
    stream: UnixStream,
    broken: Option<RanksError>,
}

impl SocketRank {
    /// Rank 0 of `size`: opens a socket at `path` and waits for the others.
    ///
    /// # Errors
    /// The socket cannot be created, or not all ranks joined in time.
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

    /// Any other rank: joins the group whose host listens at `path`, and waits until the group is
    /// complete.
    ///
    /// # Errors
    /// No host was found in time, the host refused this rank, or not all ranks joined.
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
            // The host answers within one timeout, if only with the missing ranks.
            patience: call.saturating_mul(2),
            stream,
            broken: None,
        };
        let join = Message::Join {
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
            // The thread reads no more, but can still send its answers.
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
            // The host would refuse a message of this size. The error is returned here; the others
            // notice when this rank ends.
            return Err(self.broken_by(RanksError::TooLong {
                rank: self.rank,
                values: values.len(),
            }));
        }
        let call = Message::Call {
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

    fn exchange(&mut self, message: &Message, patience: Duration) -> Answer {
        let answer = self.request(message, patience);
        answer.map_err(|error| self.broken_by(error))
    }

    fn request(&self, message: &Message, patience: Duration) -> Answer {
        let until = Instant::now() + patience;
        let sent = send(&self.stream, message);
        // Even if the send failed: a host that closed the connection may have sent the reason
        // before.
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

    /// The end of the connection notifies the others.
    fn broken_by(&mut self, error: RanksError) -> RanksError {
        let _ = self.stream.shutdown(Shutdown::Both);
        self.broken.get_or_insert(error).clone()
    }
}

/// The representative of a guest in the group.
struct Place {
    rank: u32,
    group: Arc<Group>,
    answers: Arc<Mutex<Answers>>,
}

/// The connection back to a guest, used by the thread that ends a round.
struct Answers {
    stream: UnixStream,
    /// Whether the guest is in a round and has not received its result.
    owed: bool,
}

impl Answers {
    /// Errors are ignored here; they also appear in the reads.
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

    /// Represents the guest until it ends. Continues to read while the guest waits, to detect its
    /// end.
    fn serve(&self, stream: UnixStream) {
        let mut reader = BufReader::new(stream);
        self.answers.lock().send(&Ok(Vec::new()));
        let error = loop {
            match receive(&mut reader) {
                Ok(Message::Call { reduce, values }) => {
                    let round = self.come(reduce, &values);
                    if let Err(error) = self.await_next(&mut reader, round) {
                        break connection_error(self.rank, &error);
                    }
                }
                Ok(Message::Join { .. }) => {
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
            // Sends the reason if the guest is still connected. A guest in a round gets the result
            // of the round, possibly from another thread that is about to send it.
            answers.send(&Err(error));
        }
    }

    fn come(&self, reduce: Reduce, values: &[u64]) -> Round {
        let answers = self.answers.clone();
        answers.lock().owed = true;
        let reply = Box::new(move |answer| answers.lock().send(&answer));
        self.group.come(self.rank, reduce, values, reply)
    }

    /// Waits for the first byte of the guest's next call, or for its end. Expires the round after
    /// the timeout.
    fn await_next(&self, reader: &mut BufReader<UnixStream>, round: Round) -> io::Result<()> {
        let timeout = self.group.timeout().max(Duration::from_millis(1));
        let until = Instant::now() + timeout;
        let mut left = timeout;
        let came = loop {
            reader.get_ref().set_read_timeout(Some(left))?;
            match reader.fill_buf().map(drop) {
                // A read with a timeout is not restarted after a stop of the process.
                Err(error) if error.kind() == ErrorKind::Interrupted => {
                    left = until.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        break Err(ErrorKind::TimedOut.into());
                    }
                }
                came => break came,
            }
        };
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

/// Whether a read ended by a timeout.
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

/// A listening socket that removes its file when dropped.
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
        let bound = descriptors::cover().and_then(|()| UnixListener::bind(path));
        let bound = bound.or_else(|error| {
            // A host that was killed while its group gathered leaves the file behind, and
            // connections to it are refused. Connections to a regular file are refused, too.
            let is_socket = |path| {
                let found = std::fs::symlink_metadata(path);
                found.is_ok_and(|found| found.file_type().is_socket())
            };
            let is_refused = |path| {
                let tried = UnixStream::connect(path);
                tried.is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
            };
            if error.kind() != ErrorKind::AddrInUse || !is_socket(path) || !is_refused(path) {
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

    /// Waits until all guests have joined.
    fn gather(
        &self,
        size: u32,
        timeout: Duration,
    ) -> Result<BTreeMap<u32, UnixStream>, RanksError> {
        let until = Instant::now() + timeout;
        let mut guests = BTreeMap::new();
        while guests.len() + 1 < size as usize {
            match descriptors::cover().and_then(|()| self.listener.accept()) {
                Ok((stream, _)) => {
                    // A refused rank receives the reason. Its place stays free for another.
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

/// Reads the join request of a guest. Keeps the stream, or refuses with the reason.
fn admit(
    stream: UnixStream,
    size: u32,
    until: Instant,
    guests: &mut BTreeMap<u32, UnixStream>,
) -> io::Result<()> {
    stream.set_nonblocking(false)?;
    let Message::Join {
        magic,
        version,
        rank,
        size: its_size,
    } = receive(Until(&stream, until))?
    else {
        return Ok(());
    };
    let why = if (magic, version) != (MAGIC, VERSION) {
        format!("its protocol version is {version}, that of rank 0 is {VERSION}")
    } else if its_size != size {
        format!("it expects {its_size} ranks, rank 0 expects {size}")
    } else if rank == 0 || rank >= size {
        format!("rank 0 waits for ranks 1 to {}", size - 1)
    } else if let Entry::Vacant(place) = guests.entry(rank) {
        stream.set_read_timeout(None)?;
        place.insert(stream);
        return Ok(());
    } else {
        "this rank has already joined".to_owned()
    };
    let away: Answer = Err(RanksError::TurnedAway { rank, why });
    send(&stream, &away)
}

/// Connects to the host, which may not have started yet.
fn connect(path: &Path, until: Instant) -> Result<UnixStream, RanksError> {
    loop {
        match descriptors::cover().and_then(|()| UnixStream::connect(path)) {
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

/// A reader with an absolute deadline, independent of the size of each read.
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
