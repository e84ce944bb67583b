//! Selects the device code: from the cubin cache, from NVRTC, or the built-in PTX.
//!
//! A cached cubin loads in microseconds. NVRTC, if installed, compiles a cubin in a fraction of a
//! second. The PTX needs only the driver, which compiles it.
//!
//! The name of a cached cubin contains everything that it depends on: architecture, source, version
//! of NVRTC.

use super::cache::Cache;
use super::nvrtc::{Nvrtc, Target};
use crate::kernel::SOURCE;

/// The kernels as PTX, compiled by the driver. The first line identifies the source.
pub const PTX: &str = include_str!("../../cu/kv_copy.ptx");

/// The minimum architecture of [`PTX`]. Later architectures also accept it.
pub const PTX_ARCH: &str = "compute_80";

/// Code that the driver can load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// A cubin, or PTX with a final NUL.
    pub bytes: Vec<u8>,
    /// The origin of the code.
    pub origin: Origin,
}

/// The origin of code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The cache.
    Cached,
    /// Compiled by this call.
    Compiled,
    /// The built-in PTX.
    BuiltIn,
}

/// The first line of a PTX file. It identifies the source from which the file was made.
#[must_use]
pub fn stamp(source: &str) -> String {
    format!(
        "// kv_copy.cu {}\n",
        blake3::hash(source.as_bytes()).to_hex()
    )
}

/// The file name of a cubin in the cache.
#[must_use]
pub fn cubin_name(arch: &str, source: &str, (major, minor): (i32, i32)) -> String {
    let hash = blake3::hash(source.as_bytes()).to_hex();
    format!("kv_copy-{arch}-{hash}-nvrtc-{major}.{minor}.cubin")
}

/// The best available code for an architecture. Never fails: if neither the cache nor NVRTC
/// provides code, the built-in PTX is used.
#[must_use]
pub fn best(arch: &str, nvrtc: Option<&Nvrtc>, cache: Option<&Cache>) -> Image {
    let cubin = nvrtc.and_then(|nvrtc| cubin(arch, nvrtc, cache));
    cubin.unwrap_or_else(|| Image {
        bytes: [PTX.as_bytes(), &[0]].concat(),
        origin: Origin::BuiltIn,
    })
}

fn cubin(arch: &str, nvrtc: &Nvrtc, cache: Option<&Cache>) -> Option<Image> {
    let name = cubin_name(arch, SOURCE, nvrtc.version());
    if let Some(bytes) = cache.and_then(|cache| cache.get(&name)) {
        return Some(Image {
            bytes,
            origin: Origin::Cached,
        });
    }
    // NVRTC may not support the architecture; the driver may still support it.
    let compiled = nvrtc
        .compile(SOURCE, &Target::Cubin(arch.to_owned()))
        .ok()?;
    if let Some(cache) = cache {
        // A failed cache write only makes the next start slower.
        let _ = cache.put(&name, &compiled.image);
    }
    Some(Image {
        bytes: compiled.image,
        origin: Origin::Compiled,
    })
}
