//! A small S3 server with objects in memory, and with a fault while one is set.

use std::collections::BTreeMap;
use std::env;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::ops::Range;
use std::process::Command;
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

use larder_remote::Place;

const PAGE: &str = "<!doctype html><html><body>Sign in</body></html>";

/// Set in the process that has credentials.
const INSIDE: &str = "LARDER_REMOTE_INSIDE";

/// Longest time of a fault that only delays.
const DELAY: Duration = Duration::from_millis(100);

/// Bytes of an object that only claims to be so long.
const CLAIMED: usize = 10 << 30;

/// Requests that a fault concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Asks {
    Get,
    Head,
    Put,
    List,
    All,
}

/// Which answer a request gets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// A status with the code of an error.
    Status(u16, &'static str),
    /// A status with a web page.
    Html(u16),
    /// A redirection.
    Moved,
    /// No answer.
    Hang,
    /// The connection ends before the answer.
    Close,
    /// Bytes that are no HTTP.
    Garbage,
    /// The right answer, later.
    Delay,
    /// Another object.
    Swap,
    /// A length beyond that of any object, and zeros.
    Claim,
    /// The first half, as a part or as the whole.
    Half(u16),
    /// An object of 0 bytes.
    Zero,
    /// One bit is wrong: in the middle, or in the first block.
    Flip(bool),
    /// Some bytes follow.
    Longer,
    /// Another ETag, or none.
    ETag(&'static str),
    /// The length is not stated.
    Chunked,
    /// The connection ends in the middle.
    MidClose,
    /// A byte, and no more.
    Slow,
    /// The object is stored, and the connection ends.
    Stored,
    /// A listing of foreign names without an end.
    EndlessForeign,
    /// A listing of runs that are not there, without an end.
    EndlessRuns,
    /// The same part of a listing, again and again.
    SamePart,
    /// A listing with this name alone.
    Name(&'static str),
    /// Each object has so many bytes.
    Sizes(u64),
}

#[derive(Default)]
struct State {
    objects: BTreeMap<String, Vec<u8>>,
    fault: Option<(Asks, Fault)>,
    listings: u64,
    gets: u64,
}

/// See the [module](self). Its threads end with the process.
pub struct Server {
    pub endpoint: String,
    state: Arc<(Mutex<State>, Condvar)>,
}

struct Request {
    asks: Option<Asks>,
    key: String,
    query: String,
    is_new_only: bool,
    /// The bytes of an object that a GET asks for; `None`: all.
    range: Option<Range<usize>>,
    body: Vec<u8>,
}

impl Server {
    pub fn start() -> Server {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let state: Arc<(Mutex<State>, Condvar)> = Arc::default();
        let of_server = Arc::clone(&state);
        thread::spawn(move || {
            for connection in listener.incoming() {
                let (connection, state) = (connection.unwrap(), Arc::clone(&of_server));
                // The client may have left.
                thread::spawn(move || serve(&connection, &state).ok());
            }
        });
        Server { endpoint, state }
    }

    pub fn put(&self, name: &str, object: Vec<u8>) {
        let objects = &mut self.state.0.lock().unwrap().objects;
        objects.insert(name.to_owned(), object);
    }

    pub fn has(&self, name: &str) -> bool {
        self.state.0.lock().unwrap().objects.contains_key(name)
    }

    /// Requests of listings so far.
    pub fn listings(&self) -> u64 {
        self.state.0.lock().unwrap().listings
    }

    /// Requests of objects so far.
    pub fn gets(&self) -> u64 {
        self.state.0.lock().unwrap().gets
    }

    pub fn set(&self, fault: Option<(Asks, Fault)>) {
        self.state.0.lock().unwrap().fault = fault;
        self.state.1.notify_all();
    }
}

/// The remote on a server.
pub fn place(server: &Server) -> Place {
    Place {
        url: "s3://b/p".to_owned(),
        endpoint: Some(server.endpoint.clone()),
        ..Place::default()
    }
}

/// Runs a test again in a process with credentials: no test may change the environment of others.
pub fn with_credentials(test: &str) -> bool {
    if env::var_os(INSIDE).is_some() {
        return true;
    }
    let mut inside = Command::new(env::current_exe().unwrap());
    inside
        .args([test, "--exact", "--nocapture"])
        .env(INSIDE, "1");
    inside
        .env("AWS_ACCESS_KEY_ID", "larder")
        .env("AWS_SECRET_ACCESS_KEY", "a-secret");
    inside.env("AWS_REGION", "us-east-1");
    assert!(inside.status().unwrap().success());
    false
}

/// Answers the requests of a connection.
fn serve(mut connection: &TcpStream, state: &(Mutex<State>, Condvar)) -> std::io::Result<()> {
    connection.set_nodelay(true)?;
    let mut reader = BufReader::new(connection);
    while let Some(request) = receive(&mut reader)? {
        let (lock, changed) = state;
        let fault = lock
            .lock()
            .unwrap()
            .fault
            .filter(|(asks, _)| *asks == Asks::All || request.asks == Some(*asks));
        match fault {
            Some((_, Fault::Hang)) => {
                drop(changed.wait_while(lock.lock().unwrap(), |state| state.fault == fault));
                return connection.shutdown(Shutdown::Both);
            }
            Some((_, Fault::Delay)) => {
                let is_set = |state: &mut State| state.fault == fault;
                drop(changed.wait_timeout_while(lock.lock().unwrap(), DELAY, is_set));
            }
            _ => {}
        }
        let fault = fault.map(|(_, fault)| fault);
        let answer = answer(&request, fault, &mut lock.lock().unwrap());
        connection.write_all(&answer.bytes)?;
        match answer.then {
            Then::Next => {}
            Then::End => return connection.shutdown(Shutdown::Both),
            Then::Wait => {
                drop(changed.wait_while(lock.lock().unwrap(), |state| {
                    state.fault.map(|(_, fault)| fault) == fault
                }));
                return connection.shutdown(Shutdown::Both);
            }
            Then::Zeros => loop {
                connection.write_all(&[0; 1 << 16])?;
            },
        }
    }
    Ok(())
}

fn receive(reader: &mut BufReader<&TcpStream>) -> std::io::Result<Option<Request>> {
    let mut head = Vec::new();
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(None);
        }
        if line.trim().is_empty() {
            break;
        }
        head.push(line.trim().to_owned());
    }
    let mut words = head[0].split(' ');
    let (method, path) = (words.next().unwrap(), words.next().unwrap());
    let header = |name: &str| {
        let named = |line: &&String| line.to_ascii_lowercase().starts_with(name);
        let line = head.iter().find(named)?;
        line.split_once(':')
            .map(|(_, value)| value.trim().to_owned())
    };
    let length = header("content-length:").map_or(0, |length| length.parse().unwrap());
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let path = path.replace("%2F", "/");
    let (path, query) = path.split_once('?').unwrap_or((&path, ""));
    let key = path
        .trim_start_matches('/')
        .split_once('/')
        .map(|(_, key)| key);
    let asks = match method {
        "GET" if query.contains("list-type") => Some(Asks::List),
        "GET" => Some(Asks::Get),
        "HEAD" => Some(Asks::Head),
        "PUT" => Some(Asks::Put),
        _ => None,
    };
    Ok(Some(Request {
        asks,
        key: key.unwrap_or_default().to_owned(),
        query: query.to_owned(),
        is_new_only: header("if-none-match:").is_some(),
        range: header("range:").as_deref().and_then(range_of),
        body,
    }))
}

