//! The role of a process in a store that several processes use: owner, client of the owner, or
//! neither.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use larder_base::fork::Private;
use larder_base::ids::{ClientId, NamespaceId};
use larder_base::planted;
use larder_base::runtime::{Instant, Mutex};
use larder_core::index::ReadAs;
use larder_core::status::GetStatus;
use larder_format::Namespace;

use super::bell::Wish;
use super::reach::{is_free, not_served};
use super::remote::{self, OwnerEnd, ReachError, Remote};
use super::server::{OwnReads, Server, hides_own_user, may_listen, own_name};
use crate::api::{GetPage, OpenOptions, PageStore};
use crate::catalog::Catalog;
use crate::error::{StoreError, io_error};
use crate::store::{DataPath, LocalStore};
use crate::volume::socket::socket_path;
use crate::volume::{Access, Volumes, guard, row_of};

pub(super) enum Role {
    Owner(Box<Owner>),
    Client(Arc<Client>),
    Nobody,
    Closed,
}

/// The present owner, as this process reaches it.
#[derive(Clone, Copy)]
pub(super) enum Decider<'a> {
    Owner(&'a Owner),
    Client(&'a Client),
}

pub(super) struct Owner {
    /// `None` for a store that was opened for one process alone. Declared before the store, so that
    /// it is dropped first and no request reaches a closed store.
    pub(super) service: Option<Service>,
    pub(super) store: Arc<LocalStore>,
    ids: Ids,
}

/// An owner's side of sharing.
pub(super) struct Service {
    pub(super) server: Server,
    reads: OwnReads,
}

impl Owner {
    /// The owner of a store that serves no other process.
    pub(super) fn alone(store: LocalStore) -> Owner {
        Owner {
            service: None,
            store: Arc::new(store),
            ids: Ids::default(),
        }
    }

    /// Whether this client uses the store.
    pub(super) fn serves(&self, client: ClientId) -> bool {
        let service = self.service.as_ref();
        service.is_some_and(|service| service.server.serves(client))
    }

    /// Disconnects the clients, and closes the store.
    pub(super) fn end(mut self, path: &Path) -> Result<(), StoreError> {
        let service = self.service.as_mut();
        if service.is_none_or(|service| service.server.stop(None)) {
            return self.store.close();
        }
        self.store.catalog().flush()?;
        Err(StoreError::ClientsWriting(path.to_owned()))
    }
}

pub(super) struct Client {
    pub(super) remote: Arc<Remote>,
    pub(super) data: DataPath,
    /// The group whose members the owner admits.
    pub(super) group: Option<u32>,
    /// The name of this process's program.
    name: String,
    ids: Ids,
    /// Declared after the data path, which waits for its writes when it is dropped.
    _marks: guard::Marked,
    /// The volumes' descriptors, kept private to this process.
    _privates: Vec<Private>,
}

/// By the id that this process gave out: the namespace as the present owner knows it.
#[derive(Default)]
pub(super) struct Ids(Mutex<Vec<Option<Known>>>);

/// A namespace as the present owner knows it.
#[derive(Clone, Copy)]
pub(super) struct Known {
    pub(super) id: NamespaceId,
    /// Reads of it are shared with other processes.
    pub(super) is_shared: bool,
}

impl Ids {
    pub(super) fn get(&self, id: NamespaceId) -> Option<Known> {
        self.0.lock().get(usize::from(id.0)).copied().flatten()
    }

    pub(super) fn set(&self, id: NamespaceId, owners: Known) {
        let mut ids = self.0.lock();
        let at = usize::from(id.0);
        if ids.len() <= at {
            ids.resize(at + 1, None);
        }
        ids[at] = Some(owners);
    }
}

/// Why this process could become neither a client nor the owner.
pub(super) enum NotYet {
    /// Another try may succeed.
    TryAgain(StoreError),
    /// No later try will succeed.
    Never(StoreError),
}

/// Whether this process could serve the store as its owner.
pub(super) fn may_serve(path: &Path) -> Result<(), StoreError> {
    if hides_own_user() {
        return Err(StoreError::UserUnmapped(path.to_owned()));
    }
    let socket = socket_path(path);
    may_listen(&socket).map_err(|error| io_error("serving the catalog", &socket, error))
}

impl Role {
    /// Becomes a client of the present owner, or the owner.
    pub(super) fn find(
        path: &Path,
        options: &OpenOptions,
        wish: &Wish<'_>,
    ) -> Result<Role, NotYet> {
        let unreached = match Client::reach(path, options) {
            Ok(client) => return Ok(Role::Client(Arc::new(client))),
            Err(Unreached::Nobody(why)) => why,
            Err(Unreached::Failed(error)) => return Err(error),
        };
        if !wish.may_own {
            return Err(NotYet::TryAgain(StoreError::OwnerGone));
        }
        // Checked first: a process that cannot serve would open the store for nothing, again and
        // again.
        let may_serve = || may_serve(path);
        let store =
            LocalStore::open_at_once(path, options, may_serve).map_err(|error| match error {
                StoreError::Locked { .. } if !matches!(unreached, ReachError::Nobody) => {
                    NotYet::TryAgain(not_served(path, &unreached))
                }
                StoreError::Locked { .. } | StoreError::ClientsWriting(_) => {
                    NotYet::TryAgain(error)
                }
                error if error.is_busy() => NotYet::TryAgain(error),
                error => NotYet::Never(error),
            })?;
        let store = Arc::new(store);
        let server = Server::start(store.clone(), path, options, wish).map_err(NotYet::Never)?;
        Ok(Role::Owner(Box::new(Owner {
            service: Some(Service {
                reads: server.own_reads(),
                server,
            }),
            store,
            ids: Ids::default(),
        })))
    }

    /// `None` while the store has no owner.
    pub(super) fn decider(&self) -> Option<Decider<'_>> {
        match self {
            Role::Owner(owner) => Some(Decider::Owner(owner)),
            Role::Client(client) if !client.remote.is_lost() => Some(Decider::Client(client)),
            Role::Client(_) | Role::Nobody | Role::Closed => None,
        }
    }
}

