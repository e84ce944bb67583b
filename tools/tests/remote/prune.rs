//! `larder remote prune`, by the last use and by faults.

use std::fs;
use std::time::{Duration, Instant, SystemTime};

use larder_remote::{Place, Remote, RunName};

use super::support::{fails, flip, report, text};
use super::{Shared, populated};

fn connect(shared: &Shared) -> Box<dyn Remote> {
    let place = Place {
        url: shared.url(),
        ..Place::default()
    };
    place.connect().unwrap()
}

#[test]
fn the_objects_that_were_used_least_recently_go_first() {
    let (shared, source) = (Shared::new(), populated());
    shared.push(&source, 0);
    let objects = shared.objects();
    let begin = SystemTime::now() - Duration::from_hours(1);
    for (object, age) in objects.iter().zip(0..) {
        let object = fs::File::options().write(true).open(object).unwrap();
        let made = begin + Duration::from_secs(age);
        object.set_modified(made).unwrap();
    }
    // The oldest one is used.
    let name = objects[0].strip_prefix(shared.root()).unwrap();
    let oldest: RunName = text(name).parse().unwrap();
    let until = Instant::now() + Duration::from_mins(10);
    connect(&shared).touch(&oldest, until).unwrap();
    let kept = [&objects[0], &objects[3]];
    let bytes = kept.map(|object| object.metadata().unwrap().len());
    let size = format!("{}", bytes.iter().sum::<u64>());
    let dry = shared.remote("prune", None, &["--keep", &size, "--dry-run"], 0);
    assert_eq!(dry["removed_runs"], 2);
    let pruned = shared.remote("prune", None, &["--keep", &size], 0);
    assert_eq!(pruned["removed_runs"], 2);
    assert_eq!(pruned["kept_bytes"], bytes.iter().sum::<u64>());
    let left = shared.objects();
    assert!(kept.iter().all(|object| left.contains(object)));
    // Its mark is the third file.
    assert_eq!(left.len(), 3);
    assert_eq!(shared.remote("ls", None, &[], 0)["runs"], 2);
    shared.remote("prune", None, &["--older-than", "0s"], 0);
    let pruned = shared.remote("prune", None, &["--keep", "1"], 0);
    assert_eq!(pruned["kept_runs"], 0);
    assert!(shared.objects().is_empty());
}

#[test]
fn planted_and_damaged_objects_alone_are_removed() {
    let (shared, source) = (Shared::new(), populated());
    shared.push(&source, 0);
    let objects = shared.objects();
    flip(&objects[0], 3 * 4096 + 1234);
    fs::write(&objects[1], b"planted").unwrap();
    let key = shared.key_file("key");
    let faulty = ["--faulty", "--key-file", text(&key)];
    let dry = [&faulty[..], &["--dry-run"]].concat();
    assert_eq!(shared.remote("prune", None, &dry, 0)["removed_runs"], 2);
    assert_eq!(shared.objects(), objects);
    let pruned = shared.remote("prune", None, &faulty, 0);
    assert_eq!(
        (&pruned["removed_runs"], &pruned["kept_runs"]),
        (&2.into(), &2.into())
    );
    assert_eq!(shared.objects(), objects[2..]);
    assert_eq!(shared.push(&source, 0)["runs_pushed"], 2);
    shared.remote("verify", None, &[], 0);
    // By another key all of them have a fault.
    let other = shared.key_file("other");
    report(&["remote", "key", text(&other)], 0);
    let url = shared.url();
    let wrong = [
        "remote",
        "prune",
        &url,
        "--faulty",
        "--key-file",
        text(&other),
    ];
    fails(&wrong, 3, &["no object is good by this key"]);
    assert_eq!(shared.objects(), objects);
    fails(&["remote", "prune", &url, "--faulty"], 2, &["--key-file"]);
    fails(&["remote", "prune", &url], 2, &["--older-than"]);
}
