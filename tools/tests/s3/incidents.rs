//! Incidents of an S3 service beneath a served store.

use crate::faults::{Answer, Faults};
use crate::of_faults;
use crate::scene::{Scene, Signs};
use crate::server::Identity;
use crate::support::honest::eventually;

/// A store that is served over a bucket, which the owner uses.
fn over(server: &Faults) -> Option<Scene> {
    let (mut scene, ()) = Scene::of(|_| Some(()))?;
    let (code, _, said) = of_faults(server, &["init"], &["--new"]);
    assert_eq!(code, 0, "{said}");
    scene.owner = None;
    let l4 = ["--l4", "s3://b", "--l4-unsigned", "--l4-refresh", "1s"];
    let endpoint = ["--l4-endpoint", &server.endpoint];
    let environment = Identity::Writer.variables();
    scene.serve_in(&environment, &[&l4[..], &endpoint].concat());
    eventually("the remote is in use", || is_up(&scene));
    Some(scene)
}

fn is_up(scene: &Scene) -> bool {
    scene.metric("larder_l4_up") == [1.0]
}

/// The signs of a remote that cannot be used, for a reason with these words.
fn unusable(words: &str) -> Signs<'_> {
    Signs {
        metric: ("larder_l4_up", 0.0),
        stat: words,
        // The store is served in full: no probe restarts it for its remote.
        check: (0, words),
        doctor: Some(("warn  l4", words)),
        log: Some(words),
        alert: Some("LarderRemoteDown"),
    }
}

#[test]
fn the_endpoint_refuses_connections() {
    let server = Faults::start();
    let Some(scene) = over(&server) else { return };
    let signs = unusable("Connection refused");
    server.stop();
    scene.shows(&signs);
    let (_, said) = scene.run(&["stat", scene.at()]);
    assert!(
        said.contains("check the endpoint and the network"),
        "{said}"
    );
    server.resume();
    scene.recovers(&signs);
    assert!(is_up(&scene));
}

#[test]
fn the_endpoint_refuses_this_node() {
    let server = Faults::start();
    let Some(scene) = over(&server) else { return };
    let signs = unusable("access is denied");
    for method in ["GET", "HEAD", "PUT"] {
        server.at(method, "", Answer::Status("403 Forbidden"));
    }
    scene.shows(&signs);
    let (_, said) = scene.run(&["stat", scene.at()]);
    assert!(
        said.contains("check the credentials, and the rights"),
        "{said}"
    );
    server.heal();
    scene.recovers(&signs);
    assert!(is_up(&scene));
}
