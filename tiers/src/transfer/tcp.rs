//! The transport over TCP, for tests and small loads. Rows on a device go through host memory.
//!
//! Rows are copied through buffers of the connection and written by the thread of the transfer
//! alone, which owns the sequence meanwhile. So a fence is the return of the sequence.
//!
//! A listener takes the first message of each receiver, and gives the connection to the sender of
//! its room. Receivers that come before their sender wait for it.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_sync::Mutex;

use super::link::{Link, wait};
use super::part::{Entry, Identity};
use super::place::{Ends, listen};
use super::receive::Receiver;
use super::rows::{Wanted, check_pools, digest};
use super::send::Sender;
use super::slot::{Handle, Slot};
use super::wire::{Hello, Message};
use super::{NotBegun, Patience, Room, Sending, Transfer, TransferError, Transport, spawn};
use crate::model::Model;
use crate::prefix::Sequence;

/// The pause before a rank tries again to register.
const REGISTER_AGAIN: Duration = Duration::from_millis(100);

/// The time between two registrations.
const REGISTER_EVERY: Duration = Duration::from_secs(5);

/// The most connections whose senders have not begun.
const WAITING_MAX: usize = 4096;

/// Options of a transport over TCP.
#[non_exhaustive]
#[derive(Clone, Debug)]
pub struct TcpOptions {
    /// How long it waits for the other side.
    pub patience: Patience,
    /// Where a prefill rank listens. Default: any port of this machine's loopback.
    pub listen: SocketAddr,
    /// The address by which receivers reach it, if that is another one. Default: `listen`.
    pub advertised: Option<SocketAddr>,
    /// The bootstrap place of a prefill rank. Default (`None`): it only receives.
    pub place: Option<SocketAddr>,
}

impl Default for TcpOptions {
    fn default() -> TcpOptions {
        TcpOptions {
            patience: Patience::default(),
            listen: (Ipv4Addr::LOCALHOST, 0).into(),
            advertised: None,
            place: None,
        }
    }
}

impl TcpOptions {
    /// These options, changed by `change`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> TcpOptions {
        change(&mut self);
        self
    }
}

/// See the module documentation. Transfers that run go on after its drop, but no receiver comes any
/// more.
pub struct TcpTransport {
    own: Identity,
    patience: Patience,
    /// Of a prefill rank.
    listener: Option<Arc<Listening>>,
}

/// What a transport and its listener share.
struct Listening {
    ends: Arc<Ends>,
    address: SocketAddr,
    rooms: Mutex<HashMap<Room, Arc<Slot>>>,
}

impl TcpTransport {
    /// The transport of a rank of an engine with so many ranks, which holds this part of the model.
    ///
    /// # Errors
    /// The model has components; there is no such rank; or the address cannot be used.
    pub fn new(
        model: &Model,
        rank: u32,
        ranks: u32,
        options: &TcpOptions,
    ) -> Result<TcpTransport, TransferError> {
        let own = Identity::new(model, rank, ranks)?;
        let listener = match options.place {
            None => None,
            Some(place) => {
                let (listener, address) = listen(options.listen)?;
                let listening = Arc::new(Listening {
                    ends: Ends::new()?,
                    address,
                    rooms: Mutex::default(),
                });
                let advertised = options.advertised.unwrap_or(address);
                let entry = Entry {
                    rank,
                    ranks,
                    address: advertised.to_string(),
                    held: own.held.clone(),
                };
                let patience = options.patience.bounded().bootstrap;
                let shared = listening.clone();
                spawn("larder-listen", move || {
                    Listener::new(listener, shared, place, entry, patience).serve();
                })?;
                Some(listening)
            }
        };
        Ok(TcpTransport {
            own,
            patience: options.patience.bounded(),
            listener,
        })
    }

    /// Where a prefill rank listens.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        self.listener.as_ref().map(|of| of.address)
    }

    fn begin(&self, room: Room, from: &str, sequence: Sequence) -> Result<Handle, Box<NotBegun>> {
        let prepared = || -> Result<_, TransferError> {
            let parsed = from.parse();
            let what = || format!("reading the address {from:?} of the bootstrap place");
            let place = parsed.map_err(|error| TransferError::system(&what(), &error))?;
            check_pools(&sequence, &self.own)?;
            let wanted = Wanted {
                tokens: sequence.cached().tokens()..sequence.len(),
                page_tokens: self.own.shape.page_tokens() as usize,
            };
            let slots = sequence.slots();
            let slots = slots.map_err(|error| TransferError::Sequence(error.to_string()))?;
            let pages = slots.pages().iter().skip(wanted.first_page());
            let pages: Vec<u32> = pages.take(wanted.pages()).copied().collect();
            let prompt = digest(&sequence, sequence.len())?;
            Ok((place, wanted, pages, prompt, Slot::new()?))
        };
        let (place, wanted, pages, prompt, slot) = match prepared() {
            Ok(prepared) => prepared,
            Err(error) => return Err(Box::new(NotBegun { error, sequence })),
        };
        // A thread that cannot be started gives the sequence back.
        let cell = Arc::new(Mutex::new(Some(Receiver {
            slot: slot.clone(),
            own: self.own.clone(),
            room,
            place,
            patience: self.patience,
            wanted,
            pages,
            prompt,
            sequence,
        })));
        let moved = cell.clone();
        let started = spawn("larder-receive", move || {
            if let Some(receiver) = moved.lock().take() {
                receiver.run();
            }
        });
        match (started, cell) {
            (Ok(()), _) => Ok(Handle(slot)),
            (Err(error), cell) => match cell.lock().take() {
                Some(Receiver { sequence, .. }) => Err(Box::new(NotBegun { error, sequence })),
                None => Ok(Handle(slot)),
            },
        }
    }
}

