//! The parameters that a seed draws, and the store that it begins with.

use std::path::{Path, PathBuf};
use std::time::Duration;

use larder_core::capacity::segments_min;
use larder_disk::probe::Want;
use larder_engine::format::{
    BLOCK_BYTES, KeyringCopy, Namespace, PageKey, PageShape, StoreId, Superblock, TENANT_FIELD,
};
use larder_engine::{CodecChoice, OpenOptions, SharedReads, SyncPolicy, policy};
use larder_seal::WrappingKey;
use larder_sim_runtime::dice::{Dice, mix};
use larder_sim_runtime::medium::contents;
use larder_sim_runtime::{Machine, Odds};
use larder_store::volume::simulated;

use crate::sealed::write_keyring;
use crate::secrets::Sealed;
use crate::setup::{blocks_of, superblocks};

/// Blocks of a segment of a roomy store: the fewest that the format allows, and one more, so that
/// the size is not taken for a scaled size (`volume::simulated` of the engine).
const ROOMY_SEGMENT_BLOCKS: u32 = 4097;

const STORE: StoreId = StoreId::from_bytes([9; 16]);

/// Bytes of the memory for shared reads.
const STAGING_BYTES: u64 = 64 << 10;

/// A page's name: a namespace, a chain, and the depth in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Name {
    pub namespace: usize,
    pub chain: usize,
    pub depth: usize,
}

/// Probabilities of faults among the processes, for each look of the driver.
#[derive(Clone, Copy, Debug, Default)]
pub struct Fates {
    pub kill: f64,
    pub stop: f64,
    pub power: f64,
    pub unlink: f64,
    /// A connection is cut.
    pub cut: f64,
    /// A process that breaks the rules of the protocol connects.
    pub stray: f64,
    /// A compaction begins, or is killed.
    pub compaction: f64,
}

/// See the module.
#[derive(Clone, Debug)]
pub struct Plan {
    pub namespaces: Vec<Namespace>,
    pub chains: usize,
    pub depth: usize,
    pub volumes: Vec<PathBuf>,
    /// The store has far less room than pages: pages are evicted, and segments reclaimed.
    pub is_tight: bool,
    pub segment_blocks: u32,
    /// Segments of each volume.
    pub segments: u32,
    pub processes: usize,
    /// Threads of a process that make calls.
    pub callers: usize,
    /// Calls of a thread before it ends.
    pub calls: usize,
    /// Longest pause between two calls.
    pub pause: Duration,
    pub sync: SyncPolicy,
    lease: Duration,
    shared_reads: SharedReads,
    pub fates: Fates,
    pub odds: Odds,
    /// A forked child of a process uses its handle.
    pub forks: f64,
    /// The codec of the processes that have one, and their share. `None`: the contents cannot be
    /// made smaller.
    pub codec: Option<(CodecChoice, f64)>,
    /// Pages are evicted by the learned policy.
    learns: bool,
    /// The share of processes that keep the ownership, and ask an owner for it that does not.
    pub keepers: f64,
    /// `None`: the store is not encrypted.
    pub seal: Option<Seal>,
}

/// The encryption of a store.
#[derive(Clone, Debug)]
pub struct Seal {
    wrapping: WrappingKey,
    /// The key that a rotation replaces it by.
    next: WrappingKey,
    /// A key that never opens the store.
    pub wrong: WrappingKey,
    keyring: KeyringCopy,
    /// The share of processes without the key of the store.
    pub keyless: f64,
    /// The share of these that have a wrong key.
    pub mistaken: f64,
}

fn namespace(number: usize, part_blocks: &[u32]) -> Namespace {
    let parts: Vec<u32> = part_blocks
        .iter()
        .map(|blocks| blocks * BLOCK_BYTES as u32)
        .collect();
    let shape = PageShape::new(&parts).expect("a shape of whole blocks");
    namespace_of(number, &shape, None)
}

fn namespace_of(number: usize, shape: &PageShape, tenant: Option<&str>) -> Namespace {
    let builder = Namespace::builder(&format!("model {number}"), "weights", 64, *shape);
    let builder = builder.elements("bf16", "page_first");
    let builder = match tenant {
        Some(tenant) => builder.extra(TENANT_FIELD, tenant),
        None => builder,
    };
    builder.build().expect("a sound namespace")
}

