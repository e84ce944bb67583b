//! HTTP for the client of the object store: hyper, with rustls for https.
//!
//! The client takes any text for a listing without objects. So the answer to a listing is looked at
//! here: a web page at the endpoint is no listing.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, UNIX_EPOCH};

use async_trait::async_trait;
use http::header::DATE;
use http::{HeaderMap, Method, Uri};
use http_body_util::{BodyExt, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector as TcpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use object_store::ClientOptions;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpRequestBody,
    HttpResponse, HttpResponseBody, HttpService,
};
use rustls::crypto::ring;
use rustls::{ClientConfig, RootCertStore};
use rustls_pki_types::CertificateDer;
use rustls_pki_types::pem::PemObject;

use crate::error::PlaceError;

/// A server that does not accept a connection for this long is not there.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Connections that wait for their next request.
const IDLE_MAX: usize = 32;

/// Bytes of the longest page of a listing: it has 1,000 names of at most 1,024 bytes each.
const LISTING_MAX: usize = 16 << 20;

/// Begins a listing, behind the declaration of XML.
const LISTING: &[u8] = b"<ListBucketResult";

/// An answer to a listing that is no listing.
#[derive(Debug, thiserror::Error)]
#[error("the answer to a listing is no listing")]
pub(super) struct NoListing;

/// The servers' certificates are checked against the system's authorities, or against those of a
/// file alone.
#[derive(Debug)]
pub(super) struct Connector(Service);

#[derive(Clone, Debug)]
struct Service {
    client: Client<HttpsConnector<TcpConnector>, HttpRequestBody>,
    date: Arc<Date>,
}

/// The time of the server at its last answer.
#[derive(Debug, Default)]
pub(super) struct Date(AtomicU64);

impl Date {
    /// In seconds since 1970; `None` if the server states no time.
    pub(super) fn unix_s(&self) -> Option<u64> {
        Some(self.0.load(Ordering::Relaxed)).filter(|date| *date > 0)
    }

    fn note(&self, headers: &HeaderMap) {
        let date = headers.get(DATE).and_then(|date| date.to_str().ok());
        let date = date.and_then(|date| httpdate::parse_http_date(date).ok());
        let date = date.and_then(|date| date.duration_since(UNIX_EPOCH).ok());
        if let Some(date) = date {
            self.0.store(date.as_secs(), Ordering::Relaxed);
        }
    }
}

impl Connector {
    pub(super) fn date(&self) -> Arc<Date> {
        Arc::clone(&self.0.date)
    }

    pub(super) fn new(authority: Option<&Path>) -> Result<Connector, PlaceError> {
        let mut tcp = TcpConnector::new();
        tcp.enforce_http(false);
        tcp.set_nodelay(true);
        tcp.set_connect_timeout(Some(CONNECT_TIMEOUT));
        let connector = HttpsConnectorBuilder::new()
            .with_tls_config(tls(authority)?)
            .https_or_http()
            .enable_http1()
            .wrap_connector(tcp);
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_max_idle_per_host(IDLE_MAX)
            .build(connector);
        Ok(Connector(Service {
            client,
            date: Arc::default(),
        }))
    }
}

fn tls(authority: Option<&Path>) -> Result<ClientConfig, PlaceError> {
    let mut roots = RootCertStore::empty();
    if let Some(file) = authority {
        let failed = |reason: String| PlaceError::Authority {
            file: file.display().to_string(),
            reason,
        };
        let pem = BufReader::new(File::open(file).map_err(|error| failed(error.to_string()))?);
        for certificate in CertificateDer::pem_reader_iter(pem) {
            let certificate = certificate.map_err(|error| failed(error.to_string()))?;
            let added = roots.add(certificate);
            added.map_err(|error| failed(error.to_string()))?;
        }
        if roots.is_empty() {
            return Err(failed("has no certificate".to_owned()));
        }
    } else {
        // A certificate that cannot be parsed is one authority less.
        let found = rustls_native_certs::load_native_certs();
        roots.add_parsable_certificates(found.certs);
    }
    let provider = Arc::new(ring::default_provider());
    let config = ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .map_err(|error| PlaceError::Client(error.to_string()))?;
    Ok(config.with_root_certificates(roots).with_no_client_auth())
}

impl HttpConnector for Connector {
    fn connect(&self, _options: &ClientOptions) -> object_store::Result<HttpClient> {
        Ok(HttpClient::new(self.0.clone()))
    }
}

#[async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let (mut parts, body) = request.into_parts();
        parts.uri = whole(parts.uri)?;
        let is_listing = parts.method == Method::GET
            && parts
                .uri
                .query()
                .is_some_and(|query| query.contains("list-type=2"));
        let request = HttpRequest::from_parts(parts, body);
        let response = self.client.request(request).await.map_err(|error| {
            let kind = match error.is_connect() {
                true => HttpErrorKind::Connect,
                false => HttpErrorKind::Request,
            };
            HttpError::new(kind, error)
        })?;
        let (parts, body) = response.into_parts();
        self.date.note(&parts.headers);
        if is_listing && parts.status.is_success() {
            let page = Limited::new(body, LISTING_MAX).collect().await;
            let page =
                page.map_err(|error| HttpError::new_boxed(HttpErrorKind::Interrupted, error));
            let page = page?.to_bytes();
            if !begins_listing(&page) {
                return Err(HttpError::new(HttpErrorKind::Decode, NoListing));
            }
            return Ok(HttpResponse::from_parts(parts, page.into()));
        }
        let body = body.map_err(|error| HttpError::new(HttpErrorKind::Interrupted, error));
        Ok(HttpResponse::from_parts(parts, HttpResponseBody::new(body)))
    }
}

/// hyper takes no URI without a path.
fn whole(uri: Uri) -> Result<Uri, HttpError> {
    if !uri.path().is_empty() {
        return Ok(uri);
    }
    let mut parts = uri.into_parts();
    let query = parts.path_and_query.as_ref().and_then(|path| path.query());
    let path = query.map_or_else(|| "/".to_owned(), |query| format!("/?{query}"));
    let invalid = |error| HttpError::new(HttpErrorKind::Unknown, error);
    parts.path_and_query = Some(path.parse().map_err(invalid)?);
    Uri::from_parts(parts).map_err(|error| HttpError::new(HttpErrorKind::Unknown, error))
}

/// Whether a document begins with the element of a listing.
fn begins_listing(page: &[u8]) -> bool {
    let page = page.strip_prefix(b"\xef\xbb\xbf").unwrap_or(page);
    let page = page.trim_ascii_start();
    let declaration = page.strip_prefix(b"<?xml").and_then(|page| {
        let end = page.windows(2).position(|end| end == b"?>")?;
        Some(page[end + 2..].trim_ascii_start())
    });
    declaration.unwrap_or(page).starts_with(LISTING)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_is_known_by_its_element() {
        for listing in [
            "<ListBucketResult xmlns=\"a\"><Name>b</Name>",
            "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<ListBucketResult>",
            "\u{feff}<?xml version='1.0'?><ListBucketResult/>",
        ] {
            assert!(begins_listing(listing.as_bytes()), "{listing}");
        }
        for other in [
            "",
            "<?xml",
            "<!DOCTYPE html><html>",
            "<?xml ?><Error/>",
            "{}",
        ] {
            assert!(!begins_listing(other.as_bytes()), "{other}");
        }
    }
}
