//! `larder exporter`: serves the metrics of a store over HTTP, for Prometheus.
//!
//! Each request asks the owner over its socket, so no process of an engine serves HTTP, and a
//! takeover needs no restart of the exporter. It is no client of the store: it never becomes the
//! owner. Without an owner it exports `larder_up 0`.
//!
//! One thread runs the connections, at most [`CONNECTIONS_MAX`] at a time. Each has one request
//! and a limited life, so no client keeps a place for ever. A request waits for the owner on a
//! thread of its own; at most [`QUESTIONS_MAX`] do. A volume that hangs may keep such a thread for
//! ever. Its request is answered at a limit, and so is each request that finds no thread.

use std::convert::Infallible;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use hyper::header::{ALLOW, CONTENT_TYPE, HeaderValue};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Request, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use larder_store::share;
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

use crate::failure::{Ending, Failure};
use crate::interrupt::Interrupt;
use crate::metrics;
use crate::owner::unserved;
use crate::place;
use crate::program::complain;
use crate::report::{self as output, Lines, Report};

/// Port that Prometheus' list of exporters leaves to this use.
const LISTEN: &str = "127.0.0.1:9464";

/// Connections at a time. A scraper needs one; further ones wait.
const CONNECTIONS_MAX: usize = 32;

/// Questions to the owner at a time.
const QUESTIONS_MAX: usize = 4;

/// Limit for the head of a request.
const HEAD_PATIENCE: Duration = Duration::from_secs(10);

/// Limit for an answer. An owner that is stopped and a drive that hangs take 3 s together.
const ANSWER_PATIENCE: Duration = Duration::from_secs(10);

/// Limit for a connection: its head, its answer, and a client that reads slowly or never.
const CONNECTION_PATIENCE: Duration = Duration::from_secs(30);

/// Pause after a connection that could not be accepted, for want of descriptors for example.
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// Longest sleep between two wakeups.
const SLEEP: Duration = Duration::from_secs(24 * 60 * 60);

/// Serve the metrics of a store over HTTP, for Prometheus, until stopped
#[derive(Args, Debug)]
pub struct ExporterArgs {
    /// The store: its first volume, or a backend's directory
    #[arg(value_parser = place::parser())]
    path: PathBuf,
    /// Address and port to listen on; port 0 takes a free one. There is no access control: choose
    /// an address that only the scraper reaches
    #[arg(long, value_name = "ADDRESS", default_value = LISTEN)]
    listen: SocketAddr,
    /// Print one JSON document once the metrics are served
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct ExporterReport {
    /// The store: its first volume.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    /// Where the metrics are.
    url: String,
}

impl Report for ExporterReport {
    const COMMAND: &'static str = "exporter";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        lines.row("Store", self.path.display().to_string());
        lines.row("Metrics", self.url.clone());
        lines
    }
}

/// Runs the command.
pub fn run(args: &ExporterArgs) -> Result<Ending, Failure> {
    let interrupt = Interrupt::watch();
    let failed = |doing: &str, error: &io::Error| {
        Failure::environment(format!("{}: {doing}: {error}", args.listen))
    };
    let listener = std::net::TcpListener::bind(args.listen)
        .map_err(|error| failed("listening", &error).with_hint("choose another --listen"))?;
    let url = listener
        .local_addr()
        .map(|at| format!("http://{at}/metrics"))
        .map_err(|error| failed("listening", &error))?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .max_blocking_threads(QUESTIONS_MAX)
        .build()
        .map_err(|error| Failure::thread(&error))?;
    listener
        .set_nonblocking(true)
        .map_err(|error| failed("listening", &error))?;
    let store = Asked {
        path: args.path.as_path().into(),
        questions: Arc::new(Semaphore::new(QUESTIONS_MAX)),
    };
    std::thread::Builder::new()
        .name("exporter".to_owned())
        .spawn(move || runtime.block_on(serve(listener, store)))
        .map_err(|error| Failure::thread(&error))?;
    let served = ExporterReport {
        path: args.path.clone(),
        url,
    };
    output::print(&served, args.json)?;
    while !interrupt.wait(SLEEP) {}
    Ok(Ending::Done)
}

