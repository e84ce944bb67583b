//! A remote by its URL.

use std::path::PathBuf;

#[cfg(feature = "s3")]
use object_store::path::Path;

use crate::dir::Dir;
use crate::error::PlaceError;
use crate::remote::Remote;
#[cfg(feature = "s3")]
use crate::s3::{S3, S3Place};

/// A remote as it is configured.
#[derive(Clone, Debug, Default)]
pub struct Place {
    /// `s3://BUCKET/PREFIX` or `file:///DIRECTORY`.
    pub url: String,
    /// The URL of the S3 service, if it is not AWS.
    pub endpoint: Option<String>,
    /// A PEM file of certificate authorities to trust instead of the system's.
    pub ca_file: Option<PathBuf>,
    /// How often a client of a bucket itself tries a request again. None for an agent: it counts
    /// each request.
    pub retries: usize,
    /// Most connections of a fetch of one object.
    pub parts: usize,
}

impl Place {
    /// A client of this remote. No request is made.
    ///
    /// # Errors
    /// The URL names no remote, or the environment makes no client.
    pub fn connect(&self) -> Result<Box<dyn Remote>, PlaceError> {
        let (scheme, rest) = self
            .url
            .split_once("://")
            .ok_or_else(|| self.unusable("is no URL"))?;
        match scheme {
            "file" if rest.starts_with('/') => Ok(Box::new(Dir::new(PathBuf::from(rest)))),
            "file" => Err(self.unusable("its path is relative")),
            #[cfg(feature = "s3")]
            "s3" => Ok(Box::new(self.bucket()?)),
            #[cfg(not(feature = "s3"))]
            "s3" => Err(self.unusable(
                "this build has no client for buckets: build it with `--features remote`",
            )),
            _ => Err(self.unusable("has an unknown scheme")),
        }
    }

    /// A client of a bucket. No request is made.
    ///
    /// # Errors
    /// The URL names no bucket, or the environment makes no client.
    #[cfg(feature = "s3")]
    pub fn bucket(&self) -> Result<S3, PlaceError> {
        let rest = self.url.strip_prefix("s3://");
        let rest = rest.ok_or_else(|| self.unusable("names no bucket"))?;
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        if bucket.is_empty() {
            return Err(self.unusable("names no bucket"));
        }
        // The client would put objects elsewhere, and listings would not have the names of runs.
        let prefix = prefix.trim_matches('/');
        if Path::from(prefix).as_ref() != prefix {
            return Err(self.unusable(
                "its prefix has an empty part, a part `.` or `..`, or characters that names of \
                 objects should not have: use letters, digits, `-`, `_` and `.`",
            ));
        }
        S3::new(S3Place {
            bucket: bucket.to_owned(),
            prefix: prefix.to_owned(),
            endpoint: self.endpoint.clone(),
            ca_file: self.ca_file.clone(),
            retries: self.retries,
            parts: self.parts.max(1),
        })
    }

    fn unusable(&self, reason: &str) -> PlaceError {
        PlaceError::Url {
            url: self.url.clone(),
            reason: reason.to_owned(),
        }
    }
}
