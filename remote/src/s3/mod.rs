//! An S3-compatible object store as a remote.
//!
//! The client is asynchronous and its runtime has one thread. Callers wait for it with their
//! deadlines on a channel; a call whose caller has left is cancelled. Credentials come from the
//! environment, a web identity, a pod identity or the instance's metadata, as the client finds
//! them.
//!
//! Bodies are sent with CRC-64/NVME instead of a signed SHA-256, which would take more than twice
//! the processor time. The seals protect the pages.

mod alone;
mod endpoint;
mod http;

use std::collections::HashSet;
use std::fmt::Write as _;
use std::ops::{ControlFlow, Range};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::TryStreamExt;
use futures_util::future::try_join_all;
use futures_util::stream::select_all;
use larder_engine::CodecChoice;
use larder_format::Fingerprint;
use larder_sync::descriptors;
use object_store::aws::{AmazonS3, AmazonS3Builder, AmazonS3ConfigKey, Checksum};
use object_store::list::{PaginatedListOptions, PaginatedListStore};
use object_store::path::Path;
use object_store::{
    Error, GetOptions, GetResult, ObjectMeta, ObjectStore, ObjectStoreExt, PutMode, PutOptions,
    RetryConfig,
};
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

use crate::buffer::Buffer;
use crate::error::{PlaceError, RemoteError};
use crate::remote::{Listed, Published, Remote, Unreadable, codec_of};
use crate::run::{CODEC, CODEC_BYTES_MAX, RunName, USED, VERSION};
use http::{Connector, Date, NoListing};

/// How long the client itself tries a request again. A caller's deadline may be shorter.
const RETRY_TIMEOUT: Duration = Duration::from_secs(2);

/// Least bytes of a part of an object that has a connection of its own.
const PART: usize = 16 << 20;

/// The mark of a new remote: an object below `v1/` that is no run.
pub const MARK: &str = "v1/mark";
const MARK_CONTENT: &str = "A remote of Larder.\n";

/// The address of a machine's own metadata: the last place where the client looks for credentials.
const METADATA_ADDRESS: &str = "169.254.169.254";

/// Parts of a listing in a row without a run, after which it is given up.
const WITHOUT_RUN_MAX: u32 = 1000;

/// Where the objects are.
#[derive(Clone, Debug, Default)]
pub struct S3Place {
    /// The bucket.
    pub bucket: String,
    /// Begins the name of every object; may be empty.
    pub prefix: String,
    /// The URL of the service; that of AWS in the region of `AWS_REGION` by default.
    pub endpoint: Option<String>,
    /// A PEM file of certificate authorities to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// How often the client itself tries a request again. Its caller does not count it.
    pub retries: usize,
    /// Most connections of a fetch of one object.
    pub parts: usize,
}

/// Objects in a bucket.
pub struct S3 {
    store: Arc<AmazonS3>,
    place: S3Place,
    /// The clock of the server.
    date: Arc<Date>,
    /// The server has said that an object that is never there is absent.
    is_honest: AtomicBool,
    runtime: Handle,
    /// Ends the runtime's thread when it is dropped.
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl S3 {
    /// A client. No request is made.
    ///
    /// # Errors
    /// The place or the environment makes no client.
    pub fn new(place: S3Place) -> Result<S3, PlaceError> {
        let retry = RetryConfig {
            max_retries: place.retries,
            retry_timeout: RETRY_TIMEOUT,
            ..RetryConfig::default()
        };
        let client = |error: String| PlaceError::Client(error);
        let connector = Connector::new(place.ca_file.as_deref())?;
        let date = connector.date();
        let mut builder = AmazonS3Builder::from_env()
            .with_bucket_name(&place.bucket)
            .with_unsigned_payload(true)
            .with_checksum_algorithm(Checksum::CRC64NVME)
            .with_retry(retry)
            .with_allow_http(true)
            .with_http_connector(connector);
        // The variable of the service alone has precedence over that of all services.
        let of_s3 = AmazonS3ConfigKey::S3Endpoint;
        if let Some(endpoint) = &place.endpoint {
            builder = builder.with_config(of_s3, endpoint);
        }
        let mut of_services = [of_s3, AmazonS3ConfigKey::Endpoint].into_iter();
        if let Some(endpoint) = of_services.find_map(|of| builder.get_config_value(&of))
            && endpoint::is_open(&endpoint::check(&endpoint)?)
        {
            tracing::warn!(
                "requests for s3://{} travel in the clear to {endpoint}, and the pages of a remote \
                 without keys: use an endpoint with https",
                place.bucket
            );
        }
        let store = builder.build().map_err(|error| client(error.to_string()))?;
        descriptors::cover().map_err(|error| client(error.to_string()))?;
        let runtime = Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| client(error.to_string()))?;
        let handle = runtime.handle().clone();
        let (stop, stopped) = oneshot::channel::<()>();
        let thread = thread::Builder::new()
            .name("larder-remote".to_owned())
            .spawn(move || {
                let _ = runtime.block_on(stopped);
                // Not by dropping it, which waits for the lookup of a host name.
                runtime.shutdown_background();
            })
            .map_err(|error| client(format!("starting a thread: {error}")))?;
        Ok(S3 {
            store: Arc::new(store),
            place,
            date,
            is_honest: AtomicBool::new(false),
            runtime: handle,
            stop: Some(stop),
            thread: Some(thread),
        })
    }

