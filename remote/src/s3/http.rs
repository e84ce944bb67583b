//! HTTP for the client of the object store: hyper, with rustls for https.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use http::Uri;
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

use crate::remote::PlaceError;

/// A server that does not accept a connection for this long is not there.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Connections that wait for their next request.
const IDLE_MAX: usize = 32;

/// The servers' certificates are checked against the system's authorities, or against those of a
/// file alone.
#[derive(Debug)]
pub(super) struct Connector(Service);

#[derive(Clone, Debug)]
struct Service(Client<HttpsConnector<TcpConnector>, HttpRequestBody>);

impl Connector {
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
        Ok(Connector(Service(client)))
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
        let request = HttpRequest::from_parts(parts, body);
        let response = self.0.request(request).await.map_err(|error| {
            let kind = match error.is_connect() {
                true => HttpErrorKind::Connect,
                false => HttpErrorKind::Request,
            };
            HttpError::new(kind, error)
        })?;
        let (parts, body) = response.into_parts();
        let body = http_body_util::BodyExt::map_err(body, |error| {
            HttpError::new(HttpErrorKind::Interrupted, error)
        });
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
