//! The messages between the owner and the clients of a shared store.
//!
//! The first byte of an input chooses its use. The other bytes are the input of an owner's
//! connection, or the input of a client's connection. Or they make well-formed requests of several
//! clients, in any order and with any numbers, while clients come, go and end. The owner is the
//! real one without its sockets and threads: its ledgers and answers over the core in memory.
//!
//! For every input: nothing panics, no memory use exceeds the input by much, the core keeps its
//! invariants, the resources of a client are released after its end, and a bystander keeps its own.

use std::cell::RefCell;
use std::num::NonZeroU16;

use larder_base::ids::ClientId;
use larder_core::grants::{Finding, ReservationId, SegmentMap};
use larder_core::index::{Place, ReadAs, SegmentId};
use larder_engine::PutStatus;
use larder_engine::format::PageKey;
use larder_store::catalog::Catalog;
use larder_store::protocol::Protocol;
use larder_store::share::answer::{Answer, Desk, Greeting, Later, count, done, greeting, settled};
use larder_store::share::keys::blob;
use larder_store::share::ledger::{Awaited, Ledger};
use larder_store::share::wire::{
    Failure, LandedPut, Link, MAGIC, PageProof, PinnedPage, PlaceGrant, Reply, Request, Welcome,
    WireError, parse, parse_greeting, receive, send,
};
use larder_store::volume::guard::Marks;

use crate::catalog::CoreCatalog;
use crate::feed::Feed;
use crate::machine::{Machine, NewPage};
use crate::sample::{SMALL_SEGMENT_BLOCKS, chain, fresh, namespaces, payload};

/// Segments of the owner's store.
const SEGMENTS: u32 = 8;

/// Epoch of the owner.
const RUN: u32 = 2;

/// Limit of one client's put bytes in flight.
const SHARE_BYTES: u64 = 64 << 10;

/// Clients at the same time.
const CLIENTS: usize = 3;

/// See the module.
///
/// # Panics
/// If a promise is broken.
pub fn messages(data: &[u8]) {
    let mut feed = Feed::new(data);
    match feed.below(3) {
        0 => owner_reads(feed.bytes(data.len())),
        1 => client_reads(feed.bytes(data.len())),
        _ => requests(&mut feed),
    }
}

fn map() -> SegmentMap {
    SegmentMap::new(&[SEGMENTS], SMALL_SEGMENT_BLOCKS)
}

/// Whether the client in question is marked.
struct Marked(bool);

impl Marks for Marked {
    fn are_on_all(&self, _: ClientId) -> bool {
        self.0
    }

    fn are_on_any(&self, _: ClientId) -> bool {
        self.0
    }
}

/// The owner's view of a client.
struct Client {
    ledger: Ledger,
    marked: bool,
    /// Puts whose statuses it waits for, wait by wait, with the statuses of finished ones.
    waiting: Vec<Vec<(Awaited, Option<Vec<PutStatus>>)>>,
    /// Numbers that it received, for later requests.
    puts: Vec<u64>,
    places: Vec<(PageKey, Place)>,
}

impl Client {
    fn new(id: u32) -> Client {
        Client {
            ledger: Ledger::new(ClientId(id), RUN),
            marked: true,
            waiting: Vec::new(),
            puts: Vec::new(),
            places: Vec::new(),
        }
    }
}

/// An owner, and a bystander that holds a pin and a put.
struct Owner {
    catalog: CoreCatalog,
    map: SegmentMap,
    bystander: Client,
    pinned: SegmentId,
    /// Puts of clients that are gone.
    left: RefCell<Vec<ReservationId>>,
}

/// The pages of the bystander: one is present, one is being put.
fn bystanders() -> Vec<PageKey> {
    chain(9, 2)
}

