//! The disk on io_uring: one ring and one thread for each volume that is there.
//!
//! Owns: the queue between submitters and each ring's thread (which runs the module `worker`), the
//! doorbell that wakes it, and the kernel's abilities ([`Features`]).
//!
//! Invariants:
//! - A ring is used by its own thread only. All other threads push into the inbox, under its lock.
//! - `asleep` is read and written under that lock. It is set only when the thread has seen the
//!   inbox empty, or all in it held back, and will sleep in the kernel next. So a submitter that
//!   finds it set must ring the bell. A submitter that finds it clear need not: the thread will
//!   check the inbox again before it sleeps, or when the next completion frees a place in the ring.
//! - A closed inbox stays closed, and every closing rings the bell.
//!
//! Faults defended against: those of the module `job`; kernels without newer abilities (each is
//! probed by using it); a locked-memory limit too low for registered buffers (they are used plain,
//! and [`Disk::register`] reports so).
//!
//! It does not poll (neither SQPOLL nor IOPOLL), split or merge operations, or bound its queues:
//! callers bound their submissions. Their order is that of the module `queue`.

mod worker;

use std::fmt;
use std::io::{self, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::{Arc, mpsc};

use io_uring::{IoUring, Probe, opcode, squeue, types};
use larder_base::failure::DiskError;
use larder_base::fork::Origin;
use larder_base::memory::move_to_huge_pages;
use larder_base::runtime::thread::{self, JoinHandle};
use larder_base::runtime::{Mutex, descriptors};
use larder_base::system::pages::PageSizes;
use larder_base::system::processes::monotonic_nanoseconds as now;
use rustix::event::EventfdFlags;

use super::job::{
    Answers, Refusals, Times, forget_others, give_up, join_others, refuse, submit_by_volume,
};
use super::queue::Queue;
use super::{Choice, Disk, DiskOptions, Kind, Op, Piece};

/// Most operations of one volume in the kernel at once.
pub const DEPTH_MAX: u32 = 4096;

/// Longest stretch of memory the kernel registers as one buffer, in bytes.
const FIXED_BUFFER_BYTES_MAX: usize = 1 << 30;

/// Most registered buffers of a ring: 1 TiB of memory at their longest, 16 KiB of kernel memory for
/// the table.
const FIXED_BUFFERS_MAX: u16 = 1024;

/// Set-ups of a ring, newest kernel first. A kernel refuses unknown flags with `EINVAL`.
const SETUPS: [Setup; 5] = [
    Setup {
        deferred: true,
        cooperative: true,
        no_sqarray: true,
        submit_all: true,
    },
    Setup {
        deferred: true,
        cooperative: true,
        no_sqarray: false,
        submit_all: true,
    },
    Setup {
        deferred: false,
        cooperative: true,
        no_sqarray: false,
        submit_all: true,
    },
    Setup {
        deferred: false,
        cooperative: false,
        no_sqarray: false,
        submit_all: true,
    },
    Setup {
        deferred: false,
        cooperative: false,
        no_sqarray: false,
        submit_all: false,
    },
];

/// Flags of a ring.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Setup {
    /// `SINGLE_ISSUER | DEFER_TASKRUN` (6.1): completions are processed when the thread asks for
    /// them, and do not interrupt it.
    deferred: bool,
    /// `COOP_TASKRUN | TASKRUN_FLAG` (5.19): no inter-processor interrupts for completions.
    cooperative: bool,
    /// `NO_SQARRAY` (6.6): one indirection less.
    no_sqarray: bool,
    /// `SUBMIT_ALL` (5.18): one bad entry does not block the entries behind it.
    submit_all: bool,
}

/// The abilities of this kernel's io_uring, found by trying.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    setup: Setup,
    fixed_buffers: bool,
    vectored_fixed: bool,
    /// A thread can wait for completions with a time limit (5.11).
    timed_waits: bool,
}

