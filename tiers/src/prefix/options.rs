//! The options of an open.

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
use super::shared::{Poller, Shared};
use crate::cache::{Cache, CacheError, Parts};
use crate::config::{Config, L3Write};
use crate::l3::{L3, StoreL3};
use crate::model::Model;

/// The layout of L2.
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
    /// How the store is opened.
    pub store: OpenOptions,
    /// The remotes beneath the store. Default: none.
    pub l4: L4Config,
    /// Whether a thread polls the cache. Without it, the caller calls [`PrefixCache::poll`] in its
    /// loop, also while it is idle. Default: true.
    pub polls_itself: bool,
    /// How long [`PrefixCache::begin`] waits for pages of L3 and for room in L1. Default: 10 s.
    pub begin_wait: Duration,
    /// How long [`PrefixCache::close`] waits for copies and writes. Default: 30 s.
    pub close_wait: Duration,
}

impl PrefixOptions {
    /// The defaults, for pools of these sizes in pages.
    #[must_use]
    pub fn new(model: &Model, l1_pages: u32, l2_pages: u32) -> PrefixOptions {
        let (page_tokens, page_bytes) = (model.page_tokens(), model.shape().page_bytes());
        let mut config = Config::new(page_tokens, page_bytes.into(), l1_pages, l2_pages);
        config.load_threshold_tokens = 1;
        config.prefetch.threshold_tokens = 1;
        PrefixOptions {
            model: model.clone(),
            config,
            l1: None,
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
        let namespace = self.namespace()?;
        let page_bytes = Some(page_bytes_on_disk(namespace.shape()));
        let size = CreateOptions::new(store_bytes).with(|o| o.page_bytes = page_bytes);
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
        let opened = self.over_attached(&store, path, &namespace, l4);
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
        namespace: &Namespace,
        l4: Option<L4>,
    ) -> Result<PrefixCache, OpenError> {
        let shared: Arc<dyn PageStore> = store.clone();
        let l3 = StoreL3::new(shared, namespace)?.with_puts(PutOptions::waiting(PUT_WAIT));
        if let Some(l4) = &l4 {
            l4.start(store, path).map_err(OpenError::Thread)?;
        }
        self.over_store(Some(Arc::new(l3)), Some(store.clone()), l4)
    }

    /// A cache over this L3, or over none. Over none, `config.l3_write` counts as `Never`.
    ///
    /// # Errors
    /// The memory or the configuration.
    pub fn over(self, l3: Option<Arc<dyn L3>>) -> Result<PrefixCache, OpenError> {
        self.over_store(l3, None, None)
    }

    /// The namespace of the model, without its weights: they are part of the keys of pages
    /// ([`PrefixCache::new_weights`]).
    ///
    /// # Errors
    /// Those of [`Model::namespace`].
    pub fn namespace(&self) -> Result<Namespace, NamespaceError> {
        let mut model = self.model.clone();
        model.weights.clear();
        model.namespace(L2_LAYOUT)
    }

    fn over_store(
        self,
        l3: Option<Arc<dyn L3>>,
        store: Option<Arc<Store>>,
        l4: Option<L4>,
    ) -> Result<PrefixCache, OpenError> {
        let (shape, mut config) = (self.model.shape(), self.config);
        if l3.is_none() {
            // Each order to write would fail, and count as a failure.
            config.l3_write = L3Write::Never;
        }
        config.check().map_err(CacheError::from)?;
        let (is_on_host, device, l1) = match self.l1 {
            Some(L1Memory::Pool(device, l1)) => (false, device, l1),
            Some(L1Memory::Host(device)) => host_l1(device, &shape, &config)?,
            None => host_l1(HostDevice::new()?, &shape, &config)?,
        };
        let l2_pages = config.l2_pages + 1;
        let memory = l2_memory(pool_bytes(&shape, l2_pages))?;
        let l2 = device.register(memory, L2_LAYOUT, &shape, l2_pages)?;
        let parts = Parts {
            device,
            l1: l1.clone(),
            l2,
            l3,
            ranks: None,
        };
        let mut cache = Cache::new(config, parts)?;
        cache.new_weights(&self.model.weights);
        let shared = Arc::new(Shared::new(cache, l1, is_on_host));
        let poller = self.polls_itself.then(|| Poller::start(&shared));
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
