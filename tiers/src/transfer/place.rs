//! The bootstrap place: where the ranks of a prefill engine register, and receivers ask for them.
//!
//! Each rank registers again and again, so a place that starts anew knows them soon. A rank that
//! registers with another number of ranks is of an engine that has started anew: the others are
//! forgotten. A place trusts each network peer that reaches it.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use larder_sync::descriptors;

use super::link::{Link, Waker, wait};
use super::part::Entry;
use super::wire::Message;
use super::{TransferError, spawn};

/// A connection without a message is closed after this time.
const IDLE: Duration = Duration::from_secs(10);

/// The most connections at a time.
const LINKS_MAX: usize = 1024;

/// See the module documentation. A drop ends it.
pub struct BootstrapPlace {
    address: SocketAddr,
    ends: Arc<Ends>,
}

/// How a thread with a listener is ended.
pub(super) struct Ends {
    is_ending: AtomicBool,
    pub(super) waker: Waker,
}

impl Ends {
    /// # Errors
    /// There is no descriptor.
    pub(super) fn new() -> Result<Arc<Ends>, TransferError> {
        Ok(Arc::new(Ends {
            is_ending: AtomicBool::new(false),
            waker: Waker::new()?,
        }))
    }

    pub(super) fn end(&self) {
        self.is_ending.store(true, Ordering::Release);
        self.waker.wake();
    }

    pub(super) fn is_ending(&self) -> bool {
        self.is_ending.load(Ordering::Acquire)
    }
}

/// A listener that does not block, and its address.
///
/// # Errors
/// The address is not free, or not of this machine.
pub(super) fn listen(at: SocketAddr) -> Result<(TcpListener, SocketAddr), TransferError> {
    let bound = descriptors::cover().and_then(|()| {
        let listener = TcpListener::bind(at)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        Ok((listener, address))
    });
    bound.map_err(|error| TransferError::system(&format!("listening at {at}"), &error))
}

impl BootstrapPlace {
    /// A place at this address. Port 0: any free one.
    ///
    /// # Errors
    /// The address is not free, or there is no thread.
    pub fn start(at: SocketAddr) -> Result<BootstrapPlace, TransferError> {
        let (listener, address) = listen(at)?;
        let ends = Ends::new()?;
        let own = ends.clone();
        spawn("larder-place", move || serve(&listener, &own))?;
        Ok(BootstrapPlace { address, ends })
    }

    /// Its address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl Drop for BootstrapPlace {
    fn drop(&mut self) {
        self.ends.end();
    }
}

fn serve(listener: &TcpListener, ends: &Ends) {
    let mut entries = BTreeMap::new();
    let mut links: Vec<(Link, Instant)> = Vec::new();
    while !ends.is_ending() {
        let new = Link::accept(listener).into_iter();
        links.extend(new.map(|link| (link, Instant::now() + IDLE)));
        links.truncate(LINKS_MAX);
        links.retain_mut(|(link, until)| answer(link, &mut entries) && Instant::now() < *until);
        let until = Instant::now() + IDLE;
        let open = links.iter().map(|(link, _)| link);
        wait(&ends.waker, Some(listener.as_fd()), open, until);
    }
}

/// Answers the messages of a link. Returns whether it goes on.
fn answer(link: &mut Link, entries: &mut BTreeMap<u32, Entry>) -> bool {
    link.turn();
    loop {
        let answer = match link.next() {
            Ok(None) => return true,
            Err(_) => return false,
            Ok(Some(frame)) => match frame.message {
                Message::Ask => Message::Known(entries.values().cloned().collect()),
                Message::Register(entry) if entry.rank < entry.ranks => {
                    entries.retain(|_, other| other.ranks == entry.ranks);
                    entries.insert(entry.rank, entry);
                    Message::Registered
                }
                _ => return false,
            },
        };
        link.queue(&answer);
        link.flush();
    }
}
