//! The names that a served store shows in place of those of its tenants.

use super::*;

/// Everything that a served store tells of its namespaces and quotas to programs.
pub fn told_by(store: &str, recording: &str) -> Vec<u8> {
    let mut told = Vec::new();
    let recorder = larder(&["record", store, recording, "--json"])
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let mut recorder = Process(recorder);
    while !Path::new(recording).exists() {
        std::thread::yield_now();
    }
    let client = Store::attach(Path::new(store), OpenOptions::default()).unwrap();
    assert_eq!(found_in(&client), keys().len());
    for asked in [
        &["stat", store, "--json"][..],
        &["stat", store],
        &["stat", store, "--curve"],
        &["stat", store, "--openmetrics"],
    ] {
        told.extend(ends(asked, 0).stdout);
    }
    client.close().unwrap();
    signal(&recorder, Signal::SIGINT);
    assert!(recorder.0.wait().unwrap().success());
    told.extend(fs::read(recording).unwrap());
    told
}

#[test]
fn a_namespace_and_a_tenant_have_names_that_only_the_key_leads_to() {
    let place = Place::new();
    let (key, other) = (place.key("key"), place.key("other"));
    let store = place.store("store", Some(&key));
    let shown = |store: &str, key: &str| {
        let listed = json(&["inspect", store, "--namespaces", "--key-file", key]);
        let name = &listed["namespaces"][0]["fingerprint"];
        name.as_str().unwrap().to_owned()
    };
    let name = shown(&store, &key);
    assert_ne!(name, space(TENANT).fingerprint().to_string());
    assert_eq!(name, shown(&store, &key));
    // Another store has another name for it, also if it has the pages of this one.
    let copy = place.at("copy");
    let into = ["--into", &copy, "--into-key-file", &other];
    json(&[&["compact", &store, "--key-file", &key][..], &into].concat());
    assert_ne!(name, shown(&copy, &other));
    served(&store, Some(&key), || {
        for group in [["--namespace", &name], ["--tenant", "a tenant to come"]] {
            json(&[&["quota", &store][..], &group, &["--max-age", "30d"]].concat());
        }
        fails(
            &["quota", &store, "--tenant", TENANT, "--max", "1GiB"],
            2,
            &["two groups", "tenant slot 2", &name],
        );
        json(&["quota", &store, "--namespace", &name, "--remove"]);
        let set = json(&["quota", &store, "--tenant", TENANT, "--max", "1GiB"]);
        assert_eq!(set["groups"][1]["name"], TENANT);
        assert_eq!(set["groups"][1]["namespaces"], 1);
        let told = String::from_utf8(ends(&["stat", &store, "--openmetrics"], 0).stdout).unwrap();
        for label in [
            format!("kv_namespace=\"{name}\",model=\"{MODEL}\""),
            "larder_quota_max_bytes{group=\"tenant slot 2\"}".to_owned(),
            "larder_quota_max_age_seconds{group=\"tenant without a key ".to_owned(),
        ] {
            assert!(told.contains(&label), "{label} in {told}");
        }
        let deleted = json(&["delete", &store, "--namespace", &name]);
        assert_eq!(deleted["deleted_pages"], keys().len());
    });
}
