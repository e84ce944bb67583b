//! A program of another project: it uses the engine by its documentation, with the default
//! features. It proves that [`PageStore`] can be implemented outside the engine, and that a program
//! runs the same over such a store and over the engine's own.

mod memory_store;
mod policies;

use std::error::Error;
use std::io::{IoSlice, IoSliceMut};
use std::num::NonZeroUsize;
use std::path::Path;
use std::time::Duration;

use larder_engine::format::{Namespace, PageKey, PageShape, TokenUnits, page_keys};
use larder_engine::policy::PolicyMaker;
use larder_engine::{
    Class, CreateOptions, DiskKind, GetPage, Hint, OpenOptions, PageStore, PutFailure, PutOptions,
    PutPage, PutStatus, ReadOnlyVolume, Recall, Refusal, SharedReads, Store, StoreError,
    SyncPolicy,
};
use memory_store::MemoryStore;
use policies::{LeastUsed, Shallow};

type Outcome = Result<(), Box<dyn Error>>;

const SIZE: u64 = 128 << 20;
const PAGE_TOKENS: NonZeroUsize = NonZeroUsize::new(16).unwrap();

fn main() -> Outcome {
    let directory = std::env::temp_dir().join(format!("larder-outside-{}", std::process::id()));
    std::fs::create_dir(&directory)?;
    let outcome = run(&directory);
    std::fs::remove_dir_all(&directory)?;
    outcome
}

fn run(directory: &Path) -> Outcome {
    serve(&MemoryStore::new(16))?;
    let path = directory.join("store");
    let options = OpenOptions::default().with(|o| {
        o.disk = DiskKind::Threads;
        o.sync = SyncPolicy::Relaxed;
        o.lease = Duration::from_millis(1);
    });
    let size = CreateOptions::new(SIZE);
    let store = Store::open_or_create(&path, &size, options.clone())?;
    serve(&store)?;
    store.close()?;
    let shared = options.clone();
    share(&path, shared.with(|o| o.shared_reads = SharedReads::Off))?;
    choose(&path, options)
}

fn namespace(model: &str) -> Result<Namespace, Box<dyn Error>> {
    let shape = PageShape::new(&[4096, 1000])?;
    let namespace = Namespace::builder(model, "1", 16, shape);
    Ok(namespace.elements("f32", "parts").pool("kv").build()?)
}

