//! The disk of a simulated process: the way of operations to a device, and of answers back.
//!
//! One thread of the process serves each volume. It passes on the answers that the device has for
//! it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use larder_disk::{Action, Buffer, Choice, Disk, DiskError, Done, Kind, Op, Piece, Sink};
use larder_sim_runtime::medium::Block;
use larder_sim_runtime::sync::Mutex;
use larder_sim_runtime::thread::{Builder, JoinHandle};
use larder_sim_runtime::time::Instant;
use larder_sim_runtime::{Queue, task};

use crate::setup::BLOCK;

/// Answers for one receiver.
pub type Answers = (Arc<dyn Sink>, Vec<Done>);

/// What happens to operations. No task waits in it.
pub trait Device: Send + Sync + 'static {
    /// Starts an operation. Returns whether the thread of its volume has to look at it now.
    fn launch(&self, op: Op) -> bool;

    /// All operations of a batch have been started.
    fn launched(&self) {}

    /// Ends the operations of a volume that are due. Returns the answers by receiver, and the
    /// moment when the next operation is due.
    fn land(&self, volume: usize) -> (Vec<Answers>, Option<Instant>);

    /// Takes back the operations that must not be started any more.
    fn expire(&self) -> Vec<Op> {
        Vec::new()
    }
}

struct Shared<D> {
    device: D,
    is_shut: AtomicBool,
    /// By volume: wakes its thread.
    called: Vec<Queue>,
}

/// The disk.
pub struct Lines<D> {
    shared: Arc<Shared<D>>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    choice: Choice,
}

impl<D: Device> Lines<D> {
    /// The disk of the calling process.
    pub fn new(device: D, volumes: usize) -> Arc<Lines<D>> {
        let shared = Arc::new(Shared {
            device,
            is_shut: AtomicBool::new(false),
            called: (0..volumes).map(|_| Queue::new()).collect(),
        });
        let thread = |volume: usize| {
            let shared = shared.clone();
            let thread = Builder::new().name(format!("device {volume}"));
            thread
                .spawn(move || shared.serve(volume))
                .expect("a thread")
        };
        Arc::new(Lines {
            threads: Mutex::new((0..volumes).map(thread).collect()),
            shared,
            choice: choice(),
        })
    }

    /// Lets the thread of a volume look at its operations.
    pub fn call(&self, volume: usize) {
        self.shared.called[volume].wake_all();
    }
}

impl<D: Device> Shared<D> {
    fn serve(&self, volume: usize) {
        loop {
            let (answers, next) = self.device.land(volume);
            if !answers.is_empty() {
                for (sink, batch) in answers {
                    sink.done(batch);
                }
                // Operations may have come meanwhile.
                continue;
            }
            if next.is_none() && self.is_shut.load(Ordering::Relaxed) {
                return;
            }
            self.called[volume].wait("an operation", next);
        }
    }
}

impl<D: Device> Disk for Lines<D> {
    unsafe fn submit(&self, ops: Vec<Op>) {
        task::pass();
        if self.shared.is_shut.load(Ordering::Relaxed) {
            return refuse(ops, DiskError::Shutdown);
        }
        for op in ops {
            let volume = op.volume;
            if self.shared.device.launch(op) {
                self.call(volume);
            }
        }
        self.shared.device.launched();
    }

    fn expire(&self) {
        refuse(self.shared.device.expire(), DiskError::Deadline);
    }

    unsafe fn register(&self, _: &[Piece]) -> String {
        "simulated".to_owned()
    }

    fn choice(&self) -> &Choice {
        &self.choice
    }

    fn shutdown(&self) {
        self.shared.is_shut.store(true, Ordering::Relaxed);
        for called in &self.shared.called {
            called.wake_all();
        }
        let threads = std::mem::take(&mut *self.threads.lock());
        for thread in threads {
            let _ = thread.join();
        }
    }
}

/// The description of a simulated disk.
pub fn choice() -> Choice {
    Choice {
        kind: Kind::Threads,
        reason: "simulated".to_owned(),
    }
}

fn refuse(ops: Vec<Op>, error: DiskError) {
    for op in ops {
        let (sink, done) = answer(op, Err(error));
        sink.done(vec![done]);
    }
}

/// Passes each block of an operation's memory on, in order.
pub fn each_block(buffer: &Buffer, mut take: impl FnMut(&Block)) {
    let mut each = |memory: &[u8]| {
        for block in memory.chunks(BLOCK) {
            take(block.try_into().expect("direct I/O moves whole blocks"));
        }
    };
    match buffer {
        Buffer::Owned(memory) => each(memory),
        Buffer::Borrowed(pieces) => {
            for piece in pieces {
                // SAFETY: the submitter keeps the memory valid until the answer. All tasks run on
                // this thread, so nothing writes to it now.
                each(unsafe { std::slice::from_raw_parts(piece.ptr, piece.len) });
            }
        }
    }
}

/// The receiver of an operation, and its answer.
pub fn answer(op: Op, result: Result<(), DiskError>) -> (Arc<dyn Sink>, Done) {
    let buffer = match op.action {
        Action::Read { buffer, .. } | Action::Write { buffer, .. } => buffer.into_owned(),
        Action::Sync => None,
    };
    let done = Done {
        tag: op.tag,
        result,
        buffer,
    };
    (op.sink, done)
}
