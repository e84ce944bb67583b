//! A server that keeps objects in memory, and has faults at some of them, or at all.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

use crate::support::honest::eventually;

/// The time of the server, which is that of no node, and of its objects.
const DATE: &str = "Thu, 01 Jan 2026 12:00:00 GMT";
pub const NEW: &str = "2026-01-01T11:00:00.000Z";
pub const OLD: &str = "2025-12-30T11:00:00.000Z";

const PAGE: &str = "<!DOCTYPE html><html><body>Sign in</body></html>";

/// What a server does with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// An error with this status.
    Status(&'static str),
    /// 200 with a web page.
    Html,
    /// States a length beyond that of any object.
    Long,
}

#[derive(Default)]
struct State {
    objects: BTreeMap<String, (Vec<u8>, &'static str)>,
    /// Requests with this method whose names have this part.
    rules: Vec<(&'static str, String, Answer)>,
    is_stopped: bool,
    requests: u64,
}

/// See the module. It ends with the process.
pub struct Faults {
    pub endpoint: String,
    address: SocketAddr,
    state: Arc<Mutex<State>>,
}

impl Faults {
    pub fn start() -> Faults {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let address = listener.local_addr().unwrap();
        let faults = Faults {
            endpoint: format!("http://{address}"),
            address,
            state: Arc::default(),
        };
        faults.listen(listener);
        faults
    }

    /// Takes connections again, after a stop.
    pub fn resume(&self) {
        // A connection of another program may have the port for a while.
        eventually("the port is free", || {
            let listener = TcpListener::bind(self.address);
            listener.map(|listener| self.listen(listener)).is_ok()
        });
    }

    fn listen(&self, listener: TcpListener) {
        self.state.lock().unwrap().is_stopped = false;
        let of_server = Arc::clone(&self.state);
        thread::spawn(move || {
            for connection in listener.incoming() {
                if of_server.lock().unwrap().is_stopped {
                    break;
                }
                let (connection, state) = (connection.unwrap(), Arc::clone(&of_server));
                // The client may have left.
                thread::spawn(move || serve(&connection, &state).ok());
            }
        });
    }

    /// Refuses connections, and ends the present ones, until it resumes.
    pub fn stop(&self) {
        self.state.lock().unwrap().is_stopped = true;
        // The thread closes its socket at the next connection.
        eventually("connections are refused", || {
            TcpStream::connect(self.address).is_err()
        });
    }

    /// Answers requests with this method, for names with this part, so from now on.
    pub fn at(&self, method: &'static str, part: &str, answer: Answer) {
        let rule = (method, part.to_owned(), answer);
        self.state.lock().unwrap().rules.push(rule);
    }

    pub fn heal(&self) {
        self.state.lock().unwrap().rules.clear();
    }

    /// Requests until now.
    pub fn requests(&self) -> u64 {
        self.state.lock().unwrap().requests
    }

    /// The names of the runs.
    pub fn runs(&self) -> Vec<String> {
        let state = self.state.lock().unwrap();
        let names = state.objects.keys();
        names
            .filter(|name| name.ends_with(".run"))
            .cloned()
            .collect()
    }

    pub fn date(&self, name: &str, date: &'static str) {
        self.state.lock().unwrap().objects.get_mut(name).unwrap().1 = date;
    }
}

/// Answers the requests of a connection.
fn serve(mut connection: &TcpStream, state: &Mutex<State>) -> std::io::Result<()> {
    let mut reader = BufReader::new(connection.try_clone()?);
    loop {
        let mut head = Vec::new();
        loop {
            let mut line = String::new();
            if reader.read_line(&mut line)? == 0 {
                return Ok(());
            }
            if line == "\r\n" {
                break;
            }
            head.push(line.trim().to_owned());
        }
        let length = head.iter().find_map(|line| {
            let (name, value) = line.split_once(": ")?;
            name.eq_ignore_ascii_case("content-length")
                .then(|| value.parse::<usize>().unwrap())
        });
        let range = head.iter().find_map(|line| {
            let (name, value) = line.split_once(": ")?;
            let (from, last) = value.strip_prefix("bytes=")?.split_once('-')?;
            let is_range = name.eq_ignore_ascii_case("range");
            is_range.then(|| (from.parse().unwrap(), last.parse().unwrap()))
        });
        let mut body = vec![0; length.unwrap_or(0)];
        reader.read_exact(&mut body)?;
        if state.lock().unwrap().is_stopped {
            return Ok(());
        }
        state.lock().unwrap().requests += 1;
        let mut request = head[0].split(' ');
        let (method, target) = (request.next().unwrap(), request.next().unwrap());
        let (status, length, content) = {
            let state = &mut state.lock().unwrap();
            match range.and_then(|range| part(method, target, range, state)) {
                Some(part) => part,
                None => {
                    let (status, length, content) = answer(method, target, body, state);
                    (status.to_owned(), length, content)
                }
            }
        };
        let head = format!(
            "HTTP/1.1 {status}\r\nDate: {DATE}\r\nETag: \"a\"\r\nLast-Modified: {DATE}\r\n\
             Content-Length: {length}\r\n\r\n"
        );
        connection.write_all(head.as_bytes())?;
        if method != "HEAD" {
            connection.write_all(&content)?;
        }
        if content.len() < length && method != "HEAD" {
            return Ok(());
        }
    }
}

/// The answer to a request for a part of an object that has no rule.
fn part(
    method: &str,
    target: &str,
    (from, last): (usize, usize),
    state: &State,
) -> Option<(String, usize, Vec<u8>)> {
    let mut rules = state.rules.iter();
    if rules.any(|(of, part, _)| *of == method && target.contains(part)) {
        return None;
    }
    let (object, _) = state.objects.get(target.trim_start_matches("/b/"))?;
    let end = object.len().min(last + 1);
    let content = object.get(from..end)?.to_vec();
    let place = format!("bytes {from}-{}/{}", end - 1, object.len());
    let status = format!("206 Partial Content\r\nContent-Range: {place}");
    Some((status, content.len(), content))
}

/// The status, the length and the content.
fn answer(
    method: &str,
    target: &str,
    body: Vec<u8>,
    state: &mut State,
) -> (&'static str, usize, Vec<u8>) {
    let whole = |status, content: Vec<u8>| (status, content.len(), content);
    let rule = state
        .rules
        .iter()
        .find(|(of, part, _)| *of == method && target.contains(part));
    match rule.map(|(_, _, answer)| *answer) {
        Some(Answer::Status(status)) => return whole(status, b"<Error/>".to_vec()),
        Some(Answer::Html) => return whole("200 OK", PAGE.into()),
        Some(Answer::Long) => return ("200 OK", 1 << 40, Vec::new()),
        None => {}
    }
    let (path, query) = target.split_once('?').unwrap_or((target, ""));
    let name = path
        .trim_start_matches("/b")
        .trim_start_matches('/')
        .to_owned();
    match method {
        "GET" if query.contains("list-type=2") => whole("200 OK", listing(query, state).into()),
        "GET" | "HEAD" => match state.objects.get(&name) {
            Some((object, _)) => whole("200 OK", object.clone()),
            None => whole(
                "404 Not Found",
                b"<Error><Code>NoSuchKey</Code></Error>".into(),
            ),
        },
        "PUT" if state.objects.contains_key(&name) => whole("412 Precondition Failed", Vec::new()),
        "PUT" => {
            state.objects.insert(name, (body, NEW));
            whole("200 OK", Vec::new())
        }
        "POST" if query == "delete" => whole("200 OK", delete(&body, state).into()),
        _ => whole("405 Method Not Allowed", Vec::new()),
    }
}

/// Deletes the objects of a list. The rules of `DELETE` are for each of them.
fn delete(body: &[u8], state: &mut State) -> String {
    let body = String::from_utf8_lossy(body);
    let names = body.split("<Key>").skip(1);
    let names = names.map(|rest| rest.split('<').next().unwrap());
    let deleted = names.map(|name| {
        let mut rules = state.rules.iter();
        if rules.any(|(method, part, _)| *method == "DELETE" && name.contains(part)) {
            return format!(
                "<Error><Key>{name}</Key><Code>InternalError</Code><Message>no</Message></Error>"
            );
        }
        state.objects.remove(name);
        format!("<Deleted><Key>{name}</Key></Deleted>")
    });
    format!(
        "<DeleteResult>{}</DeleteResult>",
        deleted.collect::<String>()
    )
}

/// All objects below the prefix in one page.
fn listing(query: &str, state: &State) -> String {
    let is_one = query.contains("max-keys=1");
    let most = if is_one { 1 } else { usize::MAX };
    let fields = query.split('&');
    let prefix = fields
        .filter_map(|field| field.strip_prefix("prefix="))
        .next();
    let prefix = prefix.unwrap_or("").replace("%2F", "/");
    let objects = state
        .objects
        .iter()
        .filter(|(name, _)| name.starts_with(&prefix))
        .take(most)
        .map(|(name, (object, date))| {
            let bytes = object.len();
            format!(
                "<Contents><Key>{name}</Key><LastModified>{date}</LastModified><ETag>a</ETag>\
             <Size>{bytes}</Size></Contents>"
            )
        });
    let objects: String = objects.collect();
    format!(
        "<?xml version=\"1.0\"?><ListBucketResult><Name>b</Name><IsTruncated>false</IsTruncated>\
         {objects}</ListBucketResult>"
    )
}
