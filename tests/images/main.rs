//! Whole stores and archives of every version ever released: each is opened, read, checked and
//! written to by this version.
//!
//! `tests/images/` holds, for each sample, its volumes in small (`tests/support/sparse.rs`) and a
//! list of its content: every page, absent keys, and the findings of `verify --deep`. The bytes of
//! a page follow from its key ([`content`]).
//!
//! `LARDER_BLESS=1 cargo test -p larder --test images -- --ignored bless` writes the samples of the
//! current version: for a new version, never to make a failing test of a released one pass.
#![allow(clippy::unwrap_used)]

mod bless;
#[path = "../support/mod.rs"]
mod support;

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::File;
use std::io::{IoSlice, IoSliceMut, Read};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use larder_engine::{
    CreateOptions, GetPage, NamespaceId, OpenOptions, PageStore, PutOptions, PutPage, PutStatus,
    Store, SyncPolicy, create,
};
use larder_format::{
    BLOCK_BYTES, Holder, Namespace, NamespaceFields, OVERHEAD_BYTES, PageKey, PageShape, Rank,
    SegmentState, Superblock,
};
use larder_offline::survey::{Condition, Page, Survey, SurveyOptions};
use larder_store::share::Inside;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use support::honest::{Process, found};
use support::sparse::{pack, unpack};
use support::{chain, directory, larder, make_trace, superblocks};

const SEGMENT_BYTES: u64 = 16 << 20;

/// The samples of version 2.
const SAMPLES: [Sample; 4] = [
    Sample {
        name: "v2-clean",
        volumes: 1,
    },
    Sample {
        name: "v2-unclean",
        volumes: 1,
    },
    Sample {
        name: "v2-damaged",
        volumes: 1,
    },
    Sample {
        name: "v2-two",
        volumes: 2,
    },
];

/// Archives of the namespace `ragged` of the clean store, of each version.
const ARCHIVES: [&str; 2] = ["v1-ragged.archive", ARCHIVE];

/// That of this version.
const ARCHIVE: &str = "v2-ragged.archive";

/// Pages of a kilobyte in two parts that end within a block; of two blocks; and large ones of
/// zeros, which fill segments and take no room in an image.
const MODELS: [(&str, &[u32]); 3] = [
    ("ragged", &[1000, 300]),
    ("even", &[8192]),
    ("zeros", &[1020 * 4096]),
];

/// A store as it was left.
#[derive(Clone, Copy)]
struct Sample {
    name: &'static str,
    volumes: usize,
}

/// The content of a sample.
#[derive(Serialize, Deserialize)]
struct Listing {
    /// Whether it was closed in order.
    clean: bool,
    /// The exit status of `verify --deep`, and its findings: kind, volume, offset.
    verify_code: i32,
    findings: BTreeSet<(String, u64, u64)>,
    unfinished_pages: u64,
    pages: Vec<Listed>,
    /// Pages that were stored once: model and key.
    absent: Vec<(String, String)>,
}

/// A page of a sample.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Listed {
    model: String,
    key: String,
    /// The first 24 digits of the key before it.
    parent: Option<String>,
    depth: u32,
    /// Whether a sync covered it, whether its segment takes no more pages, and whether its bytes
    /// are those of its put.
    proven: bool,
    sealed: bool,
    whole: bool,
}

fn namespace(model: &str) -> Namespace {
    let (_, parts) = MODELS.iter().find(|(name, _)| *name == model).unwrap();
    let fields = NamespaceFields {
        model: model.to_owned(),
        weights: "image".to_owned(),
        dtype: "bytes".to_owned(),
        layout: "page_first_direct".to_owned(),
        page_tokens: 16,
        shape: PageShape::new(parts).unwrap(),
        tp: Rank::ALONE,
        pp: Rank::ALONE,
        cp: Rank::ALONE,
        pool: "kv".to_owned(),
        extra: [("purpose".to_owned(), "format stability".to_owned())].into(),
    };
    Namespace::new(fields).unwrap()
}

/// The parts of a page.
fn content(model: &str, key: &PageKey) -> Vec<Vec<u8>> {
    let (_, parts) = MODELS.iter().find(|(name, _)| *name == model).unwrap();
    let byte = |part: usize, at: usize| match model {
        "zeros" => 0,
        _ => key.as_bytes()[(at + part) % 32] ^ u8::try_from(at / 32 % 256).unwrap(),
    };
    let part =
        |(part, &bytes): (usize, &u32)| (0..bytes as usize).map(|at| byte(part, at)).collect();
    parts.iter().enumerate().map(part).collect()
}

