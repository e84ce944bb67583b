//! The URL of the service, before the client has it: the client panics at a text that is no URL.

use std::env;
use std::net::IpAddr;

use http::Uri;

use crate::error::PlaceError;

/// Variables that name a proxy. The client uses none.
const PROXIES: [&str; 7] = [
    "AWS_PROXY_URL",
    "HTTPS_PROXY",
    "https_proxy",
    "HTTP_PROXY",
    "http_proxy",
    "ALL_PROXY",
    "all_proxy",
];

/// Checks an endpoint.
pub(super) fn check(endpoint: &str) -> Result<Uri, PlaceError> {
    let unusable = |reason: &str| PlaceError::Endpoint {
        endpoint: endpoint.to_owned(),
        reason: reason.to_owned(),
    };
    if endpoint.is_empty() {
        return Err(unusable("is empty"));
    }
    let Some((scheme, rest)) = endpoint.split_once("://") else {
        return Err(unusable("has no scheme"));
    };
    if !matches!(scheme, "http" | "https") {
        return Err(unusable("its scheme is neither `http` nor `https`"));
    }
    // A port beyond 65535 is a valid URI.
    let (place, _) = rest.split_once('/').unwrap_or((rest, ""));
    let (_, place) = place.rsplit_once('@').unwrap_or(("", place));
    let port = match place.rsplit_once(']') {
        Some((_, behind)) => behind.strip_prefix(':'),
        None => place.split_once(':').map(|(_, port)| port),
    };
    if port.is_some_and(|port| port.parse::<u16>().is_err()) {
        return Err(unusable("its port is no number up to 65535"));
    }
    let uri: Uri = endpoint.parse().map_err(|_| unusable("is no URL"))?;
    match uri.host() {
        None | Some("") => Err(unusable("has no host")),
        Some(_) if uri.query().is_some() => Err(unusable("has a query")),
        Some(_) => Ok(uri),
    }
}

/// Whether requests travel in the clear to another machine.
pub(super) fn is_open(endpoint: &Uri) -> bool {
    let host = endpoint.host().unwrap_or_default();
    let address = host.trim_start_matches('[').trim_end_matches(']').parse();
    let is_here = address.is_ok_and(|address: IpAddr| address.is_loopback()) || host == "localhost";
    endpoint.scheme_str() == Some("http") && !is_here
}

/// The remedy of a connection that fails where a proxy is configured.
pub(super) fn of_proxies() -> String {
    let is_set = |name: &&str| env::var_os(name).is_some_and(|value| !value.is_empty());
    let set: Vec<&str> = PROXIES.into_iter().filter(is_set).collect();
    match set.as_slice() {
        [] => String::new(),
        set => format!("; no proxy is used, though {} is set", set.join(", ")),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn an_endpoint_that_is_no_url_is_refused_by_name() {
        let cases = [
            ("", "is empty"),
            ("127.0.0.1:8333", "has no scheme"),
            ("s3.example", "has no scheme"),
            (
                "ftp://s3.example",
                "its scheme is neither `http` nor `https`",
            ),
            (
                "http://127.0.0.1:99999",
                "its port is no number up to 65535",
            ),
            ("http://[::1]:99999", "its port is no number up to 65535"),
            ("http://s3.example:", "its port is no number up to 65535"),
            ("https://", "is no URL"),
            ("https:///b", "is no URL"),
            ("https://a b", "is no URL"),
            ("https://s3.example/?a=b", "has a query"),
        ];
        for (endpoint, reason) in cases {
            let said = check(endpoint).unwrap_err().to_string();
            assert!(
                said.starts_with(&format!("the endpoint {endpoint:?} {reason}")),
                "{said}"
            );
            assert!(said.contains("--endpoint"), "{said}");
        }
    }

    #[test]
    fn pages_travel_in_the_clear_over_http_to_other_machines() {
        let is_open = |endpoint: &str| is_open(&check(endpoint).unwrap());
        for open in [
            "http://10.0.0.1:9000",
            "http://minio:9000/",
            "http://[fd00::1]",
        ] {
            assert!(is_open(open), "{open}");
        }
        for other in [
            "https://s3.example:443",
            "http://127.0.0.1:8333",
            "http://[::1]:8333",
            "http://localhost",
        ] {
            assert!(!is_open(other), "{other}");
        }
    }
}
