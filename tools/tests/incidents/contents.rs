//! Incidents of what the volumes hold: overwritten, cut, missing.

use std::fs::{self, File};
use std::path::PathBuf;

use larder_engine::{OpenOptions, PageStore, Store};
use larder_format::{PageKey, SEGMENTS_OFFSET};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::home::Pool;
use crate::scene::{Scene, Signs};
use crate::support::honest::eventually;
use crate::support::{chain, flip, overwrite, text};

/// Chains, and pages of each.
const CHAINS: u64 = 16;
const PAGES: u64 = 64;

fn keys() -> Vec<PageKey> {
    (0..CHAINS).flat_map(|seed| chain(seed, PAGES)).collect()
}

/// Works as a client, which is gone before it could own the store.
fn client<T>(scene: &Scene, work: impl FnOnce(&Pool<'_>) -> T) -> T {
    let store = Store::attach(&scene.path, OpenOptions::default()).unwrap();
    let value = work(&Pool::new(&store));
    store.close().unwrap();
    value
}

/// Puts the pages that are missing.
fn put(scene: &Scene) {
    let is_missing = |pool: &Pool<'_>, key: &PageKey| pool.hits(&[*key]) == 0;
    client(scene, |pool| {
        let keys = keys().into_iter().filter(|key| is_missing(pool, key));
        keys.for_each(|key| pool.put(&[key]));
    });
}

/// Pages that are missing.
fn missing(scene: &Scene) -> usize {
    let keys = keys();
    keys.len() - client(scene, |pool| pool.hits(&keys))
}

/// The second volume of the scene.
fn second(scene: &Scene) -> PathBuf {
    scene.path.with_file_name("second")
}

/// A served store with pages.
fn filled() -> Option<Scene> {
    let (scene, ()) = Scene::of(|_| Some(()))?;
    client(&scene, |pool| {
        (0..CHAINS).for_each(|seed| pool.put(&chain(seed, PAGES)));
    });
    if let Some(watch) = &scene.watch {
        eventually("Prometheus has seen the store without a fault", || {
            watch.sum("larder_put_pages_total") >= 1024.0
        });
    }
    Some(scene)
}

/// Ends the owner in order.
fn stop(scene: &mut Scene) {
    let mut owner = scene.owner.take().unwrap();
    let pid = Pid::from_raw(i32::try_from(owner.0.id()).unwrap());
    kill(pid, Signal::SIGTERM).unwrap();
    eventually("the owner has ended", || {
        owner.0.try_wait().unwrap().is_some()
    });
}

fn garbage(bytes: u64) -> Vec<u8> {
    (0..bytes).map(|at| (at * 7 % 251) as u8 | 1).collect()
}

/// The signs of a store that no process can open, for a reason with these words.
fn closed<'a>(words: &'a str) -> Signs<'a> {
    Signs {
        metric: ("larder_up", 0.0),
        stat: words,
        check: (3, words),
        doctor: Some(("fail  store", words)),
        log: None,
        alert: Some("LarderUnserved"),
    }
}

/// The same for the attempt to serve it.
#[track_caller]
fn is_not_served(scene: &Scene, words: &str) {
    let (code, said) = scene.run(&["serve", scene.at()]);
    assert_eq!(code, Some(3), "{said}");
    assert!(said.contains(words), "{said}");
}

/// The plan of a repair without the second volume names its loss.
#[track_caller]
fn would_lose_a_volume(scene: &Scene) {
    let plan = ["--repair", "--degraded", "--dry-run"];
    let (_, said) = scene.run(&[&["verify", scene.at()], &plan[..]].concat());
    assert!(said.contains("Would give up"), "{said}");
}

#[test]
fn the_first_mebibyte_is_overwritten_while_the_store_is_served() {
    let Some(mut scene) = filled() else {
        return;
    };
    let words = "are overwritten by another program";
    let signs = Signs {
        metric: ("larder_damaged_volumes{cause=\"overwritten\"}", 1.0),
        stat: words,
        check: (1, words),
        doctor: Some(("fail  damage", words)),
        log: Some("a volume does not hold what this process wrote"),
        alert: Some("LarderDamagedVolume"),
    };
    overwrite(&scene.path, 0, &garbage(SEGMENTS_OFFSET));
    scene.shows(&signs);
    stop(&mut scene);
    scene.serve();
    scene.recovers(&signs);
    assert_eq!(missing(&scene), 0);
}