/// The store whose metrics are served.
#[derive(Clone)]
struct Asked {
    path: Arc<Path>,
    /// A permit for each thread that may ask.
    questions: Arc<Semaphore>,
}

impl Asked {
    /// The answer to a request for the metrics.
    async fn metrics(&self) -> Response<Full<Bytes>> {
        let asked = tokio::time::timeout(ANSWER_PATIENCE, async {
            let permit = self.questions.clone().acquire_owned().await;
            let path = self.path.clone();
            tokio::task::spawn_blocking(move || {
                // Kept until the thread is free, also if the request has been answered.
                let _permit = permit;
                metrics::text(&path)
            })
            .await
        });
        match asked.await {
            Ok(Ok(Ok(text))) => {
                let mut found = Response::new(Full::new(Bytes::from(text)));
                let kind = HeaderValue::from_static(metrics::CONTENT_TYPE);
                found.headers_mut().insert(CONTENT_TYPE, kind);
                found
            }
            Ok(Ok(Err(error))) => unavailable(&error),
            Ok(Err(error)) => plain(StatusCode::INTERNAL_SERVER_ERROR, &format!("{error}\n")),
            Err(_) => unavailable(&format_args!(
                "{}: no answer within {} s; a volume or the owner hangs (`dmesg` names the drive)",
                self.path.display(),
                ANSWER_PATIENCE.as_secs()
            )),
        }
    }
}

/// Warns once if the store is not served at the start: the path may be wrong.
async fn warn_of_no_owner(store: Asked) {
    // The semaphore is never closed.
    let Ok(permit) = store.questions.clone().acquire_owned().await else {
        return;
    };
    let path = store.path.clone();
    tokio::task::spawn_blocking(move || {
        let _permit = permit;
        if let Err(error) = share::report(&path) {
            let why = unserved(&path, error);
            tracing::warn!(
                "{why}. The exporter serves larder_up 0 until a process serves the store"
            );
        }
    });
}

/// Accepts connections for ever.
async fn serve(listener: std::net::TcpListener, store: Asked) {
    let listener = match TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(error) => {
            complain(&format_args!("serving metrics: {error}"));
            std::process::exit(3);
        }
    };
    tokio::spawn(warn_of_no_owner(store.clone()));
    let room = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        // The semaphore is never closed.
        let Ok(permit) = room.clone().acquire_owned().await else {
            return;
        };
        let stream = match listener.accept().await {
            Ok((stream, _)) => stream,
            Err(error) => {
                tracing::debug!(%error, "a connection could not be accepted");
                tokio::time::sleep(ACCEPT_AGAIN).await;
                continue;
            }
        };
        let store = store.clone();
        tokio::spawn(async move {
            let _permit = permit;
            let service = service_fn(move |request| answer(request, store.clone()));
            let served = http1::Builder::new()
                .timer(TokioTimer::new())
                .header_read_timeout(HEAD_PATIENCE)
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), service);
            match tokio::time::timeout(CONNECTION_PATIENCE, served).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => tracing::debug!(%error, "a connection ended"),
                Err(_) => tracing::debug!("a connection was ended at its limit"),
            }
        });
    }
}

async fn answer(
    request: Request<Incoming>,
    store: Asked,
) -> Result<Response<Full<Bytes>>, Infallible> {
    if request.method() != Method::GET && request.method() != Method::HEAD {
        let mut refused = plain(StatusCode::METHOD_NOT_ALLOWED, "only GET is served\n");
        let allowed = HeaderValue::from_static("GET, HEAD");
        refused.headers_mut().insert(ALLOW, allowed);
        return Ok(refused);
    }
    if request.uri().path() != "/metrics" {
        return Ok(plain(
            StatusCode::NOT_FOUND,
            "the metrics are at /metrics\n",
        ));
    }
    Ok(store.metrics().await)
}

fn unavailable(reason: &dyn fmt::Display) -> Response<Full<Bytes>> {
    plain(StatusCode::SERVICE_UNAVAILABLE, &format!("{reason}\n"))
}

fn plain(status: StatusCode, text: &str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::copy_from_slice(text.as_bytes())));
    *response.status_mut() = status;
    let kind = HeaderValue::from_static("text/plain; charset=utf-8");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}
