//! A program of another project: it uses the engine by its documentation, with the default
//! features. It proves that [`PageStore`] can be implemented outside the engine, and that a program
//! runs the same over such a store and over the engine's own.

mod memory_store;
mod policies;

use std::error::Error;
use std::path::Path;
use std::time::Duration;

use larder_engine::format::{Namespace, PageShape};
use larder_engine::policy::PolicyMaker;
use larder_engine::{
    Chain, Class, CreateOptions, DiskKind, Hint, NamespaceHandle, OpenOptions, PageStore,
    PutFailure, PutOptions, PutStatus, ReadOnlyVolume, Recall, Refusal, SharedReads, Store,
    StoreError, SyncPolicy,
};
use memory_store::MemoryStore;
use policies::{LeastUsed, Shallow};

type Outcome = Result<(), Box<dyn Error>>;

const SIZE: u64 = 128 << 20;

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

/// The calls of an engine, for a prompt of 8 pages and a part of a ninth.
fn serve(store: &dyn PageStore) -> Outcome {
    let pages = NamespaceHandle::new(store, namespace("outside")?)?;
    let prompt: Vec<u64> = (0..140).collect();
    let chain = pages.chain(&prompt);
    assert_eq!((chain.keys().len(), pages.longest_prefix(&chain)), (8, 0));

    let mut computed = pages.buffers(8)?;
    for (page, number) in computed.iter_mut().zip(0_u8..) {
        page.parts_mut()[1].fill(number);
    }
    let parts: Vec<_> = computed.iter().map(|page| page.parts()).collect();
    let (head, tail) = parts.split_at(3);
    let wait = PutOptions::waiting(Duration::from_secs(1));
    let recall = Recall::default();
    let slots = head.iter().map(|page| &page[..]);
    assert!(recall.recall());
    let given_up = store.put_until_recalled(pages.id(), &chain.pages(slots), wait, &recall);
    assert_eq!(given_up, [PutStatus::Failed(PutFailure::Write); 3]);
    assert_eq!(pages.longest_prefix(&chain), 0);
    assert_eq!(pages.append(&chain, head, wait), [PutStatus::Stored; 3]);
    let rest = chain.skip(3);
    assert_eq!(rest.keys(), &chain.keys()[3..]);
    assert_eq!(pages.append(&rest, tail, wait), [PutStatus::Stored; 5]);
    let again = pages.append(&rest, tail, wait);
    assert!(again.iter().all(|status| *status == PutStatus::Duplicate));

    let mut found = pages.buffers(8)?;
    let mut slots: Vec<_> = found.iter_mut().map(|page| page.parts_mut()).collect();
    assert_eq!(pages.read_prefix(&chain, &mut slots, None), 8);
    for (page, number) in found.iter().zip(0_u8..) {
        assert_eq!(page.part(1), Some(&[number; 1000][..]));
    }
    let lent = pages.get_lent(&chain, None);
    assert!(
        lent.iter()
            .all(|page| page.as_ref().is_ok_and(|page| page.part(2).is_none()))
    );

    pages.touch(&chain, Hint::default());
    assert_eq!(pages.delete(&rest)?, 5);
    let unknown = Chain::after(None, 0, rest.keys().to_vec());
    assert_eq!(pages.longest_prefix(&unknown), 0);
    let head = Chain::new(chain.keys()[..3].to_vec());
    assert_eq!(pages.longest_prefix(&head), 3);
    let stats = store.stats();
    assert_eq!((stats.pages, refusing(&stats.read_only_volumes)), (3, None));
    assert_eq!(store.clear_namespace(pages.id())?, 3);
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
    let pages = NamespaceHandle::new(&store, namespace)?;
    let buffers = pages.buffers(9)?;
    let parts: Vec<_> = buffers.iter().map(|page| page.parts()).collect();
    let wait = PutOptions::waiting(Duration::from_secs(60));
    let tool = wait.hinting(Hint::new(Class::TOOL).session(b"agent 7"));
    let chain =
        |seed: u64| pages.chain(&(0..144).map(|token| seed << 32 | token).collect::<Vec<_>>());
    let used = chain(0);
    for seed in 0..24 {
        let statuses = pages.append(&chain(seed), &parts, tool);
        assert!(
            statuses[..8].iter().all(|status| status.is_present()),
            "{statuses:?}"
        );
        assert_eq!(statuses[8], PutStatus::Refused(Refusal::NotAdmitted));
        // As in the policy: a system prompt stays, however often others are used.
        pages.touch(&used, Hint::new(Class::SYSTEM).priority(3));
    }
    let stats = store.stats();
    assert!(stats.evicted > 0 && stats.reclaimed > 0, "{stats:?}");
    // Under the default it would have left long ago, if nothing had touched it.
    assert_eq!(pages.longest_prefix(&used), 8);
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