/// The bytes that a `Range` header names, with its first and last one.
fn range_of(header: &str) -> Option<Range<usize>> {
    let (first, last) = header.strip_prefix("bytes=")?.split_once('-')?;
    Some(first.parse().ok()?..last.parse::<usize>().ok()? + 1)
}

/// What follows an answer.
enum Then {
    Next,
    End,
    /// The end of the fault.
    Wait,
    Zeros,
}

struct Answer {
    bytes: Vec<u8>,
    then: Then,
}

/// An answer with a length that may differ from that of its body.
fn whole(status: u16, etag: &str, body: &[u8], length: usize) -> Answer {
    let etag = match etag {
        "" => String::new(),
        etag => format!("ETag: \"{etag}\"\r\n"),
    };
    let range = match status {
        206 => format!("Content-Range: bytes 0-{}/{}\r\n", length - 1, 2 * length),
        _ => String::new(),
    };
    let head = format!(
        "HTTP/1.1 {status} a\r\nContent-Length: {length}\r\n{etag}{range}\
         Last-Modified: Fri, 27 Nov 2026 00:00:00 GMT\r\n\r\n"
    );
    Answer {
        bytes: [head.as_bytes(), body].concat(),
        then: Then::Next,
    }
}

fn answer(request: &Request, fault: Option<Fault>, state: &mut State) -> Answer {
    let is_head = request.asks == Some(Asks::Head);
    let short = |status: u16, text: &str| {
        // Without a body by the rules of HTTP.
        let text = if matches!(status, 204 | 304) {
            ""
        } else {
            text
        };
        let body = if is_head { "" } else { text };
        whole(status, "x", body.as_bytes(), text.len())
    };
    let error = |code: &str| format!("<Error><Code>{code}</Code><Message>a test</Message></Error>");
    match fault {
        Some(Fault::Status(200, _)) => return short(200, ""),
        Some(Fault::Status(status, code)) => return short(status, &error(code)),
        Some(Fault::Html(status)) => return short(status, PAGE),
        Some(Fault::Moved) => {
            let head =
                "HTTP/1.1 301 a\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n";
            return Answer {
                bytes: head.into(),
                then: Then::Next,
            };
        }
        Some(Fault::Close) => {
            return Answer {
                bytes: Vec::new(),
                then: Then::End,
            };
        }
        Some(Fault::Garbage) => {
            return Answer {
                bytes: [0, 255].repeat(500),
                then: Then::End,
            };
        }
        _ => {}
    }
    match request.asks {
        Some(Asks::List) => {
            state.listings += 1;
            short(200, &listing(&request.query, fault, state))
        }
        Some(Asks::Put) => {
            if request.is_new_only && state.objects.contains_key(&request.key) {
                return short(412, &error("PreconditionFailed"));
            }
            let object = request.body.clone();
            state.objects.insert(request.key.clone(), object);
            let mut answer = short(200, "");
            if fault == Some(Fault::Stored) {
                answer = Answer {
                    bytes: Vec::new(),
                    then: Then::End,
                };
            }
            answer
        }
        Some(Asks::Get | Asks::Head) => {
            state.gets += u64::from(!is_head);
            let mut others = state.objects.iter().filter(|(key, _)| **key != request.key);
            let object = match fault {
                Some(Fault::Swap) => others.next().map(|(_, object)| object),
                _ => state.objects.get(&request.key),
            };
            match (object, &request.range) {
                (Some(object), Some(range)) if fault.is_none() => part_of(object, range),
                (Some(object), _) => give(object, fault, is_head),
                (None, _) => short(404, &error("NoSuchKey")),
            }
        }
        _ => {
            state.objects.remove(&request.key);
            short(204, "")
        }
    }
}

