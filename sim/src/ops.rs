//! Operations of the engine's disk interface, as a simulated disk takes and answers them.

use std::sync::Arc;

use larder_engine::disk::{Action, Buffer, DiskError, Done, Op, Sink};
use larder_sim_runtime::medium::Block;

use crate::setup::BLOCK;

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
