//! The messages and a store of each release, as they were recorded when it was made: they are
//! understood by this release, an owner of this release answers them as then, and a client of this
//! release uses an owner that answers as then.
//!
//! `tests/releases/RELEASE/` holds a store in small (`tests/support/sparse.rs`) and `messages`:
//! the names of all messages in the order of their numbers, and one conversation between a client
//! and the owner of that store, in hexadecimal.
//!
//! `LARDER_BLESS=1 cargo test -p larder-engine --test recordings` makes the recording of the
//! present release: when the release is made, never to make a failing test of an earlier one pass.
#![allow(clippy::unwrap_used)]

mod common;
#[path = "../../tests/support/sparse.rs"]
mod sparse;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use common::release::change_superblocks;
use common::{Home, MIB, Pool, chain, namespace};
use larder_core::index::ReadAs;
use larder_engine::format::{PageKey, Proof};
use larder_engine::{
    Class, CodecChoice, Hint, OpenOptions, PageStore, Part, PutOptions, PutStatus, Refusal, Store,
};
use larder_store::protocol::{Protocol, variants};
use larder_store::share::keys::blob;
use larder_store::share::wire::{
    Failure, LandedPut, Link, MAGIC, PlaceGrant, Reply, Request, parse, parse_greeting, receive,
    send,
};
use larder_store::volume::socket::socket_path;
use nix::fcntl::{FcntlArg, fcntl};

/// The releases whose recordings must be understood, and the present one at their end.
const RELEASES: [&str; 1] = ["0.1.0"];

const PATIENCE: Duration = Duration::from_secs(60);

/// Small pages, for a small recording.
const PARTS: [u32; 1] = [4096];
const PAGES: usize = 5;

/// Pages of the recorded store, and pages that the recorded client put.
fn pages() -> [Vec<PageKey>; 2] {
    [chain(1, PAGES), chain(2, PAGES)]
}

fn directory(release: &str) -> PathBuf {
    let releases = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/releases");
    releases.join(release)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        write!(text, "{byte:02x}").unwrap();
        text
    })
}

fn unhex(text: &str) -> Vec<u8> {
    let digits = text.as_bytes().chunks(2);
    let byte = |pair| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.map(byte).collect()
}

/// The name of the message in a frame.
fn name(variants: &'static [&'static str], frame: &[u8]) -> &'static str {
    variants[usize::from(frame[0])]
}

fn request_name(frame: &[u8]) -> &'static str {
    name(variants::<Request<'_>>(), frame)
}

