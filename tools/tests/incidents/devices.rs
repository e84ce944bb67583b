//! Incidents of devices. Clients are processes of their own: this one serves the volume.

use crate::ill::{Ill, Pace};
use crate::room::Room;
use crate::scene::{Scene, Signs};

const HUNG: Signs<'_> = Signs {
    metric: ("larder_volume_state{state=\"hung\"}", 1.0),
    stat: ": hung; oldest operation",
    check: (1, ": hung; oldest operation"),
    doctor: Some(("fail  answers", ": hung; oldest operation")),
    log: Some("a volume answers late, or not at all"),
    alert: Some("LarderHungDevice"),
};

const SLOW: Signs<'_> = Signs {
    metric: ("larder_volume_state{state=\"slow\"}", 1.0),
    stat: ": slow; oldest operation",
    check: (1, ": slow; oldest operation"),
    doctor: Some(("warn  answers", ": slow; oldest operation")),
    log: Some("a volume answers late, or not at all"),
    alert: Some("LarderSlowDevice"),
};

const PUT: [&str; 6] = ["--op", "put", "--page-bytes", "64KiB", "--pages", "256"];
const GET: [&str; 6] = ["--op", "get", "--page-bytes", "64KiB", "--pages", "256"];

#[test]
#[ignore = "needs FUSE"]
fn a_volume_hangs_without_a_call() {
    let Some((scene, volume)) = Scene::of(Ill::mount) else {
        return;
    };
    let illness = volume.falls(Pace::Hung);
    // No operation is a second old, so a check calls the volume, and hangs.
    let (code, said) = scene.run(&["doctor", scene.at()]);
    let hangs = "a check has not ended within 5 s";
    assert!(code == Some(1) && said.contains(hangs), "{said}");
    scene.shows(&HUNG);
    let (_, said) = scene.run(&["stat", scene.at(), "--check"]);
    assert!(
        said.contains(" on a file system of the kind fuse"),
        "{said}"
    );
    // No thread of it hangs in the kernel, which would keep the process.
    let (code, said) = scene.run(&["stat", scene.at(), "--openmetrics"]);
    assert_eq!(code, Some(0), "{said}");
    drop(illness);
    scene.recovers(&HUNG);
    assert!(scene.log().contains("answers in time again"));
}

#[test]
#[ignore = "needs FUSE"]
fn a_volume_hangs_under_the_calls_of_clients() {
    let Some((scene, volume)) = Scene::of(Ill::mount) else {
        return;
    };
    assert!(scene.client(&PUT).ends_well());
    let illness = volume.falls(Pace::Hung);
    let clients = [&GET, &PUT].map(|calls| scene.client(calls));
    scene.shows(&HUNG);
    // Commands that read the volumes do not begin: no signal would end them.
    for command in [&["inspect"][..], &["verify", "--online"]] {
        let (code, said) = scene.run(&[command, &[scene.at()]].concat());
        assert_eq!(code, Some(3), "{said}");
        assert!(said.contains("hung; oldest operation"), "{said}");
    }
    assert!(
        !scene.log().contains("a client has stopped"),
        "{}",
        scene.log()
    );
    drop(illness);
    scene.recovers(&HUNG);
    // Puts that found no room in time, and reads after the hang limit, are reported, not failed.
    clients
        .into_iter()
        .for_each(|client| _ = client.ends_well());
    assert!(scene.client(&PUT).ends_well());
    assert!(scene.client(&GET).ends_well());
}

#[test]
#[ignore = "needs FUSE"]
fn a_volume_is_slow_under_the_reads_of_a_client() {
    let Some((scene, volume)) = Scene::of(Ill::mount) else {
        return;
    };
    assert!(scene.client(&PUT).ends_well());
    let illness = volume.falls(Pace::Slow(2 << 20));
    let client = scene.client(&GET);
    scene.shows(&SLOW);
    assert!(
        !scene.log().contains("a client has stopped"),
        "{}",
        scene.log()
    );
    drop(illness);
    assert!(client.ends_well());
    scene.recovers(&SLOW);
    assert!(scene.client(&GET).ends_well());
}

#[test]
#[ignore = "needs root"]
fn the_file_system_is_full_below_a_sparse_volume() {
    let Some((scene, room)) = Scene::of(Room::mount) else {
        return;
    };
    let full = "No space left on device (os error 28)";
    let signs = Signs {
        metric: ("larder_read_only_volumes", 1.0),
        stat: full,
        check: (1, full),
        doctor: Some(("fail  service", full)),
        log: Some("in read-only service: the volume refuses writes"),
        alert: Some("LarderReadOnly"),
    };
    let filled = room.fill();
    let client = scene.client(&PUT);
    scene.shows(&signs);
    assert!(scene.log().contains("free space"), "{}", scene.log());
    drop(filled);
    _ = client.ends_well();
    scene.recovers(&signs);
    assert!(scene.client(&PUT).ends_well());
}
