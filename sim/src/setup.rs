//! The parameters that a seed draws before its run begins: the store, the load, and the possible
//! faults. Each class of faults has its own probability, often zero (swarm testing).

use std::time::Duration;

use larder_engine::format::{
    Clock, Features, History, Holder, Namespace, OVERHEAD_BYTES, OpenState, PageShape, Run,
    StoreId, Superblock, TENANT_FIELD, VolumeEntry, VolumeId, superblock_offsets,
};
use larder_engine::{CodecChoice, SyncPolicy};
use larder_sim_runtime::dice::Dice;
use larder_store::api::WriteBudget;

use crate::classes::Class;
use crate::kernel::Odds;

pub const BLOCK: usize = larder_engine::format::BLOCK_BYTES;

/// Probabilities of faults: per step, per operation, or per sync, as each states.
#[derive(Clone, Debug, Default)]
pub struct Faults {
    /// The process is killed after this step.
    pub kill: f64,
    /// The power fails after this step.
    pub power: f64,
    /// A clean close follows this step.
    pub close: f64,
    /// An opening or a close is cut short.
    pub cut: f64,
    /// A write of page data fails, with some of its blocks written.
    pub data_error: f64,
    /// A write of descriptors fails.
    pub meta_error: f64,
    /// A write of headers fails.
    pub header_error: f64,
    /// A write of a superblock fails.
    pub superblock_error: f64,
    /// Any write fails for lack of space.
    pub no_space: f64,
    /// Any write comes back short, without progress.
    pub no_progress: f64,
    /// Reads fail for a while, at this opening or step.
    pub outage: f64,
    /// A volume stops taking writes at this step.
    pub volume_dies: f64,
    /// A sync fails and drops some of the writes that it should have covered.
    pub sync_error: f64,
    /// A put is recalled.
    pub recall: f64,
    /// A reader opens the store at this step, beside the owner.
    pub reader: f64,
    /// A write is acknowledged and never happens.
    pub lost_write: f64,
    /// A write is acknowledged and lands at a wrong address.
    pub misdirected_write: f64,
    /// A read returns another block's content.
    pub misdirected_read: f64,
    /// A copy of the keyring, or all, are spoiled before an opening.
    pub rot_keyring: f64,
    /// A step shows that a page was encoded wrongly, or that an encrypted one was changed.
    pub miscodes: f64,
    /// A step spoils stored content of the device.
    pub at_rest: AtRest,
    /// System calls that are interrupted or come back short.
    pub calls: Odds,
    /// An operation takes long.
    pub delay: f64,
    /// At a step the clock jumps far ahead, or stops for a while.
    pub clock_forward: f64,
    pub clock_frozen: f64,
}

/// Faults of stored content, each per step.
#[derive(Clone, Copy, Debug, Default)]
pub struct AtRest {
    pub rot_payload: f64,
    pub rot_descriptor: f64,
    pub rot_header: f64,
    pub rot_headers: f64,
    pub rot_superblock: f64,
    pub rot_superblocks: f64,
    /// A block becomes unreadable.
    pub unreadable: f64,
    /// A block is unreadable for some reads: fewer than a reader tries, or more.
    pub read_errors: f64,
}

impl AtRest {
    /// Each class and its probability.
    pub fn each(&self) -> [(Class, f64); 8] {
        [
            (Class::RotPayload, self.rot_payload),
            (Class::RotDescriptor, self.rot_descriptor),
            (Class::RotHeader, self.rot_header),
            (Class::RotHeaders, self.rot_headers),
            (Class::RotSuperblock, self.rot_superblock),
            (Class::RotSuperblocks, self.rot_superblocks),
            (Class::Unreadable, self.unreadable),
            (Class::ReadErrors, self.read_errors),
        ]
    }

    fn draw(dice: &mut Dice, step: f64) -> AtRest {
        let mut some = |share: f64, of: &[f64]| {
            if dice.chance(share) {
                step * dice.pick(of)
            } else {
                0.0
            }
        };
        AtRest {
            rot_payload: some(0.3, &[2.0, 10.0]),
            rot_descriptor: some(0.3, &[2.0, 10.0]),
            rot_header: some(0.3, &[2.0, 10.0]),
            rot_headers: some(0.2, &[2.0, 5.0]),
            rot_superblock: some(0.2, &[1.0, 2.0]),
            rot_superblocks: some(0.1, &[0.3]),
            unreadable: some(0.3, &[2.0, 10.0]),
            read_errors: some(0.3, &[2.0, 20.0]),
        }
    }
}

