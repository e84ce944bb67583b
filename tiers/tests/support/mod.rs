//! Helpers of the tests that work over a real store.

use larder_format::Namespace;
use larder_kernels::{KvShape, Layout};
use larder_tiers::l3::page_shape;

/// The namespace of a model with pages of this shape and layout.
pub fn namespace(model: &str, shape: &KvShape, layout: Layout) -> Namespace {
    // A layer_first pool is stored as page_first_direct. The weights tell the two apart here.
    Namespace::builder(
        model,
        layout.name(),
        shape.page_tokens(),
        page_shape(shape).unwrap(),
    )
    .elements("bytes", layout.name())
    .pool("")
    .build()
    .unwrap()
}
