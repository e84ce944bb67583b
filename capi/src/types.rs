//! The structs of the header.

use std::ffi::{c_char, c_void};
use std::ptr::null;

/// `LARDER_ABI`.
pub const ABI: u32 = 1;

/// `LARDER_KEY_BYTES`.
pub const KEY_BYTES: usize = 32;

/// `LARDER_FOREVER`.
pub const FOREVER: u64 = u64::MAX;

/// `LARDER_BATCH_MAX`.
pub const BATCH_MAX: usize = 1 << 20;

/// `LARDER_TOKENS_MAX`.
pub const TOKENS_MAX: usize = 1 << 26;

/// `char`: a number of its own, so that a text is not taken for bytes.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub struct Char(pub c_char);

/// `larder_part`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Part {
    /// The first byte.
    pub base: *mut c_void,
    /// Bytes.
    pub length: usize,
}

/// `larder_finished`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Finished {
    /// The number of the job.
    pub job: u64,
    /// The caller's.
    pub tag: u64,
    /// Pages of the job.
    pub pages: usize,
}

/// A struct that begins with its size. All its bytes may be zero.
///
/// # Safety
/// The struct is `repr(C)`, its first field is a `usize`, and zero bytes are a valid value.
pub unsafe trait Options: Copy {
    /// The size in the first release of the ABI.
    const FIRST: usize;
    /// Its name.
    const NAME: &'static str;
    /// The defaults.
    const DEFAULT: Self;
}

/// `larder_open_options`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct OpenOptions {
    /// Bytes of the caller's struct.
    pub struct_size: usize,
    /// Bytes of a new store.
    pub size: u64,
    /// Bytes of a page.
    pub page_bytes: u64,
    /// The lease of a lookup.
    pub lease_ms: u64,
    /// The hang limit.
    pub hang_limit_ms: u64,
    /// Whether nothing is written.
    pub read_only: u64,
    /// Further keys, as JSON.
    pub settings: *const Char,
}

// SAFETY: as the trait asks; a null pointer is zero.
unsafe impl Options for OpenOptions {
    const FIRST: usize = 56;
    const NAME: &'static str = "larder_open_options";
    const DEFAULT: OpenOptions = OpenOptions {
        struct_size: size_of::<OpenOptions>(),
        size: 0,
        page_bytes: 0,
        lease_ms: 0,
        hang_limit_ms: 0,
        read_only: 0,
        settings: null(),
    };
}

/// `larder_put_options`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PutOptions {
    /// Bytes of the caller's struct.
    pub struct_size: usize,
    /// The key before the first page.
    pub before: *const u8,
    /// Patience for room.
    pub wait_ms: u64,
    /// Pages before the first one.
    pub depth: u32,
    /// Whether the pages are no chain.
    pub loose: u32,
    /// The class of the hint.
    pub hint_class: u32,
    /// Its priority.
    pub hint_priority: u32,
}

// SAFETY: as the trait asks; a null pointer is zero.
unsafe impl Options for PutOptions {
    const FIRST: usize = 40;
    const NAME: &'static str = "larder_put_options";
    const DEFAULT: PutOptions = PutOptions {
        struct_size: size_of::<PutOptions>(),
        before: null(),
        wait_ms: 0,
        depth: 0,
        loose: 0,
        hint_class: 0,
        hint_priority: 0,
    };
}

/// `larder_queue_options`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct QueueOptions {
    /// Bytes of the caller's struct.
    pub struct_size: usize,
    /// Threads for reads, and as many for writes.
    pub threads: u64,
    /// Most jobs that are not polled yet.
    pub jobs: u64,
    /// Most bytes of their pages.
    pub job_bytes: u64,
}

// SAFETY: as the trait asks.
unsafe impl Options for QueueOptions {
    const FIRST: usize = 32;
    const NAME: &'static str = "larder_queue_options";
    const DEFAULT: QueueOptions = QueueOptions {
        struct_size: size_of::<QueueOptions>(),
        threads: 0,
        jobs: 0,
        job_bytes: 0,
    };
}
