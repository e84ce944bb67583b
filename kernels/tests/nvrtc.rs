//! The kernels' code: the built-in PTX matches the source, NVRTC compiles the source for the
//! relevant architectures, and the cubin cache returns only valid files.
//!
//! Needs NVRTC, located through `LARDER_NVRTC_DIR` (`scripts/fetch-nvrtc` downloads it); without it
//! the tests are skipped with a message.

#![allow(clippy::unwrap_used)]

#[path = "../../tests/support/honest.rs"]
mod honest;

use honest::skipped;
use larder_kernels::cuda::cache::Cache;
use larder_kernels::cuda::image::{Origin, PTX, best, cubin_name, stamp};
use larder_kernels::cuda::nvrtc::{Compiled, Nvrtc, NvrtcError, Target};
use larder_kernels::kernel::{KvCopyArgs, SOURCE};

fn nvrtc() -> Option<Nvrtc> {
    Nvrtc::find()
        .inspect_err(|error| skipped("compilation of the kernels by NVRTC", error))
        .ok()
}

fn cubin(nvrtc: &Nvrtc, source: &str, arch: &str) -> Result<Compiled, NvrtcError> {
    nvrtc.compile(source, &Target::Cubin(arch.to_owned()))
}

#[test]
fn the_built_in_ptx_is_of_this_source() {
    assert!(
        PTX.starts_with(&stamp(SOURCE)),
        "cu/kv_copy.ptx is stale: write it again with the example `ptx`"
    );
    // Its argument has the size of the crate's structure.
    let argument = format!("kv_copy_param_0[{}]", size_of::<KvCopyArgs>());
    assert!(PTX.contains(&argument), "{argument}");
    let forward = &larder_fake_cuda::forward::source();
    assert!(
        larder_fake_cuda::forward::PTX.starts_with(&stamp(forward)),
        "fake/cu/forward.ptx is stale: write it again with the example `ptx`"
    );
    for kernel in ["kv_copy", "kv_read"] {
        assert!(
            PTX.contains(&format!(".visible .entry {kernel}(")),
            "{kernel}"
        );
    }
}

#[test]
fn every_kernel_compiles_for_every_architecture_without_spilling() {
    let Some(nvrtc) = nvrtc() else { return };
    println!("NVRTC {:?}", nvrtc.version());
    for arch in ["sm_80", "sm_90", "sm_100"] {
        if arch == "sm_100" && nvrtc.version() < (12, 8) {
            skipped(
                &format!("kernels for {arch}"),
                "this NVRTC does not support it",
            );
            continue;
        }
        let source = larder_fake_cuda::forward::source();
        let Compiled { image, log } = cubin(&nvrtc, &source, arch).unwrap();
        assert!(image.starts_with(b"\x7fELF"));
        println!("{arch}: {} bytes\n{log}", image.len());
        let kernels = ["kv_copy", "kv_read"].into_iter();
        let kernels: Vec<_> = kernels.chain(larder_fake_cuda::forward::KERNELS).collect();
        for kernel in &kernels {
            assert!(log.contains(&format!("'{kernel}'")), "{arch}: {log}");
        }
        let spills: Vec<&str> = log.lines().filter(|line| line.contains("spill")).collect();
        assert_eq!(spills.len(), kernels.len(), "{log}");
        for line in spills {
            assert!(
                line.contains("0 bytes spill stores, 0 bytes spill loads"),
                "{arch}: {line}"
            );
        }
    }
}

#[test]
fn a_compile_error_contains_the_compiler_log() {
    let Some(nvrtc) = nvrtc() else { return };
    let error = cubin(&nvrtc, "__global__ void broken( {", "sm_90")
        .unwrap_err()
        .to_string();
    assert!(
        error.contains("nvrtcCompileProgram") && error.contains("error:"),
        "{error}"
    );
    let error = cubin(&nvrtc, SOURCE, "sm_1").unwrap_err().to_string();
    assert!(error.contains("gpu-architecture"), "{error}");
    assert!(cubin(&nvrtc, "a\0b", "sm_90").is_err());
}

#[test]
fn a_directory_without_nvrtc_is_an_error_with_a_remedy() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("libnvrtc.so.13"), b"no library").unwrap();
    let error = Nvrtc::load(Some(directory.path())).unwrap_err().to_string();
    assert!(error.contains("LARDER_NVRTC_DIR"), "{error}");
}

#[test]
fn without_nvrtc_the_built_in_ptx_is_used() {
    let directory = tempfile::tempdir().unwrap();
    let image = best("sm_90", None, Some(&Cache::new(directory.path())));
    assert_eq!(image.origin, Origin::BuiltIn);
    assert_eq!(image.bytes.strip_suffix(&[0]), Some(PTX.as_bytes()));
}

#[test]
fn a_cubin_is_compiled_once_and_again_after_its_file_was_torn() {
    let Some(nvrtc) = nvrtc() else { return };
    let directory = tempfile::tempdir().unwrap();
    let cache = Cache::new(directory.path().join("not there yet"));
    let origin = || {
        let image = best("sm_90", Some(&nvrtc), Some(&cache));
        assert!(image.bytes.starts_with(b"\x7fELF"));
        image.origin
    };
    assert_eq!([origin(), origin()], [Origin::Compiled, Origin::Cached]);
    let path =
        directory
            .path()
            .join("not there yet")
            .join(cubin_name("sm_90", SOURCE, nvrtc.version()));
    let whole = std::fs::read(&path).unwrap();
    std::fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    assert_eq!([origin(), origin()], [Origin::Compiled, Origin::Cached]);
    // For an architecture unknown to NVRTC, the driver compiles the PTX.
    assert_eq!(
        best("sm_9999", Some(&nvrtc), Some(&cache)).origin,
        Origin::BuiltIn
    );
}

#[test]
fn the_cache_returns_whole_files_only() {
    let directory = tempfile::tempdir().unwrap();
    let cache = Cache::new(directory.path());
    let path = directory.path().join("a");
    assert_eq!(cache.get("a"), None);
    cache.put("a", b"first").unwrap();
    cache.put("a", b"second").unwrap();
    assert_eq!(cache.get("a").unwrap(), b"second");
    let whole = std::fs::read(&path).unwrap();
    for len in 0..whole.len() {
        std::fs::write(&path, &whole[..len]).unwrap();
        assert_eq!(cache.get("a"), None, "cut off at {len}");
    }
    for at in 0..whole.len() {
        let mut spoiled = whole.clone();
        spoiled[at] ^= 1;
        std::fs::write(&path, &spoiled).unwrap();
        assert_eq!(cache.get("a"), None, "spoiled at {at}");
    }
    std::fs::write(&path, [&whole[..], &[0]].concat()).unwrap();
    assert_eq!(cache.get("a"), None, "a byte too many");
}

#[test]
fn cubins_of_other_sources_architectures_and_compilers_have_other_names() {
    let name = cubin_name("sm_90", SOURCE, (13, 0));
    assert_ne!(name, cubin_name("sm_80", SOURCE, (13, 0)));
    assert_ne!(name, cubin_name("sm_90", &SOURCE[1..], (13, 0)));
    assert_ne!(name, cubin_name("sm_90", SOURCE, (12, 9)));
}
