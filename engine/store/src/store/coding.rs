//! The codec of a handle: memory, times and a log line.

use std::sync::atomic::{AtomicBool, Ordering};

use larder_base::latency::Latency;
use larder_base::memory::AlignedBuf;
use larder_base::runtime::Mutex;
use larder_codec::{Codec, Malformed};

/// Most plain bytes of encoded pages of one call in flight.
pub(super) const ENCODED_BYTES: usize = 32 << 20;

/// The codec of a handle's puts, and memory for encoded pages that no put uses now: new memory
/// costs as much as the encoding.
#[derive(Default)]
pub(super) struct Encoding {
    pub(super) codec: Codec,
    spare: Mutex<Vec<AlignedBuf>>,
    /// Times, page by page.
    pub(super) times: Latency,
}

impl Encoding {
    /// Memory for so many bytes; `None` if there is none, or none is needed.
    pub(super) fn memory(&self, bytes: usize) -> Option<AlignedBuf> {
        if bytes == 0 {
            return None;
        }
        let mut spare = self.spare.lock();
        match spare.iter().position(|memory| memory.len() >= bytes) {
            Some(at) => Some(spare.swap_remove(at)),
            None => AlignedBuf::zeroed(bytes).ok(),
        }
    }

    /// Keeps the memory of a landed window, as much as one call uses.
    pub(super) fn give_back(&self, memory: Vec<AlignedBuf>) {
        let mut spare = self.spare.lock();
        spare.extend(memory);
        while spare.iter().map(|memory| memory.len()).sum::<usize>() > ENCODED_BYTES {
            spare.remove(0);
        }
    }
}

/// Decodes pages of gets.
#[derive(Default)]
pub(super) struct Decoder {
    codec: Codec,
    /// Times, page by page.
    pub(super) times: Latency,
    is_logged: AtomicBool,
}

impl Decoder {
    pub(super) fn codec(&self) -> Codec {
        #[cfg(debug_assertions)]
        if larder_base::planted!(SkippedEscape) {
            return Codec::of(larder_codec::Form::that_skips_an_escape());
        }
        self.codec
    }

    /// A page with the bytes that were put could not be decoded.
    pub(super) fn note(&self, error: &Malformed) {
        if !self.is_logged.swap(true, Ordering::Relaxed) {
            tracing::error!(
                %error,
                "a page cannot be decoded: it was encoded wrongly, or is decoded wrongly by this \
                 process; turn the codec off, and report the fault (counted in \
                 misses.undecodable; logged once)"
            );
        }
    }
}
