//! The options of an open.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

use larder_engine::format::{Namespace, NamespaceError};
use larder_engine::{
    AlignedBuf, CreateOptions, OpenOptions, PageStore, PutOptions, Store, StoreError, create,
};
use larder_kernels::{Device, HostDevice, HostMemory, KvShape, L1Pool, Layout, pool_bytes};
use larder_remote::l4::{L4, L4Config};
use larder_store::fit::page_bytes_on_disk;
use larder_sync::Mutex;

use super::PrefixCache;
use super::error::OpenError;
use super::shared::{Numbering, Poller, Shared, SharedComponent};
use crate::cache::{Cache, CacheError, ComponentPools, Components, Parts, Section};
use crate::config::{Config, L3Write, TailConfig, TailKind};
use crate::l3::{HeadsL3, L3, StoreL3};
use crate::model::{Component, Model, Role};
use crate::ranks::{Ranks, RanksError};

/// The layout of L2, but of pages whose heads are stored in groups.
const L2_LAYOUT: Layout = Layout::PageFirstDirect;

/// How long a write to L3 waits for room in the store.
const PUT_WAIT: Duration = Duration::from_secs(1);

/// Where L1 is.
pub enum L1Memory {
    /// In memory of this process, allocated by the cache. Rows are slices.
    Host(HostDevice),
    /// In a pool of this device: of a GPU, or tensors of the engine. `l1_pages` pages plus one for
    /// padding (page 0).
    Pool(Arc<dyn Device>, L1Pool),
}

/// Options of a prefix cache.
#[non_exhaustive]
pub struct PrefixOptions {
    /// The model. Its weights are those at the start: [`PrefixCache::new_weights`] replaces them.
    pub model: Model,
    /// Sizes and policies. Default: those of [`Config::new`], but prefetches and loads from one
    /// page on.
    pub config: Config,
    /// Where L1 is. Default (`None`): in memory of this process.
    pub l1: Option<L1Memory>,
    /// Groups of equally many heads that the whole model is stored in. Ranks find the pages of
    /// ranks that hold other heads, if all hold whole groups and give the same number: a multiple
    /// of all numbers of ranks, at most the heads. L2 has the order `page_head` then, and each
    /// group is read and written apart. Default (`None`): the pages of a rank are for ranks that
    /// hold the same heads.
    pub head_groups: Option<u32>,
    /// The other ranks of the engine: all make the same calls, and find the same pages. No thread
    /// polls then. Windows and states are not supported. Default: none.
    pub ranks: Option<Box<dyn Ranks>>,
    /// Pools of the device of `l1` for the components of the model, one for each section. Default
    /// (empty): allocated by the cache.
    pub component_l1: Vec<Vec<L1Pool>>,
    /// How the store is opened. With the key of an encrypted store ([`OpenOptions::wrapping`]) a
    /// store that is created is encrypted.
    pub store: OpenOptions,
    /// The remotes beneath the store. Default: none.
    pub l4: L4Config,
    /// Whether a thread polls the cache. Without it, the caller calls [`PrefixCache::poll`] in its
    /// loop, also while it is idle. With other ranks there is no thread. Default: true.
    pub polls_itself: bool,
    /// How long [`PrefixCache::begin`] waits for pages of L3 and for room in L1. Default: 10 s.
    pub begin_wait: Duration,
    /// How long [`PrefixCache::close`] waits for copies and writes. Default: 30 s.
    pub close_wait: Duration,
}

impl PrefixOptions {
    /// The defaults, for pools of these sizes in pages. A window of the model gets as many pages of
    /// its own; states get one block for 16 pages, and at least 8 ([`Config::tails`], in the order
    /// of the windows and states among the components).
    #[must_use]
    pub fn new(model: &Model, l1_pages: u32, l2_pages: u32) -> PrefixOptions {
        let (page_tokens, page_bytes) = (model.page_tokens(), model.shape().page_bytes());
        let mut config = Config::new(page_tokens, page_bytes.into(), l1_pages, l2_pages);
        config.load_threshold_tokens = 1;
        config.prefetch.threshold_tokens = 1;
        let blocks = |pages: u32| (pages / 16).max(8);
        let tail = |component: &Component| match component.role {
            Role::Follower => None,
            Role::Window { tokens } => Some(TailConfig {
                kind: TailKind::Window { tokens },
                l1_pages,
                l2_pages,
            }),
            Role::State => Some(TailConfig {
                kind: TailKind::State { every: 1 },
                l1_pages: blocks(l1_pages),
                l2_pages: blocks(l2_pages),
            }),
        };
        config.tails = model.components().iter().filter_map(tail).collect();
        PrefixOptions {
            model: model.clone(),
            config,
            l1: None,
            head_groups: None,
            ranks: None,
            component_l1: Vec::new(),
            store: OpenOptions::default(),
            l4: L4Config::default(),
            polls_itself: true,
            begin_wait: Duration::from_secs(10),
            close_wait: Duration::from_secs(30),
        }
    }