impl Owner {
    fn new() -> Owner {
        let image = fresh(&[SEGMENTS], SMALL_SEGMENT_BLOCKS);
        let (machine, _) = Machine::open(image).expect("a fresh store opens");
        let catalog = CoreCatalog::new(machine, map());
        let mut slots = Vec::new();
        for namespace in namespaces() {
            slots.push(
                catalog
                    .namespace(namespace)
                    .expect("space for a namespace")
                    .into(),
            );
        }
        let keys = bystanders();
        let page = NewPage {
            key: keys[0],
            parent: None,
            depth: 0,
            bytes: payload(&(0, keys[0]), 1),
        };
        let statuses = catalog.inner().machine.put(slots[0], &[page]);
        assert_eq!(statuses, [PutStatus::Stored]);
        let mut owner = Owner {
            catalog,
            map: map(),
            bystander: Client::new(u32::MAX),
            pinned: SegmentId(0),
            left: RefCell::default(),
        };
        let mut bystander = std::mem::replace(&mut owner.bystander, Client::new(u32::MAX));
        owner.send_request(&mut bystander, &Request::Marked);
        let blob = blob(&keys);
        let pin = Request::Pin {
            namespace: 0,
            keys: &blob[..32],
            read_as: ReadAs::Use,
        };
        owner.send_request(&mut bystander, &pin);
        let reserve = Request::Reserve {
            namespace: 0,
            keys: &blob[32..],
            links: vec![link(1)],
        };
        owner.send_request(&mut bystander, &reserve);
        owner.pinned = bystander.places[0].1.segment;
        owner.bystander = bystander;
        owner
    }

    /// A client sends a request, encoded as on a connection.
    fn send_request(&self, client: &mut Client, request: &Request<'_>) {
        let (mut frame, mut buffer) = (Vec::new(), Vec::new());
        if send(&mut frame, &mut buffer, request).is_err() {
            return;
        }
        let arrived = receive(&mut &frame[..], &mut buffer);
        assert!(matches!(arrived, Ok(true)), "a frame that readers reject");
        let request = parse(&buffer).expect("a sent message can be parsed");
        self.serve(client, request);
    }

    /// The owner answers a request. Returns whether the connection continues.
    fn serve(&self, client: &mut Client, request: Request<'_>) -> bool {
        let marked = Marked(client.marked);
        let desk = Desk {
            catalog: &self.catalog,
            map: &self.map,
            marks: &marked,
            share_bytes: SHARE_BYTES,
            is_sealed: false,
        };
        let keys = match &request {
            Request::Pin { keys, .. } => keys
                .as_chunks()
                .0
                .iter()
                .copied()
                .map(PageKey::from_bytes)
                .collect(),
            _ => Vec::new(),
        };
        let reply = match desk.answer(&client.ledger, request) {
            Answer::Reply(reply) => reply,
            Answer::Nothing => return true,
            Answer::Later(Later::Settled(puts)) => {
                let puts = puts.into_iter().map(|put| (put, None));
                client.waiting.push(puts.collect());
                self.settle(client);
                return true;
            }
            Answer::Later(Later::Room { .. }) => Reply::Room { room: 1 },
            Answer::Later(Later::Delete(namespace, keys)) => {
                count(self.catalog.delete(namespace, &keys))
            }
            Answer::Later(Later::Clear(namespace)) => {
                count(self.catalog.clear_namespace(namespace))
            }
            Answer::Later(Later::Flush) => done(self.catalog.flush()),
            Answer::Later(Later::Report) => Reply::Done,
        };
        match &reply {
            Reply::Reserved { reservation, .. } => client.puts.push(*reservation),
            Reply::Pinned(pages) => client.places.extend(
                keys.iter()
                    .zip(pages)
                    .filter_map(|(key, page)| Some((*key, page.as_ref()?.place))),
            ),
            _ => {}
        }
        check_sendable(&reply);
        !matches!(reply, Reply::Failed(Failure::Protocol(_)))
    }

    /// Answers the waits whose puts have all ended.
    fn settle(&self, client: &mut Client) {
        let machine = &mut self.catalog.inner().machine;
        for (put, statuses) in client.waiting.iter_mut().flatten() {
            if statuses.is_none() {
                // The core has no put without a reservation.
                *statuses = put
                    .reservation
                    .map_or(Some(Vec::new()), |id| machine.settled(id));
            }
        }
        client.waiting.retain_mut(|puts| {
            if puts.iter().any(|(_, statuses)| statuses.is_none()) {
                return true;
            }
            let asks: usize = puts.iter().map(|(put, _)| put.asks + put.beyond).sum();
            let outcomes = puts.drain(..);
            let outcomes = outcomes.filter_map(|(put, statuses)| Some((put, statuses?)));
            let reply = settled(&client.ledger, outcomes.collect());
            assert!(
                matches!(&reply, Reply::Settled(statuses) if statuses.len() == asks),
                "not one status for each requested page: {reply:?}"
            );
            check_sendable(&reply);
            false
        });
    }