    fn path(&self, name: &str) -> Path {
        match self.place.prefix.trim_matches('/') {
            "" => Path::from(name),
            prefix => Path::from(format!("{prefix}/{name}")),
        }
    }

    /// An object of a listing, if it is the object of a run.
    fn listed(&self, found: &ObjectMeta) -> Option<Listed> {
        let prefix = self.place.prefix.trim_matches('/');
        let name = found.location.as_ref().strip_prefix(prefix)?;
        let created = u64::try_from(found.last_modified.timestamp()).unwrap_or(0);
        Listed::of(name.trim_start_matches('/'), found.size, created)
    }

    fn head(&self, run: &RunName, deadline: Instant) -> Result<bool, RemoteError> {
        let (store, path) = (Arc::clone(&self.store), self.path(&run.to_string()));
        self.call(deadline, async move { absent(store.head(&path).await) })
            .map(|found| found.is_some())
    }

    /// The object of a run, or consecutive parts of it, at once.
    fn get(
        &self,
        run: &RunName,
        parts: Vec<GetOptions>,
        bytes_max: usize,
        deadline: Instant,
    ) -> Result<Option<Buffer>, RemoteError> {
        let (store, path) = (Arc::clone(&self.store), self.path(&run.to_string()));
        let fetched = self.call(deadline, async move {
            let parts = parts
                .into_iter()
                .map(async |options| absent(store.get_opts(&path, options).await));
            let parts: Option<Vec<GetResult>> = try_join_all(parts).await?.into_iter().collect();
            let Some(parts) = parts else {
                return Ok(None);
            };
            let first = parts.first().map_or(0, |part| part.range.start);
            let end = parts.last().map_or(0, |part| part.range.end);
            let bytes = usize::try_from(end - first).unwrap_or(usize::MAX);
            if bytes > bytes_max {
                let object = path.to_string();
                return Ok(Some(Err(RemoteError::TooLong { object, bytes_max })));
            }
            let mut object = match Buffer::of(bytes) {
                Ok(object) => object,
                Err(error) => return Ok(Some(Err(error))),
            };
            let chunks = parts.into_iter().map(|part| {
                let mut at = usize::try_from(part.range.start - first).unwrap_or(usize::MAX);
                part.into_stream().map_ok(move |chunk| {
                    let begin = at;
                    at += chunk.len();
                    (begin, chunk)
                })
            });
            let (mut filled, mut chunks) = (0, select_all(chunks));
            while let Some((begin, chunk)) = chunks.try_next().await? {
                // A server may send more than it stated.
                let room = object.get_mut(begin..).unwrap_or_default();
                let taken = chunk.len().min(room.len());
                room[..taken].copy_from_slice(&chunk[..taken]);
                filled += taken;
            }
            object.truncate(filled);
            Ok(Some(Ok(object)))
        })?;
        fetched.transpose()
    }