/// The pages of a chain behind the first `from`, with their parts.
fn pages<'a>(keys: &[PageKey], from: usize, parts: &'a [Vec<IoSlice<'a>>]) -> Vec<PutPage<'a>> {
    let pages = parts.iter().zip(from..);
    let page = |(parts, at): (&'a Vec<IoSlice<'a>>, usize)| PutPage {
        key: keys[at],
        parent: at.checked_sub(1).map(|before| keys[before]),
        depth: at as u32,
        parts,
    };
    pages.map(page).collect()
}

/// The calls of an engine, for a prompt of 8 pages and a part of a ninth.
fn serve(store: &dyn PageStore) -> Outcome {
    let id = store.namespace(&namespace("outside")?)?;
    let prompt: Vec<u64> = (0..140).collect();
    let keys = page_keys(&prompt, PAGE_TOKENS, None, TokenUnits::Single);
    assert_eq!((keys.len(), store.longest_prefix(id, &keys)), (8, 0));

    let computed: Vec<_> = (0..8)
        .map(|page| [vec![0; 4096], vec![page; 1000]])
        .collect();
    let parts = computed
        .iter()
        .map(|page| page.iter().map(|part| IoSlice::new(part)).collect());
    let parts: Vec<Vec<IoSlice<'_>>> = parts.collect();
    let (head, tail) = (pages(&keys, 0, &parts[..3]), pages(&keys, 3, &parts[3..]));
    let wait = PutOptions::waiting(Duration::from_secs(1));
    let recall = Recall::default();
    assert!(recall.recall());
    let given_up = store.put_recallable(id, &head, wait, Some(&recall));
    assert_eq!(given_up, [PutStatus::Failed(PutFailure::Write); 3]);
    assert_eq!(store.longest_prefix(id, &keys), 0);
    assert_eq!(store.put(id, &head, wait), [PutStatus::Stored; 3]);
    assert_eq!(store.put(id, &tail, wait), [PutStatus::Stored; 5]);
    let again = store.put(id, &tail, wait);
    assert!(again.iter().all(|status| *status == PutStatus::Duplicate));

    let mut found = vec![[vec![0; 4096], vec![0; 1000]]; 8];
    let slots = found
        .iter_mut()
        .map(|page| page.iter_mut().map(|part| IoSliceMut::new(part)).collect());
    let mut slots: Vec<Vec<IoSliceMut<'_>>> = slots.collect();
    let asked = keys.iter().zip(&mut slots);
    let mut asked: Vec<_> = asked
        .map(|(key, parts)| GetPage { key: *key, parts })
        .collect();
    assert!(
        store
            .get(id, &mut asked, None)
            .iter()
            .all(|status| status.is_hit())
    );
    assert_eq!(found, computed);

    store.touch(id, &keys, Hint::default());
    assert_eq!(store.delete(id, &keys[3..])?, 5);
    assert_eq!(store.contains(id, &keys[2..4]), [true, false]);
    assert_eq!(store.longest_prefix(id, &keys), 3);
    let stats = store.stats();
    assert_eq!((stats.pages, refusing(&stats.read_only_volumes)), (3, None));
    assert_eq!(store.clear_namespace(id)?, 3);
    store.flush()?;
    Ok(())
}

/// Twice as many pages as the store keeps, under this project's policies.
fn choose(path: &Path, options: OpenOptions) -> Outcome {
    let options = options.with(|o| {
        o.eviction = Some(PolicyMaker::eviction(LeastUsed::default));
        o.admission = Some(PolicyMaker::admission(|| Shallow(8)));
    });
    let store = Store::open(path, options)?;
    let shape = PageShape::new(&[1 << 20])?;
    let namespace = Namespace::builder("policies", "1", 16, shape).build()?;
    let id = store.namespace(&namespace)?;
    let page = vec![0; 1 << 20];
    let parts = vec![vec![IoSlice::new(&page)]; 9];
    let wait = PutOptions::waiting(Duration::from_secs(60));
    let tool = wait.hinting(Hint::new(Class::TOOL).session(b"agent 7"));
    let chain = |seed: u64| {
        let tokens: Vec<u64> = (0..144).map(|token| seed << 32 | token).collect();
        page_keys(&tokens, PAGE_TOKENS, None, TokenUnits::Single)
    };
    let used = chain(0);
    for seed in 0..24 {
        let statuses = store.put(id, &pages(&chain(seed), 0, &parts), tool);
        assert!(
            statuses[..8].iter().all(|status| status.is_present()),
            "{statuses:?}"
        );
        assert_eq!(statuses[8], PutStatus::Refused(Refusal::NotAdmitted));
        // As in the policy: a system prompt stays, however often others are used.
        store.touch(id, &used, Hint::new(Class::SYSTEM).priority(3));
    }
    let stats = store.stats();
    assert!(stats.evicted > 0 && stats.reclaimed > 0, "{stats:?}");
    // Under the default it would have left long ago, if nothing had touched it.
    assert_eq!(store.longest_prefix(id, &used), 8);
    store.close()?;
    Ok(())
}

/// The first volume that takes no writes, for a log line.
fn refusing(volumes: &[ReadOnlyVolume]) -> Option<String> {
    let first = volumes.first()?;
    Some(format!("{}: {}", first.path.display(), first.reason))
}

/// One store, two handles that attach to it.
fn share(path: &Path, options: OpenOptions) -> Outcome {
    let owner = Store::attach(path, options.clone())?;
    let client = Store::attach(path, options.clone())?;
    serve(&client)?;
    assert_eq!(owner.report()?.clients, 1);
    assert!(matches!(
        Store::open(path, options),
        Err(StoreError::Locked { .. })
    ));
    client.close()?;
    owner.close()?;
    Ok(())
}