impl Features {
    /// Sets up a small ring and probes it.
    ///
    /// # Errors
    /// The kernel's, if no ring can be set up: `ENOSYS` (too old), `EPERM` (forbidden), `ENOMEM`
    /// (locked-memory limit). [`io::ErrorKind::Unsupported`] if the ring lacks an operation that
    /// this disk needs (before 5.6).
    pub fn probe() -> Result<Self, io::Error> {
        let (setup, mut ring) = Self::first_setup()?;
        prove(&mut ring)?;
        let timed_waits = ring.params().is_feature_ext_arg();
        let submitter = ring.submitter();
        let mut known = Probe::new();
        submitter.register_probe(&mut known)?;
        let needed = [
            opcode::Read::CODE,
            opcode::Write::CODE,
            opcode::Readv::CODE,
            opcode::Writev::CODE,
            opcode::Fsync::CODE,
        ];
        if !needed.into_iter().all(|code| known.is_supported(code)) {
            return Err(io::Error::new(
                io::ErrorKind::Unsupported,
                "io_uring lacks read, write or fsync",
            ));
        }
        let fixed_buffers = submitter
            .register_buffers_sparse(u32::from(FIXED_BUFFERS_MAX))
            .is_ok();
        let vectored = known.is_supported(opcode::ReadvFixed::CODE)
            && known.is_supported(opcode::WritevFixed::CODE);
        Ok(Self {
            setup,
            fixed_buffers,
            vectored_fixed: fixed_buffers && vectored,
            timed_waits,
        })
    }

    fn first_setup() -> Result<(Setup, IoUring), io::Error> {
        let mut refusal = None;
        for setup in SETUPS {
            match setup.build(8) {
                Ok(ring) => return Ok((setup, ring)),
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => refusal = Some(error),
                Err(error) => return Err(error),
            }
        }
        Err(refusal.unwrap_or_else(|| io::ErrorKind::Unsupported.into()))
    }
}

/// Carries out a `NOP` and a read. A container profile may allow `io_uring_setup` and refuse
/// `io_uring_enter`.
fn prove(ring: &mut IoUring) -> Result<(), io::Error> {
    const MESSAGE: [u8; 8] = *b"a proof!";
    let (reader, mut writer) = io::pipe()?;
    writer.write_all(&MESSAGE)?;
    let mut memory = Box::new([0; MESSAGE.len()]);
    let (to, bytes) = (memory.as_mut_ptr(), MESSAGE.len() as u32);
    let nop = opcode::Nop::new().build();
    let read = opcode::Read::new(types::Fd(reader.as_raw_fd()), to, bytes).build();
    // SAFETY: a NOP points to nothing.
    unsafe { carry_out(ring, &nop) }?;
    // SAFETY: the memory of the read is freed only after its completion.
    match unsafe { carry_out(ring, &read) } {
        Ok(moved) if moved == MESSAGE.len() && *memory == MESSAGE => Ok(()),
        Ok(_) => Err(io::Error::other("a read through io_uring gave other bytes")),
        Err(error) => {
            // The read may still be in progress.
            Box::leak(memory);
            Err(error)
        }
    }
}

/// Carries out one operation.
///
/// # Safety
/// Memory that the entry points to must live until this returns, and for ever when this fails.
unsafe fn carry_out(ring: &mut IoUring, entry: &squeue::Entry) -> Result<usize, io::Error> {
    // SAFETY: the caller's promise.
    let pushed = unsafe { ring.submission().push(entry) };
    pushed.map_err(io::Error::other)?;
    loop {
        match ring.submit_and_wait(1) {
            Err(error) if error.kind() != io::ErrorKind::Interrupted => return Err(error),
            Ok(_) | Err(_) => {}
        }
        if let Some(completion) = ring.completion().next() {
            let result = completion.result();
            let errno = || io::Error::from_raw_os_error(result.wrapping_neg());
            return usize::try_from(result).map_err(|_| errno());
        }
    }
}

impl Setup {
    fn build(self, entries: u32) -> Result<IoUring, io::Error> {
        descriptors::cover()?;
        let mut builder = IoUring::builder();
        builder.dontfork().setup_cqsize(entries.saturating_mul(2));
        if self.deferred {
            builder.setup_single_issuer().setup_defer_taskrun();
        }
        if self.cooperative {
            builder.setup_coop_taskrun().setup_taskrun_flag();
        }
        if self.no_sqarray {
            builder.setup_no_sqarray();
        }
        if self.submit_all {
            builder.setup_submit_all();
        }
        builder.build(entries)
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("io_uring: registered files")?;
        let names = [
            (self.setup.deferred, "single issuer, deferred task work"),
            (self.setup.cooperative, "cooperative task work"),
            (self.setup.no_sqarray, "no submission array"),
            (self.fixed_buffers, "fixed buffers"),
            (self.vectored_fixed, "vectored fixed buffers"),
            (!self.timed_waits, "no timed waits, so nothing is paced"),
        ];
        names
            .iter()
            .filter(|(has, _)| *has)
            .try_for_each(|(_, name)| write!(f, ", {name}"))
    }
}

