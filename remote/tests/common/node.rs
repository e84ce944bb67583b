//! A node with one remote that the test controls.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{IoSlice, IoSliceMut};
use std::ops::{ControlFlow, Range};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use larder_engine::{
    CodecChoice, CreateOptions, GetPage, OpenOptions, PageStore, PutOptions, PutPage, Store, create,
};
use larder_format::{Fingerprint, Namespace, PageKey, PageShape};
use larder_remote::agent::{Admission, Agent, AgentOptions, CONNECTIONS_MAX};
use larder_remote::{Buffer, Listed, Published, Remote, RemoteError, RunName, Unreadable};
use larder_store::beneath::Beneath;

use super::member::{PATIENCE, RUN_PAGES};
use super::{namespace, object, payload, run_of, trust};

pub type Objects = Arc<Mutex<BTreeMap<RunName, Vec<u8>>>>;

/// Objects in memory whose requests are watched.
#[derive(Clone, Default)]
pub struct Watched {
    pub objects: Objects,
    /// The setting of the codec.
    pub encodes: bool,
    /// Listed behind the objects.
    pub beside: Vec<Listed>,
    /// Fetches: the run, and the most bytes.
    pub fetched: Arc<Mutex<Vec<(RunName, usize)>>>,
    /// Runs whose use was marked.
    pub touched: Arc<Mutex<Vec<RunName>>>,
    /// Fetches fail for this reason.
    pub fails: Arc<Mutex<Option<RemoteError>>>,
    /// The remote itself does not answer, for this reason.
    pub is_down: Arc<Mutex<Option<RemoteError>>>,
    /// Questions and fetches fail for these runs alone.
    pub broken: Arc<Mutex<BTreeSet<RunName>>>,
    /// The next fetch takes so long.
    pub slow: Arc<Mutex<Duration>>,
    /// Publications and marks of use are refused for this reason.
    pub refuses: Option<RemoteError>,
    /// Listings and fetches wait for it.
    pub gate: Arc<Mutex<()>>,
}

impl Watched {
    /// With the runs of a chain.
    pub fn with(model: &str, pages: &[PageKey]) -> Watched {
        let runs = 0..pages.len() / RUN_PAGES;
        let made = runs.map(|run| {
            let pages = run_of(pages, run, RUN_PAGES);
            object(&namespace(model), &pages, &trust(1))
        });
        let watched = Watched::default();
        watched.objects.lock().unwrap().extend(made);
        watched
    }

    fn check(&self, run: &RunName) -> Result<(), RemoteError> {
        match self.broken.lock().unwrap().contains(run) {
            true => Err(RemoteError::Failed(format!("{run}: a bad sector"))),
            false => Ok(()),
        }
    }

    pub fn fetched(&self) -> Vec<(RunName, usize)> {
        self.fetched.lock().unwrap().clone()
    }
}

impl Remote for Watched {
    fn look(&self, _: Instant) -> Result<(), RemoteError> {
        match &*self.is_down.lock().unwrap() {
            Some(reason) => Err(reason.clone()),
            None => Ok(()),
        }
    }

    fn mark(&self, _: Instant) -> Result<(), RemoteError> {
        Ok(())
    }

    fn codec(&self, _: Instant) -> Result<CodecChoice, RemoteError> {
        Ok(match self.encodes {
            true => CodecChoice::Bf16,
            false => CodecChoice::Off,
        })
    }

    fn now_unix_s(&self, _: Instant) -> Result<u64, RemoteError> {
        Ok(0)
    }

    fn holds(&self, run: &RunName, _: Instant) -> Result<bool, RemoteError> {
        self.check(run)?;
        Ok(self.objects.lock().unwrap().contains_key(run))
    }

    fn fetch(
        &self,
        run: &RunName,
        bytes_max: usize,
        deadline: Instant,
    ) -> Result<Option<Buffer>, RemoteError> {
        self.fetched.lock().unwrap().push((*run, bytes_max));
        let took = std::mem::take(&mut *self.slow.lock().unwrap());
        let left = deadline.saturating_duration_since(Instant::now());
        std::thread::sleep(took.min(left));
        if took > left {
            return Err(RemoteError::Deadline);
        }
        drop(self.gate.lock().unwrap());
        self.check(run)?;
        if let Some(reason) = &*self.fails.lock().unwrap() {
            return Err(reason.clone());
        }
        let objects = self.objects.lock().unwrap();
        let object = objects.get(run).filter(|object| object.len() <= bytes_max);
        object.map(|object| Buffer::copy_of(object)).transpose()
    }

