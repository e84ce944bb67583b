//! An owner's report: its counters, the processes that use the store, the state of its volumes.

use std::num::NonZeroU16;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::api::{Settings, Stats};
use crate::beneath::BeneathReport;
use crate::counts::{Departed, Process};
use crate::curve::CurveReport;
use crate::history::HistoryReport;
use crate::protocol::{Agreed, Protocol};
use crate::quotas::QuotaReport;
use crate::staging::StagingReport;
use crate::totals::Totals;

/// A volume whose path no longer leads to the file that its owner serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DisplacedVolume {
    /// Its path.
    pub path: PathBuf,
    /// The fault.
    pub reason: String,
}

/// A volume that does not hold what the store wrote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DamagedVolume {
    /// Its path.
    pub path: PathBuf,
    /// What happened to it.
    pub damage: VolumeDamage,
    /// Damaged places that the open found; 0 for other damage.
    pub places: u64,
}

/// See [`DamagedVolume`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum VolumeDamage {
    /// Another program wrote over a superblock while the store is served.
    Overwritten,
    /// The file was cut while the store is served.
    Truncated,
    /// The open found damaged structures.
    AtOpen,
}

impl VolumeDamage {
    /// All kinds.
    pub const ALL: [VolumeDamage; 3] = [
        VolumeDamage::Overwritten,
        VolumeDamage::Truncated,
        VolumeDamage::AtOpen,
    ];

    /// Its name in documents and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            VolumeDamage::Overwritten => "overwritten",
            VolumeDamage::Truncated => "truncated",
            VolumeDamage::AtOpen => "at_open",
        }
    }

    /// The fault and its remedy, for people.
    #[must_use]
    pub fn what(self) -> &'static str {
        match self {
            VolumeDamage::Overwritten => {
                "its superblocks, in the first 128 KiB, are overwritten by another program. Find \
                 and end that program, then stop the owner in order: its close writes the \
                 superblocks again. If the owner is killed before, write them back with `larder \
                 superblock restore`"
            }
            VolumeDamage::Truncated => {
                "its file was truncated while the store is served, and the pages behind its end \
                 are lost. Save the others with `larder export`, stop the owner, and make a new \
                 store"
            }
            VolumeDamage::AtOpen => {
                "damaged when the owner opened the store, and emptied since. The owner's log has \
                 the first places: many in one range were overwritten by another program, else \
                 check the disk. `larder verify --online` lists pages that are damaged now"
            }
        }
    }
}

/// How a volume answers, over all processes that use the store.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AnsweringVolume {
    /// Its path.
    pub path: PathBuf,
    /// The device below it, or the file system where there is none; empty if it is not known.
    #[serde(default)]
    pub device: String,
    /// The state of the last second.
    pub state: VolumeState,
    /// The age of the oldest operation in the kernel; 0 without one.
    pub oldest_seconds: f64,
    /// A bound below which 99 % of the reads and writes of the last ten seconds took, at most 20;
    /// 0 without any.
    pub p99_seconds: f64,
}

/// A client that has not run for some seconds, in the middle of reads or puts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StoppedClient {
    /// Its pid in the owner's pid namespace. `None` if it is not visible there.
    pub pid: Option<u32>,
    /// The name of its program; `None` if it is not known.
    pub name: Option<String>,
    /// For how long it has not run.
    pub stopped_seconds: f64,
    /// Pages that it was reading.
    pub reads_in_flight: u64,
    /// Its puts in progress.
    pub puts_in_flight: u64,
}

/// A client that ended in the middle of puts, whose pages are not stored.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct EndedClient {
    /// Its pid in the owner's pid namespace. `None` if it is not visible there.
    pub pid: Option<u32>,
    /// The name of its program; `None` if it is not known.
    pub name: Option<String>,
    /// When it ended, in seconds since 1970.
    pub ended_unix_s: f64,
    /// The pages of these puts.
    pub pages: u64,
}