impl<'a> Decider<'a> {
    /// The ids that the owner gave out.
    pub(super) fn ids(self) -> &'a Ids {
        match self {
            Decider::Owner(owner) => &owner.ids,
            Decider::Client(client) => &client.ids,
        }
    }

    /// Whether no other process can use the store.
    pub(super) fn is_alone(self) -> bool {
        matches!(self, Decider::Owner(owner) if owner.service.is_none())
    }

    /// The owner's id for a namespace.
    pub(super) fn named(self, namespace: &Namespace) -> Result<NamespaceId, StoreError> {
        match self {
            Decider::Owner(owner) => {
                let id = owner.store.namespace(namespace)?;
                if let Some(service) = &owner.service {
                    service.reads.named(id);
                }
                Ok(id)
            }
            Decider::Client(client) => client.remote.namespace(namespace),
        }
    }

    /// The pages of a get, not counted yet. Those of a check are read from the device.
    pub(super) fn get(
        self,
        space: Known,
        pages: &mut [GetPage<'_, '_>],
        deadline: Option<Instant>,
        read_as: ReadAs,
    ) -> Vec<GetStatus> {
        let is_shared = space.is_shared && read_as == ReadAs::Use;
        match self {
            Decider::Owner(owner) => match &owner.service {
                Some(service) if is_shared => {
                    let store = &owner.store;
                    store.get_staged(&service.reads, space.id, pages, deadline)
                }
                _ => owner.store.read(space.id, pages, deadline, read_as),
            },
            Decider::Client(Client { remote, data, .. }) => match is_shared {
                true => data.get_staged(&**remote, &**remote, space.id, pages, deadline),
                false => data.get(&**remote, space.id, pages, deadline, read_as),
            },
        }
    }
}

/// Why this process is not a client.
enum Unreached {
    /// Perhaps there is no owner.
    Nobody(ReachError),
    Failed(NotYet),
}

