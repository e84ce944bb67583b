//! Incidents of the remote beneath a store.

use std::fs;

use crate::scene::{Scene, Signs};
use crate::support::honest::eventually;
use crate::support::text;

#[test]
fn the_remote_is_unreachable() {
    let Some((mut scene, ())) = Scene::of(|_| Some(())) else {
        return;
    };
    let signs = Signs {
        metric: ("larder_l4_up", 0.0),
        stat: "does not exist",
        // The store is served in full: no probe restarts it for its remote.
        check: (0, "does not exist"),
        doctor: Some(("warn  l4", "does not exist")),
        log: Some(" for some time: "),
        alert: Some("LarderRemoteDown"),
    };
    let place = scene.path.with_file_name("remote");
    fs::create_dir_all(place.join("v1")).unwrap();
    let url = format!("file://{}", text(&place));
    scene.owner = None;
    scene.serve_with(&["--l4", &url, "--l4-unsigned", "--l4-refresh", "1s"]);
    let is_up = |scene: &Scene| scene.metric("larder_l4_up") == [1.0];
    eventually("the remote is in use", || is_up(&scene));
    // As a file system that is unmounted.
    let away = scene.path.with_file_name("away");
    fs::rename(&place, &away).unwrap();
    scene.shows(&signs);
    // A directory made below an absent mount would lie on another disk.
    let (_, said) = scene.run(&["stat", scene.at()]);
    assert!(said.contains("if it is a mount, mount it"), "{said}");
    fs::rename(&away, &place).unwrap();
    scene.recovers(&signs);
    assert!(is_up(&scene));
}
