//! What the instruments tell of a store: its volumes, the processes that had it open, its absence.

use larder_engine::Part;

use super::support::honest::eventually;
use super::*;

#[test]
fn doctor_describes_each_volume() {
    let directory = directory();
    let [first, second] = ["store", "second"].map(|name| directory.path().join(name));
    let create = ["create", text(&first), "--size", "256MiB", "--volume"];
    json(&[&create[..], &[text(&second)]].concat());
    let said = doctor(&[text(&first)]);
    for volume in [&first, &second] {
        let begin = format!("  {}: ", volume.display());
        let mut lines = said
            .lines()
            .filter(|line| line.starts_with("ok    volume "));
        let line = lines.find(|line| line.contains(&begin));
        let line = line.unwrap_or_else(|| panic!("{said}"));
        assert!(line.contains(" on ") && line.contains(" free"), "{line}");
    }
    let of_second = format!("{}: honoured", second.display());
    let of_first = said.contains("direct I/O") && said.contains("honoured");
    assert!(!of_first || said.contains(&of_second), "{said}");
}

#[test]
fn a_path_without_a_store_fails() {
    let directory = directory();
    let path = directory.path().join("store");
    let words = ["no store is here", "larder create", "mount its file system"];
    says(&["doctor", text(&path)], 1, &words);
    // A directory for a store is none.
    let said = doctor(&[text(directory.path())]);
    assert!(said.contains("no store is in"), "{said}");
    assert!(!said.contains("fail  path"), "{said}");
}

#[test]
fn a_directory_with_a_store_of_another_name_is_warned_of() {
    let directory = directory();
    let path = directory.path().join("pages.store");
    std::fs::write(directory.path().join("notes"), "no store").unwrap();
    json(&["create", text(&path), "--size", "256MiB"]);
    let said = doctor(&[text(directory.path())]);
    let line = said.lines().find(|line| line.contains("  path "));
    let line = line.unwrap_or_else(|| panic!("{said}"));
    assert!(
        line.starts_with("warn") && line.contains(text(&path)),
        "{line}"
    );
}

#[test]
fn a_client_that_took_over_from_a_killed_owner_and_closed_is_named_with_that_owner() {
    let directory = directory();
    let path = store_in(&directory);
    let at = text(&path);
    let owner = metrics::serve(at);
    let killed = owner.0.id();
    let client = Store::attach(&path, OpenOptions::default()).unwrap();
    drop(owner);
    eventually("the client is the owner", || client.part() == Part::Owner);
    client.close().unwrap();
    drop(client);
    let closed = format!(
        "closed cleanly by process {}, which opened it at ",
        std::process::id()
    );
    let before = format!("process {killed}, which opened it at ");
    let words = [
        "no process serves the store",
        &closed,
        &before,
        "was killed or crashed, and process",
    ];
    fails(&["stat", at, "--check"], 3, &words);
    let said = doctor(&[at]);
    let line = said.lines().find(|line| line.contains("store in use"));
    let line = line.unwrap();
    assert!(line.starts_with("warn"), "{line}");
    assert!(words.iter().all(|word| line.contains(word)), "{line}");
    // The next open begins anew.
    Store::open(&path, OpenOptions::default())
        .unwrap()
        .close()
        .unwrap();
    let said = doctor(&[at]);
    assert!(!said.contains("was killed"), "{said}");
}

#[test]
fn stat_counts_no_asker_and_no_ratio_of_no_puts() {
    let directory = directory();
    let path = store_in(&directory);
    let at = text(&path);
    let _owner = metrics::serve(at);
    assert_eq!(json(&["stat", at])["clients"], 0);
    let said = String::from_utf8(ends(&["stat", at], 0).stdout).unwrap();
    assert!(!said.contains("times the bytes of puts"), "{said}");
}

#[test]
fn an_exporter_of_no_store_warns() {
    let directory = directory();
    let path = directory.path().join("store");
    let mut exporter = larder(&["exporter", text(&path), "--listen", "127.0.0.1:0"]);
    let exporter = exporter
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn();
    let mut exporter = Process(exporter.unwrap());
    let mut line = String::new();
    let said = exporter.0.stderr.take().unwrap();
    BufReader::new(said).read_line(&mut line).unwrap();
    assert!(line.contains("WARN"), "{line}");
    assert!(line.contains(text(&path)), "{line}");
    assert!(line.contains("The exporter serves larder_up 0"), "{line}");
}