impl Faults {
    /// Whether the device may spoil content that it once held.
    pub fn spoils(&self) -> bool {
        self.miscodes > 0.0 || self.spoils_checksums()
    }

    /// The same, so that a checksum shows it.
    pub fn spoils_checksums(&self) -> bool {
        let at_rest = self.at_rest.each();
        self.lost_write + self.misdirected_write > 0.0
            || at_rest.iter().any(|(_, probability)| *probability > 0.0)
    }

    /// Whether reads may return wrong content, or syncs fail.
    pub fn misleads(&self) -> bool {
        self.misdirected_read + self.sync_error + self.volume_dies > 0.0
    }

    /// Whether writes may fail.
    pub fn fail_writes(&self) -> bool {
        self.fail_headers() || self.fail_descriptors() || self.data_error > 0.0
    }

    /// Whether writes of headers may fail.
    pub fn fail_headers(&self) -> bool {
        self.header_error + self.no_space + self.no_progress + self.volume_dies > 0.0
    }

    /// Whether writes of descriptors may fail.
    pub fn fail_descriptors(&self) -> bool {
        self.meta_error + self.no_space + self.no_progress + self.volume_dies > 0.0
    }

    /// Pages that the device refuses, and syncs that lose the headers that exclude these pages:
    /// with nothing else in the way, for both together are rare.
    fn refusing(dice: &mut Dice, step: f64) -> Faults {
        Faults {
            power: 6.0 * step,
            kill: step,
            data_error: dice.pick(&[0.05, 0.2]),
            sync_error: dice.pick(&[0.1, 0.3]),
            delay: dice.pick(&[0.05, 0.3]),
            ..Faults::default()
        }
    }

    fn draw(dice: &mut Dice, steps: usize) -> Faults {
        let step = 1.0 / steps as f64;
        if dice.chance(0.1) {
            return Faults::refusing(dice, step);
        }
        let mut some = |share: f64, of: &[f64]| {
            if dice.chance(share) {
                dice.pick(of)
            } else {
                0.0
            }
        };
        let mut faults = Faults {
            kill: some(0.6, &[1.0 * step, 4.0 * step]),
            power: some(0.6, &[1.0 * step, 4.0 * step]),
            close: some(0.3, &[2.0 * step]),
            cut: some(0.5, &[0.1, 0.4]),
            data_error: some(0.2, &[0.002, 0.02]),
            meta_error: some(0.2, &[0.002, 0.02, 0.1]),
            header_error: some(0.15, &[0.02, 0.2]),
            superblock_error: some(0.1, &[0.02, 0.1]),
            no_space: some(0.1, &[0.002, 0.05]),
            no_progress: some(0.1, &[0.002, 0.02]),
            volume_dies: some(0.15, &[1.0 * step, 4.0 * step]),
            outage: some(0.2, &[0.1, 0.5]),
            sync_error: some(0.25, &[0.02, 0.1, 0.3]),
            recall: some(0.2, &[0.05, 0.3]),
            reader: some(0.15, &[2.0 * step]),
            delay: some(0.3, &[0.02, 0.2]),
            clock_forward: some(0.2, &[1.0 * step]),
            clock_frozen: some(0.2, &[1.0 * step]),
            calls: Odds {
                interrupted: some(0.2, &[0.01, 0.2]),
                short: some(0.2, &[0.01, 0.2]),
            },
            ..Faults::default()
        };
        if dice.chance(0.35) {
            let mut some = |of: &[f64]| if dice.chance(0.4) { dice.pick(of) } else { 0.0 };
            faults.lost_write = some(&[0.002, 0.01]);
            faults.misdirected_write = some(&[0.002, 0.01]);
            faults.misdirected_read = some(&[0.002, 0.02]);
            faults.at_rest = AtRest::draw(dice, step);
        }
        faults
    }
}

/// The choice of the page that is evicted next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Eviction {
    /// The store's own.
    Default,
    /// The learned policy.
    Learned,
    /// By a policy of the caller: the leaf that was filed first.
    Fifo,
    /// Any leaf.
    Random,
}