/// Moves bytes through one io_uring a volume.
pub struct Uring {
    lanes: Vec<Option<Arc<Lane>>>,
    workers: Mutex<Vec<JoinHandle<()>>>,
    features: Features,
    choice: Choice,
    origin: Origin,
}

/// The state shared by submitters and the thread of one volume's ring.
struct Lane {
    refusals: Refusals,
    times: Times,
    inbox: Mutex<Inbox>,
    /// An eventfd that the ring reads from whenever its thread may sleep.
    bell: OwnedFd,
}

struct Inbox {
    queue: Queue,
    registrations: Vec<Registration>,
    open: bool,
    asleep: bool,
}

/// Memory to register as one buffer, and the receiver of the result.
struct Registration {
    buffer: Piece,
    reply: mpsc::Sender<io::Result<()>>,
}

impl Uring {
    /// Sets up a ring and starts a thread for each volume that is there. `depth` is clamped to
    /// 1..=[`DEPTH_MAX`].
    ///
    /// # Errors
    /// The kernel's, if a ring cannot be set up or a thread cannot be started. Every thread already
    /// started is stopped then.
    pub fn open(mut options: DiskOptions, features: Features) -> Result<Self, io::Error> {
        let depth = options.depth.clamp(1, DEPTH_MAX);
        let mut disk = Self {
            lanes: Vec::with_capacity(options.files.len()),
            workers: Mutex::new(Vec::new()),
            features,
            choice: Choice {
                kind: Kind::Uring,
                reason: features.to_string(),
            },
            origin: Origin::here(),
        };
        for (volume, file) in std::mem::take(&mut options.files).into_iter().enumerate() {
            let Some(file) = file else {
                disk.lanes.push(None);
                continue;
            };
            let pacing = match features.timed_waits {
                true => options.pacing.clone(),
                false => Arc::default(),
            };
            let queue = Queue::new(volume, pacing);
            let lane = Arc::new(Lane::new(queue, Times::of(volume, &options))?);
            let (started, outcome) = mpsc::channel();
            let thread = thread::Builder::new()
                .name(format!("larder-ring-{volume}"))
                .spawn({
                    let lane = Arc::clone(&lane);
                    move || worker::run(&lane, file, depth, features, &started)
                })?;
            disk.lanes.push(Some(lane));
            disk.workers.get_mut().push(thread);
            outcome
                .recv()
                .unwrap_or_else(|_| Err(io::ErrorKind::BrokenPipe.into()))?;
        }
        Ok(disk)
    }

    /// The kernel's abilities that this disk uses.
    pub fn features(&self) -> &Features {
        &self.features
    }

    fn push(&self, volume: usize, ops: Vec<Op>, answers: &mut Answers) {
        let Some(lane) = self.lanes.get(volume).and_then(Option::as_ref) else {
            return ops
                .into_iter()
                .for_each(|op| refuse(op, DiskError::Os(libc::ENODEV), answers));
        };
        if let Err(ops) = lane.put(ops, |inbox, ops| inbox.queue.extend(ops, now())) {
            ops.into_iter()
                .for_each(|op| refuse(op, DiskError::Shutdown, answers));
        }
    }

    /// Registers a buffer with every running ring; returns their number.
    fn register_everywhere(&self, buffer: Piece) -> io::Result<usize> {
        let (reply, replies) = mpsc::channel();
        for lane in self.lanes.iter().flatten() {
            let registration = Registration {
                buffer,
                reply: reply.clone(),
            };
            // A closed lane drops its registration, and with it its end of the channel.
            let _ = lane.put(registration, |inbox, registration| {
                inbox.registrations.push(registration);
            });
        }
        drop(reply);
        replies
            .iter()
            .try_fold(0, |rings, registered| registered.map(|()| rings + 1))
    }
}

impl Disk for Uring {
    unsafe fn submit(&self, ops: Vec<Op>) {
        submit_by_volume(ops, |volume, ops, answers| self.push(volume, ops, answers));
    }

    fn expire(&self) {
        let lanes = self.lanes.iter().flatten();
        give_up(lanes.map(|lane| lane.inbox.lock().queue.take_late()));
    }

