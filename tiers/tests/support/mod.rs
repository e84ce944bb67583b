//! Helpers of the tests that work over a real store.

use std::collections::BTreeMap;

use larder_format::{Namespace, NamespaceFields, Rank};
use larder_kernels::{KvShape, Layout};
use larder_tiers::l3::page_shape;

/// The namespace of a model with pages of this shape and layout.
pub fn namespace(model: &str, shape: &KvShape, layout: Layout) -> Namespace {
    // A layer_first pool is stored as page_first_direct. The weights tell the two apart here.
    Namespace::new(NamespaceFields {
        model: model.into(),
        weights: layout.name().into(),
        dtype: "bytes".into(),
        layout: layout.name().into(),
        page_tokens: shape.page_tokens(),
        shape: page_shape(shape).unwrap(),
        tp: Rank::ALONE,
        pp: Rank::ALONE,
        cp: Rank::ALONE,
        pool: String::new(),
        extra: BTreeMap::new(),
    })
    .unwrap()
}
