//! The owner's socket, spoken to without the code of a client.

use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use larder_engine::{OpenOptions, PageStore, Part, PutStatus, Store, StoreError, report};
use larder_store::protocol::Protocol;
use larder_store::share::wire::{
    Failure, Link, MAGIC, PlaceGrant, Reply, Request, parse, receive, send,
};
use larder_store::volume::socket::socket_path;

use super::attach;
use super::common::honest::{PATIENCE, eventually};
use super::common::{Home, MIB, Pool, chain, namespace};
use super::descriptors::mark;

/// For clients that ask on their first connection, where totals would come between the replies.
fn without_features() -> Protocol {
    Protocol {
        features: 0,
        ..Protocol::default()
    }
}

#[test]
fn the_socket_is_for_the_stores_owner_alone() {
    let home = Home::with_store(256 * MIB);
    let owner = attach(&home);
    let mode = |home: &Home| {
        let found = std::fs::metadata(socket_path(&home.path)).unwrap();
        found.permissions().mode() & 0o777
    };
    assert_eq!(mode(&home), 0o600);
    owner.close().unwrap();
    let group = OpenOptions::default().with(|o| o.group = Some(rustix::process::getgid().as_raw()));
    let _owner = Store::attach(&home.path, group).unwrap();
    assert_eq!(mode(&home), 0o660);
}

#[test]
fn a_name_that_fits_no_socket_is_refused_before_the_store_is_opened() {
    let home = Home::with_store(256 * MIB);
    let path = home.path.with_file_name("n".repeat(120));
    std::fs::rename(&home.path, &path).unwrap();
    let superblocks = || {
        let mut bytes = vec![0; 1 << 20];
        let mut file = std::fs::File::open(&path).unwrap();
        file.read_exact(&mut bytes).unwrap();
        bytes
    };
    let before = superblocks();
    let error = Store::attach(&path, OpenOptions::default()).err().unwrap();
    assert!(
        error.to_string().contains("too long for a socket"),
        "{error}"
    );
    assert!(superblocks() == before);
}

#[test]
fn nonsense_on_the_socket_ends_that_connection_and_nothing_else() {
    let home = Home::with_store(256 * MIB);
    let owner = attach(&home);
    let client = attach(&home);
    let pool = Pool::new(&client, "m", &[65536]);
    let keys = chain(1, 4);
    assert_eq!(pool.put(&keys), vec![PutStatus::Stored; 4]);
    let frame = |bytes: &[u8]| {
        let mut frame = u32::try_from(bytes.len()).unwrap().to_le_bytes().to_vec();
        frame.extend_from_slice(bytes);
        frame
    };
    let hello = |version: u8| {
        let mut bytes = vec![0];
        bytes.extend_from_slice(b"LARDERCT");
        bytes.push(version);
        frame(&bytes)
    };
    let after_hello = |bytes: &[u8]| [hello(1), frame(bytes)].concat();
    for nonsense in [
        vec![],
        vec![1],
        vec![0xff; 64],
        u32::MAX.to_le_bytes().to_vec(),
        frame(&[]),
        frame(&[0xff; 100]),
        hello(9),
        [hello(1), hello(1)].concat(),
        after_hello(&[]),
        after_hello(&[200]),
        // A lookup with half a key; a wait for an unknown put; findings without keys.
        after_hello(&[4, 0, 3, 1, 2, 3]),
        after_hello(&[12, 0]),
        after_hello(&[9, 0, 0, 1]),
    ] {
        let mut stream = UnixStream::connect(socket_path(&home.path)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        // The other end may hang up before all of it is written.
        let _ = stream.write_all(&nonsense);
        let _ = stream.shutdown(std::net::Shutdown::Write);
        let mut answer = Vec::new();
        let ended = stream.read_to_end(&mut answer);
        assert!(
            ended.is_ok() || ended.is_err_and(|e| e.kind() == std::io::ErrorKind::ConnectionReset),
            "the owner does not hang up after {nonsense:?}"
        );
        assert_eq!(pool.hits(&keys), 4);
    }
    assert_eq!(owner.part(), Part::Owner);
    eventually("the connections are gone", || {
        report(&home.path).unwrap().clients == 1
    });
}

/// Sends a request to an owner without the client code.
fn ask(stream: &mut UnixStream, request: &Request<'_>) -> Vec<u8> {
    send(stream, &mut Vec::new(), request).unwrap();
    let mut frame = Vec::new();
    assert!(receive(stream, &mut frame).unwrap());
    frame
}

#[test]
fn a_request_that_makes_no_sense_is_the_last_of_its_connection() {
    let home = Home::with_store(128 * MIB);
    let _owner = attach(&home);
    let mut stream = UnixStream::connect(socket_path(&home.path)).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let hello = Request::Hello {
        magic: MAGIC,
        protocol: without_features(),
    };
    ask(&mut stream, &hello);
    let of_no_put = Request::Wait {
        reservations: vec![7],
    };
    let refused = ask(&mut stream, &of_no_put);
    assert!(matches!(
        parse(&refused).unwrap(),
        Reply::Failed(Failure::Protocol(_))
    ));
    assert_eq!(stream.read_to_end(&mut Vec::new()).unwrap(), 0);
}

#[test]
fn connections_that_have_ended_leave_no_memory_mapped() {
    let home = Home::with_store(128 * MIB);
    let _owner = attach(&home);
    let mapped = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().count()
    };
    let before = mapped();
    for _ in 0..2000 {
        report(&home.path).unwrap();
    }
    // The stack of a thread, and the guard behind it, are two. Other tests have threads, too.
    assert!(mapped() < before + 2000);
}

