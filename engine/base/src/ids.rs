//! Numbers of an open store, which no file holds.

use serde::{Deserialize, Serialize};

/// A namespace of an open store. Not stored, and not valid after a reopen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NamespaceId(pub u16);

/// A client of a shared store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct ClientId(pub u32);
