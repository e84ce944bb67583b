//! Encrypted stores from a shell: keys, refusals without them, and a search in everything that was
//! written.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::io::IoSlice;
use std::os::unix::fs::PermissionsExt;
use std::time::Duration;

use larder_engine::PutOptions;
use larder_engine::format::{Namespace, PageKey, PageShape};
use larder_engine::{GetPage, PutPage};

use super::*;

mod archives;
mod disowned;
mod memory;
mod names;
mod remotes;
mod replays;

const PARTS: [u32; 2] = [8192, 5000];
const SIZE: [&str; 4] = ["--size", "16MiB", "--segment-size", "256KiB"];
const MODEL: &str = "a-model-with-its-name";
const TENANT: &str = "a-tenant-with-its-name";

/// A directory with keys and stores.
struct Place(TempDir);

impl Place {
    fn new() -> Place {
        Place(directory())
    }

    fn at(&self, name: &str) -> String {
        self.0.path().join(name).to_str().unwrap().to_owned()
    }

    /// Makes a key.
    fn key(&self, name: &str) -> String {
        let file = self.at(name);
        json(&["key", "make", &file]);
        file
    }

    /// Makes a store with pages, encrypted if there is a key.
    fn store(&self, name: &str, key: Option<&str>) -> String {
        let store = self.at(name);
        let with = key.map_or_else(Vec::new, |key| vec!["--key-file", key]);
        let made = json(&[&["create", &store][..], &SIZE, &with].concat());
        assert_eq!(made["encrypted"], key.is_some());
        let opened = open(&store, key);
        put(&opened);
        opened.close().unwrap();
        store
    }
}

fn open(store: &str, key: Option<&str>) -> Store {
    let options = OpenOptions::default().with(|o| {
        o.wrapping = key.map(|key| format!("file:{key}").parse().unwrap());
    });
    Store::open(Path::new(store), options).unwrap()
}

fn space(tenant: &str) -> Namespace {
    let builder = Namespace::builder(MODEL, "", 64, PageShape::new(&PARTS).unwrap());
    builder.extra("tenant", tenant).build().unwrap()
}

fn keys() -> Vec<PageKey> {
    (0..24_u8)
        .map(|number| {
            let mut key = [number ^ 0xb7; 32];
            key[0] = 0x9e;
            PageKey::from_bytes(key)
        })
        .collect()
}

/// The bytes of a part: no two blocks of 16 bytes are equal.
fn content(key: &PageKey, part: usize) -> Vec<u8> {
    let page = key.as_bytes()[1];
    let numbers = 0..PARTS[part].div_ceil(16);
    let blocks = numbers.map(|number| format!("{page:03}.{part:01}.{number:06}.pg\n"));
    let mut bytes = blocks.collect::<String>().into_bytes();
    bytes.truncate(PARTS[part] as usize);
    bytes
}

fn put(store: &Store) {
    let id = store.namespace(&space(TENANT)).unwrap();
    let contents: Vec<[Vec<u8>; 2]> = keys()
        .iter()
        .map(|key| [content(key, 0), content(key, 1)])
        .collect();
    let parts: Vec<Vec<IoSlice<'_>>> = contents
        .iter()
        .map(|parts| parts.iter().map(|part| IoSlice::new(part)).collect())
        .collect();
    let keys = keys();
    let pages = keys.iter().zip(&parts).enumerate();
    let pages: Vec<PutPage<'_>> = pages
        .map(|(at, (key, parts))| PutPage {
            key: *key,
            parent: at.checked_sub(1).map(|before| keys[before]),
            depth: u32::try_from(at).unwrap(),
            parts,
        })
        .collect();
    let stored = store.put(id, &pages, PutOptions::waiting(Duration::from_secs(60)));
    assert!(
        stored.iter().all(|status| status.is_present()),
        "{stored:?}"
    );
}

/// Pages of the store that are there, each with its bytes.
fn hits(store: &str, key: Option<&str>) -> usize {
    let store = open(store, key);
    let hits = found_in(&store);
    store.close().unwrap();
    hits
}

fn found_in(store: &Store) -> usize {
    let id = store.namespace(&space(TENANT)).unwrap();
    let mut hits = 0;
    for key in keys() {
        let mut parts = PARTS.map(|bytes| vec![0; bytes as usize]);
        let [a, b] = &mut parts;
        let page = GetPage {
            key,
            parts: &mut [std::io::IoSliceMut::new(a), std::io::IoSliceMut::new(b)],
        };
        if store.get(id, &mut [page], None)[0].is_hit() {
            assert!(parts == [content(&key, 0), content(&key, 1)]);
            hits += 1;
        }
    }
    hits
}