    /// Runs a request on the runtime's thread. It is cancelled at the deadline.
    fn call<T: Send + 'static>(
        &self,
        deadline: Instant,
        request: impl Future<Output = object_store::Result<T>> + Send + 'static,
    ) -> Result<T, RemoteError> {
        // The request may make a connection.
        descriptors::cover().map_err(|error| RemoteError::Failed(error.to_string()))?;
        let (sender, receiver) = mpsc::sync_channel(1);
        let bucket = self.place.bucket.clone();
        let limited = async move {
            let outcome = tokio::time::timeout_at(deadline.into(), request).await;
            // The caller waits until it receives this.
            let _ = sender.send(match outcome {
                Ok(outcome) => outcome.map_err(|error| explain(&error, &bucket)),
                Err(_) => Err(RemoteError::Deadline),
            });
        };
        let task = self.runtime.spawn(limited);
        // The runtime's thread may be late: it serves all calls.
        let left = deadline.saturating_duration_since(Instant::now());
        receiver.recv_timeout(left).unwrap_or_else(|_| {
            task.abort();
            Err(RemoteError::Deadline)
        })
    }
}

impl Drop for S3 {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // Its panic has been reported by its thread.
            let _ = thread.join();
        }
    }
}

impl Remote for S3 {
    fn look(&self, deadline: Instant) -> Result<(), RemoteError> {
        let store = Arc::clone(&self.store);
        let below = format!("{}/", self.path(VERSION));
        // A listing, and no object: objects may be refused to this node.
        match self.call(deadline, async move { has_some(&store, &below).await })? {
            true => Ok(()),
            false => {
                let S3Place { bucket, prefix, .. } = &self.place;
                let place = format!("s3://{bucket}/{prefix}");
                Err(RemoteError::Unmarked(
                    place.trim_end_matches('/').to_owned(),
                ))
            }
        }
    }

    fn mark(&self, deadline: Instant) -> Result<(), RemoteError> {
        let store = Arc::clone(&self.store);
        let path = self.path(MARK);
        self.call(deadline, async move {
            store.put(&path, MARK_CONTENT.into()).await.map(|_| ())
        })
    }

    fn codec(&self, deadline: Instant) -> Result<CodecChoice, RemoteError> {
        let (store, path) = (Arc::clone(&self.store), self.path(CODEC));
        let text = self.call(deadline, async move {
            let got = store.get_opts(&path, range(0..CODEC_BYTES_MAX)).await;
            match absent(got)? {
                Some(got) => got.bytes().await.map(Some),
                None => Ok(None),
            }
        })?;
        let place = || format!("bucket {}: {}", self.place.bucket, self.path(CODEC));
        text.map_or(Ok(CodecChoice::Off), |text| codec_of(&place(), &text))
    }

    fn set_codec(&self, codec: CodecChoice, deadline: Instant) -> Result<(), RemoteError> {
        let (store, path) = (Arc::clone(&self.store), self.path(CODEC));
        self.call(deadline, async move {
            match codec {
                CodecChoice::Off => absent(store.delete(&path).await).map(|_| ()),
                codec => store
                    .put(&path, format!("{codec}\n").into())
                    .await
                    .map(|_| ()),
            }
        })
    }

    fn now_unix_s(&self, deadline: Instant) -> Result<u64, RemoteError> {
        self.look(deadline)?;
        self.date.unix_s().ok_or_else(|| {
            let bucket = &self.place.bucket;
            RemoteError::Failed(format!(
                "bucket {bucket}: the server states no time (header Date), so that no object has \
                 an age"
            ))
        })
    }

    fn holds(&self, run: &RunName, deadline: Instant) -> Result<bool, RemoteError> {
        if !self.head(run, deadline)? {
            return Ok(false);
        }
        // A server may find any object.
        if !self.is_honest.load(Ordering::Relaxed) {
            if self.head(&RunName::NONE, deadline)? {
                let bucket = &self.place.bucket;
                let reason = format!("bucket {bucket}: an object that is never there is found");
                return Err(RemoteError::NoService(reason));
            }
            self.is_honest.store(true, Ordering::Relaxed);
        }
        Ok(true)
    }

    fn fetch(
        &self,
        run: &RunName,
        bytes_max: usize,
        deadline: Instant,
    ) -> Result<Option<Buffer>, RemoteError> {
        let parts = self.requests_of_fetch(bytes_max);
        if parts == 1 {
            return self.get(run, vec![GetOptions::default()], bytes_max, deadline);
        }
        let bytes = bytes_max.div_ceil(parts);
        let part = |at: usize| range(at * bytes..bytes_max.min((at + 1) * bytes));
        self.get(run, (0..parts).map(part).collect(), bytes_max, deadline)
    }

