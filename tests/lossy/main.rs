//! Power loss at random moments, over a device that loses unsynced writes: flushed pages are there.
//! Power loss at every write of the tools that change a store. And sectors that cannot be read.
//!
//! Needs FUSE and the right to mount. Without them it reports the skip and passes.
//! `LARDER_KILLS=n` makes n power losses instead of the usual number.
#![allow(clippy::unwrap_used)]

mod device;
#[path = "../support/fuse.rs"]
mod fuse;
mod offline;
#[path = "../support/mod.rs"]
mod support;

use device::Device;
use serde_json::Value;
use support::honest::skipped;
use support::stage::{AMPLE, Promise, Stage, is_used_up, kills, stages_max};

/// A device under the stage's store; `None`, with a visible line, where none can be had.
fn device_under(stage: &mut Stage) -> Option<Device> {
    let mountpoint = stage.beside("mounted");
    std::fs::create_dir(&mountpoint).unwrap();
    match Device::mount(&stage.store, &mountpoint) {
        Ok(device) => {
            stage.store = device.path();
            Some(device)
        }
        Err(error) => {
            let why = format!("no FUSE file system can be mounted: {error}");
            skipped("power losses and bad sectors", why);
            None
        }
    }
}

/// Starts a writer and cuts the power under it; false when it had ended by then.
fn power_loss(stage: &mut Stage, device: &Device, promise: Promise) -> bool {
    let writer = stage.writer(promise);
    let was_cut = stage.interrupt(writer, |child| {
        device.cut_power();
        child.kill().unwrap();
    });
    if was_cut {
        device.restore_power(&mut stage.dice);
    }
    was_cut
}

/// Cuts the power under writers until `enough` times, or until the stage is used up. Returns how
/// often, and how many blocks were lost; `None` without a device.
fn power_losses(stage: &mut Stage, enough: usize) -> Option<(usize, u64)> {
    let device = device_under(stage)?;
    let mut losses = 0;
    for round in 1.. {
        losses += usize::from(power_loss(stage, &device, Promise::PowerLoss));
        assert!(
            round < 20 + 10 * losses,
            "commands end before the power does"
        );
        let report = stage.check();
        assert_eq!(report["check"]["missing_pages"], 0, "{report:#}");
        if losses >= enough || is_used_up(losses, &report) {
            break;
        }
    }
    let counts = device.counts();
    println!("{losses} power losses: {counts:?}");
    Some((losses, counts.lost))
}

#[test]
fn what_was_flushed_survives_power_loss_whatever_became_of_unsynced_blocks() {
    let mut left = kills(40);
    let mut stages = 4000..4000 + stages_max(left);
    let mut lost_blocks = 0;
    while left > 0 {
        let stage = stages.next().expect("commands end before the power does");
        let mut stage = Stage::new(1, AMPLE, stage);
        let Some((losses, lost)) = power_losses(&mut stage, left) else {
            return;
        };
        left = left.saturating_sub(losses);
        lost_blocks += lost;
    }
    assert!(lost_blocks > 0);
}

/// Without this the other test might pass over a device that loses nothing.
#[test]
fn what_was_only_written_may_be_lost_with_the_power() {
    let mut stage = Stage::new(1, AMPLE, 5000);
    let Some(device) = device_under(&mut stage) else {
        return;
    };
    let lost = (0..50).any(|_| {
        power_loss(&mut stage, &device, Promise::Kill);
        stage.check()["check"]["missing_pages"] != 0
    });
    assert!(lost, "{:?}", device.counts());
}

#[test]
fn a_sector_that_cannot_be_read_costs_one_page_and_that_is_named() {
    let mut stage = Stage::new(1, AMPLE, 6000);
    let Some(device) = device_under(&mut stage) else {
        return;
    };
    let mut writer = stage.writer(Promise::Kill);
    writer.args(["--limit", "40"]);
    stage.finish(writer);
    let document = |command: &str, options: &[&str]| -> Value {
        let output = stage
            .larder(command, options)
            .arg("--json")
            .output()
            .unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    };
    let key = stage.acknowledged();
    let found = document("inspect", &["--key", &key]);
    let page = found["key"]["records"][0]["offset"].as_u64().unwrap();
    let pages = found["pages"].as_u64().unwrap();
    device.spoil(page + 8192);
    let archive = stage.beside("archive");
    let exported = document("export", &[archive.to_str().unwrap()]);
    assert_eq!(exported["pages"], pages - 1);
    let verified = document("verify", &["--deep"]);
    assert_eq!(verified["deep"]["good_pages"], pages - 1);
    for report in [exported, verified] {
        let damage = report["damage"].as_array().unwrap();
        assert_eq!(damage.len(), 1, "{report:#}");
        assert_eq!(damage[0]["key"], key);
        let reason = damage[0]["reason"].as_str().unwrap();
        assert!(reason.contains("unreadable"), "{reason}");
    }
}