/// There is no session yet that could hang up on it, and an owner that closes would wait for it.
#[test]
fn a_connection_without_a_greeting_is_closed_after_a_while() {
    let home = Home::with_store(128 * MIB);
    let _owner = attach(&home);
    let mut stream = UnixStream::connect(socket_path(&home.path)).unwrap();
    let pace = Duration::from_millis(250);
    stream.set_read_timeout(Some(pace)).unwrap();
    stream.write_all(&1000_u32.to_le_bytes()).unwrap();
    eventually("it hangs up", || {
        let is_over = matches!(stream.read(&mut [0]), Ok(0));
        is_over || stream.write_all(b"?").is_err()
    });
}

#[test]
fn an_owner_that_closes_while_a_client_may_be_writing_leaves_the_store_to_the_next_opener() {
    let home = Home::with_store(256 * MIB);
    let owner = attach(&home);
    let pool = Pool::new(&owner, "m", &[65536]);
    let keys = chain(1, 4);
    assert_eq!(pool.put(&keys), vec![PutStatus::Stored; 4]);

    let mut stream = UnixStream::connect(socket_path(&home.path)).unwrap();
    let hello = Request::Hello {
        magic: MAGIC,
        protocol: without_features(),
    };
    let Reply::Welcome(welcome) = parse(&ask(&mut stream, &hello)).unwrap() else {
        panic!("no welcome");
    };
    let marked = mark(&home.path, welcome.client.0);
    assert!(matches!(
        parse(&ask(&mut stream, &Request::Marked)).unwrap(),
        Reply::Done
    ));
    let record = namespace("m", &[65536]).encode().to_vec();
    let Reply::Namespace(namespace, ..) =
        parse(&ask(&mut stream, &Request::Namespace { record: &record })).unwrap()
    else {
        panic!("no namespace");
    };
    let reserve = Request::Reserve {
        namespace,
        keys: &[7; 32],
        links: vec![Link::default()],
    };
    let Reply::Reserved { grants, .. } = parse(&ask(&mut stream, &reserve)).unwrap() else {
        panic!("no grant");
    };
    assert!(matches!(grants[..], [PlaceGrant::Write(_)]));

    let closed = owner.close();
    assert!(
        matches!(closed, Err(StoreError::ClientsWriting(_))),
        "{closed:?}"
    );
    let opened = Store::open(&home.path, OpenOptions::default());
    assert!(
        matches!(opened, Err(StoreError::ClientsWriting(_))),
        "another process owns the store under a client's writes"
    );
    drop(marked);
    let next = attach(&home);
    let pool = Pool::new(&next, "m", &[65536]);
    assert_eq!(pool.hits(&keys), 4);
}

#[test]
fn a_client_is_disconnected_when_one_of_its_connections_fails() {
    let home = Home::with_store(256 * MIB);
    let _owner = attach(&home);
    let connect = |greeting: &Request<'_>| {
        let mut stream = UnixStream::connect(socket_path(&home.path)).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let welcome = ask(&mut stream, greeting);
        (stream, welcome)
    };
    // The bytes after an invalid message are not read. A client that had reported its landed pages
    // there, and waits on another connection for the effect, would wait for good.
    for nonsense in [&[0xff; 20][..], &[200]] {
        let (mut first, welcome) = connect(&Request::Hello {
            magic: MAGIC,
            protocol: without_features(),
        });
        let Reply::Welcome(welcome) = parse(&welcome).unwrap() else {
            panic!("no welcome");
        };
        let (mut further, _) = connect(&Request::Join {
            magic: MAGIC,
            client: welcome.client,
            secret: welcome.secret,
        });
        let length = u32::try_from(nonsense.len()).unwrap().to_le_bytes();
        further.write_all(&[&length, nonsense].concat()).unwrap();
        assert_eq!(first.read(&mut [0]).unwrap(), 0, "the owner sent something");
    }
}
