//! Chains of an engine that follows the example at the head of the crate.
#![allow(clippy::unwrap_used)]

use larder_engine::format::{Namespace, PageShape};
use larder_engine::{CreateOptions, NamespaceHandle, OpenOptions, PageStore, PutOptions, Store};

const PAGE_TOKENS: usize = 16;

#[test]
fn an_engine_reads_no_more_tokens_than_its_prompt_has() {
    let directory = tempfile::tempdir().unwrap();
    let size = CreateOptions::new(128 << 20);
    let path = directory.path().join("store");
    let store = Store::open_or_create(&path, &size, OpenOptions::default()).unwrap();
    let shape = PageShape::new(&[3000, 5000]).unwrap();
    let namespace = Namespace::builder("m", "1", PAGE_TOKENS as u32, shape);
    let pages = NamespaceHandle::new(&store, namespace.build().unwrap()).unwrap();
    // The prompts share no page.
    for (first, length) in [0, 1, 15, 16, 17, 31, 33, 100].into_iter().enumerate() {
        let prompt: Vec<u64> = (0..length as u64)
            .map(|at| at + 1000 * first as u64)
            .collect();
        for run in 0..2 {
            let chain = pages.chain(&prompt);
            let mut buffers = pages.buffers(chain.keys().len()).unwrap();
            let mut slots: Vec<_> = buffers
                .iter_mut()
                .map(larder_engine::LentPage::parts_mut)
                .collect();
            let read = pages.read_prefix(&chain, &mut slots, None);
            assert_eq!(read, run * (length / PAGE_TOKENS), "{length} tokens");
            let computed: Vec<_> = buffers[read..]
                .iter()
                .map(larder_engine::LentPage::parts)
                .collect();
            let stored = pages.append(&chain.skip(read), &computed, PutOptions::default());
            assert!(stored.iter().all(|status| status.is_present()));
        }
    }
    store.close().unwrap();
}