    fn requests_of_fetch(&self, bytes_max: usize) -> usize {
        bytes_max.div_ceil(PART).clamp(1, self.place.parts)
    }

    fn begin_of(
        &self,
        run: &RunName,
        bytes: usize,
        deadline: Instant,
    ) -> Result<Option<Buffer>, RemoteError> {
        self.get(run, vec![range(0..bytes)], bytes, deadline)
    }

    fn publish(
        &self,
        run: &RunName,
        object: Buffer,
        deadline: Instant,
    ) -> Result<Published, RemoteError> {
        let (store, path) = (Arc::clone(&self.store), self.path(&run.to_string()));
        let object = Bytes::from_owner(object);
        self.call(deadline, async move {
            let options = PutOptions::from(PutMode::Create);
            match store.put_opts(&path, object.into(), options).await {
                Ok(_) => Ok(Published::Created),
                Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => {
                    Ok(Published::Present)
                }
                Err(error) => Err(error),
            }
        })
    }

    fn touch(&self, run: &RunName, deadline: Instant) -> Result<(), RemoteError> {
        let (store, path) = (Arc::clone(&self.store), self.path(&run.mark()));
        self.call(deadline, async move {
            store.put(&path, Bytes::new().into()).await.map(|_| ())
        })
    }

    fn remove(&self, run: &RunName, deadline: Instant) -> Result<(), RemoteError> {
        let store = Arc::clone(&self.store);
        let paths = [self.path(&run.mark()), self.path(&run.to_string())];
        self.call(deadline, async move {
            for path in &paths {
                absent(store.delete(path).await)?;
            }
            Ok(())
        })
    }

    fn list(
        &self,
        within: Option<Fingerprint>,
        part: &mut dyn FnMut() -> ControlFlow<()>,
        each: &mut dyn FnMut(Result<Listed, Unreadable>) -> ControlFlow<()>,
        patience: Duration,
    ) -> Result<(), RemoteError> {
        self.list_below(&RunName::prefix(within), part, each, patience)
    }

    fn list_marks(
        &self,
        part: &mut dyn FnMut() -> ControlFlow<()>,
        each: &mut dyn FnMut(Result<Listed, Unreadable>) -> ControlFlow<()>,
        patience: Duration,
    ) -> Result<(), RemoteError> {
        self.list_below(USED, part, each, patience)
    }
}

impl S3 {
    /// Lists the objects of runs whose names begin so.
    fn list_below(
        &self,
        prefix: &str,
        part: &mut dyn FnMut() -> ControlFlow<()>,
        each: &mut dyn FnMut(Result<Listed, Unreadable>) -> ControlFlow<()>,
        patience: Duration,
    ) -> Result<(), RemoteError> {
        let below = format!("{}/", self.path(prefix));
        let (mut token, mut seen, mut without_run) = (None, HashSet::new(), 0);
        loop {
            if part().is_break() {
                return Ok(());
            }
            let (store, below) = (Arc::clone(&self.store), below.clone());
            let options = PaginatedListOptions {
                page_token: token.take(),
                ..PaginatedListOptions::default()
            };
            let page = self.call(Instant::now() + patience, async move {
                store.list_paginated(Some(&below), options).await
            })?;
            let runs: Vec<Listed> = page
                .result
                .objects
                .iter()
                .filter_map(|found| self.listed(found))
                .collect();
            without_run = if runs.is_empty() { without_run + 1 } else { 0 };
            if runs.into_iter().any(|run| each(Ok(run)).is_break()) {
                return Ok(());
            }
            let Some(next) = page.page_token else {
                return Ok(());
            };
            let bucket = &self.place.bucket;
            if !seen.insert(next.clone()) {
                let reason = format!("bucket {bucket}: the server gives a part of it again");
                return Err(RemoteError::Endless(reason));
            }
            if without_run >= WITHOUT_RUN_MAX {
                let reason = format!("bucket {bucket}: {without_run} parts in a row have no run");
                return Err(RemoteError::Endless(reason));
            }
            token = Some(next);
        }
    }
}

/// The options of a request for a part of an object.
fn range(bytes: Range<usize>) -> GetOptions {
    GetOptions {
        range: Some((bytes.start as u64..bytes.end as u64).into()),
        ..GetOptions::default()
    }
}

