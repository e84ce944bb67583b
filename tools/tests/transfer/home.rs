//! Code shared by the tests: pages whose bytes follow from their keys, and the parts of archives.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{IoSlice, IoSliceMut};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use larder_engine::{GetPage, NamespaceId, PageStore, PutOptions, PutPage, PutStatus, Store};
use larder_format::{
    ArchiveItem, ArchiveReader, ArchivedPage, BLOCK_BYTES, Namespace, NamespaceFields, PageKey,
    PageShape, Rank,
};
use larder_offline::survey::{Survey, SurveyOptions};

use crate::support::home::Home;
use crate::support::text;

/// Namespaces of the tests: pages in one aligned part, and in two that end within a block.
pub const EVEN: Model = Model("even", &[64 << 10]);
pub const RAGGED: Model = Model("ragged", &[5000, 300]);

/// Pages that a codec makes smaller.
pub const SMOOTH: Model = Model("smooth", &[64 << 10, 70_000]);

/// A namespace by its model and the parts of its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Model(pub &'static str, pub &'static [u32]);

impl Model {
    pub fn namespace(self) -> Namespace {
        let fields = NamespaceFields {
            model: self.0.to_owned(),
            weights: String::new(),
            dtype: "bytes".to_owned(),
            layout: "page_first_direct".to_owned(),
            page_tokens: 16,
            shape: PageShape::new(self.1).unwrap(),
            tp: Rank::ALONE,
            pp: Rank::ALONE,
            cp: Rank::ALONE,
            pool: "kv".to_owned(),
            extra: BTreeMap::new(),
        };
        Namespace::new(fields).unwrap()
    }

    pub fn fingerprint(self) -> String {
        self.namespace().fingerprint().to_string()
    }

    /// The parts of a page.
    pub fn content(self, key: &PageKey) -> Vec<Vec<u8>> {
        let byte = |part: usize, at: usize| {
            let key = key.as_bytes()[(at + 7 * part) % 32];
            key ^ u8::try_from(at / 32 % 251).unwrap()
        };
        let parts = self.1.iter().enumerate();
        let mut parts: Vec<Vec<u8>> = parts
            .map(|(part, &bytes)| (0..bytes as usize).map(|at| byte(part, at)).collect())
            .collect();
        if self == SMOOTH {
            // Values in bf16 with exponents of eight neighbours.
            for [_, high] in parts.iter_mut().flat_map(|part| part.as_chunks_mut().0) {
                *high = *high & 0x83 | 0x3c;
            }
        }
        parts
    }
}

impl Home {
    /// Works on the store and closes it in order.
    pub fn with<T>(&self, work: impl FnOnce(&Store) -> T) -> T {
        let store = self.open();
        let value = work(&store);
        store.close().unwrap();
        value
    }

    /// The pages that the store has. Their bytes must be right.
    #[track_caller]
    pub fn having(&self, model: Model, keys: &[PageKey]) -> usize {
        self.with(|store| {
            let id = store.namespace(&model.namespace()).unwrap();
            let has = |key: &&PageKey| has(store, id, model, key);
            keys.iter().filter(has).count()
        })
    }

    /// Every live page: its model, key, parent and depth.
    pub fn pages(&self) -> Vec<(String, PageKey, Option<String>, u32)> {
        let survey = Survey::new(&self.path, &SurveyOptions::default()).unwrap();
        let mut pages: Vec<_> = survey
            .live()
            .map(|page| {
                let namespace = survey.namespaces[page.namespace].record.as_ref().unwrap();
                let parent = page.parent.map(|parent| parent.to_string());
                let model = namespace.fields().model.clone();
                (model, page.key, parent, page.depth)
            })
            .collect();
        pages.sort();
        pages
    }

    /// Exports the whole store; the archive.
    #[track_caller]
    pub fn export(&self, name: &str, options: &[&str]) -> PathBuf {
        let file = self.beside(name);
        self.report("export", &[&[text(&file)], options].concat(), 0);
        file
    }
}

fn has(store: &Store, id: NamespaceId, model: Model, key: &PageKey) -> bool {
    let expected = model.content(key);
    let mut parts: Vec<Vec<u8>> = expected.iter().map(|part| vec![0xee; part.len()]).collect();
    let mut slices: Vec<IoSliceMut<'_>> =
        parts.iter_mut().map(|part| IoSliceMut::new(part)).collect();
    let mut pages = [GetPage {
        key: *key,
        parts: &mut slices,
    }];
    let hit = store.get(id, &mut pages, None)[0].is_hit();
    assert!(!hit || parts == expected, "wrong bytes for {key}");
    hit
}

/// Stores the pages of a chain from page `from` on, one call each.
#[track_caller]
pub fn put_from(store: &Store, model: Model, keys: &[PageKey], from: usize) {
    for (depth, key) in keys.iter().enumerate().skip(from) {
        let parent = depth.checked_sub(1).map(|before| keys[before]);
        put_page(store, model, key, parent, depth);
    }
}

/// Stores a page as the successor of any other.
#[track_caller]
pub fn put_after(store: &Store, model: Model, key: &PageKey, parent: &PageKey) {
    put_page(store, model, key, Some(*parent), 1);
}

#[track_caller]
fn put_page(store: &Store, model: Model, key: &PageKey, parent: Option<PageKey>, depth: usize) {
    let id = store.namespace(&model.namespace()).unwrap();
    let parts = model.content(key);
    let parts: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
    let page = PutPage {
        key: *key,
        parent,
        depth: u32::try_from(depth).unwrap(),
        parts: &parts,
    };
    let options = PutOptions::waiting(Duration::from_secs(120));
    assert_eq!(store.put(id, &[page], options), [PutStatus::Stored]);
}

#[track_caller]
pub fn put(store: &Store, model: Model, keys: &[PageKey]) {
    put_from(store, model, keys, 0);
}

/// The structures of an archive, each with its offset.
pub fn items(archive: &Path) -> Vec<(u64, ArchiveItem)> {
    let file = File::open(archive).unwrap();
    let mut reader = ArchiveReader::new();
    let mut items = Vec::new();
    while !reader.is_over() {
        let offset = reader.offset();
        let mut block = [0; BLOCK_BYTES];
        file.read_exact_at(&mut block, offset).unwrap();
        items.push((offset, reader.item(&block).unwrap()));
    }
    assert_eq!(reader.offset(), file.metadata().unwrap().len());
    items
}

/// The pages of an archive, in its order.
pub fn archived(archive: &Path) -> Vec<ArchivedPage> {
    let items = items(archive).into_iter();
    let pages = items.filter_map(|(_, item)| match item {
        ArchiveItem::Pages(pages) => Some(pages),
        _ => None,
    });
    pages.flatten().collect()
}