    fn publish(&self, run: &RunName, object: Buffer, _: Instant) -> Result<Published, RemoteError> {
        if let Some(reason) = &self.refuses {
            return Err(reason.clone());
        }
        self.objects.lock().unwrap().insert(*run, object.to_vec());
        Ok(Published::Created)
    }

    fn touch(&self, run: &RunName, _: Instant) -> Result<(), RemoteError> {
        if let Some(reason) = &self.refuses {
            return Err(reason.clone());
        }
        self.touched.lock().unwrap().push(*run);
        Ok(())
    }

    fn list_marks(
        &self,
        _: &mut dyn FnMut() -> ControlFlow<()>,
        _: &mut dyn FnMut(Result<Listed, Unreadable>) -> ControlFlow<()>,
        _: Duration,
    ) -> Result<(), RemoteError> {
        unreachable!("agents list no marks")
    }

    fn remove(&self, run: &RunName, _: Instant) -> Result<(), RemoteError> {
        self.objects.lock().unwrap().remove(run);
        Ok(())
    }

    fn list(
        &self,
        _: Option<Fingerprint>,
        part: &mut dyn FnMut() -> ControlFlow<()>,
        each: &mut dyn FnMut(Result<Listed, Unreadable>) -> ControlFlow<()>,
        _: Duration,
    ) -> Result<(), RemoteError> {
        let listed = |(run, object): (&RunName, &Vec<u8>)| Listed {
            run: *run,
            bytes: object.len() as u64,
            created_unix_s: 0,
        };
        if part().is_break() {
            return Ok(());
        }
        let mut all: Vec<Listed> = self.objects.lock().unwrap().iter().map(listed).collect();
        drop(self.gate.lock().unwrap());
        all.extend(&self.beside);
        let _ = all.into_iter().map(Ok).try_for_each(each);
        Ok(())
    }
}

/// An agent that publishes each run at once, and lists the remote often.
pub fn options() -> AgentOptions {
    AgentOptions {
        place: "a test".to_owned(),
        trust: trust(1),
        run_tokens: 16 * u32::try_from(RUN_PAGES).unwrap(),
        admission: Admission::Through,
        bytes_per_day: 1 << 40,
        bytes_per_second: 1 << 40,
        requests_per_hour: 1 << 40,
        connections: CONNECTIONS_MAX,
        patience: Duration::from_secs(10),
        timeout: Duration::from_secs(1),
        prefill_rate: None,
        pause: Duration::from_millis(20),
        refresh: Duration::from_millis(20),
        delay: Duration::from_millis(1),
    }
}

/// No other listing than that at the start, and no second attempt after a failure.
pub fn listed_once(options: &mut AgentOptions) {
    options.refresh = Duration::from_hours(1);
    options.pause = options.refresh;
}

/// The same run with other bytes and right checksums, as an attacker without the key makes it.
pub fn forged(run: &RunName, object: &[u8]) -> Vec<u8> {
    let mut object = object.to_vec();
    let opened = larder_remote::run::open(&mut object, run, &trust(1));
    let pages: Vec<_> = opened.pages.iter().map(|opened| opened.page).collect();
    let pages = pages.iter().map(|page| larder_remote::RunPage {
        key: page.key,
        parent: page.parent.map(|parent| parent.padded()),
        depth: page.depth,
    });
    let pages: Vec<_> = pages.collect();
    let mut draft = larder_remote::Draft::new(namespace("model"), pages, trust(2)).unwrap();
    draft
        .payloads()
        .into_iter()
        .for_each(|page| page[..5000].fill(0x66));
    let store = larder_format::StoreId::from_bytes([9; 16]);
    // A torn object has no pages.
    let object = draft.finish(store, 1);
    object.map_or_else(|_| Vec::new(), |object| object.to_vec())
}

pub struct Node {
    pub agent: Arc<Agent>,
    pub store: Arc<Store>,
    pub id: larder_engine::NamespaceId,
    _directory: tempfile::TempDir,
}

impl Node {
    pub fn new(remote: Box<dyn Remote>) -> Node {
        Node::with(remote, |_| {})
    }

    /// A node that may publish so many bytes a day. All attempts at a run take so long that its
    /// pages are written meanwhile.
    pub fn within(bytes_per_day: u64, remote: Box<dyn Remote>) -> Node {
        Node::with(remote, |options| {
            options.bytes_per_day = bytes_per_day;
            options.delay = Duration::from_millis(200);
        })
    }