#[derive(Debug)]
pub struct Setup {
    /// Segments of each volume.
    pub volumes: Vec<u32>,
    pub segment_blocks: u32,
    pub namespaces: Vec<Namespace>,
    /// Share of the namespaces that are named when an epoch begins. Some of the others are named
    /// later, some never.
    pub named: f64,
    pub chains: usize,
    pub depth: usize,
    pub sync: SyncPolicy,
    pub write_bytes_max: u64,
    pub lease_ms: u64,
    pub clients: usize,
    pub batch: usize,
    pub steps: usize,
    pub eviction: Eviction,
    /// A policy of admission refuses some pages.
    pub admits_some: bool,
    /// Further calls that delete pages, as a share of all calls.
    pub deletes: f64,
    /// Callers keep books of their own: counted leases, lists of pages, evictions.
    pub keeps_books: bool,
    /// Callers have segments emptied, as a compaction does.
    pub compacts: bool,
    pub faults: Faults,
    /// The codec of puts, and the share of the openings with it. `None`: the contents cannot be
    /// made smaller.
    pub codec: Option<(CodecChoice, f64)>,
    /// The store is encrypted.
    pub sealed: bool,
    /// The bytes a day that the store may write, in a tenth of the seeds.
    pub write_budget: WriteBudget,
    /// Callers change quotas.
    pub quotas: bool,
    /// Groups have limits of lifetimes, and clocks jump.
    pub lives: bool,
    /// Steps between two full checks. Cheap checks run at each step.
    pub check_every: u64,
}

impl Setup {
    pub fn draw(dice: &mut Dice) -> Setup {
        let volumes = dice.pick(&[1, 1, 2]);
        let least = larder_core::capacity::segments_min(volumes) as u32;
        let volumes = (0..volumes as u32)
            .map(|volume| (least + dice.below(5) as u32).div_ceil(volumes as u32) + volume % 2)
            .collect();
        let segment_blocks = dice.pick(&[24, 32, 32, 48, 48, 64, 64]);
        let steps = dice.pick(&[60, 120, 120, 120, 240, 480]);
        let namespaces = (0..dice.pick(&[1, 1, 2, 3]))
            .map(|index| {
                let most = segment_blocks as usize / dice.pick(&[4, 8, 16, 32]);
                let page = 1 + dice.below(most.max(1));
                namespace(index, page as u32)
            })
            .collect();
        Setup {
            volumes,
            segment_blocks,
            namespaces,
            named: dice.pick(&[0.3, 0.7, 1.0, 1.0]),
            chains: 4 + dice.below(20),
            depth: 2 + dice.below(12),
            sync: match dice.below(4) {
                0 => SyncPolicy::Relaxed,
                1 => SyncPolicy::Always,
                _ => SyncPolicy::Interval(Duration::from_millis(dice.pick(&[5, 50, 1000]))),
            },
            write_bytes_max: dice.pick(&[64 << 10, 1 << 20, 1 << 30]),
            lease_ms: dice.pick(&[1, 100, 10_000]),
            clients: 1 + dice.below(6),
            batch: dice.pick(&[1, 4, 16]),
            steps,
            eviction: dice.pick(&[
                Eviction::Default,
                Eviction::Learned,
                Eviction::Fifo,
                Eviction::Random,
            ]),
            admits_some: dice.chance(0.1),
            deletes: dice.pick(&[0.0, 0.0, 0.0, 0.0, 0.3]),
            keeps_books: dice.chance(0.3),
            compacts: dice.chance(0.3),
            faults: Faults::draw(dice, steps),
            codec: None,
            sealed: false,
            write_budget: WriteBudget::Off,
            quotas: false,
            lives: false,
            check_every: dice.pick(&[1, 25, 50, 50, 50, 50, 50, 50]),
        }
    }

    /// Half of the seeds have a codec, and pages that it can make smaller: those of few blocks
    /// stay as they are.
    pub fn draw_codec(&mut self, dice: &mut Dice) {
        if dice.chance(0.5) {
            return;
        }
        let choice = dice.pick(&[CodecChoice::Bf16, CodecChoice::Bf16, CodecChoice::Auto]);
        self.codec = Some((choice, dice.pick(&[0.5, 1.0, 1.0])));
        self.segment_blocks = dice.pick(&[32, 48, 48, 64, 96]);
        let most = self.segment_blocks as usize / 4;
        for (index, space) in self.namespaces.iter_mut().enumerate() {
            let page = match dice.chance(0.8) {
                true => CODED_BLOCKS_MIN + dice.below(most - CODED_BLOCKS_MIN + 1),
                false => 1 + dice.below(CODED_BLOCKS_MIN),
            };
            *space = namespace(index, page as u32);
        }
        // Longer memory of encoded pages would be mapped, and stay mapped after a kill.
        self.batch = self.batch.min(WINDOW_BLOCKS_MAX / most);
        if dice.chance(0.3) {
            self.faults.miscodes = dice.pick(&[2.0, 10.0]) / self.steps as f64;
        }
    }