#[test]
fn the_first_mebibyte_is_overwritten_while_the_store_is_closed() {
    let Some(mut scene) = filled() else {
        return;
    };
    let file = scene.path.with_file_name("saved");
    let saved = scene.run(&["superblock", "save", scene.at(), text(&file)]);
    assert_eq!(saved.0, Some(0), "{}", saved.1);
    stop(&mut scene);
    overwrite(&scene.path, 0, &garbage(SEGMENTS_OFFSET));
    let words = "larder superblock restore";
    scene.shows(&closed(words));
    is_not_served(&scene, words);
    let restored = scene.run(&["superblock", "restore", scene.at(), text(&file)]);
    assert_eq!(restored.0, Some(0), "{}", restored.1);
    scene.serve();
    scene.recovers(&closed(words));
    assert_eq!(missing(&scene), 0);
}

#[test]
fn bytes_of_a_page_are_flipped_while_the_store_is_served() {
    let Some(scene) = filled() else {
        return;
    };
    let words = "1 damaged page dropped";
    let signs = Signs {
        metric: ("larder_removed_pages_total{reason=\"damaged\"}", 1.0),
        stat: words,
        check: (0, words),
        doctor: Some(("fail  damage", words)),
        log: Some("a page does not read back as it was written"),
        alert: Some("LarderDamagedPages"),
    };
    let page = SEGMENTS_OFFSET + 2 * 4096;
    flip(&scene.path, page + 99);
    assert_eq!(missing(&scene), 1);
    scene.shows(&signs);
    let (log, place) = (
        scene.log(),
        format!("volume=0 segment=0 offset={page} namespace="),
    );
    let (_, line) = log.split_once(&place).expect(&log);
    let (_, key) = line.split_once(" key=").unwrap();
    let key = key.split_whitespace().next().unwrap();
    assert!(keys()[0].to_string().starts_with(key), "{log}");
    assert!(log.contains("larder verify --online"), "{log}");
    let (_, said) = scene.run(&["inspect", scene.at()]);
    assert!(said.contains(words), "{said}");
    // What the log advises finds the others, without a read of a server.
    flip(&scene.path, page + (64 << 10) + 99);
    let (code, said) = scene.run(&["verify", scene.at(), "--online", "--rate", "4GiB"]);
    assert_eq!(code, Some(1), "{said}");
    let (_, said) = scene.run(&["stat", scene.at()]);
    assert!(said.contains("2 damaged pages dropped"), "{said}");
    // They are put again.
    put(&scene);
    assert_eq!(missing(&scene), 0);
}

