//! Which code the device gets: from the cache of cubins, from NVRTC, or the PTX that is built in.
//!
//! A cubin in the cache loads in microseconds; NVRTC makes one in a fraction of a second where it is installed; the PTX needs
//! nothing but the driver, which compiles it.
//!
//! A cached cubin is named after everything it depends on: architecture, source, version of NVRTC.

use super::cache::Cache;
use super::nvrtc::{Nvrtc, Target};
use crate::kernel::SOURCE;

/// The kernels for the driver to compile. The first line says of which source.
pub const PTX: &str = include_str!("../../cu/kv_copy.ptx");

/// The architecture that [`PTX`] is for; later ones take it too.
pub const PTX_ARCH: &str = "compute_80";

/// Code for the driver to load.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Image {
    /// A cubin, or PTX that ends with a NUL.
    pub bytes: Vec<u8>,
    /// Where it came from.
    pub origin: Origin,
}

/// Where code came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The cache.
    Cached,
    /// Compiled just now.
    Compiled,
    /// The PTX that is built in.
    BuiltIn,
}

/// The first line of a PTX file: which source it was made from.
#[must_use]
pub fn stamp(source: &str) -> String {
    format!(
        "// kv_copy.cu {}\n",
        blake3::hash(source.as_bytes()).to_hex()
    )
}

/// The name of a cubin in the cache.
#[must_use]
pub fn cubin_name(arch: &str, source: &str, (major, minor): (i32, i32)) -> String {
    let hash = blake3::hash(source.as_bytes()).to_hex();
    format!("kv_copy-{arch}-{hash}-nvrtc-{major}.{minor}.cubin")
}

/// The best code to be had for an architecture. Never fails: what the cache or NVRTC cannot give is built in.
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
    // An architecture that this NVRTC does not know, say: the driver may know it.
    let compiled = nvrtc
        .compile(SOURCE, &Target::Cubin(arch.to_owned()))
        .ok()?;
    if let Some(cache) = cache {
        // A cache that cannot be written costs the next start its time, and nothing else.
        let _ = cache.put(&name, &compiled.image);
    }
    Some(Image {
        bytes: compiled.image,
        origin: Origin::Compiled,
    })
}
