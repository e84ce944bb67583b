//! The errors of remotes.

/// Why a remote did not do its work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RemoteError {
    /// It did not answer in time.
    #[error("no answer by the deadline; check the network, or raise the timeout")]
    Deadline,
    /// It refuses this node. With the remedy.
    #[error("access is denied: {0}")]
    Denied(String),
    /// The bucket or directory does not exist.
    #[error(
        "the place does not exist: {0}; if it is a mount, mount it; create it only if the remote \
         is new"
    )]
    Missing(String),
    /// It has no mark.
    #[error(
        "{0} is no remote yet: it has no `v1/`; mount it or check its name, or make a new remote \
         there with `larder remote init URL --new`"
    )]
    Unmarked(String),
    /// The endpoint is none of an S3 service.
    #[error("no S3 service at the endpoint: {0}; is it the port of a web console, or a proxy?")]
    NoService(String),
    /// An object is longer than the longest that is taken.
    #[error(
        "{object} has more than {bytes_max} bytes; remove it, if all nodes have the same \
         tokens of a run"
    )]
    TooLong {
        /// Its full name.
        object: String,
        /// Bytes of the longest object that is taken.
        bytes_max: usize,
    },
    /// It asks for fewer requests, or too many calls wait.
    #[error("it is overloaded: {0}; lower the rate")]
    Overloaded(String),
    /// This process has no memory for an object of so many bytes.
    #[error("no memory for an object of {0} bytes; free some, or configure shorter runs")]
    Memory(usize),
    /// Another writer has made a name that ends each listing. The remote answers all the same.
    #[error("{0}; no node makes such a name: remove the object, or use another prefix")]
    Foreign(String),
    /// A listing goes on without an end. The remote answers all the same.
    #[error("the listing does not end: {0}; check the server, or use another prefix")]
    Endless(String),
    /// It cannot be reached, or failed. With the remedy.
    #[error("{0}")]
    Failed(String),
}

/// Why a remote cannot be used at all.
#[derive(Debug, thiserror::Error)]
pub enum PlaceError {
    /// Its URL.
    #[error("{url}: {reason}; a remote is s3://BUCKET/PREFIX or file:///DIRECTORY")]
    Url {
        /// The URL.
        url: String,
        /// The reason.
        reason: String,
    },
    /// The URL of the service.
    #[error(
        "the endpoint {endpoint:?} {reason}; an endpoint is http://HOST:PORT or https://HOST \
         (--endpoint, AWS_ENDPOINT_URL)"
    )]
    Endpoint {
        /// The URL.
        endpoint: String,
        /// The reason.
        reason: String,
    },
    /// The file of the certificate authority.
    #[error("{file}: {reason}; name a PEM file with the certificates to trust")]
    Authority {
        /// The file.
        file: String,
        /// The reason.
        reason: String,
    },
    /// The client.
    #[error("the client of the object store: {0}; check the endpoint and the AWS_ variables")]
    Client(String),
}
