//! The functions of namespaces and pages.

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use larder_engine::{Class, Hint, PutOptions as EnginePut};
use larder_format::{PageKey, TokenUnits, namespace_seed, page_keys};
use larder_handle::chain::Chain;
use larder_handle::identity::Identity;
use larder_handle::region::{slices, slices_mut};
use larder_handle::store::Space;

use crate::answer::{Error, Failure, answer};
use crate::given;
use crate::store::{Owner, Store};
use crate::types::{Char, Part, PutOptions, TOKENS_MAX};

/// `larder_namespace`.
pub struct Namespace {
    pub(crate) space: Arc<Space>,
    /// Keeps the store open.
    _owner: Arc<Owner>,
}

/// A longer wait has the same effect.
const LONG: Duration = Duration::from_secs(100_000_000);

/// A namespace, and keys in it.
///
/// # Safety
/// By the header.
unsafe fn named<'a>(
    ns: *const Namespace,
    keys: *const u8,
    count: usize,
) -> Result<(&'a Space, &'a [PageKey]), Failure> {
    // SAFETY: by the header.
    let ns = unsafe { given::object(ns, "ns") }?;
    // SAFETY: by the header.
    let keys = unsafe { given::keys(keys, count) }?;
    Ok((&ns.space, keys))
}

/// Where the pages of a put stand, and the engine's options.
///
/// # Safety
/// By the header.
pub(crate) unsafe fn putting(
    options: *const PutOptions,
) -> Result<(Option<Chain>, EnginePut), Failure> {
    // SAFETY: by the header.
    let options = unsafe { given::options(options) }?;
    // SAFETY: by the header.
    let before = unsafe { given::key(options.before) };
    let depth = options.depth;
    let chain = match (options.loose, before, depth) {
        (0, before, depth) => Some(Chain { before, depth }),
        (1, None, 0) => None,
        (1, ..) => {
            let said = "pages that are no chain (`loose`) have neither `before` nor `depth`";
            return Err(Failure::argument(said));
        }
        (other, ..) => {
            return Err(Failure::argument(format!("`loose`: {other} is not 0 or 1")));
        }
    };
    let class = u8::try_from(options.hint_class).ok().and_then(Class::new);
    let class = class.ok_or_else(|| {
        let said = format!("`hint_class`: {} is not below 64", options.hint_class);
        Failure::argument(said)
    })?;
    let priority = u8::try_from(options.hint_priority).map_err(|_| {
        let said = format!(
            "`hint_priority`: {} is not below 256",
            options.hint_priority
        );
        Failure::argument(said)
    })?;
    let wait = Duration::from_millis(options.wait_ms).min(LONG);
    let hint = Hint::new(class).priority(priority);
    Ok((chain, EnginePut::waiting(wait).hinting(hint)))
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_namespace_open(
    store: *mut Store,
    identity: *const Char,
    ns: *mut *mut Namespace,
    error: *mut *mut Error,
) -> i32 {
    let call = || {
        let place = given::place(ns, "ns")?;
        // SAFETY: by the header.
        let store = unsafe { given::object(store, "store") }?;
        // SAFETY: by the header.
        let identity = unsafe { given::text(identity, "identity") }?;
        let record = Identity::parse(identity)?.record()?;
        let space = store.owner.handle.space(record)?;
        let made = Namespace {
            space: Arc::new(space),
            _owner: store.owner.clone(),
        };
        // SAFETY: by the header.
        unsafe { place.write(Box::into_raw(Box::new(made))) };
        Ok(())
    };
    // SAFETY: by the header.
    unsafe { answer("larder_namespace_open", error, call) }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_namespace_free(ns: *mut Namespace) {
    // SAFETY: by the header.
    unsafe { given::release("larder_namespace_free", ns) };
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_chain(
    ns: *const Namespace,
    before: *const u8,
    salt: *const Char,
    tokens: *const u32,
    count: usize,
    keys: *mut u8,
    room: usize,
    pages: *mut usize,
    error: *mut *mut Error,
) -> i32 {
    let call = || {
        // SAFETY: by the header.
        let ns = unsafe { given::object(ns, "ns") }?;
        // SAFETY: by the header.
        let before = unsafe { given::key(before) };
        let salt = match salt.is_null() {
            true => None,
            // SAFETY: by the header.
            false => Some(unsafe { given::text(salt, "salt") }?),
        };
        if before.is_some() && salt.is_some() {
            let said = "`salt` belongs to the head of a chain: `before` covers it";
            return Err(Failure::argument(said));
        }
        // SAFETY: by the header.
        let tokens = unsafe { given::values(tokens, count, TOKENS_MAX, "tokens") }?;
        let page_tokens = ns.space.namespace.fields().page_tokens as usize;
        let page_tokens = NonZeroUsize::new(page_tokens).unwrap_or(NonZeroUsize::MIN);
        let whole = count / page_tokens;
        let written = whole.min(room);
        if written > 0 {
            given::place(keys, "keys")?;
        }
        let used = tokens.iter().take(written * page_tokens.get());
        let words: Vec<u64> = used.copied().map(u64::from).collect();
        let prior = before.or_else(|| namespace_seed(None, salt));
        let made = page_keys(&words, page_tokens, prior, TokenUnits::Single);
        // SAFETY: by the header; a key is its 32 bytes.
        unsafe { given::set_all(keys.cast(), &made) };
        // SAFETY: by the header.
        unsafe { given::set(pages, whole) };
        Ok(())
    };
    // SAFETY: by the header.
    unsafe { answer("larder_chain", error, call) }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_longest_prefix(
    ns: *mut Namespace,
    keys: *const u8,
    count: usize,
    found: *mut usize,
    error: *mut *mut Error,
) -> i32 {
    let call = || {
        let place = given::place(found, "found")?;
        // SAFETY: by the header.
        let (space, keys) = unsafe { named(ns, keys, count) }?;
        let found = space.longest_prefix(keys);
        // SAFETY: by the header.
        unsafe { place.write(found) };
        Ok(())
    };
    // SAFETY: by the header.
    unsafe { answer("larder_longest_prefix", error, call) }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_contains(
    ns: *mut Namespace,
    keys: *const u8,
    count: usize,
    statuses: *mut u8,
    error: *mut *mut Error,
) -> i32 {
    let call = || {
        // SAFETY: by the header.
        let (space, keys) = unsafe { named(ns, keys, count) }?;
        given::place_for(statuses, count)?;
        let codes = space.contains(keys, None);
        // SAFETY: by the header.
        unsafe { given::set_all(statuses, &codes) };
        Ok(())
    };
    // SAFETY: by the header.
    unsafe { answer("larder_contains", error, call) }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_put(
    ns: *mut Namespace,
    keys: *const u8,
    parts: *const Part,
    pages: usize,
    options: *const PutOptions,
    statuses: *mut u8,
    error: *mut *mut Error,
) -> i32 {
    let call = || {
        // SAFETY: by the header.
        let (space, keys) = unsafe { named(ns, keys, pages) }?;
        let sizes = &space.parts;
        // SAFETY: by the header.
        let starts = unsafe { given::part_starts(parts, pages, sizes, false) }?;
        // SAFETY: by the header.
        let (chain, options) = unsafe { putting(options) }?;
        given::place_for(statuses, pages)?;
        // SAFETY: each part has its bytes, which do not change during the call, by the header.
        let memory = unsafe { slices(&starts, sizes) };
        let codes = space.put(keys, chain, &memory, options, None);
        // SAFETY: by the header.
        unsafe { given::set_all(statuses, &codes) };
        Ok(())
    };
    // SAFETY: by the header.
    unsafe { answer("larder_put", error, call) }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_get(
    ns: *mut Namespace,
    keys: *const u8,
    parts: *const Part,
    pages: usize,
    timeout_ms: u64,
    statuses: *mut u8,
    error: *mut *mut Error,
) -> i32 {
    let call = || {
        // SAFETY: by the header.
        let (space, keys) = unsafe { named(ns, keys, pages) }?;
        let sizes = &space.parts;
        // SAFETY: by the header.
        let starts = unsafe { given::part_starts(parts, pages, sizes, true) }?;
        given::place_for(statuses, pages)?;
        // SAFETY: no two parts overlap, and nothing else uses them during the call, by the header.
        let mut memory = unsafe { slices_mut(&starts, sizes) };
        let codes = space.get(keys, &mut memory, given::moment(timeout_ms));
        // SAFETY: by the header.
        unsafe { given::set_all(statuses, &codes) };
        Ok(())
    };
    // SAFETY: by the header.
    unsafe { answer("larder_get", error, call) }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_touch(
    ns: *mut Namespace,
    keys: *const u8,
    count: usize,
    error: *mut *mut Error,
) -> i32 {
    let call = || {
        // SAFETY: by the header.
        let (space, keys) = unsafe { named(ns, keys, count) }?;
        space.touch(keys, Hint::default());
        Ok(())
    };
    // SAFETY: by the header.
    unsafe { answer("larder_touch", error, call) }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_delete(
    ns: *mut Namespace,
    keys: *const u8,
    count: usize,
    removed: *mut u64,
    error: *mut *mut Error,
) -> i32 {
    let call = || {
        // SAFETY: by the header.
        let (space, keys) = unsafe { named(ns, keys, count) }?;
        let gone = space.delete(keys)?;
        // SAFETY: by the header.
        unsafe { given::set(removed, gone) };
        Ok(())
    };
    // SAFETY: by the header.
    unsafe { answer("larder_delete", error, call) }
}

/// See the header.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn larder_clear(
    ns: *mut Namespace,
    removed: *mut u64,
    error: *mut *mut Error,
) -> i32 {
    let call = || {
        // SAFETY: by the header.
        let ns = unsafe { given::object(ns, "ns") }?;
        let gone = ns.space.clear()?;
        // SAFETY: by the header.
        unsafe { given::set(removed, gone) };
        Ok(())
    };
    // SAFETY: by the header.
    unsafe { answer("larder_clear", error, call) }
}
