//! Incidents of processes.

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::scene::{Scene, Signs};

#[test]
fn the_owner_is_stopped() {
    let Some((scene, ())) = Scene::of(|_| Some(())) else {
        return;
    };
    let signs = Signs {
        metric: ("larder_up", 0.0),
        stat: "has not answered for 2 s: it is stopped, or its machine is overloaded",
        check: (
            3,
            "has not answered for 2 s: it is stopped, or its machine is overloaded",
        ),
        doctor: ("fail  store in use", "has not answered for 2 s"),
        log: "",
        alert: "LarderUnserved",
    };
    let owner = scene.owner.as_ref().unwrap().0.id();
    let owner = Pid::from_raw(i32::try_from(owner).unwrap());
    kill(owner, Signal::SIGSTOP).unwrap();
    scene.shows(&signs);
    kill(owner, Signal::SIGCONT).unwrap();
    scene.recovers(&signs);
}

#[test]
fn the_owner_is_killed() {
    let Some((mut scene, ())) = Scene::of(|_| Some(())) else {
        return;
    };
    let signs = Signs {
        metric: ("larder_up", 0.0),
        stat: "no process serves the store",
        check: (3, "no process serves the store"),
        doctor: ("ok    store in use", "did not close it"),
        log: "",
        alert: "LarderUnserved",
    };
    scene.owner = None;
    scene.shows(&signs);
    scene.serve();
    scene.recovers(&signs);
}