fn part_of(object: &[u8], range: &Range<usize>) -> Answer {
    let all = object.len();
    if range.start >= all {
        return whole(416, "x", &[], 0);
    }
    let part = &object[range.start..range.end.min(all)];
    let last = range.start + part.len() - 1;
    let head = format!(
        "HTTP/1.1 206 a\r\nContent-Length: {}\r\nETag: \"x\"\r\n\
         Content-Range: bytes {}-{last}/{all}\r\n\
         Last-Modified: Fri, 27 Nov 2026 00:00:00 GMT\r\n\r\n",
        part.len(),
        range.start
    );
    Answer {
        bytes: [head.as_bytes(), part].concat(),
        then: Then::Next,
    }
}

fn give(object: &[u8], fault: Option<Fault>, is_head: bool) -> Answer {
    let bytes = object.len();
    let flipped = |at: usize| {
        let mut object = object.to_vec();
        object[at] ^= 1;
        whole(200, "x", &object, bytes)
    };
    let cut = |end: usize, then: Then| Answer {
        then,
        ..whole(200, "x", &object[..end], bytes)
    };
    match fault {
        Some(Fault::Claim) => Answer {
            then: if is_head { Then::Next } else { Then::Zeros },
            ..whole(200, "x", &[], CLAIMED)
        },
        _ if is_head => whole(200, "x", &[], bytes),
        Some(Fault::Half(status)) => whole(status, "x", &object[..bytes / 2], bytes / 2),
        Some(Fault::Zero) => whole(200, "x", &[], 0),
        Some(Fault::Flip(is_first)) => flipped(if is_first { 100 } else { bytes / 2 }),
        Some(Fault::Longer) => whole(200, "x", &[object, &[1; 4096]].concat(), bytes + 4096),
        Some(Fault::ETag(etag)) => whole(200, etag, object, bytes),
        Some(Fault::Chunked) => {
            let head = "HTTP/1.1 200 a\r\nETag: \"x\"\r\nTransfer-Encoding: chunked\r\n\
                        Last-Modified: Fri, 27 Nov 2026 00:00:00 GMT\r\n\r\n";
            let head = format!("{head}{bytes:x}\r\n");
            Answer {
                bytes: [head.as_bytes(), object, b"\r\n0\r\n\r\n"].concat(),
                then: Then::Next,
            }
        }
        Some(Fault::MidClose) => cut(bytes / 2, Then::End),
        Some(Fault::Slow) => cut(1, Then::Wait),
        _ => whole(200, "x", object, bytes),
    }
}