    /// A client goes, and its writes have ended.
    fn end_client(&self, client: &mut Client) {
        client.ledger.leave(&self.catalog, &self.map);
        let held = client
            .ledger
            .end_when_over(&self.catalog, &self.map, &Marked(true));
        assert!(held.is_none(), "puts end while their client may write");
        let ended = client
            .ledger
            .end_when_over(&self.catalog, &self.map, &Marked(false));
        // If another client is already writing a page of this client's put, the page gets its
        // status when the put of that other client ends.
        let mut left = self.left.borrow_mut();
        left.extend(ended.expect("its writes have ended"));
        let waiting = client.waiting.drain(..).flatten();
        let waiting = waiting.filter(|(_, statuses)| statuses.is_none());
        left.extend(waiting.filter_map(|(put, _)| put.reservation));
        assert_eq!(
            client.ledger.counts(),
            (0, 0),
            "a client that is gone still holds resources"
        );
    }

    /// Checks the bystander. All other clients are gone.
    fn check(mut self) {
        let bystander = &mut self.bystander;
        assert_eq!(
            bystander.ledger.counts(),
            (1, 1),
            "a bystander loses its resources"
        );
        {
            let machine = &self.catalog.inner().machine;
            for segment in (0..SEGMENTS).map(SegmentId) {
                let pins = u32::from(segment == self.pinned);
                assert_eq!(machine.index.pins(segment), pins, "pins on {segment:?}");
            }
            machine.check();
        }
        let mut bystander = std::mem::replace(bystander, Client::new(u32::MAX));
        self.end_client(&mut bystander);
        let machine = &mut self.catalog.inner().machine;
        for reservation in self.left.take() {
            let settled = machine.settled(reservation);
            assert!(
                settled.is_some(),
                "a put of a client that is gone has not ended"
            );
        }
        assert!(
            machine.with_core(|core| core.is_idle()),
            "the core is not idle"
        );
        machine.check();
    }
}

/// An answer can be sent.
fn check_sendable(reply: &Reply) {
    let sent = send(&mut Vec::new(), &mut Vec::new(), reply);
    assert!(sent.is_ok(), "an answer that cannot be sent: {sent:?}");
}

/// The bytes of a connection, at its owner.
fn owner_reads(mut bytes: &[u8]) {
    let owner = Owner::new();
    let mut buffer = Vec::new();
    let mut client = None;
    while let Ok(true) = receive(&mut bytes, &mut buffer) {
        match &mut client {
            None => match greeting(&buffer, &Protocol::default()) {
                Ok(Greeting::First(_)) => client = Some(Client::new(1)),
                // No client has such a secret.
                Ok(Greeting::Further(..)) | Err(_) => break,
            },
            Some(client) => {
                let goes_on = match parse(&buffer) {
                    Ok(request) => owner.serve(client, request),
                    Err(error) => matches!(error, WireError::Unknown(_)),
                };
                if !goes_on {
                    break;
                }
            }
        }
    }
    if let Some(mut client) = client {
        owner.end_client(&mut client);
    }
    owner.check();
}

/// The bytes of a connection, at its client.
fn client_reads(mut bytes: &[u8]) {
    let mut buffer = Vec::new();
    let mut map = map();
    let mut is_first = true;
    while let Ok(true) = receive(&mut bytes, &mut buffer) {
        let read = match is_first {
            true => parse_greeting::<Reply>(&buffer),
            false => parse(&buffer),
        };
        is_first = false;
        let Ok(reply) = read else {
            return;
        };
        match &reply {
            Reply::Welcome(welcome) => {
                let _ = Protocol::default().agree(&welcome.protocol);
                let segments: Vec<u32> = welcome.volumes.iter().map(|(_, count)| *count).collect();
                map = SegmentMap::new(&segments, welcome.segment_blocks);
            }
            Reply::Pinned(pages) => pages.iter().flatten().for_each(|page| {
                let _ = map.extent(page.place);
            }),
            Reply::Reserved { grants, .. } => {
                for grant in grants {
                    if let PlaceGrant::Write(place) = grant {
                        let _ = map.extent(*place);
                    }
                }
            }
            _ => {}
        }
        let mut again = Vec::new();
        send(&mut again, &mut Vec::new(), &reply).expect("a received reply can be sent");
        let read: Reply = parse(&again[4..]).expect("a sent reply can be parsed");
        assert_eq!(format!("{read:?}"), format!("{reply:?}"));
    }
}