impl Plan {
    pub fn draw(dice: &mut Dice) -> Plan {
        let shapes: [&[u32]; 4] = [&[1], &[2, 1], &[4], &[3, 3]];
        let namespaces = (0..1 + dice.below(2))
            .map(|number| namespace(number, dice.pick(&shapes)))
            .collect();
        let mut some = |share: f64, of: &[f64]| match dice.chance(share) {
            true => dice.pick(of),
            false => 0.0,
        };
        let fates = Fates {
            kill: some(0.8, &[0.01, 0.03, 0.1]),
            stop: some(0.5, &[0.01, 0.05]),
            power: some(0.3, &[0.005, 0.02]),
            unlink: some(0.2, &[0.02]),
            cut: some(0.2, &[0.02]),
            stray: some(0.3, &[0.02, 0.05]),
            compaction: some(0.3, &[0.02, 0.05]),
        };
        let odds = Odds {
            interrupted: some(0.3, &[0.02, 0.2]),
            short: some(0.3, &[0.05, 0.3]),
            slow: some(0.5, &[0.01, 0.1]),
            socket_short: some(0.3, &[0.05, 0.5]),
            signal: some(0.3, &[0.05]),
            write_error: some(0.2, &[0.01, 0.05]),
            ..Odds::default()
        };
        let forks = some(0.1, &[0.1]);
        let keepers = some(0.3, &[0.2, 0.5]);
        let volumes = 1 + dice.below(2);
        let is_tight = dice.chance(0.5);
        let (segment_blocks, segments, chains) = if is_tight {
            let least = segments_min(volumes) as usize;
            let segments = (least + dice.below(4)).div_ceil(volumes);
            (dice.pick(&[24, 32, 48]), segments as u32, 4 + dice.below(6))
        } else {
            (ROOMY_SEGMENT_BLOCKS, 4, 2 + dice.below(3))
        };
        Plan {
            namespaces,
            chains,
            depth: 3 + dice.below(4),
            volumes: (0..volumes)
                .map(|at| PathBuf::from(format!("/store{at}")))
                .collect(),
            is_tight,
            segment_blocks,
            segments,
            processes: 2 + dice.below(3),
            callers: 1 + dice.below(2),
            calls: if is_tight {
                dice.pick(&[12, 24, 40])
            } else {
                dice.pick(&[6, 12, 20])
            },
            pause: Duration::from_millis(dice.pick(&[0, 2, 20, 1000])),
            sync: dice.pick(&[
                SyncPolicy::Relaxed,
                SyncPolicy::Interval(Duration::from_millis(50)),
                SyncPolicy::Always,
            ]),
            lease: Duration::from_millis(dice.pick(&[1, 100, 10_000])),
            shared_reads: dice.pick(&[SharedReads::Off, SharedReads::Off, SharedReads::On]),
            fates,
            odds: Odds {
                transfer: Duration::from_micros(dice.pick(&[50, 300, 2000])),
                socket_bytes: dice.pick(&[2 << 10, 64 << 10]),
                ..odds
            },
            forks,
            codec: None,
            learns: dice.chance(0.3),
            keepers,
            seal: None,
        }
    }

    /// Half of the seeds have a codec, and pages that it can make smaller.
    pub fn draw_codec(&mut self, dice: &mut Dice) {
        if dice.chance(0.5) {
            return;
        }
        self.codec = Some((CodecChoice::Bf16, dice.pick(&[0.5, 1.0])));
        let shapes: [&[u32]; 4] = [&[6], &[6, 1], &[4, 4], &[3, 3]];
        for (number, space) in self.namespaces.iter_mut().enumerate() {
            *space = namespace(number, dice.pick(&shapes));
        }
        if self.is_tight {
            self.segment_blocks = dice.pick(&[48, 64]);
        }
    }

    /// Half of the seeds are encrypted, with namespaces of some tenants and of none.
    pub fn draw_seal(&mut self, dice: &mut Dice) {
        if dice.chance(0.5) {
            return;
        }
        for (number, space) in self.namespaces.iter_mut().enumerate() {
            let tenant = dice
                .chance(0.7)
                .then(|| format!("tenant {}", dice.below(2)));
            *space = namespace_of(number, space.shape(), tenant.as_deref());
        }
        let keyless = match dice.chance(0.3) {
            true => dice.pick(&[0.2, 0.4]),
            false => 0.0,
        };
        let mut sealed = Sealed::new(STORE, dice.fork(), None);
        sealed.name(&mut self.namespaces);
        self.seal = Some(Seal {
            next: sealed.begin_rotation(),
            wrapping: sealed.wrapping,
            wrong: sealed.wrong,
            keyring: sealed.first,
            keyless,
            mistaken: dice.pick(&[0.0, 0.5, 1.0]),
        });
    }

