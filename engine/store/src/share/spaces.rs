//! The namespaces of a handle. Each owner numbers them in its own way.

use std::collections::HashMap;

use larder_base::ids::NamespaceId;
use larder_core::core::NAMESPACES_MAX;
use larder_format::{Fingerprint, Namespace};

use crate::error::StoreError;

/// The registered namespaces, by the id that a handle gave out.
#[derive(Default)]
pub(super) struct Spaces {
    list: Vec<Namespace>,
    ids: HashMap<Fingerprint, NamespaceId>,
}

impl Spaces {
    /// The id of a namespace, a new one if it is not registered.
    pub(super) fn id(&mut self, namespace: &Namespace) -> Result<NamespaceId, StoreError> {
        if let Some(id) = self.ids.get(&namespace.fingerprint()) {
            return Ok(*id);
        }
        let full = || StoreError::TooManyNamespaces(NAMESPACES_MAX);
        if self.list.len() >= NAMESPACES_MAX {
            return Err(full());
        }
        let id = NamespaceId(u16::try_from(self.list.len()).map_err(|_| full())?);
        self.list.push(namespace.clone());
        self.ids.insert(namespace.fingerprint(), id);
        Ok(id)
    }

    /// The namespace of an id.
    pub(super) fn get(&self, id: NamespaceId) -> Option<Namespace> {
        self.list.get(usize::from(id.0)).cloned()
    }
}