/// A process of its own that uses a store: the keys of its tenant are in its memory.
#[test]
#[ignore = "a part of another test"]
fn a_process_that_uses_the_store() {
    let Ok(store) = std::env::var("LARDER_STORE_TO_USE") else {
        return;
    };
    let client = Store::attach(Path::new(&store), OpenOptions::default()).unwrap();
    assert_eq!(found_in(&client), keys().len());
    println!("uses it");
    std::io::stdin().read_to_end(&mut Vec::new()).unwrap();
}

/// Starts it, and returns when it has the keys.
fn using(store: &str) -> Process {
    let name = "sealed::a_process_that_uses_the_store";
    let mut user = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", name, "--ignored", "--nocapture"])
        .env("LARDER_STORE_TO_USE", store)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(user.stdout.take().unwrap()).lines();
    let said = lines
        .map(Result::unwrap)
        .find(|line| line.contains("uses it"));
    assert!(said.is_some(), "it cannot use the store");
    Process(user)
}

fn signal(user: &Process, signal: Signal) {
    kill(Pid::from_raw(i32::try_from(user.0.id()).unwrap()), signal).unwrap();
}

/// The report of an erasure that waits for a stopped process.
pub fn blocked_erasure() -> Value {
    let place = Place::new();
    let key = place.key("key");
    let store = place.store("store", Some(&key));
    let blocked = served(&store, Some(&key), || {
        let user = using(&store);
        signal(&user, Signal::SIGSTOP);
        report(&["erase", &store, "--tenant", TENANT, "--wait", "1ms"], 3)
    });
    blocked.0
}

#[test]
fn an_erased_tenant_is_gone_from_the_store_and_from_all_processes() {
    let place = Place::new();
    let key = place.key("key");
    let plain = place.store("plain", None);
    fails(
        &["erase", &plain, "--tenant", TENANT],
        2,
        &["not encrypted"],
    );
    let store = place.store("store", Some(&key));
    let of = |tenant| ["erase", &store, "--tenant", tenant];
    let hurried = [&of(TENANT)[..], &["--wait", "1s"]].concat();
    fails(&of(TENANT), 3, &["--key-file"]);
    let ((), _) = served(&store, Some(&key), || {
        assert_eq!(json(&of("another"))["erased_keys"], serde_json::json!([]));
        let user = using(&store);
        signal(&user, Signal::SIGSTOP);
        let stopped = report(&hurried, 3);
        assert_eq!(stopped["erased_pages"], keys().len());
        assert_eq!(stopped["waits_for"][0]["pid"], user.0.id());
        let client = Store::attach(Path::new(&store), OpenOptions::default()).unwrap();
        assert_eq!(found_in(&client), 0);
        // The same as long as the process is stopped.
        says(
            &hurried,
            3,
            &["no tenant of this name has a key", "may still have a key"],
        );
        signal(&user, Signal::SIGCONT);
        let done = json(&[&of(TENANT)[..], &["--wait", "1m"]].concat());
        assert_eq!(done["erased_keys"], serde_json::json!([]));
        assert_eq!(done["waits_for"], serde_json::json!([]));
        client.close().unwrap();
    });
    assert_eq!(hits(&store, Some(&key)), 0);
    json(&["verify", &store, "--deep", "--key-file", &key]);
}

/// Serves a store while `work` runs. Returns what it returned, and the log of the owner.
fn served<T>(store: &str, key: Option<&str>, work: impl FnOnce() -> T) -> (T, Vec<u8>) {
    let with = key.map_or_else(Vec::new, |key| vec!["--key-file", key]);
    let mut owner = larder(&[&["serve", store, "--json"][..], &with].concat())
        .env("LARDER_LOG", "trace")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The log must not fill its pipe.
    let mut log = owner.stderr.take().unwrap();
    let reader = std::thread::spawn(move || {
        let mut text = Vec::new();
        log.read_to_end(&mut text).unwrap();
        text
    });
    let mut owner = Process(owner);
    documents::first_document(&mut owner.0);
    let done = work();
    kill(
        Pid::from_raw(i32::try_from(owner.0.id()).unwrap()),
        Signal::SIGTERM,
    )
    .unwrap();
    assert!(owner.0.wait().unwrap().success());
    (done, reader.join().unwrap())
}

