//! A disk in memory that can lose, tear, refuse and rot its content.
//!
//! Each volume is a [`Medium`]. Writes in flight stay with the driver. It hands a write over when
//! it decides that the write happens, in whole or in part.
//!
//! Page data is kept as one word for each block, all else as bytes: no run materialises the payload
//! that it writes.
//!
//! Every operation passes the simulated system calls of [`Kernel`]. As a [`Disk`] it answers at
//! once: recovery and reclaim read through it.

use std::sync::{Arc, Mutex, MutexGuard};

use larder_disk::{Action, Choice, Disk, DiskError, Done, Kind, Op, Piece};
use larder_engine::AlignedBuf;
use larder_engine::format::BLOCK_BYTES;
use larder_sim_runtime::dice::Dice;
use larder_sim_runtime::medium::{Arrival, Content, Medium};

use crate::kernel::{Answer, Kernel, Odds};

/// The outcome of a write.
#[derive(Clone, Debug)]
pub enum Fate {
    Done,
    /// Acknowledged, but never happens.
    Lost,
    /// Acknowledged, but lands from this block on.
    Elsewhere(usize),
    /// Fails, after this part of it has arrived.
    Fails(Answer, Arrival),
}

/// All volumes of a store.
pub struct SimDisk {
    volumes: Mutex<Vec<Medium>>,
    kernel: Mutex<Kernel>,
    choice: Choice,
}

impl SimDisk {
    pub fn new(blocks: &[usize], dice: Dice, odds: Odds) -> Arc<SimDisk> {
        Arc::new(SimDisk {
            volumes: Mutex::new(blocks.iter().map(|&blocks| Medium::new(blocks)).collect()),
            kernel: Mutex::new(Kernel::new(dice, odds)),
            choice: Choice {
                kind: Kind::Threads,
                reason: "simulated".to_owned(),
            },
        })
    }

    pub fn volumes(&self) -> MutexGuard<'_, Vec<Medium>> {
        self.volumes.lock().unwrap()
    }

    pub fn kernel(&self) -> MutexGuard<'_, Kernel> {
        self.kernel.lock().unwrap()
    }

    /// A read of adjacent blocks. `take` is called with their contents if it succeeds.
    pub fn read(
        &self,
        volume: usize,
        start: usize,
        count: usize,
        take: impl FnOnce(&[Content]),
    ) -> Result<(), DiskError> {
        let volume = &mut self.volumes()[volume];
        let mut kernel = self.kernel();
        kernel.read(start, count, |start, count| volume.fails(start, count))?;
        take(volume.all_visible(start, count));
        Ok(())
    }

    /// A write of adjacent blocks, with its outcome. Returns the answer of the device.
    pub fn write(
        &self,
        volume: usize,
        start: usize,
        blocks: &[Content],
        fate: &Fate,
    ) -> Result<(), DiskError> {
        let volume = &mut self.volumes()[volume];
        let mut kernel = self.kernel();
        let answer = match fate {
            Fate::Fails(answer, _) => *answer,
            Fate::Done | Fate::Lost | Fate::Elsewhere(_) => Answer::Done,
        };
        let land = |first: usize, count: usize, is_last: bool| {
            let within = first - start;
            let part = &blocks[within..within + count];
            match fate {
                Fate::Lost => {}
                Fate::Elsewhere(to) => volume.write(to + within, part, || true),
                Fate::Fails(_, arrival) if is_last => volume.write_part(first, part, arrival),
                Fate::Done | Fate::Fails(..) => volume.write(first, part, || true),
            }
        };
        kernel.write(start, blocks.len(), answer, land)
    }

    fn carry_out(
        &self,
        volume: usize,
        action: Action,
    ) -> (Result<(), DiskError>, Option<AlignedBuf>) {
        let Action::Read { offset, mut buffer } = action else {
            panic!("only reads use the disk interface");
        };
        let start = usize::try_from(offset).unwrap() / BLOCK_BYTES;
        let count = buffer.len() / BLOCK_BYTES;
        let result = self.read(volume, start, count, |blocks| {
            // SAFETY: the operation is answered after this.
            let parts = unsafe { buffer.parts_mut() };
            let out = parts.flat_map(|part| part.chunks_exact_mut(BLOCK_BYTES));
            blocks
                .iter()
                .zip(out)
                .for_each(|(block, out)| block.render(out));
        });
        (result, buffer.into_owned())
    }
}

impl Disk for SimDisk {
    unsafe fn submit(&self, ops: Vec<Op>) {
        for op in ops {
            let (result, buffer) = self.carry_out(op.volume, op.action);
            op.sink.done(vec![Done {
                tag: op.tag,
                result,
                buffer,
            }]);
        }
    }

    unsafe fn register(&self, _: &[Piece]) -> String {
        "simulated".to_owned()
    }

    fn choice(&self) -> &Choice {
        &self.choice
    }

    fn shutdown(&self) {}
}