fn listing(query: &str, fault: Option<Fault>, state: &State) -> String {
    let of = |name: &str| {
        let mut pairs = query.split('&').filter_map(|pair| pair.split_once('='));
        let found = pairs.find(|(key, _)| *key == name);
        found.map_or("", |(_, value)| value)
    };
    let (prefix, token) = (of("prefix"), of("continuation-token"));
    let number: u64 = token.parse().unwrap_or_default();
    let entry = |name: &str, bytes: u64| {
        format!(
            "<Contents><Key>{name}</Key><LastModified>2026-11-27T00:00:00Z</LastModified>\
             <ETag>a</ETag><Size>{bytes}</Size></Contents>"
        )
    };
    let most: usize = of("max-keys").parse().unwrap_or(1000);
    let (entries, next): (String, Option<String>) = match fault {
        Some(Fault::EndlessForeign) => {
            let names = (0..10).map(|at| entry(&format!("{prefix}{number}-{at}.txt"), 5));
            (names.collect(), Some((number + 1).to_string()))
        }
        Some(Fault::EndlessRuns) => {
            let name = |at: u64| format!("{prefix}{:032}/00/{:064}.run", 0, number * 10 + at);
            let names = (0..10).map(|at| entry(&name(at), 5));
            (names.collect(), Some((number + 1).to_string()))
        }
        Some(Fault::Name(name)) => (entry(name, 5), None),
        _ => {
            let size = |object: &Vec<u8>| match fault {
                Some(Fault::Sizes(bytes)) => bytes,
                _ => object.len() as u64,
            };
            let behind = state.objects.iter().filter(|(key, _)| {
                key.starts_with(prefix) && (fault == Some(Fault::SamePart) || key.as_str() > token)
            });
            let part: Vec<_> = behind.take(most).collect();
            let entries = part.iter().map(|(key, object)| entry(key, size(object)));
            let last = part.last().map(|(key, _)| (*key).clone());
            let next = match fault {
                Some(Fault::SamePart) => Some("again".to_owned()),
                _ => last.filter(|_| part.len() == most),
            };
            (entries.collect(), next)
        }
    };
    let is_truncated = next.is_some();
    let next = next.map(|next| format!("<NextContinuationToken>{next}</NextContinuationToken>"));
    format!(
        "<?xml version=\"1.0\"?><ListBucketResult><Name>b</Name>\
         <IsTruncated>{is_truncated}</IsTruncated>{entries}{}</ListBucketResult>",
        next.unwrap_or_default()
    )
}