#[test]
fn a_key_is_made_once_and_used_only_if_nobody_else_can_use_it() {
    let place = Place::new();
    let key = place.key("key");
    assert_eq!(
        fs::metadata(&key).unwrap().permissions().mode() & 0o7777,
        0o400
    );
    assert_eq!(fs::read_to_string(&key).unwrap().trim_end().len(), 64);
    fails(&["key", "make", &key], 3, &["never overwritten"]);
    let store = place.at("store");
    let create = [&["create", &store][..], &SIZE].concat();
    let with = |more: &[&'static str]| [&create[..], more].concat();
    fs::set_permissions(&key, fs::Permissions::from_mode(0o440)).unwrap();
    let keyed = [&create[..], &["--key-file", &key]].concat();
    fails(&keyed, 3, &["mode 0440", "chmod 0400"]);
    fails(&with(&["--key-command", "exit 3"]), 3, &["exit status: 3"]);
    fails(
        &with(&["--key-command", "echo short"]),
        3,
        &["64 hexadecimal digits"],
    );
    fails(&with(&["--key-credential"]), 3, &["CREDENTIALS_DIRECTORY"]);
    fails(
        &with(&["--key-credential", "--key-command", "true"]),
        2,
        &["cannot be used with"],
    );
    assert!(!Path::new(&store).exists());
    fs::set_permissions(&key, fs::Permissions::from_mode(0o600)).unwrap();
    says(&keyed, 0, &["Encrypted", "Keep a copy of the key"]);
    // The same key from a command, and from the service manager.
    let command = format!("cat {key}");
    json(&["verify", &store, "--deep", "--key-command", &command]);
    let credentials = place.0.path().join("credentials");
    fs::create_dir(&credentials).unwrap();
    fs::copy(&key, credentials.join("larder.kek")).unwrap();
    let output = larder(&["verify", &store, "--deep", "--key-credential"])
        .env("CREDENTIALS_DIRECTORY", &credentials)
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", stderr(&output));
}

#[test]
fn a_store_is_made_with_its_key_or_without_and_never_taken_for_the_other() {
    let place = Place::new();
    let (key, other) = (place.key("key"), place.key("other"));
    let store = place.store("store", Some(&key));
    let plain = place.store("plain", None);
    let before = fs::read(&store).unwrap();
    let spare = place.at("spare");
    for command in [
        &["compact", &store][..],
        &["export", &store, &spare],
        &["verify", &store, "--repair"],
        &["delete", &store, "--model", MODEL],
        &["quota", &store],
        &["pin", &store],
        &["volume", "add", &store, &spare],
        &["create", &store, "--grow", "--size", "32MiB"],
        &["bench", &store, "--op", "get"],
    ] {
        fails(command, 3, &["is encrypted", "--key-file"]);
        let wrong = [command, &["--key-file", &other]].concat();
        fails(&wrong, 3, &["is not a key of this store"]);
        let needless = [command, &["--key-file", &key]].concat();
        let needless: Vec<&str> = needless
            .into_iter()
            .map(|word| if word == store { &plain } else { word })
            .collect();
        fails(&needless, 2, &["is not encrypted"]);
    }
    let again = [
        &["create", &plain][..],
        &SIZE,
        &["--if-absent", "--key-file", &key],
    ]
    .concat();
    fails(&again, 2, &["is not encrypted"]);
    let again = [
        &["create", &store][..],
        &SIZE,
        &["--if-absent", "--key-file", &key],
    ]
    .concat();
    let there = json(&again);
    assert_eq!(
        (&there["existed"], &there["encrypted"]),
        (&true.into(), &true.into())
    );
    assert!(fs::read(&store).unwrap() == before && !Path::new(&spare).exists());
    assert_eq!(hits(&store, Some(&key)), keys().len());
}

#[test]
fn without_the_key_the_structures_are_shown_and_checked() {
    let place = Place::new();
    let key = place.key("key");
    let store = place.store("store", Some(&key));
    let pages = keys().len();
    let locked = json(&["inspect", &store]);
    assert_eq!(locked["encryption"], "locked");
    assert_eq!(
        locked["not_checked"],
        serde_json::json!(["namespaces", "records", "pages"])
    );
    assert_eq!(locked["pages"], pages);
    for unknown in ["live_bytes", "records", "namespaces"] {
        assert!(locked[unknown].is_null(), "{unknown}");
    }
    let unlocked = json(&["inspect", &store, "--key-file", &key]);
    assert_eq!(unlocked["encryption"], "unlocked");
    assert_eq!(
        (&unlocked["pages"], &unlocked["not_checked"]),
        (&pages.into(), &Value::Array(vec![]))
    );
    assert_eq!(locked["segment_states"], unlocked["segment_states"]);
    assert_eq!(locked["data_bytes"], unlocked["data_bytes"]);
    says(
        &["inspect", &store],
        0,
        &["no key is given: namespaces, records, pages are not checked"],
    );
    says(&["inspect", &store, "--segments"], 0, &["sealed"]);
    fails(&["inspect", &store, "--namespaces"], 3, &["need its key"]);
    says(
        &["verify", &store],
        0,
        &["can be checked without the key is sound"],
    );
    let said = ends(&["verify", &store, "--deep"], 0);
    let said = String::from_utf8(said.stdout).unwrap();
    let last = said.lines().last().unwrap();
    assert!(last.contains("NO PAGE WAS CHECKED") && last.contains("--key-file"));
    let checked = json(&["verify", &store, "--deep"]);
    assert!(checked["deep"].is_null() && checked["damaged"] == false);
    let deep = json(&["verify", &store, "--deep", "--key-file", &key]);
    assert_eq!(deep["deep"]["good_pages"], pages);
    assert_eq!(deep["deep"]["unopened_pages"], 0);
    // Damage is found either way.
    support::flip(Path::new(&store), 130 << 10);
    for with in [&[][..], &["--key-file", &key]] {
        let found = report(&[&["verify", &store][..], with].concat(), 1);
        assert_eq!(found["damage"][0]["kind"], "keyring");
    }
    let mended = json(&["verify", &store, "--repair", "--key-file", &key]);
    assert_eq!(mended["repair"]["keyrings"], 1);
    assert_eq!(json(&["verify", &store])["damaged"], false);
}

#[test]
fn pages_move_between_plain_and_encrypted_stores_as_the_operator_names_it() {
    let place = Place::new();
    let (key, other) = (place.key("key"), place.key("other"));
    let plain = place.store("plain", None);
    let pages = keys().len();
    let sealed = place.at("sealed");
    json(&[
        "compact",
        &plain,
        "--into",
        &sealed,
        "--into-key-file",
        &key,
    ]);
    assert_eq!(hits(&sealed, Some(&key)), pages);
    // By default a copy of an encrypted store has its key.
    let same = place.at("same");
    json(&["compact", &sealed, "--key-file", &key, "--into", &same]);
    assert_eq!(hits(&same, Some(&key)), pages);
    let fresh = place.at("fresh");
    let into = ["--into", &fresh, "--into-key-file", &other];
    json(&[&["compact", &sealed, "--key-file", &key][..], &into].concat());
    assert_eq!(hits(&fresh, Some(&other)), pages);
    let clear = place.at("clear");
    json(&[
        "compact",
        &sealed,
        "--key-file",
        &key,
        "--into",
        &clear,
        "--plaintext",
    ]);
    assert_eq!(hits(&clear, None), pages);
    // Archives in clear.
    let archive = place.at("clear-archive");
    let export = ["export", &sealed, &archive, "--key-file", &key];
    json(&[&export[..], &["--plaintext"]].concat());
    let taker = place.at("taker");
    json(&[&["create", &taker][..], &SIZE, &["--key-file", &other]].concat());
    fails(&["import", &taker, &archive], 3, &["is encrypted"]);
    json(&["import", &taker, &archive, "--key-file", &other]);
    assert_eq!(hits(&taker, Some(&other)), pages);
    // Remotes without keys have pages in clear.
    let url = format!("file://{}", place.at("remote"));
    let push = ["remote", "push", &sealed, &url, "--new", "--unsigned"];
    fails(&push, 2, &["in clear"]);
    fails(
        &["remote", "pull", &sealed, &url, "--unsigned"],
        2,
        &["in clear"],
    );
}

#[test]
fn a_rotation_has_the_new_key_open_the_store_and_writes_no_page() {
    let place = Place::new();
    let (key, new) = (place.key("key"), place.key("new"));
    let store = place.store("store", Some(&key));
    let before = fs::read(&store).unwrap();
    let rotate = ["key", "rotate", &store, "--new-key-file", &new];
    fails(&rotate, 3, &["name the present key"]);
    fails(
        &[&rotate[..], &["--key-file", &new]].concat(),
        3,
        &["is not a key of this store"],
    );
    let to_itself = [
        "key",
        "rotate",
        &store,
        "--new-key-file",
        &key,
        "--key-file",
        &key,
    ];
    fails(&to_itself, 2, &["is the present one"]);
    assert!(before == fs::read(&store).unwrap());
    let done = json(&[&rotate[..], &["--key-file", &key]].concat());
    assert_ne!(done["key_id"], done["former_key_id"]);
    let after = fs::read(&store).unwrap();
    let first = 1 << 20;
    let last = after.len() - (1 << 20);
    assert!(before[first..last] == after[first..last]);
    fails(
        &["verify", &store, "--key-file", &key],
        3,
        &["is not a key of this store"],
    );
    assert_eq!(hits(&store, Some(&new)), keys().len());
}

#[test]
fn a_renewal_of_keys_encrypts_all_pages_anew() {
    let place = Place::new();
    let key = place.key("key");
    let store = place.store("store", Some(&key));
    let rekey = ["compact", &store, "--key-file", &key, "--rekey"];
    let wrong = [&rekey[..], &["--tenant", "of no page"]].concat();
    fails(&wrong, 2, &["no tenant of this name"]);
    let new = place.key("new");
    let rotate = [
        "key",
        "rotate",
        &store,
        "--key-file",
        &key,
        "--new-key-file",
        &new,
    ];
    served(&store, Some(&key), || {
        for command in [&rekey[..], &rotate] {
            let said = fails(command, 3, &["in use", "stop"]);
            assert!(!said.contains("--online"), "{said}");
        }
    });
    let before = fs::read(&store).unwrap();
    let plan = json(&[&rekey[..], &["--dry-run"]].concat());
    assert_eq!(plan["in_place"]["planned_pages"], keys().len());
    assert_eq!(
        (&plan["rekeyed"], &plan["dry_run"]),
        (&true.into(), &true.into())
    );
    assert!(before == fs::read(&store).unwrap());
    let done = json(&rekey);
    let pages = keys().len();
    assert_eq!(done["rekeyed"], true);
    assert_eq!(done["in_place"]["planned_pages"], pages);
    assert_eq!(done["in_place"]["left_pages"], 0);
    assert_eq!(hits(&store, Some(&key)), pages);
    // An image of the store from before has other keys: none of its pages is a page of now.
    assert!(before != fs::read(&store).unwrap());
    let plain = place.store("plain", None);
    fails(&["compact", &plain, "--rekey"], 2, &["is not encrypted"]);
}

/// Texts and bytes to search for, by their first bytes.
struct Needles {
    begins: Vec<bool>,
    whole: HashMap<[u8; NEEDLE], &'static str>,
}

const NEEDLE: usize = 12;

impl Needles {
    /// What an encrypted store must not show: names, page keys, blocks of 16 bytes of the pages,
    /// and the key in the file, as its text and as bytes.
    fn new(key: Option<&str>) -> Needles {
        let mut needles = Needles {
            begins: vec![false; 1 << 16],
            whole: HashMap::new(),
        };
        needles.add("model", MODEL.as_bytes());
        needles.add("tenant", TENANT.as_bytes());
        let fingerprint = space(TENANT).fingerprint();
        needles.add("fingerprint", fingerprint.as_bytes());
        needles.add("fingerprint", fingerprint.to_string().as_bytes());
        for key in keys() {
            needles.add("page key", key.as_bytes());
            for part in 0..PARTS.len() {
                for block in content(&key, part).chunks_exact(16) {
                    needles.add("page", block);
                }
            }
        }
        if let Some(key) = key {
            let text = fs::read_to_string(key).unwrap();
            needles.add("key", text.as_bytes());
            let bytes = (0..32).map(|at| u8::from_str_radix(&text[2 * at..2 * at + 2], 16));
            needles.add("key", &bytes.map(Result::unwrap).collect::<Vec<u8>>());
        }
        needles
    }

    fn add(&mut self, what: &'static str, bytes: &[u8]) {
        let begin = *bytes.first_chunk::<NEEDLE>().unwrap();
        self.begins[usize::from(u16::from_le_bytes([begin[0], begin[1]]))] = true;
        self.whole.insert(begin, what);
    }

    fn found_in(&self, bytes: &[u8]) -> BTreeSet<&'static str> {
        let windows = bytes.array_windows::<NEEDLE>();
        let likely =
            windows.filter(|of| self.begins[usize::from(u16::from_le_bytes([of[0], of[1]]))]);
        likely
            .filter_map(|of| self.whole.get(of).copied())
            .collect()
    }
}

