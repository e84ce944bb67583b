//! What the instruments tell of a store.

use super::*;

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
