//! A remote by its URL.

use std::path::PathBuf;

use crate::dir::Dir;
use crate::remote::{PlaceError, Remote};

/// A remote as it is configured.
#[derive(Clone, Debug, Default)]
pub struct Place {
    /// `file:///DIRECTORY`.
    pub url: String,
}

impl Place {
    /// A client of this remote. No request is made.
    ///
    /// # Errors
    /// The URL names no remote.
    pub fn connect(&self) -> Result<Box<dyn Remote>, PlaceError> {
        let unusable = |reason: &str| PlaceError {
            url: self.url.clone(),
            reason: reason.to_owned(),
        };
        match self.url.split_once("://") {
            Some(("file", path)) if path.starts_with('/') => {
                Ok(Box::new(Dir::new(PathBuf::from(path))))
            }
            Some(("file", _)) => Err(unusable("its path is relative")),
            Some(_) => Err(unusable("has an unknown scheme")),
            None => Err(unusable("is no URL")),
        }
    }
}