    /// Half of the seeds are encrypted, with namespaces of some tenants and of none.
    pub fn draw_seal(&mut self, dice: &mut Dice) {
        if dice.chance(0.5) {
            return;
        }
        self.sealed = true;
        for (index, space) in self.namespaces.iter_mut().enumerate() {
            if dice.chance(0.7) {
                let tenant = format!("tenant {}", dice.below(2));
                *space = namespace_of(index, space.shape().page_blocks(), Some(&tenant));
            }
        }
        if dice.chance(0.3) {
            self.faults.miscodes = dice.pick(&[2.0, 10.0]) / self.steps as f64;
        }
        if dice.chance(0.3) {
            self.faults.rot_keyring = 0.3;
        }
    }

    /// A tenth of the seeds have a budget of writes: so many blocks a second.
    pub fn draw_budget(&mut self, dice: &mut Dice) {
        if dice.chance(0.1) {
            let blocks = dice.pick(&[20, 500, 500, 10_000, 10_000, 100_000]);
            self.write_budget = WriteBudget::Bytes(blocks * BLOCK as u64 * 86_400);
        }
    }

    /// Half of the seeds with quotas have limits of lifetimes.
    pub fn draw_lives(&mut self, dice: &mut Dice) {
        self.lives = self.quotas && dice.chance(0.5);
        if self.lives {
            // The clock jumps forward in these.
            self.faults.clock_forward = self.faults.clock_forward.max(f64::MIN_POSITIVE);
            // Long runs: a change of the clock is noted a while later, and must be by the crash.
            if dice.chance(0.4) {
                self.faults.kill /= 4.0;
                self.faults.power /= 4.0;
                self.faults.close /= 4.0;
            }
        }
    }

    pub fn volume_blocks(&self) -> Vec<usize> {
        let beside = OVERHEAD_BYTES as usize / BLOCK;
        self.volumes
            .iter()
            .map(|&segments| beside + (segments * self.segment_blocks) as usize)
            .collect()
    }

    pub fn superblocks(&self, store: StoreId) -> Vec<Superblock> {
        let volumes = self.volumes.iter().zip(1..);
        let volumes = volumes.map(|(segments, id)| (*segments, format!("volume{id}")));
        superblocks(store, self.segment_blocks, volumes)
    }
}

/// Mixed with a seed, for the dice that draw whether it has a codec: no other draw depends on them.
pub const CODEC: u64 = 0xc0dec;

/// The same for the dice that draw whether it has a budget of writes.
pub const BUDGET: u64 = 0xb0d9e7;

/// The same for the dice that draw whether it is encrypted.
pub const SEAL: u64 = 0x5ea1;

/// Blocks of a page that the codec makes smaller, at least.
const CODED_BLOCKS_MIN: usize = 6;

/// Blocks of the pages of a call with a codec, at most.
const WINDOW_BLOCKS_MAX: usize = 64;

/// Copies of a superblock.
pub const COPIES: usize = 3;

/// The blocks of the copies of a superblock, on a volume of so many blocks.
pub fn blocks_of(blocks: usize) -> [usize; COPIES] {
    let offsets = superblock_offsets((blocks * BLOCK) as u64);
    offsets.map(|offset| offset as usize / BLOCK)
}

/// The superblocks of a new store on volumes with these numbers of segments and these paths.
pub fn superblocks(
    store: StoreId,
    segment_blocks: u32,
    volumes: impl Iterator<Item = (u32, String)>,
) -> Vec<Superblock> {
    let entry = |((segments, path), id)| VolumeEntry {
        id: VolumeId::from_bytes([id; 16]),
        segments,
        lost: false,
        path,
    };
    let volumes: Vec<VolumeEntry> = volumes.zip(1..).map(entry).collect();
    let superblock = |volume| Superblock {
        store,
        volume,
        generation: 1,
        run: Run::FIRST,
        state: OpenState::Clean,
        created_unix_s: 0,
        holder: Holder {
            pid: 1,
            pid_scope: [0; 16],
        },
        history: History::default(),
        clock: Clock::default(),
        keyring: 0,
        quotas: 0,
        segment_blocks,
        features: Features::default(),
        volumes: volumes.clone(),
    };
    (0..).map(superblock).take(volumes.len()).collect()
}

/// A namespace of pages of one part.
pub fn namespace(index: usize, blocks: u32) -> Namespace {
    namespace_of(index, blocks, None)
}

fn namespace_of(index: usize, blocks: u32, tenant: Option<&str>) -> Namespace {
    let shape = PageShape::new(&[blocks * BLOCK as u32]).unwrap();
    let builder = Namespace::builder(&format!("model {index}"), "", 64, shape);
    let builder = match tenant {
        Some(tenant) => builder.extra(TENANT_FIELD, tenant),
        None => builder,
    };
    builder.build().unwrap()
}