#[test]
fn two_regions_are_overwritten_in_a_closed_store() {
    let Some(mut scene) = filled() else {
        return;
    };
    stop(&mut scene);
    let mebibyte = 1 << 20;
    for (volume, from) in [(&scene.path, 10), (&second(&scene), 10)] {
        overwrite(volume, from * mebibyte, &garbage(20 * mebibyte));
    }
    let (code, said) = scene.run(&["verify", scene.at(), "--deep"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains(" damaged, 0 unfinished"), "{said}");
    scene.serve();
    let words = "damaged when the owner opened the store";
    let signs = Signs {
        metric: ("larder_damaged_volumes{cause=\"at_open\"}", 2.0),
        stat: words,
        check: (0, words),
        doctor: Some(("fail  damage", words)),
        log: Some("damage found at the open"),
        alert: Some("LarderDamagedPages"),
    };
    scene.shows(&signs);
    let log = scene.log();
    for volume in [&scene.path, &second(&scene)] {
        let places = format!("{}: damage found at the open", text(volume));
        assert!(log.contains(&places), "{log}");
    }
    // As the log advises, beside the owner.
    let (code, said) = scene.run(&["verify", scene.at(), "--online", "--rate", "4GiB"]);
    assert_eq!(code, Some(1), "{said}");
    stop(&mut scene);
    let (code, said) = scene.run(&["verify", scene.at(), "--repair"]);
    assert_eq!(code, Some(0), "{said}");
    let (code, said) = scene.run(&["verify", scene.at(), "--deep"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains(" 0 damaged, 0 unfinished"), "{said}");
    scene.serve();
    eventually("no damage is shown", || {
        let (code, said) = scene.run(&["stat", scene.at(), "--check"]);
        code == Some(0) && !said.contains(words)
    });
    assert_eq!(scene.metric(signs.metric.0), [0.0]);
    put(&scene);
    assert_eq!(missing(&scene), 0);
}

#[test]
fn a_volume_is_cut_while_the_store_is_served() {
    let Some(mut scene) = filled() else {
        return;
    };
    let words = "was truncated while the store is served";
    let signs = Signs {
        metric: ("larder_damaged_volumes{cause=\"truncated\"}", 1.0),
        stat: words,
        check: (1, words),
        doctor: Some(("fail  damage", words)),
        log: Some("a volume does not hold what this process wrote"),
        alert: Some("LarderDamagedVolume"),
    };
    let volume = File::options().write(true).open(second(&scene)).unwrap();
    volume.set_len(30 << 20).unwrap();
    scene.shows(&signs);
    // As the instruments advise.
    let archive = scene.path.with_file_name("archive");
    scene.run(&["export", scene.at(), text(&archive)]);
    stop(&mut scene);
    let second = second(&scene);
    let create = [
        "create",
        scene.at(),
        "--size",
        "256MiB",
        "--force",
        "--volume",
    ];
    let (code, said) = scene.run(&[&create[..], &[text(&second)]].concat());
    assert_eq!(code, Some(0), "{said}");
    let (code, said) = scene.run(&["import", scene.at(), text(&archive)]);
    assert_eq!(code, Some(0), "{said}");
    scene.serve();
    scene.recovers(&signs);
    let pages = scene.metric("larder_pages");
    assert!(pages[0] >= 512.0, "{pages:?}");
}

#[test]
fn a_volume_is_cut_while_the_store_is_closed() {
    let Some(mut scene) = filled() else {
        return;
    };
    stop(&mut scene);
    let volume = File::options().write(true).open(second(&scene)).unwrap();
    let bytes = volume.metadata().unwrap().len();
    volume.set_len(30 << 20).unwrap();
    let words = "was truncated: it is 31457280 bytes (30 MiB) long, and must be at least";
    scene.shows(&closed(words));
    let (_, said) = scene.run(&["stat", scene.at(), "--check"]);
    let named = format!("{}: volume 1 of the store", text(&second(&scene)));
    assert!(
        said.contains(&named) && said.contains("--degraded"),
        "{said}"
    );
    is_not_served(&scene, words);
    would_lose_a_volume(&scene);
    // With its length again: the contents are gone, and that is said.
    volume.set_len(bytes).unwrap();
    scene.serve();
    scene.recovers(&closed(words));
    assert!(scene.log().contains("damage found at the open"));
    put(&scene);
    assert_eq!(missing(&scene), 0);
}

#[test]
fn a_volume_is_missing() {
    let Some(mut scene) = filled() else {
        return;
    };
    stop(&mut scene);
    let (second, moved) = (second(&scene), scene.path.with_file_name("moved"));
    fs::rename(&second, &moved).unwrap();
    let words = "volume 1 of the store is missing";
    scene.shows(&closed(words));
    is_not_served(&scene, words);
    would_lose_a_volume(&scene);
    scene.serve_with(&["--volume", text(&moved)]);
    scene.recovers(&closed(words));
    assert_eq!(missing(&scene), 0);
}

#[test]
fn a_volume_is_moved_while_the_store_is_served() {
    let Some(scene) = filled() else {
        return;
    };
    let words = "the owner serves the former file";
    let signs = Signs {
        metric: ("larder_displaced_volumes", 1.0),
        stat: words,
        check: (1, words),
        doctor: Some(("fail  place", words)),
        log: Some("a volume is displaced"),
        alert: Some("LarderDisplaced"),
    };
    let (second, moved) = (second(&scene), scene.path.with_file_name("moved"));
    fs::rename(&second, &moved).unwrap();
    scene.shows(&signs);
    fs::rename(&moved, &second).unwrap();
    scene.recovers(&signs);
    assert_eq!(missing(&scene), 0);
}