/// Clients that send any requests in any order.
fn requests(feed: &mut Feed<'_>) {
    let owner = Owner::new();
    let mut next = 0;
    let mut come = || {
        next += 1;
        Client::new(next)
    };
    let mut clients: Vec<Client> = (0..CLIENTS).map(|_| come()).collect();
    let keys: Vec<PageKey> = [chain(1, 6), chain(2, 6), bystanders()].concat();
    while !feed.is_empty() {
        let at = feed.below(CLIENTS);
        match feed.byte() {
            0 => {
                let mut gone = std::mem::replace(&mut clients[at], come());
                owner.end_client(&mut gone);
            }
            1 => clients[at].marked = feed.byte() & 1 == 0,
            2 => {
                clients[at].ledger.leave(&owner.catalog, &owner.map);
            }
            3 => {
                clients[at].ledger.look(&owner.catalog, &owner.map);
            }
            what => {
                let first = feed.below(keys.len());
                let last = (first + 1 + feed.below(6)).min(keys.len());
                let blob = blob(&keys[first..last]);
                let request = request(feed, what, &clients, at, blob);
                owner.send_request(&mut clients[at], &request);
                owner.settle(&mut clients[at]);
            }
        }
    }
    for mut client in clients {
        owner.end_client(&mut client);
    }
    owner.check();
}

/// A request. Its numbers are mostly numbers that a client received, and not always the client that
/// sends them.
fn request<'a>(
    feed: &mut Feed<'_>,
    what: u8,
    clients: &[Client],
    at: usize,
    keys: &'a [u8],
) -> Request<'a> {
    let count = keys.len() / 32;
    let whose = if feed.byte() < 200 {
        at
    } else {
        feed.below(CLIENTS)
    };
    let source = &clients[whose];
    let namespace = match feed.byte() {
        0..100 => 0,
        100..200 => 1,
        _ => feed.awkward() as u16,
    };
    let known = source.puts.last().copied().unwrap_or(0);
    let reservation = match feed.byte() {
        0..150 => known,
        150..200 => known.wrapping_sub(u64::from(feed.byte() % 4)),
        _ => feed.awkward(),
    };
    let place = |feed: &mut Feed<'_>| match feed.byte() {
        0..200 => feed.pick(&source.places).map_or(
            Place {
                segment: SegmentId(0),
                start: 0,
                saved: 0,
            },
            |(_, place)| place,
        ),
        _ => Place {
            segment: SegmentId(feed.awkward() as u32),
            start: feed.awkward() as u32,
            saved: feed.awkward() as u32,
        },
    };
    match what % 18 {
        0 => Request::Marked,
        1 => Request::LongestPrefix { namespace, keys },
        2 => Request::Contains { namespace, keys },
        3 => Request::Touch { namespace, keys },
        4 | 5 => Request::Pin {
            namespace,
            keys,
            read_as: match feed.below(2) {
                0 => ReadAs::Use,
                _ => ReadAs::Check,
            },
        },
        6 => Request::Unpin {
            segments: (0..feed.below(5)).map(|_| place(feed).segment).collect(),
        },
        7 => Request::Verified {
            namespace,
            keys,
            findings: (0..feed.below(5))
                .map(|_| {
                    let finding = [
                        Finding::Good,
                        Finding::Mismatch,
                        Finding::Unreadable,
                        Finding::Undecodable,
                    ];
                    (place(feed), finding[feed.below(4)])
                })
                .collect(),
        },
        8 | 9 => Request::Reserve {
            namespace,
            keys,
            links: (0..count)
                .map(|_| {
                    let parent = (feed.byte() & 1 == 0).then(|| [feed.byte(); 32]);
                    Link {
                        parent,
                        depth: feed.awkward() as u32,
                        saved: feed.awkward() as u32 & 3,
                    }
                })
                .collect(),
        },
        10 => Request::Commit {
            reservation,
            proofs: (0..feed.below(8))
                .map(|_| {
                    let checksum = (feed.byte() < 200).then(|| feed.awkward())?;
                    let slot = NonZeroU16::new(u16::from(feed.byte() & 3));
                    let seal = slot.map(|slot| (slot, [feed.byte(); 12], [feed.byte(); 16]));
                    Some(PageProof { checksum, seal })
                })
                .collect(),
        },
        11 => Request::Landed {
            puts: (0..1 + feed.below(3) as u64)
                .map(|back| LandedPut {
                    reservation: reservation.wrapping_sub(back),
                    pages: (0..feed.below(8))
                        .map(|_| (feed.awkward() as u32 % 16, feed.byte() < 200))
                        .collect(),
                })
                .collect(),
        },
        12 => Request::Wait {
            reservations: (0..1 + feed.below(3) as u64)
                .map(|back| reservation.wrapping_sub(back))
                .collect(),
        },
        13 => Request::Delete { namespace, keys },
        14 => Request::Clear { namespace },
        15 => Request::WaitForRoom {
            seen: feed.awkward(),
            patience_ms: feed.awkward() as u32,
        },
        16 => Request::Flush,
        _ => Request::Room,
    }
}