fn put(store: &Store, model: &str, keys: &[PageKey]) {
    let id = store.namespace(&namespace(model)).unwrap();
    for (depth, key) in keys.iter().enumerate() {
        let parts = content(model, key);
        let parts: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
        let page = PutPage {
            key: *key,
            parent: depth.checked_sub(1).map(|before| keys[before]),
            depth: u32::try_from(depth).unwrap(),
            parts: &parts,
        };
        let options = PutOptions::waiting(Duration::from_secs(120));
        assert!(store.put(id, &[page], options)[0].is_present());
    }
}

/// Whether the store returns the page. Its bytes must be right.
#[track_caller]
fn has(store: &Store, id: NamespaceId, model: &str, key: &PageKey) -> bool {
    let expected = content(model, key);
    let mut parts: Vec<Vec<u8>> = expected.iter().map(|part| vec![0xee; part.len()]).collect();
    let mut slices: Vec<IoSliceMut<'_>> =
        parts.iter_mut().map(|part| IoSliceMut::new(part)).collect();
    let mut pages = [GetPage {
        key: *key,
        parts: &mut slices,
    }];
    let hit = store.get(id, &mut pages, None)[0].is_hit();
    assert!(!hit || parts == expected, "wrong bytes for {model} {key}");
    hit
}

impl Sample {
    fn volume_name(self, volume: usize) -> String {
        format!("{}-{volume}.img", self.name)
    }

    fn listing_name(self) -> String {
        format!("{}.json", self.name)
    }

    /// Makes the store in a directory; its volumes.
    fn unpack(self, directory: &Path) -> Vec<PathBuf> {
        let volumes = (0..self.volumes).map(|volume| {
            let path = directory.join(format!("volume-{volume}"));
            unpack(
                &std::fs::read(image(&self.volume_name(volume))).unwrap(),
                &path,
            );
            path
        });
        volumes.collect()
    }

    fn listing(self) -> Listing {
        serde_json::from_slice(&std::fs::read(image(&self.listing_name())).unwrap()).unwrap()
    }
}

fn image(name: &str) -> PathBuf {
    let images = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/images");
    images.join(name)
}

fn open(volumes: &[PathBuf], read_only: bool) -> Store {
    let options = OpenOptions::default().with(|o| {
        o.volumes = volumes[1..].to_vec();
        o.sync = SyncPolicy::Relaxed;
        o.read_only = read_only;
    });
    Store::open(&volumes[0], options).unwrap()
}

fn survey(volumes: &[PathBuf]) -> Survey {
    let options = SurveyOptions {
        volumes: volumes[1..].to_vec(),
        ..SurveyOptions::default()
    };
    Survey::new(&volumes[0], &options).unwrap()
}

fn listed(survey: &Survey, page: &Page, whole: bool) -> Listed {
    let namespace = survey.namespaces[page.namespace].record.as_ref().unwrap();
    Listed {
        model: namespace.fields().model.clone(),
        key: page.key.to_string(),
        parent: page.parent.map(|parent| parent.to_string()),
        depth: page.depth,
        proven: page.proven,
        sealed: survey.condition == Condition::Clean
            || survey.segments[page.segment].state == Some(SegmentState::Sealed),
        whole,
    }
}

/// Runs `larder COMMAND STORE ... --json` and gives back its exit code and its document.
fn run(command: &str, volumes: &[PathBuf], options: &[&str]) -> (Option<i32>, Value, String) {
    let mut child = larder(&[command]);
    child.arg(&volumes[0]).args(options).arg("--json");
    for volume in &volumes[1..] {
        child.arg("--volume").arg(volume);
    }
    let output = child.output().unwrap();
    let document = serde_json::from_slice(&output.stdout).unwrap_or_default();
    let errors = String::from_utf8(output.stderr).unwrap();
    (output.status.code(), document, errors)
}

fn findings(document: &Value) -> BTreeSet<(String, u64, u64)> {
    let damage = document["damage"].as_array().unwrap().iter();
    let row = |finding: &Value| {
        (
            finding["kind"].as_str().unwrap().to_owned(),
            finding["volume"].as_u64().unwrap(),
            finding["offset"].as_u64().unwrap(),
        )
    };
    damage.map(row).collect()
}

#[test]
fn every_sample_holds_exactly_the_pages_listed_beside_it() {
    for sample in SAMPLES {
        let directory = directory();
        let volumes = sample.unpack(directory.path());
        let survey = survey(&volumes);
        let listing = sample.listing();
        let whole = |key: &str| {
            listing
                .pages
                .iter()
                .any(|page| page.key == key && page.whole)
        };
        let found: BTreeSet<Listed> = survey
            .live()
            .map(|page| listed(&survey, &page, whole(&page.key.to_string())))
            .collect();
        assert_eq!(
            found,
            listing.pages.into_iter().collect(),
            "{}",
            sample.name
        );
    }
}

