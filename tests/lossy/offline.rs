//! The power goes at one write after the other of `compact`, of `verify --repair` and of `volume
//! retire`: run again, each ends as if it never had, with every page.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Stdio;

use larder_format::{BLOCK_BYTES, SEGMENTS_OFFSET};
use serde_json::Value;

use crate::device::Device;
use crate::device_under;
use crate::support::sparse;
use crate::support::stage::{Promise, Stage, kills};
use crate::support::text;

const SEGMENT_BYTES: u64 = 16 << 20;

/// Power losses of each command, unless more are asked for.
const LOSSES: usize = 12;

/// A store of conversations that were written in turns, most of it in one segment. Returns the key
/// of one of its pages.
fn stage(seed: u64, volumes: usize, size: &'static str) -> (Stage, String) {
    let mut stage = Stage::new(volumes, size, seed);
    let mut writer = stage.writer(Promise::Kill);
    writer.args(["--limit", "30"]);
    stage.finish(writer);
    let key = stage.acknowledged();
    (stage, key)
}

fn document(stage: &Stage, command: &str, options: &[&str]) -> (Option<i32>, Value) {
    let output = stage
        .larder(command, options)
        .arg("--json")
        .output()
        .unwrap();
    let document = serde_json::from_slice(&output.stdout).unwrap_or_default();
    (output.status.code(), document)
}

/// How many pages there are, all of them good; the store must be sound.
#[track_caller]
fn good_pages(stage: &Stage) -> u64 {
    let (code, found) = document(stage, "verify", &["--deep"]);
    assert_eq!(code, Some(0), "{found:#}");
    found["deep"]["good_pages"].as_u64().unwrap()
}

/// Runs a command on the stage's store with the power of its first volume going after some writes,
/// for many numbers of them. `further` are the other volumes, which lose nothing.
fn at_many_writes(stage: &mut Stage, command: &str, options: &[&str], further: &[PathBuf]) {
    let backing = stage.store.clone();
    let packed = sparse::pack(&backing);
    let others: Vec<_> = further
        .iter()
        .map(|path| (path, sparse::pack(path)))
        .collect();
    let Some(device) = device_under(stage) else {
        return;
    };
    let (code, done) = document(stage, command, options);
    assert_eq!(code, Some(0), "{done:#}");
    let wanted = good_pages(stage);
    let writes = device.counts().writes;
    assert!(writes > 4, "{command} has nothing to do: {done:#}");
    drop(device);
    let losses = (kills(LOSSES) as u64).min(writes);
    let (mut cut, mut lost) = (0, 0);
    for number in 0..losses {
        let volumes = others.iter().map(|(path, packed)| (*path, packed));
        for (path, packed) in volumes.chain([(&backing, &packed)]) {
            std::fs::remove_file(path).unwrap();
            sparse::unpack(packed, path);
        }
        let mountpoint = stage.store.parent().unwrap();
        let device = Device::mount(&backing, mountpoint).unwrap();
        let mut child = stage.larder(command, options);
        child.stdout(Stdio::null()).stderr(Stdio::null());
        cut += u64::from(device.cut_power_after(number * writes / losses, &mut child));
        device.restore_power(&mut stage.dice);
        let (code, again) = document(stage, command, options);
        assert_eq!(
            code,
            Some(0),
            "{command}, cut at {number} of {losses}: {again:#}, {:#}",
            document(stage, "verify", &["--deep"]).1["damage"]
        );
        assert_eq!(good_pages(stage), wanted, "cut at {number} of {losses}");
        lost += device.counts().lost;
    }
    println!("{command}: {writes} writes, {cut} power losses, {lost} blocks lost");
    assert!(cut > losses / 2);
}

#[test]
fn a_compaction_that_loses_power_at_any_write_is_run_again_and_loses_no_page() {
    let (mut stage, _) = stage(7000, 1, "128MiB");
    at_many_writes(&mut stage, "compact", &[], &[]);
}

#[test]
fn a_retirement_that_loses_power_at_any_write_is_run_again_and_loses_no_page() {
    let (mut stage, _) = stage(7002, 2, "256MiB");
    let second = stage.beside("volume-1");
    let options = [text(&second)];
    at_many_writes(
        &mut stage,
        "volume retire",
        &options,
        std::slice::from_ref(&second),
    );
}

#[test]
fn a_repair_that_loses_power_at_any_write_is_run_again_and_loses_no_page() {
    let (mut stage, key) = stage(7001, 1, "128MiB");
    let (_, found) = document(&stage, "inspect", &["--key", &key]);
    let offset = found["key"]["records"][0]["offset"].as_u64().unwrap();
    let segment = (offset - SEGMENTS_OFFSET) / SEGMENT_BYTES;
    // The second descriptor block: its pages are lost, the others of the segment move out.
    let block = SEGMENTS_OFFSET + (segment + 1) * SEGMENT_BYTES - 2 * BLOCK_BYTES as u64;
    let file = File::options().write(true).open(&stage.store).unwrap();
    file.write_all_at(&[0xa5; 64], block + 200).unwrap();
    drop(file);
    let (code, damaged) = document(&stage, "verify", &[]);
    assert_eq!(code, Some(1), "{damaged:#}");
    at_many_writes(&mut stage, "verify", &["--repair"], &[]);
}