/// Whether there is an object whose name begins so.
async fn has_some(store: &AmazonS3, below: &str) -> object_store::Result<bool> {
    let mut page_token = None;
    loop {
        let options = PaginatedListOptions {
            max_keys: Some(1),
            page_token,
            ..PaginatedListOptions::default()
        };
        let page = match store.list_paginated(Some(below), options).await {
            Ok(page) => page,
            // A name that the client does not take.
            Err(Error::InvalidPath { .. }) => return Ok(true),
            Err(error) => return Err(error),
        };
        page_token = page.page_token;
        if !page.result.objects.is_empty() || page_token.is_none() {
            return Ok(!page.result.objects.is_empty());
        }
    }
}

/// The outcome, with `None` if there is no such object. A missing bucket is an error.
fn absent<T>(outcome: object_store::Result<T>) -> object_store::Result<Option<T>> {
    match outcome {
        Ok(value) => Ok(Some(value)),
        Err(error @ Error::NotFound { .. }) if is_bucket(&error) => Err(error),
        Err(Error::NotFound { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether it is the bucket that was not found.
fn is_bucket(error: &Error) -> bool {
    said(error).contains("NoSuchBucket")
}

/// An error with all its causes.
fn said(error: &Error) -> String {
    let mut said = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let text = cause.to_string();
        if !said.contains(&text) {
            // Writing to a text does not fail.
            let _ = write!(said, ": {text}");
        }
        source = cause.source();
    }
    said.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// Whether the answer to a listing was none.
fn is_no_listing(error: &Error) -> bool {
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        if cause.is::<NoListing>() {
            return true;
        }
        source = cause.source();
    }
    false
}

fn denied(reason: &str) -> RemoteError {
    RemoteError::Denied(format!(
        "{reason}; check the credentials, and the rights of this user"
    ))
}

fn explain(error: &Error, bucket: &str) -> RemoteError {
    let reason = format!("bucket {bucket}: {}", said(error));
    if is_no_listing(error) {
        return RemoteError::NoService(reason);
    }
    let says = |words: &[&str]| words.iter().any(|word| reason.contains(word));
    match error {
        // A page of a listing is taken as a whole.
        Error::InvalidPath { .. } => RemoteError::Foreign(reason),
        _ if says(&["RequestTimeTooSkewed"]) => RemoteError::Denied(format!(
            "{reason}; the clock of this node differs from that of the server: set it"
        )),
        _ if says(&["ExpiredToken", "TokenRefreshRequired"]) => RemoteError::Denied(format!(
            "{reason}; the token has expired: renew it, and start this process again"
        )),
        _ if says(&[METADATA_ADDRESS]) => RemoteError::Denied(format!(
            "{reason}; there are no credentials in the environment, and this machine gives none: \
             set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (~/.aws/credentials is not read)"
        )),
        Error::PermissionDenied { .. } | Error::Unauthenticated { .. } => denied(&reason),
        Error::NotFound { .. } => RemoteError::Missing(reason),
        _ if says(&["NoSuchBucket"]) => RemoteError::Missing(reason),
        _ if says(&["SlowDown", "503 Service Unavailable", "429 Too Many"]) => {
            RemoteError::Overloaded(reason)
        }
        _ if says(&["403 Forbidden", "AccessDenied"]) => denied(&reason),
        _ => RemoteError::Failed(format!(
            "{reason}{}; check the endpoint and the network",
            endpoint::of_proxies()
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_names_its_own_remedy() {
        let said = |answer: &str| {
            let error = Error::Generic {
                store: "S3",
                source: answer.into(),
            };
            explain(&error, "kvpages").to_string()
        };
        let cases = [
            (
                "403 Forbidden: <Code>RequestTimeTooSkewed</Code>",
                "the clock of this node differs",
            ),
            (
                "400 Bad Request: <Code>ExpiredToken</Code>",
                "the token has expired",
            ),
            (
                "PUT http://169.254.169.254/latest/api/token: 403 Forbidden",
                "~/.aws/credentials is not read",
            ),
            (
                "403 Forbidden: <Code>SignatureDoesNotMatch</Code>",
                "check the credentials",
            ),
        ];
        for (answer, remedy) in cases {
            let said = said(answer);
            assert!(said.contains("access is denied"), "{said}");
            assert!(said.contains(remedy), "{said}");
        }
        let said = said("error sending request: connection refused");
        assert!(
            said.ends_with("check the endpoint and the network"),
            "{said}"
        );
    }
}