#[test]
fn every_sample_is_verified_with_the_findings_listed_beside_it() {
    for sample in SAMPLES {
        let directory = directory();
        let volumes = sample.unpack(directory.path());
        let before: Vec<Vec<u8>> = volumes.iter().map(|path| pack(path)).collect();
        let listing = sample.listing();
        let (code, document, errors) = run("verify", &volumes, &["--deep"]);
        assert_eq!(code, Some(listing.verify_code), "{}: {errors}", sample.name);
        assert_eq!(document["condition"] == "clean", listing.clean);
        assert_eq!(findings(&document), listing.findings, "{}", sample.name);
        assert_eq!(
            document["deep"]["unfinished_pages"],
            listing.unfinished_pages
        );
        let after: Vec<Vec<u8>> = volumes.iter().map(|path| pack(path)).collect();
        assert!(before == after, "{}: verifying changed it", sample.name);
    }
}

#[test]
fn every_sample_is_read_without_being_changed() {
    for sample in SAMPLES {
        let directory = directory();
        let volumes = sample.unpack(directory.path());
        let before: Vec<Vec<u8>> = volumes.iter().map(|path| pack(path)).collect();
        let store = open(&volumes, true);
        for page in &sample.listing().pages {
            let id = store.namespace(&namespace(&page.model)).unwrap();
            let hit = has(&store, id, &page.model, &page.key.parse().unwrap());
            // A reader without the lock sees proven pages, in segments that take no more writes.
            let expected = page.whole && page.proven && page.sealed;
            assert_eq!(hit, expected, "{}: {page:?}", sample.name);
        }
        store.close().unwrap();
        let after: Vec<Vec<u8>> = volumes.iter().map(|path| pack(path)).collect();
        assert!(before == after, "{}: reading changed it", sample.name);
    }
}

#[test]
fn every_sample_is_opened_for_writing_keeps_its_pages_and_takes_more() {
    for sample in SAMPLES {
        let directory = directory();
        let volumes = sample.unpack(directory.path());
        let listing = sample.listing();
        let more = chain(99, 5);
        let store = open(&volumes, false);
        put(&store, "even", &more);
        for page in listing.pages.iter().filter(|page| !page.whole) {
            let id = store.namespace(&namespace(&page.model)).unwrap();
            assert!(!has(&store, id, &page.model, &page.key.parse().unwrap()));
        }
        store.close().unwrap();
        let store = open(&volumes, false);
        let whole = listing.pages.iter().filter(|page| page.whole);
        for page in whole.clone() {
            let id = store.namespace(&namespace(&page.model)).unwrap();
            let key = page.key.parse().unwrap();
            assert!(
                has(&store, id, &page.model, &key),
                "{}: {page:?}",
                sample.name
            );
        }
        for (model, key) in &listing.absent {
            let id = store.namespace(&namespace(model)).unwrap();
            assert!(
                !has(&store, id, model, &key.parse().unwrap()),
                "{model} {key}"
            );
        }
        let id = store.namespace(&namespace("even")).unwrap();
        assert!(more.iter().all(|key| has(&store, id, "even", key)));
        assert_eq!(store.stats().pages, (whole.count() + more.len()) as u64);
        store.local().unwrap().check_invariants().unwrap();
        store.close().unwrap();
    }
}

#[test]
fn archives_of_each_version_are_taken_by_a_store_of_this_version() {
    ARCHIVES.into_iter().for_each(is_taken);
}

fn is_taken(name: &str) {
    let directory = directory();
    let archive = directory.path().join("archive");
    unpack(&std::fs::read(image(name)).unwrap(), &archive);
    let path = directory.path().join("store");
    make(std::slice::from_ref(&path));
    let (code, document, errors) = run(
        "import",
        std::slice::from_ref(&path),
        &[archive.to_str().unwrap()],
    );
    assert_eq!(code, Some(0), "{errors}");
    let listing = SAMPLES[0].listing();
    let ragged = || listing.pages.iter().filter(|page| page.model == "ragged");
    assert_eq!(document["pages_put"], ragged().count());
    let store = open(&[path], false);
    let id = store.namespace(&namespace("ragged")).unwrap();
    assert!(ragged().all(|page| has(&store, id, "ragged", &page.key.parse().unwrap())));
    store.close().unwrap();
}