/// The first inputs.
///
/// # Panics
/// If a message cannot be sent.
#[must_use]
pub fn seeds() -> Vec<Vec<u8>> {
    let mut seeds = vec![read_by_owner(), read_by_client()];
    for seed in 0..12_u8 {
        let bytes = (0..200 + 40 * u32::from(seed)).map(|at| {
            let word = (at + 1)
                .wrapping_mul(0x9e37_79b9)
                .rotate_left(u32::from(seed));
            (word >> 13) as u8
        });
        seeds.push(std::iter::once(2).chain(bytes).collect());
    }
    seeds
}

fn read_by_owner() -> Vec<u8> {
    let keys = chain(1, 3);
    let keys = blob(&keys);
    let record = namespaces()[0].encode();
    let requests = [
        Request::Hello {
            magic: MAGIC,
            protocol: Protocol::default(),
        },
        Request::Marked,
        Request::Namespace { record },
        Request::LongestPrefix { namespace: 0, keys },
        Request::Reserve {
            namespace: 0,
            keys,
            links: vec![link(0); 3],
        },
        Request::Commit {
            reservation: u64::from(RUN) << 32,
            proofs: vec![Some(proof(7)), None, Some(proof(9))],
        },
        Request::Landed {
            puts: vec![LandedPut {
                reservation: u64::from(RUN) << 32,
                pages: vec![(0, true), (1, true), (2, false)],
            }],
        },
        Request::Wait {
            reservations: vec![u64::from(RUN) << 32],
        },
        Request::Pin {
            namespace: 0,
            keys,
            read_as: ReadAs::Use,
        },
        Request::Verified {
            namespace: 0,
            keys: &keys[..32],
            findings: vec![(
                Place {
                    segment: SegmentId(0),
                    start: 2,
                    saved: 0,
                },
                Finding::Mismatch,
            )],
        },
        Request::Unpin {
            segments: vec![SegmentId(0); 2],
        },
        Request::Flush,
        Request::Stats,
        Request::Room,
    ];
    let mut bytes = vec![0];
    for request in &requests {
        send(&mut bytes, &mut Vec::new(), request).expect("a request");
    }
    // A message of a later release.
    send(&mut bytes, &mut Vec::new(), &(1000_u32, "later")).expect("a message");
    bytes
}

fn proof(checksum: u64) -> PageProof {
    let seal = None;
    PageProof { checksum, seal }
}

fn link(depth: u32) -> Link {
    Link {
        depth,
        ..Link::default()
    }
}

fn read_by_client() -> Vec<u8> {
    let place = Place {
        segment: SegmentId(5),
        start: 7,
        saved: 0,
    };
    let replies = [
        Reply::Welcome(Welcome {
            protocol: Protocol::default(),
            client: ClientId(1),
            secret: 2,
            store: [3; 16],
            group: Some(100),
            run: 4,
            segment_blocks: 64,
            volumes: vec![(Some("volume".to_owned()), 8), (None, u32::MAX)],
            sealed: true,
        }),
        Reply::Done,
        Reply::Flags(vec![true, false]),
        Reply::Pinned(vec![
            None,
            Some(PinnedPage {
                place,
                proof: proof(1),
                unproven: true,
            }),
        ]),
        Reply::Reserved {
            reservation: 3,
            grants: vec![PlaceGrant::Write(place), PlaceGrant::Settles],
        },
        Reply::Settled(vec![PutStatus::Stored, PutStatus::Duplicate]),
        Reply::Failed(Failure::NoRoom),
        Reply::Stats(Box::default()),
        Reply::Failed(Failure::Unsupported),
    ];
    let mut bytes = vec![1];
    for reply in &replies {
        send(&mut bytes, &mut Vec::new(), reply).expect("a reply");
    }
    bytes
}