impl Transport for TcpTransport {
    fn sender(&self, room: Room) -> Result<Box<dyn Sending>, TransferError> {
        let Some(listening) = &self.listener else {
            let why = "it has no bootstrap place; set TcpOptions::place";
            return Err(TransferError::system("sending", &why));
        };
        let slot = Slot::new()?;
        {
            let mut rooms = listening.rooms.lock();
            if rooms.contains_key(&room) {
                return Err(TransferError::Taken(room.0));
            }
            rooms.insert(room, slot.clone());
        }
        let sender = Sender {
            slot: slot.clone(),
            own: self.own.clone(),
            room,
            patience: self.patience,
        };
        let rooms = listening.clone();
        let forget = move || drop(rooms.rooms.lock().remove(&room));
        let started = spawn("larder-send", move || sender.run(forget));
        if started.is_err() {
            listening.rooms.lock().remove(&room);
        }
        started?;
        listening.ends.waker.wake();
        Ok(Box::new(Handle(slot)))
    }

    fn receiver(
        &self,
        room: Room,
        from: &str,
        sequence: Sequence,
    ) -> Result<Box<dyn Transfer>, Box<NotBegun>> {
        let handle = self.begin(room, from, sequence)?;
        Ok(Box::new(handle))
    }
}

impl Drop for TcpTransport {
    fn drop(&mut self) {
        if let Some(listening) = &self.listener {
            listening.ends.end();
        }
    }
}

/// A receiver whose sender has not begun.
struct Waiting {
    link: Link,
    hello: Option<Hello>,
    until: Instant,
}

struct Listener {
    listener: TcpListener,
    shared: Arc<Listening>,
    waiting: Vec<Waiting>,
    patience: Duration,
    place: SocketAddr,
    entry: Entry,
    /// The connection to the place, while it registers.
    registering: Option<Link>,
    /// When it registers again.
    next: Instant,
}

impl Listener {
    fn new(
        listener: TcpListener,
        shared: Arc<Listening>,
        place: SocketAddr,
        entry: Entry,
        patience: Duration,
    ) -> Listener {
        Listener {
            listener,
            shared,
            waiting: Vec::new(),
            patience,
            place,
            entry,
            registering: None,
            next: Instant::now(),
        }
    }

    fn serve(mut self) {
        while !self.shared.ends.is_ending() {
            self.register();
            for link in Link::accept(&self.listener) {
                self.waiting.push(Waiting {
                    link,
                    hello: None,
                    until: Instant::now() + self.patience,
                });
            }
            self.waiting.truncate(WAITING_MAX);
            let waiting = std::mem::take(&mut self.waiting);
            self.waiting = waiting
                .into_iter()
                .filter_map(|of| self.route(of))
                .collect();
            let links = self.waiting.iter().map(|waiting| &waiting.link);
            let links = links.chain(&self.registering);
            let listener = Some(self.listener.as_fd());
            wait(&self.shared.ends.waker, listener, links, self.next);
        }
    }

    /// Gives a receiver to its sender. Returns it while it waits.
    fn route(&self, mut waiting: Waiting) -> Option<Waiting> {
        waiting.link.turn();
        if waiting.hello.is_none() {
            match waiting.link.next() {
                Ok(None) => {}
                Ok(Some(frame)) => match frame.message {
                    Message::Hello(hello) => waiting.hello = Some(hello),
                    _ => return None,
                },
                Err(_) => return None,
            }
        }
        let Waiting { link, hello, until } = waiting;
        let slot = hello.as_ref().and_then(|hello| {
            let rooms = self.shared.rooms.lock();
            rooms.get(&hello.room).cloned()
        });
        match (slot, hello) {
            (Some(slot), Some(hello)) => {
                slot.arrive(link, hello);
                None
            }
            (_, hello) => {
                let waits = !link.is_over() && Instant::now() < until;
                waits.then_some(Waiting { link, hello, until })
            }
        }
    }

    fn register(&mut self) {
        if let Some(link) = &mut self.registering {
            link.turn();
            let pause = match link.next() {
                Ok(None) => None,
                Ok(Some(frame)) if matches!(frame.message, Message::Registered) => {
                    Some(REGISTER_EVERY)
                }
                Ok(Some(_)) | Err(_) => Some(REGISTER_AGAIN),
            };
            if let Some(pause) = pause {
                self.registering = None;
                self.next = Instant::now() + pause;
            }
        }
        if Instant::now() < self.next {
            return;
        }
        // A connection that hangs is replaced.
        self.next = Instant::now() + REGISTER_EVERY;
        let link = Link::connect(self.place, "the bootstrap place".to_owned());
        self.registering = link.ok().map(|mut link| {
            link.queue(&Message::Register(self.entry.clone()));
            link.flush();
            link
        });
    }
}
