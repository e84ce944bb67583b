//! Helpers of the tests that work over a real store.

use std::collections::BTreeMap;

use larder_format::{Namespace, NamespaceFields, PageShape, Rank};
use larder_kernels::{KvShape, Layout};

/// The namespace of a model with pages of this shape and layout.
pub fn namespace(model: &str, shape: &KvShape, layout: Layout) -> Namespace {
    let parts = vec![shape.part_bytes(); shape.parts() as usize];
    // A layer_first pool is stored as page_first_direct. The weights tell the two apart here.
    Namespace::new(NamespaceFields {
        model: model.into(),
        weights: layout.name().into(),
        dtype: "bytes".into(),
        layout: layout.name().into(),
        page_tokens: shape.page_tokens(),
        shape: PageShape::new(&parts).unwrap(),
        tp: Rank::ALONE,
        pp: Rank::ALONE,
        cp: Rank::ALONE,
        pool: String::new(),
        extra: BTreeMap::new(),
    })
    .unwrap()
}
