//! A process that connects to the owner and breaks the rules of the protocol: it asks for room
//! before its marks are known, names puts that are not its own, returns pins twice, and reports
//! findings on pages that it has not pinned. Nothing of that may have an effect.

use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::time::Duration;

use larder_core::grants::Finding;
use larder_core::index::ReadAs;
use larder_sim_runtime::sockets::{UnixStream, connect, poll};
use larder_sim_runtime::{note, thread};
use larder_store::protocol::Protocol;
use larder_store::share::keys::blob;
use larder_store::share::wire::{
    Failure, LandedPut, Link, MAGIC, PlaceGrant, Reply, Request, WireError, parse, parse_greeting,
    receive, send,
};

use super::process::Shared;
use crate::classes::Class;

/// Longest wait for an answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// Numbers of puts that are tried are below this, in their epoch.
const NUMBERS: u64 = 64;

/// Rounds of these numbers, and the pause before each.
const ROUNDS: u64 = 6;
const PAUSE: Duration = Duration::from_millis(2);

struct Line {
    stream: UnixStream,
    buffer: Vec<u8>,
}

impl Line {
    fn open(shared: &Shared) -> io::Result<Line> {
        let mut path = shared.borrow().plan.path().as_os_str().as_bytes().to_vec();
        path.extend(b".sock");
        let path = PathBuf::from(std::ffi::OsStr::from_bytes(&path));
        Ok(Line {
            stream: connect(&path, PATIENCE)?,
            buffer: Vec::new(),
        })
    }

    fn tell(&mut self, request: &Request<'_>) -> Result<(), WireError> {
        send(&mut &self.stream, &mut self.buffer, request)
    }

    fn hear(&mut self) -> Result<&[u8], WireError> {
        self.buffer.clear();
        let has_come = poll(&self.stream, Some(PATIENCE))?;
        if !has_come || !receive(&mut &self.stream, &mut self.buffer)? {
            return Err(io::Error::from(io::ErrorKind::UnexpectedEof).into());
        }
        Ok(&self.buffer)
    }

    fn ask(&mut self, request: &Request<'_>) -> Result<Reply, WireError> {
        self.tell(request)?;
        parse(self.hear()?)
    }
}

/// Connects, and breaks rules until a connection ends.
///
/// # Panics
/// If something of it has an effect.
pub fn misbehave(shared: &Shared) {
    let outcome = try_to(shared);
    note(|| format!("a stray process ends: {outcome:?}"));
}

fn try_to(shared: &Shared) -> Result<(), WireError> {
    let mut first = Line::open(shared)?;
    first.tell(&Request::Hello {
        magic: MAGIC,
        protocol: Protocol::default(),
    })?;
    let Reply::Welcome(welcome) = parse_greeting(first.hear()?)? else {
        return Ok(());
    };
    let mut line = Line::open(shared)?;
    line.ask(&Request::Join {
        magic: MAGIC,
        client: welcome.client,
        secret: welcome.secret,
    })?;
    let (record, keys) = {
        let state = &mut *shared.borrow_mut();
        let namespace = state.dice.below(state.plan.namespaces.len());
        let names = state.plan.names().into_iter();
        let keys = names.filter(|name| name.namespace == namespace);
        let keys: Vec<_> = keys.map(|name| state.plan.key(name)).collect();
        (state.plan.namespaces[namespace].encode().to_vec(), keys)
    };
    let Reply::Namespace(namespace, ..) = line.ask(&Request::Namespace { record: &record })? else {
        return Ok(());
    };
    reserve_unmarked(shared, &mut line, namespace, blob(&keys[..1]))?;
    name_others(shared, &mut line, welcome.run)?;
    give_back_twice(shared, &mut line, namespace, blob(&keys))?;
    let former = u64::from(welcome.run.wrapping_sub(1)) << 32;
    let reply = line.ask(&Request::Wait {
        reservations: vec![former],
    })?;
    assert!(
        matches!(reply, Reply::Failed(Failure::Protocol(_))),
        "a put of a former owner is waited for: {reply:?}"
    );
    Ok(())
}

/// Asks for room without marks.
fn reserve_unmarked(
    shared: &Shared,
    line: &mut Line,
    namespace: u16,
    key: &[u8],
) -> Result<(), WireError> {
    shared.borrow_mut().tally.count(Class::HastyPut);
    let reply = line.ask(&Request::Reserve {
        namespace,
        keys: key,
        links: vec![Link::default()],
    })?;
    let Reply::Reserved { grants, .. } = reply else {
        panic!("a request for room is answered by {reply:?}");
    };
    let is_refused = |grant: &PlaceGrant| matches!(grant, PlaceGrant::Refused(_));
    assert!(
        grants.iter().all(is_refused),
        "a client without marks is granted extents"
    );
    Ok(())
}

/// Names puts of other clients, of the core, and of a former owner.
fn name_others(shared: &Shared, line: &mut Line, run: u32) -> Result<(), WireError> {
    for low in (0..ROUNDS).flat_map(|_| 0..NUMBERS) {
        let (epoch, is_commit) = {
            let dice = &mut shared.borrow_mut().dice;
            (dice.pick(&[0, run.wrapping_sub(1)]), dice.chance(0.5))
        };
        if low == 0 {
            thread::sleep(PAUSE);
        }
        shared.borrow_mut().tally.count(Class::AstrayMessage);
        let reservation = u64::from(epoch) << 32 | low;
        line.tell(&if is_commit {
            Request::Commit {
                reservation,
                proofs: vec![None; 4],
            }
        } else {
            Request::Landed {
                puts: vec![LandedPut {
                    reservation,
                    pages: (0..4).map(|at| (at, true)).collect(),
                }],
            }
        })?;
    }
    Ok(())
}

/// Returns pins twice, and then reports the pages as damaged.
fn give_back_twice(
    shared: &Shared,
    line: &mut Line,
    namespace: u16,
    keys: &[u8],
) -> Result<(), WireError> {
    let pin = Request::Pin {
        namespace,
        keys,
        read_as: ReadAs::Use,
    };
    let Reply::Pinned(pages) = line.ask(&pin)? else {
        return Ok(());
    };
    let places: Vec<_> = pages.iter().flatten().map(|page| page.place).collect();
    for _ in 0..2 {
        line.tell(&Request::Unpin {
            segments: places.iter().map(|place| place.segment).collect(),
        })?;
    }
    let is_there = pages.iter().map(Option::is_some);
    let keys = keys.chunks_exact(32).zip(is_there);
    let keys: Vec<u8> = keys
        .filter(|(_, is_there)| *is_there)
        .flat_map(|(key, _)| key.to_vec())
        .collect();
    shared.borrow_mut().tally.count(Class::LateFinding);
    line.tell(&Request::Verified {
        namespace,
        keys: &keys,
        findings: places
            .into_iter()
            .map(|place| (place, Finding::Mismatch))
            .collect(),
    })
}