    /// The key of an encrypted store, and that of the next rotation.
    pub fn keys(&self) -> Option<(WrappingKey, WrappingKey)> {
        let seal = self.seal.as_ref();
        seal.map(|seal| (seal.wrapping.clone(), seal.next.clone()))
    }

    /// From here on processes have the key of the rotation.
    pub fn swap_keys(&mut self) {
        if let Some(seal) = &mut self.seal {
            std::mem::swap(&mut seal.wrapping, &mut seal.next);
        }
    }

    /// The codec of a process.
    pub fn pick_codec(&self, dice: &mut Dice) -> CodecChoice {
        match self.codec {
            Some((choice, share)) if dice.chance(share) => choice,
            _ => CodecChoice::Off,
        }
    }

    /// Whether stored pages may be evicted. With failing writes also in a roomy store: a segment
    /// whose free header is refused is unusable, and the limit of the store falls.
    pub fn may_evict(&self) -> bool {
        self.is_tight || self.has_write_errors()
    }

    /// Whether an owner may hand the store over. It then hangs up on clients with puts under way.
    pub fn hands_over(&self) -> bool {
        self.keepers > 0.0
    }

    pub fn has_write_errors(&self) -> bool {
        self.odds.write_error > 0.0
    }

    pub fn path(&self) -> &Path {
        &self.volumes[0]
    }

    pub fn names(&self) -> Vec<Name> {
        let mut names = Vec::new();
        for namespace in 0..self.namespaces.len() {
            for chain in 0..self.chains {
                names.extend((0..self.depth).map(|depth| Name {
                    namespace,
                    chain,
                    depth,
                }));
            }
        }
        names
    }

    /// Position in the list of all names.
    pub fn index(&self, name: Name) -> usize {
        (name.namespace * self.chains + name.chain) * self.depth + name.depth
    }

    /// The same in every namespace: namespaces must not mix.
    pub fn key(&self, name: Name) -> PageKey {
        let ordinal = (name.chain * self.depth + name.depth) as u64;
        let mut bytes = [0; 32];
        for (at, chunk) in (0..).zip(bytes.chunks_exact_mut(8)) {
            chunk.copy_from_slice(&mix(ordinal, at).to_le_bytes());
        }
        PageKey::from_bytes(bytes)
    }

    /// Options of a process. It keeps the ownership, or hands it over to a client that keeps it.
    pub fn options(&self, keeps_ownership: bool, codec: CodecChoice, has_key: bool) -> OpenOptions {
        let seal = self.seal.as_ref().filter(|_| has_key);
        OpenOptions::default().with(|o| {
            o.wrapping = seal.map(|seal| seal.wrapping.clone());
            o.keeps_ownership = keeps_ownership;
            o.codec = codec;
            o.disk = Want::Threads;
            o.depth = 3;
            o.sync = self.sync;
            o.lease = self.lease;
            o.staging_bytes = STAGING_BYTES;
            o.shared_reads = self.shared_reads;
            o.eviction = self.learns.then(policy::learned);
        })
    }

    /// Creates the store, as `larder create` does.
    pub fn create(&self, machine: &Machine) {
        let place = |path: &PathBuf| (self.segments, path.to_string_lossy().into_owned());
        let volumes = self.volumes.iter().map(place);
        let superblocks = superblocks(STORE, self.segment_blocks, volumes);
        for (mut superblock, path) in superblocks.into_iter().zip(&self.volumes) {
            let keyring = self.seal.as_ref().map(|seal| &seal.keyring);
            superblock.keyring = keyring.map_or(0, |keyring| keyring.generation);
            // The plan made the superblock from the engine's own constants, within its limits.
            let encoded = simulated::encode(&superblock).expect("a sound superblock");
            let stated = Superblock::decode(&encoded[..]).expect("a sound superblock");
            let geometry = stated.geometry(stated.volume).expect("a small geometry");
            // The segments take a part of it alone: the file has the length that is stated.
            machine.add_volume(path, geometry.volume_bytes() as usize / BLOCK_BYTES);
            machine.with_medium(path, |medium| {
                for at in blocks_of(medium.blocks()) {
                    medium.write(at, &contents(&encoded[..]), || true);
                }
                medium.synced(medium.next());
                if let Some(keyring) = keyring {
                    write_keyring(medium, keyring);
                }
            });
        }
    }
}
