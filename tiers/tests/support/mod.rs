//! Helpers of the tests that work over a real store.

use larder_format::Namespace;
use larder_kernels::{KvShape, Layout};
use larder_tiers::Model;

/// The namespace of a model with pages of this shape, for a host pool of this layout.
pub fn namespace(model: &str, shape: &KvShape, layout: Layout) -> Namespace {
    // A layer_first pool is stored as page_first_direct. The weights tell the two apart here.
    let model = Model::new(model, layout.name(), "bytes", *shape);
    model.namespace(layout).unwrap()
}
