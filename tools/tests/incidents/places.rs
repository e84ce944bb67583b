//! Incidents of the paths of a store.

use std::fs::Permissions;
use std::os::unix::fs::{PermissionsExt, chown};

use crate::scene::{Scene, Signs};
use crate::support::honest::skipped;
use crate::support::{as_user, fails, json, text};

/// The user `nobody`.
const USER: u32 = 65_534;

const STORE_SIZE: &str = "128MiB";

#[test]
fn the_file_of_a_served_store_is_deleted() {
    let Some((mut scene, ())) = Scene::of(|_| Some(())) else {
        return;
    };
    let process = format!("rocess {}", scene.pid());
    let signs = Signs {
        metric: ("larder_displaced_volumes", 1.0),
        stat: "no file is at its path",
        check: (1, "no file is at its path"),
        doctor: Some(("fail  place", "no file is at its path")),
        log: Some("a volume is displaced: no file is at its path"),
        alert: Some("LarderDisplaced"),
    };
    std::fs::remove_file(&scene.path).unwrap();
    scene.shows(&signs);
    assert!(
        scene
            .run(&["stat", scene.at(), "--check"])
            .1
            .contains(&process)
    );
    let put = ["bench", scene.at(), "--shared", "--op", "put"];
    for arguments in [&["serve", scene.at()][..], &put] {
        fails(arguments, 3, &[&process, "deleted"]);
    }
    scene.owner = None;
    json(&["create", scene.at(), "--size", STORE_SIZE]);
    scene.serve();
    scene.recovers(&signs);
}

#[test]
fn another_store_is_at_the_path_of_a_served_one() {
    let Some((mut scene, ())) = Scene::of(|_| Some(())) else {
        return;
    };
    let another = format!("Process {} listens at", scene.pid());
    let signs = Signs {
        metric: ("larder_up", 0.0),
        stat: &another,
        check: (3, &another),
        doctor: Some(("fail  store in use", &another)),
        log: Some("a volume is displaced: another file is at its path"),
        alert: Some("LarderUnserved"),
    };
    let other = scene.path.with_extension("other");
    json(&["create", text(&other), "--size", STORE_SIZE]);
    std::fs::rename(&other, &scene.path).unwrap();
    scene.shows(&signs);
    // The store at the path is another one, which works at once.
    let former = scene.owner.take();
    scene.serve();
    scene.recovers(&signs);
    drop(former);
    assert!(scene.client(&["--op", "put", "--pages", "4"]).ends_well());
}

#[test]
fn the_permission_to_reach_a_served_store_is_removed() {
    let is_possible = || {
        let version = as_user(&["--version"], Some(USER)).output();
        version.is_ok_and(|output| output.status.success())
    };
    if !nix::unistd::geteuid().is_root() || !is_possible() {
        let why = "this is not root, or another user cannot run the command";
        skipped("the incident of a removed permission", why);
        return;
    }
    let may = |mode| Permissions::from_mode(mode);
    let Some((scene, ())) = Scene::with(Some(USER), |second| {
        let directory = second.parent().unwrap();
        std::fs::set_permissions(directory, may(0o755)).unwrap();
        for volume in [second, &directory.join("store")] {
            chown(volume, None, Some(USER)).unwrap();
            std::fs::set_permissions(volume, may(0o660)).unwrap();
        }
        Some(())
    }) else {
        return;
    };
    let denied = "Permission denied (os error 13)";
    let signs = Signs {
        metric: ("up", 0.0),
        stat: denied,
        check: (3, denied),
        doctor: Some(("fail  permission", denied)),
        log: None,
        alert: Some("LarderUnobserved"),
    };
    let directory = scene.path.parent().unwrap();
    std::fs::set_permissions(directory, may(0o700)).unwrap();
    scene.shows(&signs);
    let refused = format!(
        "The directory {} refuses the user nobody (65534): its mode is 700, its owner root (0)",
        text(directory)
    );
    for command in [
        &["doctor", scene.at()][..],
        &["stat", scene.at(), "--check"],
    ] {
        let (_, said) = scene.run(command);
        assert!(said.contains(&refused), "{said}");
    }
    std::fs::set_permissions(directory, may(0o755)).unwrap();
    scene.recovers(&signs);
}