    /// These options, changed by `change`.
    #[must_use]
    pub fn with(mut self, change: impl FnOnce(&mut Self)) -> PrefixOptions {
        change(&mut self);
        self
    }

    /// A cache over the store at `path`, shared with other processes. Creates a store of
    /// `store_bytes` bytes first if there is none, with segments that suit the pages of the model.
    /// For a store that is there, `store_bytes` does not matter.
    ///
    /// # Errors
    /// The store, which holds no page of the model if it is too small or has small segments. The
    /// memory, the names or the configuration.
    pub fn open(self, path: &Path, store_bytes: u64) -> Result<PrefixCache, OpenError> {
        let mut components = self.model.components().iter();
        let tail = components.find(|of| of.role != Role::Follower);
        if let Some(component) = tail.filter(|_| !self.l4.urls.is_empty()) {
            let name = component.name.clone();
            return Err(OpenError::RemoteBeneath { name });
        }
        let namespaces = self.namespaces()?;
        let shapes = namespaces.iter().map(Namespace::shape);
        let page_bytes = shapes.map(page_bytes_on_disk).max();
        let size = CreateOptions::new(store_bytes).with(|o| {
            o.page_bytes = page_bytes;
            o.wrapping.clone_from(&self.store.wrapping);
        });
        match create(path, &size) {
            Ok(_) | Err(StoreError::Exists(_) | StoreError::Locked { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let l4 = self.l4.connect()?;
        let options = match &l4 {
            Some(l4) => l4.beneath(self.store.clone()),
            None => self.store.clone(),
        };
        let store = Arc::new(Store::attach(path, options)?);
        let opened = self.over_attached(&store, path, &namespaces, l4);
        if opened.is_err() {
            // The first error says more than a second.
            let _ = store.close();
        }
        opened
    }

    fn over_attached(
        self,
        store: &Arc<Store>,
        path: &Path,
        namespaces: &[Namespace],
        l4: Option<L4>,
    ) -> Result<PrefixCache, OpenError> {
        let shared: Arc<dyn PageStore> = store.clone();
        let puts = PutOptions::waiting(PUT_WAIT);
        let mut l3s: Vec<Arc<dyn L3>> = Vec::new();
        let components = self.model.components().len();
        let (mut rest, components) = namespaces.split_at(namespaces.len() - components);
        if self.head_groups.is_some() {
            let heads = HeadsL3::new(&shared, self.namespace()?, rest, puts)?;
            l3s.push(Arc::new(heads));
            rest = &[];
        }
        for namespace in rest.iter().chain(components) {
            let l3 = StoreL3::new(shared.clone(), namespace)?;
            l3s.push(Arc::new(l3.with_puts(puts)));
        }
        if let Some(l4) = &l4 {
            l4.start(store, path).map_err(OpenError::Thread)?;
        }
        let stored = stored(path, namespaces);
        self.over_store(l3s, stored, Some(store.clone()), l4)
    }

    /// A cache over this L3, or over none. Over none, `config.l3_write` counts as `Never`. For a
    /// model with components, [`PrefixOptions::over_each`].
    ///
    /// # Errors
    /// The memory or the configuration.
    pub fn over(self, l3: Option<Arc<dyn L3>>) -> Result<PrefixCache, OpenError> {
        self.over_store(l3.into_iter().collect(), None, None, None)
    }

    /// A cache over these L3, one for the model and then one for each of its components; or over
    /// none.
    ///
    /// # Errors
    /// The memory or the configuration; or a component has no L3.
    pub fn over_each(self, l3s: Vec<Arc<dyn L3>>) -> Result<PrefixCache, OpenError> {
        self.over_store(l3s, None, None, None)
    }

    /// The namespace of the model, without its weights: they are part of the keys of pages
    /// ([`PrefixCache::new_weights`]).
    ///
    /// # Errors
    /// Those of [`Model::namespace`].
    pub fn namespace(&self) -> Result<Namespace, NamespaceError> {
        self.unweighted().namespace(self.layout())
    }

    /// The layout of L2.
    fn layout(&self) -> Layout {
        self.head_groups.map_or(L2_LAYOUT, |_| Layout::PageHead)
    }

    fn unweighted(&self) -> Model {
        let mut model = self.model.clone();
        model.weights.clear();
        model
    }

    /// The namespaces of the model, one or one for each group of its heads, and then of each
    /// component; without weights.
    ///
    /// # Errors
    /// The heads are no whole groups. Or those of [`Model::namespace`].
    pub fn namespaces(&self) -> Result<Vec<Namespace>, OpenError> {
        let model = self.unweighted();
        let models = match self.head_groups {
            Some(groups) => model.head_groups(groups)?,
            None => vec![model.clone()],
        };
        let models = models.iter().map(|of| of.namespace(self.layout()));
        let components = model.components().iter();
        let components = components.map(|of| model.namespace_of(of, L2_LAYOUT));
        let all = models.chain(components).collect::<Result<_, _>>();
        Ok(all?)
    }

    fn over_store(
        mut self,
        l3s: Vec<Arc<dyn L3>>,
        stored: Option<u64>,
        store: Option<Arc<Store>>,
        l4: Option<L4>,
    ) -> Result<PrefixCache, OpenError> {
        let namespace = self.namespace().ok().map(|of| of.fingerprint());
        let (shape, layout, mut config) = (self.model.shape(), self.layout(), self.config.clone());
        let mut l3s = l3s.into_iter();
        let l3 = l3s.next();
        if l3.is_none() {
            // Each order to write would fail, and count as a failure.
            config.l3_write = L3Write::Never;
        }
        config.check().map_err(CacheError::from)?;
        if let Some(ranks) = &mut self.ranks {
            let own = self.model.components().iter();
            let tail = own.clone().find(|of| of.role != Role::Follower);
            if let Some(component) = tail {
                let name = component.name.clone();
                return Err(OpenError::RanksBeside { name });
            }
            let has_writer = agree(&mut **ranks, &config, stored)?;
            config.writes_l3 &= !has_writer || ranks.rank() == 0;
        }
        let (is_on_host, device, l1) = match self.l1 {
            Some(L1Memory::Pool(device, l1)) => (false, device, l1),
            Some(L1Memory::Host(device)) => host_l1(device, &shape, &config)?,
            None => host_l1(HostDevice::new()?, &shape, &config)?,
        };
        let l2_pages = config.l2_pages + 1;
        let memory = l2_memory(pool_bytes(&shape, l2_pages))?;
        let l2 = device.register(memory, layout, &shape, l2_pages)?;
        let given = ComponentPoolsOf {
            device: &*device,
            config: &config,
            given: self.component_l1,
            l3s: l3s.collect(),
        };
        let (components, shared_components) = given.of(self.model.components())?;
        let parts = Parts {
            device,
            l1: l1.clone(),
            l2,
            l3,
            ranks: self.ranks,
        };
        let mut cache = Cache::hybrid(config, parts, components)?;
        if cache.has_ranks() {
            cache.number_each_report();
        }
        cache.new_weights(&self.model.weights);
        let shared = Shared::new(cache, l1, is_on_host, shared_components, namespace);
        let shared = Arc::new(shared);
        let polls_itself = self.polls_itself && !shared.has_ranks();
        let poller = polls_itself.then(|| Poller::start(&shared));
        Ok(PrefixCache {
            poller: Mutex::new(poller.transpose().map_err(OpenError::Thread)?),
            shared,
            l4: Mutex::new(l4),
            store: Mutex::new(store),
            begin_wait: self.begin_wait,
            close_wait: self.close_wait,
        })
    }
}

/// A digest of a store and of the pages that a rank stores in it: equal for ranks that write the
/// same bytes to the same place. `None` if the place is not known.
fn stored(path: &Path, namespaces: &[Namespace]) -> Option<u64> {
    let file = std::fs::metadata(path).ok()?;
    let boot = std::fs::read("/proc/sys/kernel/random/boot_id").ok()?;
    let mut hasher = DefaultHasher::new();
    (file.dev(), file.ino(), boot).hash(&mut hasher);
    for namespace in namespaces {
        namespace.encode().hash(&mut hasher);
    }
    Some(hasher.finish())
}

/// Compares the configurations of all ranks. Returns whether all write the same bytes to the same
/// place: then rank 0 alone does.
fn agree(ranks: &mut dyn Ranks, config: &Config, stored: Option<u64>) -> Result<bool, CacheError> {
    let mut hasher = DefaultHasher::new();
    let mut config = config.clone();
    config.writes_l3 = true;
    format!("{config:?}").hash(&mut hasher);
    let (config, rank) = (hasher.finish(), u64::from(ranks.rank()));
    let stored = stored.unwrap_or(rank);
    let mut all = [config, !config, stored, !stored];
    ranks.min(&mut all)?;
    match all[0] == !all[1] {
        true => Ok(all[2] == !all[3]),
        false => Err(RanksError::Unlike.into()),
    }
}

/// The pools of components, to be made.
struct ComponentPoolsOf<'o> {
    device: &'o dyn Device,
    config: &'o Config,
    /// Pools of L1, by component and section, or none.
    given: Vec<Vec<L1Pool>>,
    l3s: Vec<Arc<dyn L3>>,
}

impl ComponentPoolsOf<'_> {
    fn of(self, components: &[Component]) -> Result<(Components, Vec<SharedComponent>), OpenError> {
        let (mut all, mut shared) = (Components::default(), Vec::new());
        let mut given = self.given.into_iter();
        let mut l3s = self.l3s.into_iter();
        for component in components {
            let tail = match component.role {
                Role::Follower => None,
                Role::Window { .. } | Role::State => Some(all.tails.len()),
            };
            let sizes = tail.and_then(|tail| self.config.tails.get(tail));
            let (l1_pages, l2_pages) = match sizes {
                Some(sizes) => (sizes.l1_pages, sizes.l2_pages),
                None => (self.config.l1_pages, self.config.l2_pages),
            };
            let (found, needed) = (given.next().unwrap_or_default(), component.sections().len());
            if !found.is_empty() && found.len() != needed {
                return Err(OpenError::Component {
                    name: component.name.clone(),
                    found: found.len(),
                    needed,
                });
            }
            let mut found = found.into_iter();
            let mut sections = Vec::new();
            for shape in component.sections() {
                let l1 = match found.next() {
                    Some(l1) => l1,
                    None => self.device.alloc_l1(shape, l1_pages + 1)?,
                };
                let memory = l2_memory(pool_bytes(shape, l2_pages + 1))?;
                let l2 = self
                    .device
                    .register(memory, L2_LAYOUT, shape, l2_pages + 1)?;
                sections.push(Section { l1, l2 });
            }
            shared.push(SharedComponent {
                place: tail.map_or(Numbering::Follower, Numbering::Tail),
                sections: sections.iter().map(|section| section.l1.clone()).collect(),
            });
            let pools = ComponentPools {
                sections,
                l3: l3s.next(),
            };
            match tail {
                None => all.followers.push(pools),
                Some(_) => all.tails.push(pools),
            }
        }
        Ok((all, shared))
    }
}

type HostL1 = (bool, Arc<dyn Device>, L1Pool);

fn host_l1(device: HostDevice, shape: &KvShape, config: &Config) -> Result<HostL1, OpenError> {
    let l1 = device.alloc_l1(shape, config.l1_pages + 1)?;
    Ok((true, Arc::new(device), l1))
}

/// Memory for L2, aligned for the device of the store, in huge pages if the kernel has them.
fn l2_memory(bytes: u64) -> Result<HostMemory, OpenError> {
    let out_of_memory = |error| OpenError::Memory { bytes, error };
    let length = usize::try_from(bytes)
        .map_err(|_| out_of_memory(std::io::ErrorKind::OutOfMemory.into()))?;
    let mut memory = AlignedBuf::zeroed(length).map_err(out_of_memory)?;
    let start = NonNull::from(&mut *memory).cast();
    // SAFETY: the bytes are initialised, and the owner keeps them at their place. The only
    // reference to them ends here, so all later accesses go through the pool.
    Ok(unsafe { HostMemory::new(start, length, Box::new(memory)) })
}
