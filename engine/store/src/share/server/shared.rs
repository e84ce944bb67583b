//! The state of a server, which its threads share.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32};

use larder_base::fork::{Private, keep_private};
use larder_base::ids::ClientId;
use larder_base::runtime::thread::JoinHandle;
use larder_base::runtime::{Condvar, Instant, Mutex};
use larder_base::seldom::Seldom;
use larder_base::system::files::{FileId, Handle};
use larder_base::system::sockets::UnixListener;
use larder_core::grants::SegmentMap;

use super::answering::Answering;
use super::forgotten::Forgetting;
use super::peer::Admission;
use super::places::Places;
use super::reads::Reads;
use super::session::Session;
use super::soundness::Soundness;
use super::watch::Watch;
use crate::api::Settings;
use crate::counts::Departed;
use crate::history::History;
use crate::protocol::{Agreed, Protocol};
use crate::share::bell::Bell;
use crate::share::wire::Welcome;
use crate::store::LocalStore;
use crate::totals::{Measures, Totals};

pub(super) struct Shared {
    pub(super) store: Arc<LocalStore>,
    pub(super) places: Places,
    pub(super) answering: Answering,
    pub(super) soundness: Soundness,
    pub(super) history: Mutex<History>,
    pub(super) socket: PathBuf,
    pub(super) welcome: Template,
    pub(super) map: SegmentMap,
    /// The volumes, used to check clients' marks.
    pub(super) probes: Vec<Arc<Handle>>,
    pub(super) listening: Mutex<Listening>,
    /// Limits the warning about a deleted socket.
    pub(super) rebinds: Seldom,
    pub(super) admission: Admission,
    /// Limits the warning about denied processes.
    pub(super) denials: Seldom,
    /// Limits the warning about messages of later releases.
    pub(super) unknown: Seldom,
    /// The settings that apply to all processes of the store.
    pub(super) settings: Settings,
    pub(super) sessions: Mutex<BTreeMap<ClientId, Arc<Session>>>,
    /// Threads of connections, and of clients that have gone.
    pub(super) threads: Mutex<Vec<JoinHandle<()>>>,
    pub(super) reads: Reads,
    pub(super) watch: Watch,
    pub(super) next_client: AtomicU32,
    pub(super) lingering: AtomicU32,
    /// The last attempt to start a thread failed.
    pub(super) lacks_threads: AtomicBool,
    /// A client's puts were ended before its writes were over.
    pub(super) abandoned: AtomicBool,
    pub(super) begun: Instant,
    /// The clients that have gone. Changed under the lock of the sessions.
    pub(super) departed: Mutex<Departed>,
    pub(super) adding: Adding,
    /// Held while a segment is emptied for a client.
    pub(super) emptying: Mutex<()>,
    pub(super) forgetting: Forgetting,
    /// In seconds since 1970.
    pub(super) started_unix_s: f64,
    /// Called by clients that ask for the ownership.
    pub(super) bell: Arc<Bell>,
    pub(super) keeps_ownership: bool,
    pub(super) stop: AtomicBool,
    pub(super) stopped: Condvar,
    pub(super) stopping: Mutex<()>,
}

/// The part of the greeting that is the same for all clients.
pub(super) struct Template {
    pub(super) protocol: Protocol,
    pub(super) store: [u8; 16],
    pub(super) group: Option<u32>,
    pub(super) run: u32,
    pub(super) segment_blocks: u32,
    /// The store is encrypted.
    pub(super) sealed: bool,
    pub(super) volumes: Vec<(Option<String>, u32)>,
}

impl Template {
    pub(super) fn map(&self) -> SegmentMap {
        let segments: Vec<u32> = self.volumes.iter().map(|(_, count)| *count).collect();
        SegmentMap::new(&segments, self.segment_blocks)
    }

    /// The owner as a client of its own.
    pub(super) fn own_session(&self) -> Session {
        let agreed = Agreed {
            version: self.protocol.newest,
            features: self.protocol.features,
            release: self.protocol.release.clone(),
        };
        Session::new(ClientId(u32::MAX), self.run, agreed, None)
    }

    pub(super) fn for_client(&self, session: &Session) -> Welcome {
        Welcome {
            protocol: self.protocol.clone(),
            client: session.id,
            secret: session.secret,
            store: self.store,
            group: self.group,
            run: self.run,
            segment_blocks: self.segment_blocks,
            volumes: self.volumes.clone(),
            sealed: self.sealed,
        }
    }
}

/// The owner's part in totals.
pub(super) struct Adding {
    /// The totals of the owners before this one.
    pub former: Totals,
    /// The measures of the clients that have gone.
    pub gone: Mutex<Measures>,
}

/// The socket that clients connect to.
pub(super) struct Listening {
    pub(super) listener: Arc<UnixListener>,
    /// The file that it is bound to.
    pub(super) bound: FileId,
    _private: Private,
}

impl Listening {
    pub(super) fn new((listener, bound): (UnixListener, FileId)) -> Listening {
        Listening {
            _private: keep_private(&listener),
            listener: Arc::new(listener),
            bound,
        }
    }
}