/// The enums of the protocol whose variants are numbered.
fn enums() -> [(&'static str, &'static [&'static str]); 5] {
    [
        ("Request", variants::<Request<'_>>()),
        ("Reply", variants::<Reply>()),
        ("Failure", variants::<Failure>()),
        ("PutStatus", variants::<PutStatus>()),
        ("Refusal", variants::<Refusal>()),
    ]
}

/// A recording.
struct Recording {
    enums: BTreeMap<String, Vec<String>>,
    /// Requests in their order, with their replies, if they have one.
    exchanges: Vec<(Vec<u8>, Option<Vec<u8>>)>,
}

impl Recording {
    fn read(release: &str) -> Recording {
        let text = std::fs::read_to_string(directory(release).join("messages")).unwrap();
        let (mut enums, mut exchanges) = (BTreeMap::new(), Vec::new());
        for line in text.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            match words[..] {
                ["enum", name, ref variants @ ..] => {
                    let variants = variants.iter().map(|variant| (*variant).to_owned());
                    enums.insert(name.to_owned(), variants.collect());
                }
                ["request", frame] => exchanges.push((unhex(frame), None)),
                ["reply", frame] => exchanges.last_mut().unwrap().1 = Some(unhex(frame)),
                _ => panic!("{line}"),
            }
        }
        Recording { enums, exchanges }
    }

    fn write(exchanges: &[(Vec<u8>, Option<Vec<u8>>)]) -> String {
        let mut text = String::new();
        for (name, variants) in enums() {
            writeln!(text, "enum {name} {}", variants.join(" ")).unwrap();
        }
        for (request, reply) in exchanges {
            writeln!(text, "request {}", hex(request)).unwrap();
            if let Some(reply) = reply {
                writeln!(text, "reply {}", hex(reply)).unwrap();
            }
        }
        text
    }
}

/// The recorded store in a directory of its own.
fn unpacked(release: &str) -> Home {
    let home = Home::new();
    let packed = std::fs::read(directory(release).join("store.img")).unwrap();
    sparse::unpack(&packed, &home.path);
    home
}

/// Locks the byte of a client, as clients do.
fn mark(volume: &Path, client: u32) -> std::fs::File {
    let mut options = std::fs::File::options();
    let file = options.read(true).write(true).open(volume).unwrap();
    let lock = libc::flock {
        l_type: i16::try_from(libc::F_WRLCK).unwrap(),
        l_whence: 0,
        l_start: (1 << 62) + i64::from(client),
        l_len: 1,
        l_pid: 0,
    };
    fcntl(&file, FcntlArg::F_OFD_SETLK(&lock)).unwrap();
    file
}

/// A client made of frames.
struct Bare {
    stream: UnixStream,
    volume: PathBuf,
    mark: Option<std::fs::File>,
}

impl Bare {
    fn connect(home: &Home) -> Bare {
        let stream = UnixStream::connect(socket_path(&home.path)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Bare {
            stream,
            volume: home.path.clone(),
            mark: None,
        }
    }

    /// Sends a frame, and receives the reply if one is expected.
    fn exchange(&mut self, request: &[u8], is_answered: bool) -> Option<Vec<u8>> {
        use std::io::Write as _;
        let length = u32::try_from(request.len()).unwrap().to_le_bytes();
        self.stream.write_all(&[&length, request].concat()).unwrap();
        let mut reply = Vec::new();
        if !is_answered {
            return None;
        }
        assert!(receive(&mut self.stream, &mut reply).unwrap(), "it hung up");
        if let Reply::Welcome(welcome) = parse_greeting(&reply).unwrap() {
            self.mark = Some(mark(&self.volume, welcome.client.0));
        }
        Some(reply)
    }
}

fn frame(request: &Request<'_>) -> Vec<u8> {
    let mut frame = Vec::new();
    send(&mut frame, &mut Vec::new(), request).unwrap();
    frame.split_off(4)
}

/// A reply without the path of the store's volume in it, of an owner without features: it answers
/// the recorded messages alone.
fn plain(reply: Vec<u8>) -> Vec<u8> {
    let Ok(Reply::Welcome(mut welcome)) = parse_greeting(&reply) else {
        return reply;
    };
    welcome.protocol.features = 0;
    for (path, _) in &mut welcome.volumes {
        *path = Some("/store".to_owned());
    }
    postcard::to_stdvec(&Reply::Welcome(welcome)).unwrap()
}

fn link(depth: u32) -> Link {
    Link {
        depth,
        ..Link::default()
    }
}

/// Makes the recording of this release: one conversation with each message that a client sends on
/// its first connection.
fn record(home: &Home) -> Vec<(Vec<u8>, Option<Vec<u8>>)> {
    let owner = Store::attach(&home.path, without_codec()).unwrap();
    let mut client = Bare::connect(home);
    let mut exchanges = Vec::new();
    let mut say = |request: &Request<'_>, is_answered| {
        let request = frame(request);
        let reply = client.exchange(&request, is_answered);
        let reply = reply.map(plain);
        exchanges.push((request, reply.clone()));
        reply.unwrap_or_default()
    };
    say(
        &Request::Hello {
            magic: MAGIC,
            // Messages of a feature may come at any time.
            protocol: Protocol {
                features: 0,
                ..Protocol::default()
            },
        },
        true,
    );
    say(&Request::Marked, true);
    let record = namespace("m", &PARTS).encode().to_vec();
    say(&Request::Namespace { record: &record }, true);
    let [stored, new] = pages();
    let (keys, new) = (blob(&stored), blob(&new));
    let namespace = 0;
    say(&Request::LongestPrefix { namespace, keys }, true);
    say(&Request::Contains { namespace, keys }, true);
    say(&Request::Touch { namespace, keys }, false);
    let pin = Request::Pin {
        namespace,
        keys,
        read_as: ReadAs::Use,
    };
    let pinned = say(&pin, true);
    let Reply::Pinned(pinned) = parse(&pinned).unwrap() else {
        panic!("not pinned");
    };
    let places: Vec<_> = pinned.iter().flatten().map(|page| page.place).collect();
    say(
        &Request::Verified {
            namespace,
            keys,
            findings: places
                .iter()
                .map(|place| (*place, larder_core::grants::Finding::Good))
                .collect(),
        },
        false,
    );
    let segments: Vec<_> = places.iter().map(|place| place.segment).collect();
    say(
        &Request::Unpin {
            segments: segments.clone(),
        },
        false,
    );
    say(&Request::Stage { namespace, keys }, true);
    say(
        &Request::Unstage {
            segments,
            slots: Vec::new(),
        },
        false,
    );
    say(&Request::Area, true);
    say(&Request::Room, true);
    let reserved = say(
        &Request::Reserve {
            namespace,
            keys: new,
            links: (0..PAGES as u32).map(link).collect(),
        },
        true,
    );
    let Reply::Reserved {
        reservation,
        grants,
    } = parse(&reserved).unwrap()
    else {
        panic!("not reserved");
    };
    let is_granted = |grant: &PlaceGrant| matches!(grant, PlaceGrant::Write(_));
    assert!(grants.iter().all(is_granted), "{grants:?}");
    say(
        &Request::Commit {
            reservation,
            proofs: vec![Some(Proof::from(7).into()); PAGES],
        },
        false,
    );
    let landed = LandedPut {
        reservation,
        pages: (0..PAGES as u32).map(|page| (page, true)).collect(),
    };
    say(&Request::Landed { puts: vec![landed] }, false);
    say(
        &Request::Wait {
            reservations: vec![reservation],
        },
        true,
    );
    say(
        &Request::WaitForRoom {
            seen: u64::MAX,
            patience_ms: 1,
        },
        true,
    );
    say(&Request::Flush, true);
    say(
        &Request::Delete {
            namespace,
            keys: new,
        },
        true,
    );
    say(&Request::Clear { namespace }, true);
    say(&Request::Stats, true);
    drop(client);
    owner.close().unwrap();
    exchanges
}

/// Writes the recording of this release, if the environment asks for it.
fn bless() {
    if std::env::var_os("LARDER_BLESS").is_none() {
        return;
    }
    let directory = directory(env!("CARGO_PKG_VERSION"));
    std::fs::create_dir_all(&directory).unwrap();
    let home = Home::with_store(128 * MIB);
    let store = home.open();
    let [stored, _] = pages();
    let put = Pool::new(&store, "m", &PARTS).put(&stored);
    assert_eq!(put, vec![PutStatus::Stored; PAGES]);
    store.close().unwrap();
    change_superblocks(&home.path, |superblock| {
        "/store".clone_into(&mut superblock.volumes[0].path);
    });
    std::fs::write(directory.join("store.img"), sparse::pack(&home.path)).unwrap();
    let exchanges = record(&unpacked(env!("CARGO_PKG_VERSION")));
    std::fs::write(directory.join("messages"), Recording::write(&exchanges)).unwrap();
}

#[test]
fn messages_and_variants_keep_the_numbers_of_every_release() {
    bless();
    assert_eq!(RELEASES.last(), Some(&env!("CARGO_PKG_VERSION")));
    for release in RELEASES {
        let recording = Recording::read(release);
        for (name, variants) in enums() {
            let recorded = &recording.enums[name];
            assert!(variants.len() >= recorded.len(), "{release}: {name}");
            assert_eq!(
                variants[..recorded.len()],
                recorded[..],
                "{release}: {name}"
            );
        }
    }
}

#[test]
fn recorded_requests_are_read_and_written_alike_and_recorded_replies_are_read() {
    for release in RELEASES {
        for (request, reply) in Recording::read(release).exchanges {
            let read: Request<'_> = parse_greeting(&request).unwrap();
            // The protocol of a greeting is the sender's.
            assert_eq!(hex(&frame(&read)), hex(&request), "{release}: {read:?}");
            if let Some(reply) = reply {
                let read: Reply = parse_greeting(&reply).unwrap();
                assert!(!matches!(read, Reply::Failed(_)), "{release}: {read:?}");
            }
        }
    }
}

/// The options of the recorded owners.
fn without_codec() -> OpenOptions {
    OpenOptions::default().with(|o| o.codec = CodecChoice::Off)
}

#[test]
fn an_owner_of_this_release_answers_a_recorded_client_as_its_owner_did() {
    for release in RELEASES {
        let home = unpacked(release);
        let owner = Store::attach(&home.path, without_codec()).unwrap();
        assert_eq!(owner.part(), Part::Owner);
        let mut client = Bare::connect(&home);
        for (request, expected) in Recording::read(release).exchanges {
            let reply = client.exchange(&request, expected.is_some());
            let (Some(expected), Some(reply)) = (expected, reply) else {
                continue;
            };
            let asked = request_name(&request);
            let names = [&expected, &reply].map(|frame| name(variants::<Reply>(), frame));
            assert_eq!(names[0], names[1], "{release}: the reply to {asked}");
            // The others have counters, or numbers of the process.
            if !matches!(names[0], "Welcome" | "Room" | "Stats") {
                assert_eq!(
                    hex(&reply),
                    hex(&expected),
                    "{release}: the reply to {asked}"
                );
            }
        }
        drop(client);
        owner.close().unwrap();
    }
}

/// Answers requests as the recorded owner did.
fn answer(mut stream: UnixStream, replies: &BTreeMap<&'static str, Option<Vec<u8>>>) {
    use std::io::Write as _;
    let mut request = Vec::new();
    while receive(&mut stream, &mut request).is_ok_and(|more| more) {
        let reply = match request_name(&request) {
            // Recorded on a first connection, which has no `Join`.
            "Join" => Some(postcard::to_stdvec(&Reply::Done).unwrap()),
            other => replies[other].clone(),
        };
        if let Some(reply) = reply {
            let length = u32::try_from(reply.len()).unwrap().to_le_bytes();
            if stream.write_all(&[&length, &reply[..]].concat()).is_err() {
                return;
            }
        }
    }
}

#[test]
fn a_client_of_this_release_uses_a_recorded_owner() {
    for release in RELEASES {
        let home = unpacked(release);
        let exchanges = Recording::read(release).exchanges;
        let replies = exchanges
            .into_iter()
            .map(|(request, reply)| (request_name(&request), reply));
        let replies = Arc::new(replies.collect::<BTreeMap<_, _>>());
        let listener = UnixListener::bind(socket_path(&home.path)).unwrap();
        std::thread::spawn(move || {
            for stream in listener.incoming() {
                let (stream, replies) = (stream.unwrap(), replies.clone());
                std::thread::spawn(move || answer(stream, &replies));
            }
        });
        let client = Store::attach(&home.path, OpenOptions::default()).unwrap();
        assert_eq!(client.part(), Part::Client);
        let pool = Pool::new(&client, "m", &PARTS);
        let [stored, new] = pages();
        assert_eq!(client.longest_prefix(pool.id, &stored), PAGES);
        assert_eq!(client.contains(pool.id, &stored), vec![true; PAGES]);
        // The recorded owner knows no hints.
        let hint = Hint::new(Class::SYSTEM);
        client.touch(pool.id, &stored, hint);
        // The bytes come from the recorded store, from where the recorded owner said.
        assert_eq!(pool.hits(&stored), PAGES);
        let options = PutOptions::default().hinting(hint);
        assert_eq!(
            pool.put_from(&new, 0, options),
            vec![PutStatus::Stored; PAGES]
        );
        client.flush().unwrap();
        assert_eq!(client.delete(pool.id, &new).unwrap(), PAGES as u64);
        assert_eq!(client.report().unwrap().stats.pages_put, PAGES as u64);
        drop(client);
    }
}