/// Everything that commands write beside and from a store: volumes, side files, saved superblocks,
/// archives, bundles, and their output on stderr.
fn written(place: &Place, key: Option<&str>, new: Option<&str>) -> BTreeSet<&'static str> {
    let needles = Needles::new(key);
    let with = |key: Option<&str>| -> Vec<String> {
        key.map_or_else(Vec::new, |key| {
            vec!["--key-file".to_owned(), key.to_owned()]
        })
    };
    let (mut logs, mut owner_log) = (Vec::new(), Vec::new());
    let mut run = |arguments: &[&str], key: Option<&str>| {
        let mut command = larder(arguments);
        command.args(with(key)).env("LARDER_LOG", "trace");
        let output = command.output().unwrap();
        // The result of a doctor depends on the machine.
        let is_done = output.status.success() || arguments[0] == "doctor";
        assert!(is_done, "{arguments:?}: {}", stderr(&output));
        logs.extend(output.stderr);
    };
    let store = place.store("store", key);
    let at = |name: &str| place.at(name);
    let (found, log) = served(&store, key, || {
        let client = Store::attach(Path::new(&store), OpenOptions::default()).unwrap();
        let found = found_in(&client);
        client.close().unwrap();
        json(&["quota", &store, "--tenant", TENANT, "--max", "1GiB"]);
        let told = needles.found_in(&names::told_by(&store, &at("traffic")));
        match key {
            Some(_) => assert_eq!(told, BTreeSet::from(["model"])),
            None => assert_eq!(told, BTreeSet::from(["fingerprint", "model", "tenant"])),
        }
        let bundle = ["doctor", &store, "--bundle", &at("served.tar")];
        let said = larder(&bundle).output().unwrap().stdout;
        assert!(!String::from_utf8(said).unwrap().contains("log.txt"));
        let bundled = needles.found_in(&fs::read(at("served.tar")).unwrap());
        let fingerprint = key.is_none().then_some("fingerprint");
        assert_eq!(bundled, fingerprint.into_iter().collect());
        // A recording has names of models, for its replay.
        fs::remove_file(at("traffic")).unwrap();
        found
    });
    // A client without the key of the store gets that of its tenant from the owner.
    assert_eq!(found, keys().len());
    owner_log.extend(log);
    run(&["verify", &store, "--deep"], key);
    run(
        &["volume", "add", &store, &at("second"), "--size", "8MiB"],
        key,
    );
    run(&["create", &store, "--grow", "--size", "48MiB"], key);
    run(&["superblock", "save", &store, &at("saved")], None);
    run(&["doctor", &store, "--bundle", &at("bundle.tar")], None);
    if let Some(new) = new {
        let rotate = ["key", "rotate", &store, "--new-key-file", new];
        run(&rotate, key);
    }
    let key = new.or(key);
    run(&["compact", &store], key);
    run(&["compact", &store, "--into", &at("compacted")], key);
    run(&["export", &store, &at("archive")], key);
    run(&["volume", "retire", &store, &at("second")], key);
    assert_eq!(hits(&store, key), keys().len());
    logs.extend(owner_log);
    let mut found = needles.found_in(&logs);
    // Logs may name models.
    found.remove("model");
    let is_key =
        |path: &Path| [Some("key"), Some("new")].contains(&path.file_name().unwrap().to_str());
    for entry in fs::read_dir(place.0.path()).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() && !is_key(&path) {
            found.extend(needles.found_in(&fs::read(&path).unwrap()));
        }
    }
    found
}

#[test]
fn nothing_that_was_written_shows_pages_names_or_keys() {
    let place = Place::new();
    let (key, new) = (place.key("key"), place.key("new"));
    assert_eq!(written(&place, Some(&key), Some(&new)), BTreeSet::new());
    // The same search finds all of them in a plain store.
    let found = written(&Place::new(), None, None);
    assert_eq!(
        found,
        BTreeSet::from(["fingerprint", "model", "page", "page key", "tenant"])
    );
}