impl Client {
    fn reach(path: &Path, options: &OpenOptions) -> Result<Client, Unreached> {
        let (remote, welcome) =
            Remote::reach(path, &options.protocol).map_err(|error| match error {
                // A process that holds no lock on the store may not speak for it.
                error @ (ReachError::Denied(_)
                | ReachError::Version { .. }
                | ReachError::Nonsense)
                    if !is_free(path) =>
                {
                    Unreached::Failed(NotYet::Never(not_served(path, &error)))
                }
                error => Unreached::Nobody(error),
            })?;
        // The owner of a store that was deleted or replaced does not serve this one.
        remote.check_store().map_err(Unreached::Nobody)?;
        let never = |error| Unreached::Failed(NotYet::Never(error));
        let gone = |_| Unreached::Failed(NotYet::TryAgain(StoreError::OwnerGone));
        // The owner's paths may name other files here: in another mount namespace.
        let own = options.volumes.iter().cloned();
        let owners = welcome.volumes.iter();
        let owners = owners.filter_map(|(path, _)| path.as_ref().map(PathBuf::from));
        let places: Vec<PathBuf> = own.chain(owners).collect();
        let some_lost = welcome.volumes.iter().any(|(path, _)| path.is_none());
        let volumes = Volumes::open_any(path, &places, Access::Client, some_lost);
        let mut volumes = volumes.map_err(|error| match error {
            StoreError::Io {
                source, path: of, ..
            } if source.kind() == ErrorKind::NotFound && of == path => {
                let owner = remote.owner_pid();
                never(StoreError::Removed { path: of, owner })
            }
            error => never(error),
        })?;
        if *volumes.superblock().store.as_bytes() != welcome.store {
            return Err(Unreached::Nobody(remote.of_another()));
        }
        let mut marks = guard::Marked::by(remote.client().0);
        for (_, volume) in volumes.present() {
            marks.mark(&volume.file).map_err(|error| match error {
                // A process that becomes owner locks the marks' bytes for a moment to check them.
                error if guard::is_held(&error) => gone(remote::Gone),
                error => never(io_error("marking the volume", &volume.path, error)),
            })?;
        }
        if !remote.marked().map_err(gone)? {
            return Err(never(StoreError::OtherVolumes(path.to_owned())));
        }
        if planted!(DroppedMarks) {
            marks = guard::Marked::by(remote.client().0);
        }
        let common = match cfg!(feature = "simulated") {
            true => None,
            false => Some(remote.common().map_err(gone)?),
        };
        let row = row_of(remote.client());
        let disk = volumes.open_disk(options, common, row).map_err(never)?;
        if let Err(error) = volumes.check_key(&*disk, welcome.sealed, options.wrapping.as_ref()) {
            disk.shutdown();
            return Err(never(error));
        }
        let data = DataPath::new(disk, &volumes, options.hang_limit);
        let volumes = volumes.list.into_iter().flatten();
        let client = Client {
            remote: Arc::new(remote),
            data,
            group: welcome.group,
            name: own_name().unwrap_or_default(),
            ids: Ids::default(),
            _marks: marks,
            _privates: volumes.map(|volume| volume.private).collect(),
        };
        client.send_counts();
        Ok(client)
    }

    /// Runs a call that moves pages, and sends the owner the counters that it changed.
    pub(super) fn counted<R>(&self, call: impl FnOnce(&Arc<Remote>, &DataPath) -> R) -> R {
        let outcome = call(&self.remote, &self.data);
        self.send_counts();
        outcome
    }

    /// Sends the owner the measures of this process, if they have changed.
    pub(super) fn send_measures(&self) {
        self.remote.send_measures(|| self.data.measures());
    }

    /// Waits until the owner has gone, or this client is being closed.
    pub(super) fn wait_for_owner_end(&self) -> OwnerEnd {
        let board = &self.data.board;
        self.remote
            .wait_for_owner_end(board, || self.send_measures())
    }

    fn send_counts(&self) {
        self.remote.send_counts(&self.name, self.data.counts());
    }
}