    unsafe fn register(&self, memory: &[Piece]) -> String {
        if !self.features.fixed_buffers {
            return "not registered: this kernel's io_uring has no updatable buffer table \
                    (5.19 has)"
                .to_owned();
        }
        let mib = |bytes: usize| bytes >> 20;
        let wanted: usize = memory.iter().map(|piece| piece.len).sum();
        let (mut buffers, mut bytes, mut rings) = (0, 0, 0);
        for buffer in memory.iter().copied().flat_map(cut) {
            // Populated before: the rings' threads cannot move bytes while they pin memory, so they
            // get a small part at a time, and all of it is present by then.
            populate(buffer);
            match self.register_everywhere(buffer) {
                Ok(0) => return "not registered: no ring is running".to_owned(),
                Ok(count) => rings = count,
                Err(refusal) => {
                    let (registered, wanted) = (mib(bytes), mib(wanted));
                    let hint = hint(&refusal);
                    return format!(
                        "{registered} of {wanted} MiB registered, plain I/O for the rest: \
                         {refusal}; {hint}"
                    );
                }
            }
            buffers += 1;
            bytes += buffer.len;
        }
        format!(
            "{} MiB registered, in {buffers} buffers on {rings} rings",
            mib(bytes)
        )
    }

    fn choice(&self) -> &Choice {
        &self.choice
    }

    fn shutdown(&self) {
        if self.origin.is_inherited() {
            forget_others(&self.workers);
            return;
        }
        for lane in self.lanes.iter().flatten() {
            lane.inbox.lock().open = false;
            lane.ring_bell();
        }
        join_others(&mut self.workers.lock());
    }
}

impl Drop for Uring {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl Lane {
    fn new(queue: Queue, times: Times) -> Result<Self, io::Error> {
        // Blocking, so that the ring's read waits for the bell instead of failing.
        descriptors::cover()?;
        let bell = rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?;
        let inbox = Inbox {
            queue,
            registrations: Vec::new(),
            open: true,
            asleep: false,
        };
        Ok(Self {
            refusals: Refusals::default(),
            times,
            inbox: Mutex::new(inbox),
            bell,
        })
    }

    /// Puts an item into the inbox and wakes the thread if it sleeps. Returns the item if the lane
    /// is closed.
    fn put<T>(&self, item: T, into: impl FnOnce(&mut Inbox, T)) -> Result<(), T> {
        let mut inbox = self.inbox.lock();
        if !inbox.open {
            return Err(item);
        }
        into(&mut inbox, item);
        let asleep = std::mem::replace(&mut inbox.asleep, false);
        drop(inbox);
        if asleep {
            self.ring_bell();
        }
        Ok(())
    }

    fn ring_bell(&self) {
        while let Err(error) = rustix::io::write(&self.bell, &1u64.to_ne_bytes()) {
            // Nothing else can fail: the counter would have to be rung 2^64 times without a read.
            if error != rustix::io::Errno::INTR {
                tracing::error!(%error, "could not wake the thread of an io_uring");
                return;
            }
        }
    }

    fn bell_fd(&self) -> i32 {
        self.bell.as_raw_fd()
    }
}

/// Cuts memory into buffers no longer than the kernel takes.
fn cut(piece: Piece) -> impl Iterator<Item = Piece> {
    (0..piece.len)
        .step_by(FIXED_BUFFER_BYTES_MAX)
        .map(move |start| Piece {
            ptr: piece.ptr.wrapping_add(start),
            len: FIXED_BUFFER_BYTES_MAX.min(piece.len - start),
        })
}

/// Makes the kernel fault memory in, on huge pages where it can: pinned memory moves no more. A
/// kernel without these calls faults memory in when it pins it.
fn populate(piece: Piece) {
    let (start, bytes) = PageSizes::here().around(piece.ptr.addr(), piece.len);
    let start = piece.ptr.with_addr(start).cast();
    let advice = rustix::mm::Advice::LinuxPopulateWrite;
    // SAFETY: the memory is mapped (contract of `Disk::register`), and this changes none of its
    // bytes.
    let _ = unsafe { rustix::mm::madvise(start, bytes, advice) };
    move_to_huge_pages(piece.ptr.addr(), piece.len, || true);
}

/// The remedy for memory that was not registered.
fn hint(refusal: &io::Error) -> &'static str {
    match refusal.raw_os_error() {
        Some(libc::ENOMEM | libc::EPERM) => {
            "raise the locked-memory limit (ulimit -l, LimitMEMLOCK=)"
        }
        Some(libc::EFAULT | libc::EOPNOTSUPP) => {
            "the kernel cannot pin this kind of mapping (use anonymous memory)"
        }
        _ => "if it is the locked-memory limit, raise it (ulimit -l, LimitMEMLOCK=)",
    }
}

#[cfg(test)]
mod tests;