    /// A node with changed options.
    pub fn with(remote: Box<dyn Remote>, change: impl FnOnce(&mut AgentOptions)) -> Node {
        let directory = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let path = directory.path().join("store");
        let size = CreateOptions::new(128 << 20).with(|o| o.segment_size = Some(16 << 20));
        create(&path, &size).unwrap();
        let mut options = options();
        change(&mut options);
        let agent = Agent::new(remote, options);
        let store = OpenOptions::default().over(agent.clone());
        let store = Arc::new(Store::open(&path, store).unwrap());
        let id = store.namespace(&namespace("model")).unwrap();
        let of_agent: Arc<dyn PageStore> = store.clone();
        agent.start(&of_agent).unwrap();
        Node {
            agent,
            store,
            id,
            _directory: directory,
        }
    }

    pub fn put(&self, keys: &[PageKey]) {
        self.put_of(&namespace("model"), keys, payload);
    }

    /// Puts a chain of a namespace, with pages of this content: parts with their padding.
    pub fn put_of(
        &self,
        namespace: &Namespace,
        keys: &[PageKey],
        content: impl Fn(&PageKey) -> Vec<u8>,
    ) {
        let contents: Vec<Vec<u8>> = keys.iter().map(content).collect();
        let parts: Vec<Vec<IoSlice<'_>>> = contents
            .iter()
            .map(|page| {
                let parts = parts_of(namespace.shape()).into_iter();
                parts.map(|part| IoSlice::new(&page[part])).collect()
            })
            .collect();
        let pages: Vec<PutPage<'_>> = (0..keys.len())
            .map(|at| PutPage {
                key: keys[at],
                parent: at.checked_sub(1).map(|before| keys[before]),
                depth: u32::try_from(at).unwrap(),
                parts: &parts[at],
            })
            .collect();
        let id = self.store.namespace(namespace).unwrap();
        self.store.put(id, &pages, PutOptions::waiting(PATIENCE));
    }

    /// Waits for the publication of so many runs in all, these among them. An attempt fails while
    /// the disk still writes the pages of its run, and each use of a page begins new attempts.
    #[track_caller]
    pub fn publishes(&self, keys: &[PageKey], runs: u64) {
        self.eventually(|| self.read(keys) == keys.len() && self.count("published_runs") == runs);
    }

    /// Looks pages up and reads those found. Returns the number of hits.
    pub fn read(&self, keys: &[PageKey]) -> usize {
        self.read_of(&namespace("model"), keys, payload)
    }

    /// The same for a chain of a namespace, with pages of this content.
    pub fn read_of(
        &self,
        namespace: &Namespace,
        keys: &[PageKey],
        content: impl Fn(&PageKey) -> Vec<u8>,
    ) -> usize {
        let id = self.store.namespace(namespace).unwrap();
        let found = self.store.longest_prefix(id, keys);
        let places = parts_of(namespace.shape());
        let mut memory: Vec<Vec<Vec<u8>>> = (0..found)
            .map(|_| places.iter().map(|part| vec![0xee; part.len()]).collect())
            .collect();
        let mut parts: Vec<Vec<IoSliceMut<'_>>> = memory
            .iter_mut()
            .map(|page| page.iter_mut().map(|part| IoSliceMut::new(part)).collect())
            .collect();
        let mut pages: Vec<GetPage<'_, '_>> = keys
            .iter()
            .zip(&mut parts)
            .map(|(key, parts)| GetPage { key: *key, parts })
            .collect();
        let begin = Instant::now();
        let deadline = begin + Duration::from_secs(5);
        let statuses = self.store.get(id, &mut pages, Some(deadline));
        assert!(begin.elapsed() < PATIENCE);
        let hits = statuses
            .iter()
            .enumerate()
            .filter(|(_, status)| status.is_hit());
        let hits: Vec<usize> = hits.map(|(at, _)| at).collect();
        for at in &hits {
            let expected = content(&keys[*at]);
            let expected = places.iter().map(|part| &expected[part.clone()]);
            assert!(memory[*at].iter().eq(expected), "wrong bytes of page {at}");
        }
        hits.len()
    }

    pub fn count(&self, name: &str) -> u64 {
        self.agent.report().counts[name]
    }

    #[track_caller]
    pub fn eventually(&self, is_so: impl Fn() -> bool) {
        let until = Instant::now() + PATIENCE;
        while !is_so() {
            assert!(Instant::now() < until, "{:?}", self.agent.report());
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    pub fn close(&self) {
        let begin = Instant::now();
        self.agent.close();
        self.store.close().unwrap();
        assert!(begin.elapsed() < PATIENCE);
    }
}

/// The places of the parts of a page in its padded form.
fn parts_of(shape: &PageShape) -> Vec<Range<usize>> {
    let part = |part| {
        let start = usize::try_from(shape.part_offset(part)).unwrap();
        start..start + shape.part_bytes(part) as usize
    };
    (0..shape.parts()).map(part).collect()
}