/// See [`AnsweringVolume`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VolumeState {
    /// It answers in time.
    #[default]
    Answering,
    /// More than 1 % of its reads and writes take longer than half a second.
    Slow,
    /// An operation has not ended for five seconds.
    Hung,
}

impl VolumeState {
    /// All states.
    pub const ALL: [VolumeState; 3] =
        [VolumeState::Answering, VolumeState::Slow, VolumeState::Hung];

    /// Its name in documents and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            VolumeState::Answering => "answering",
            VolumeState::Slow => "slow",
            VolumeState::Hung => "hung",
        }
    }
}

/// An owner's report.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct Report {
    /// The owner's release and protocol.
    pub protocol: Protocol,
    /// The clients by release.
    pub releases: Vec<ReleaseCount>,
    /// Counters of its store.
    pub stats: Stats,
    /// The settings that apply to all processes of the store.
    pub settings: Settings,
    /// Its process id in the reader's pid namespace. `None` if it is not visible there.
    pub pid: Option<u32>,
    /// Clients connected.
    pub clients: u32,
    /// Pages that clients are reading.
    pub reads_in_flight: u64,
    /// Puts of clients in progress.
    pub puts_in_flight: u64,
    /// Pages of puts that were aborted because their client was silent, with writes that may not be
    /// over.
    pub pages_adrift: u64,
    /// Clients that have gone and may still have writes in flight.
    pub lingering: u32,
    /// Resident memory of the process in bytes.
    pub rss_bytes: u64,
    /// The staging area, through which clients share reads.
    pub staging: StagingReport,
    /// The processes that use the store: the owner, then its clients in the order of their pids.
    pub processes: Vec<Process>,
    /// The clients that have gone since the owner opened the store.
    pub departed: Departed,
    /// Counters of all processes, under this owner and the owners before it.
    pub totals: Totals,
    /// When the owner opened the store, in seconds since 1970. 0 if its release does not tell.
    pub started_unix_s: f64,
    /// Version of the on-disk format. 0 if its release does not tell.
    pub format_version: u32,
    /// Processes that compact the store.
    pub compactions: u32,
    /// The place beneath the store, if there is one.
    pub beneath: Option<BeneathReport>,
    /// The volumes whose paths no longer lead to the files that the owner serves.
    pub displaced_volumes: Vec<DisplacedVolume>,
    /// The volumes that do not hold what the store wrote.
    pub damaged_volumes: Vec<DamagedVolume>,
    /// How each volume answers. Empty if that is not measured.
    pub answering_volumes: Vec<AnsweringVolume>,
    /// The clients that are stopped. Empty if that is not measured.
    pub stopped_clients: Vec<StoppedClient>,
    /// The last client that ended in the middle of puts.
    pub ended_client: Option<EndedClient>,
    /// The hit rate at other sizes, for the lookups since the owner opened the store.
    pub curve: CurveReport,
    /// Counters over the time since the owner opened the store.
    pub history: HistoryReport,
    /// The quotas of the store.
    pub quotas: QuotaReport,
}

/// The clients of one release.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ReleaseCount {
    /// The name of the release.
    pub release: String,
    /// The version of the messages that they and the owner use.
    pub version: u32,
    /// How many there are.
    pub clients: u32,
}

impl ReleaseCount {
    pub(in crate::share) fn of((agreed, clients): (&Agreed, u32)) -> ReleaseCount {
        ReleaseCount {
            release: agreed.release.clone(),
            version: agreed.version,
            clients,
        }
    }
}

/// The erasure of a tenant, so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Erasure {
    /// The slots of the erased keys; none if the tenant had no keys any more.
    pub slots: Vec<NonZeroU16>,
    /// Pages that are gone with them.
    pub pages: u64,
    /// The clients that may still have a key of this tenant, or of a tenant erased before. The
    /// erasure is complete without any.
    pub waits_for: Vec<Keyholder>,
}

/// A client that may have an erased key.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Keyholder {
    /// Its pid; `None` in another pid namespace.
    pub pid: Option<u32>,
    /// The name of its program; empty if it is not known.
    pub name: String,
}
