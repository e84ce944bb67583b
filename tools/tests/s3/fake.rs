//! A server that lists one object a page, and gives none of them out, as if they were in cold
//! storage.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

/// Starts a server whose listing has so many pages, each after a pause. It ends with the process.
/// Returns its URL.
pub fn start(pages: usize, pause: Duration) -> String {
    start_with(None, pages, pause)
}

/// The same, with an object of this name in each page.
pub fn start_with(beside: Option<&'static str>, pages: usize, pause: Duration) -> String {
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let address = listener.local_addr().unwrap();
    thread::spawn(move || {
        for connection in listener.incoming() {
            let connection = connection.unwrap();
            thread::spawn(move || answer(connection, beside, pages, pause));
        }
    });
    format!("http://{address}")
}

/// Answers one request.
fn answer(mut connection: TcpStream, beside: Option<&'static str>, pages: usize, pause: Duration) {
    let head = BufReader::new(connection.try_clone().unwrap()).lines();
    let head = head
        .map_while(Result::ok)
        .take_while(|line| !line.is_empty());
    let head: Vec<String> = head.collect();
    // A client may connect, and ask nothing.
    let Some(request) = head.first() else { return };
    let (is_object, is_head) = (request.contains(".run"), request.starts_with("HEAD"));
    let (status, content) = match (is_object, is_head) {
        (true, true) => ("200 OK", String::new()),
        (true, false) => ("403 Forbidden", error("InvalidObjectState")),
        (false, _) => {
            thread::sleep(pause);
            ("200 OK", listing(request, beside, pages))
        }
    };
    let length = if is_head { 10 } else { content.len() };
    let headers = "ETag: a\r\nLast-Modified: Fri, 27 Nov 2026 00:00:00 GMT\r\nConnection: close";
    let answer =
        format!("HTTP/1.1 {status}\r\nContent-Length: {length}\r\n{headers}\r\n\r\n{content}");
    // The client may have left.
    let _ = connection.write_all(answer.as_bytes());
}

fn error(code: &str) -> String {
    format!("<Error><Code>{code}</Code><Message>a test</Message></Error>")
}

/// The page that a request names by its number.
fn listing(request: &str, beside: Option<&str>, pages: usize) -> String {
    let token = request.split_once("continuation-token=");
    let digits = token.map(|(_, rest)| rest.split(['&', ' ']).next().unwrap());
    let page: usize = digits.map_or(0, |digits| digits.parse().unwrap());
    let name = format!("v1/{:032}/00/{page:064}.run", 0);
    let object = |name: &str| {
        format!(
            "<Contents><Key>{name}</Key><LastModified>2026-11-27T00:00:00Z</LastModified>\
             <ETag>a</ETag><Size>10</Size></Contents>"
        )
    };
    let objects: String = [Some(name.as_str()), beside]
        .into_iter()
        .flatten()
        .map(object)
        .collect();
    let is_truncated = page + 1 < pages;
    let next = match is_truncated {
        true => format!(
            "<NextContinuationToken>{}</NextContinuationToken>",
            page + 1
        ),
        false => String::new(),
    };
    format!(
        "<ListBucketResult><Name>b</Name><KeyCount>1</KeyCount>\
         <IsTruncated>{is_truncated}</IsTruncated>{next}{objects}\
         </ListBucketResult>"
    )
}