/// The block with another version and the CRC that belongs to it.
fn set_version(path: &Path, offset: u64, version: u32) {
    let file = File::options().read(true).write(true).open(path).unwrap();
    let mut block = [0; BLOCK_BYTES];
    file.read_exact_at(&mut block, offset).unwrap();
    block[8..12].copy_from_slice(&version.to_le_bytes());
    block[16..20].fill(0);
    let crc = crc32fast::hash(&block);
    block[16..20].copy_from_slice(&crc.to_le_bytes());
    file.write_all_at(&block, offset).unwrap();
}

/// Every command that opens a store, started beside its first volume.
const COMMANDS: [&str; 11] = [
    "inspect volume-0",
    "verify volume-0 --deep",
    "verify volume-0 --repair",
    "compact volume-0",
    "compact volume-0 --into new",
    "export volume-0 archive --force",
    "import volume-0 archive",
    "bench volume-0 --op exists",
    "replay store trace --store volume-0 --capacity 1GiB --page-bytes 64KiB",
    "create volume-0 --grow --size 1GiB",
    "serve volume-0",
];

/// Runs a command in a directory. Returns its exit status and its output.
fn end_of(command: &str, directory: &Path) -> (Option<i32>, String) {
    let arguments: Vec<&str> = command.split(' ').collect();
    let mut command = larder(&arguments);
    let command = command.current_dir(directory).stdout(Stdio::null());
    let Process(child) = &mut Process(command.stderr(Stdio::piped()).spawn().unwrap());
    let ended = found("it ends", || child.try_wait().unwrap());
    let mut said = String::new();
    let mut errors = child.stderr.take().unwrap();
    errors.read_to_string(&mut said).unwrap();
    (ended.code(), said)
}

/// The files of a directory: names and lengths.
fn files_in(directory: &Path) -> BTreeSet<(OsString, u64)> {
    let entries = std::fs::read_dir(directory).unwrap().map(Result::unwrap);
    entries
        .map(|entry| (entry.file_name(), entry.metadata().unwrap().len()))
        .collect()
}

#[test]
fn a_store_of_a_newer_version_is_refused_by_every_command_and_left_alone() {
    // A newer Larder may have been killed between two copies.
    for copies in [&[0, 1, 2][..], &[0], &[1], &[2]] {
        let directory = directory();
        let volumes = SAMPLES[0].unpack(directory.path());
        for &copy in copies {
            set_version(&volumes[0], superblocks(&volumes[0])[copy], 3);
        }
        let words = ["version 3 is newer than version 2", "use a newer Larder"];
        is_refused_by_every_command(&volumes[0], directory.path(), words);
    }
}

/// Each command ends with these words, and changes nothing.
fn is_refused_by_every_command(volume: &Path, directory: &Path, words: [&str; 2]) {
    unpack(
        &std::fs::read(image(ARCHIVE)).unwrap(),
        &directory.join("archive"),
    );
    make_trace(&directory.join("trace"), 2, 1);
    let before = (pack(volume), files_in(directory));
    for command in COMMANDS {
        let (code, errors) = end_of(command, directory);
        assert_eq!(code, Some(3), "{command}: {errors}");
        assert!(words.iter().all(|word| errors.contains(word)), "{errors}");
    }
    assert!(
        before == (pack(volume), files_in(directory)),
        "it was changed"
    );
}

#[test]
fn a_store_of_version_1_is_refused_by_every_command_with_the_way_out() {
    let directory = directory();
    let volumes = SAMPLES[0].unpack(directory.path());
    for offset in superblocks(&volumes[0]) {
        set_version(&volumes[0], offset, 1);
    }
    let words = ["version 1 is older than version 2", "create the store anew"];
    is_refused_by_every_command(&volumes[0], directory.path(), words);
}

#[test]
fn an_archive_of_a_newer_version_is_refused() {
    let directory = directory();
    let volumes = SAMPLES[0].unpack(directory.path());
    let archive = directory.path().join("archive");
    unpack(&std::fs::read(image(ARCHIVE)).unwrap(), &archive);
    set_version(&archive, 0, 3);
    let (code, _, errors) = run("import", &volumes, &[archive.to_str().unwrap()]);
    assert_eq!(code, Some(3));
    assert!(errors.contains("format version 3"), "{errors}");
}

/// A new store on these volumes.
fn make(volumes: &[PathBuf]) {
    let segments = if volumes.len() == 1 { 8 } else { 5 };
    let options =
        CreateOptions::new((OVERHEAD_BYTES + segments * SEGMENT_BYTES) * volumes.len() as u64)
            .with(|o| {
                o.segment_size = Some(SEGMENT_BYTES);
                o.volumes = volumes[1..].to_vec();
            });
    create(&volumes[0], &options).unwrap();
}
