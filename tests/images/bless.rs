//! Makes the samples of the current version.

use super::support::{flip, overwrite};
use super::*;

#[test]
#[ignore = "writes the samples of the current version, with LARDER_BLESS"]
fn bless() {
    // Not in a run of all ignored tests.
    assert!(std::env::var_os("LARDER_BLESS").is_some());
    for sample in SAMPLES {
        let directory = directory();
        let volumes: Vec<PathBuf> = (0..sample.volumes)
            .map(|volume| directory.path().join(format!("volume-{volume}")))
            .collect();
        make(&volumes);
        let listing = match sample.name {
            "v2-clean" => clean(&volumes),
            "v2-unclean" => unclean(&volumes),
            "v2-damaged" => damaged(&volumes),
            _ => two(&volumes),
        };
        for (volume, path) in volumes.iter().enumerate() {
            std::fs::write(image(&sample.volume_name(volume)), pack(path)).unwrap();
        }
        let listing = serde_json::to_string(&listing).unwrap();
        let lines = listing.replace("},{", "},\n{") + "\n";
        std::fs::write(image(&sample.listing_name()), lines).unwrap();
    }
}

/// Segments that were filled, emptied and filled again; a deletion; branches.
fn clean(volumes: &[PathBuf]) -> Listing {
    let (ragged, even) = (chain(1, 6), chain(2, 4));
    let mut branch = ragged[..4].to_vec();
    branch.extend(chain(3, 2));
    let store = open(volumes, false);
    for seed in 10..20 {
        put(&store, "zeros", &chain(seed, 3));
    }
    // Room for the writes of the tests, without an eviction.
    let id = store.namespace(&namespace("zeros")).unwrap();
    let deleted: Vec<_> = (18..20).flat_map(|seed| chain(seed, 3)).collect();
    assert!(store.delete(id, &deleted).unwrap() > 0);
    let zeros = deleted
        .iter()
        .map(|key| ("zeros".to_owned(), key.to_string()));
    put(&store, "ragged", &ragged);
    put(&store, "even", &even);
    let id = store.namespace(&namespace("ragged")).unwrap();
    let deleted_too = chain(4, 1);
    put(&store, "ragged", &deleted_too);
    assert_eq!(store.delete(id, &deleted_too).unwrap(), 1);
    put_branch(&store, &branch, 4);
    store.close().unwrap();
    neutral(volumes);
    let absent = zeros.chain([("ragged".to_owned(), deleted_too[0].to_string())]);
    let listing = list(volumes, &BTreeSet::new(), absent.collect());
    let of_model = |model: &str| {
        listing
            .pages
            .iter()
            .filter(|page| page.model == model)
            .count()
    };
    assert_eq!((of_model("ragged"), of_model("even")), (8, 4));
    assert!((1..30).contains(&of_model("zeros")));
    archive(volumes);
    listing
}

fn put_branch(store: &Store, keys: &[PageKey], from: usize) {
    let id = store.namespace(&namespace("ragged")).unwrap();
    for (depth, key) in keys.iter().enumerate().skip(from) {
        let parts = content("ragged", key);
        let parts: Vec<IoSlice<'_>> = parts.iter().map(|part| IoSlice::new(part)).collect();
        let page = PutPage {
            key: *key,
            parent: Some(keys[depth - 1]),
            depth: u32::try_from(depth).unwrap(),
            parts: &parts,
        };
        let stored = store.put(id, &[page], PutOptions::default());
        assert_eq!(stored, [PutStatus::Stored]);
    }
}

fn archive(volumes: &[PathBuf]) {
    let file = volumes[0].with_file_name("archive");
    let fingerprint = namespace("ragged").fingerprint().to_string();
    let options = [file.to_str().unwrap(), "--namespace", &fingerprint];
    let (code, _, errors) = run("export", volumes, &options);
    assert_eq!(code, Some(0), "{errors}");
    std::fs::write(image(ARCHIVE), pack(&file)).unwrap();
}

/// Left without being closed: some pages were synced, some not, one of these never landed.
fn unclean(volumes: &[PathBuf]) -> Listing {
    let (ragged, even) = (chain(1, 6), chain(2, 4));
    let store = open(volumes, false);
    put(&store, "ragged", &ragged[..2]);
    // These fill the segment that those are in.
    put(&store, "zeros", &chain(10, 4));
    put(&store, "ragged", &ragged[..]);
    store.flush().unwrap();
    put(&store, "even", &even);
    drop(store);
    neutral(volumes);
    let torn = offset_of(volumes, &even[3]);
    overwrite(&volumes[0], torn, &[0; 8192]);
    let listing = list(volumes, &BTreeSet::from([even[3].to_string()]), Vec::new());
    assert_eq!((listing.verify_code, listing.unfinished_pages), (0, 1));
    assert_eq!(listing.pages.iter().filter(|page| !page.proven).count(), 4);
    listing
}

/// A flipped bit in a page, in the descriptor block of another chain, in a header copy and in a
/// superblock copy.
fn damaged(volumes: &[PathBuf]) -> Listing {
    let (ragged, even, lost) = (chain(1, 6), chain(2, 4), chain(5, 1));
    let store = open(volumes, false);
    put(&store, "ragged", &ragged);
    put(&store, "even", &even);
    put(&store, "ragged", &lost);
    store.close().unwrap();
    neutral(volumes);
    let (_, document, _) = run("inspect", volumes, &["--segments"]);
    let list_of = document["segment_list"].as_array().unwrap();
    let segment = list_of.iter().find(|row| row["records"] != 0).unwrap();
    let start = segment["offset"].as_u64().unwrap();
    let blocks = segment["descriptor_blocks"].as_u64().unwrap();
    let page = offset_of(volumes, &even[1]);
    let last_block = start + SEGMENT_BYTES - blocks * BLOCK_BYTES as u64;
    for offset in [page + 5000, last_block + 200, start + 4096 + 41, 73] {
        flip(&volumes[0], offset);
    }
    let absent = vec![("ragged".to_owned(), lost[0].to_string())];
    let listing = list(volumes, &BTreeSet::from([even[1].to_string()]), absent);
    let kinds: Vec<&str> = listing
        .findings
        .iter()
        .map(|(kind, _, _)| &**kind)
        .collect();
    assert_eq!(kinds, ["descriptor", "header", "payload", "superblock"]);
    assert_eq!(listing.pages.len(), 10);
    listing
}

/// Pages on both of two volumes.
fn two(volumes: &[PathBuf]) -> Listing {
    let store = open(volumes, false);
    for seed in 1..=4 {
        put(&store, "zeros", &chain(10 + seed, 1));
        put(&store, "ragged", &chain(seed, 3));
    }
    store.close().unwrap();
    neutral(volumes);
    let survey = survey(volumes);
    for volume in 0..2 {
        let lies_here = |page: Page| {
            let namespace = survey.namespaces[page.namespace].record.as_ref().unwrap();
            let segment = &survey.segments[page.segment];
            namespace.fields().model == "ragged" && segment.volume == volume
        };
        assert!(survey.live().any(lies_here));
    }
    list(volumes, &BTreeSet::new(), Vec::new())
}

/// The present content of the store. `broken` are the keys of pages whose bytes were changed.
fn list(volumes: &[PathBuf], broken: &BTreeSet<String>, absent: Vec<(String, String)>) -> Listing {
    let (code, document, errors) = run("verify", volumes, &["--deep"]);
    let survey = survey(volumes);
    let pages = survey.live().map(|page| {
        let whole = !broken.contains(&page.key.to_string());
        listed(&survey, &page, whole)
    });
    Listing {
        clean: document["condition"] == "clean",
        verify_code: code.unwrap_or_else(|| panic!("{errors}")),
        findings: findings(&document),
        unfinished_pages: document["deep"]["unfinished_pages"].as_u64().unwrap(),
        pages: pages.collect(),
        absent,
    }
}

/// Takes the properties of the machine out of the superblocks.
fn neutral(volumes: &[PathBuf]) {
    for path in volumes {
        let file = File::options().read(true).write(true).open(path).unwrap();
        for offset in superblocks(path) {
            let mut block = [0; BLOCK_BYTES];
            file.read_exact_at(&mut block, offset).unwrap();
            let mut superblock = Superblock::decode(&block).unwrap();
            superblock.created_unix_s = 1_790_000_000;
            superblock.holder = Holder {
                pid: 1,
                pid_scope: [0; 16],
            };
            for (index, entry) in superblock.volumes.iter_mut().enumerate() {
                entry.path = format!("/larder/volume-{index}");
            }
            file.write_all_at(&*superblock.encode().unwrap(), offset)
                .unwrap();
        }
    }
}

fn offset_of(volumes: &[PathBuf], key: &PageKey) -> u64 {
    let (_, document, errors) = run("inspect", volumes, &["--key", &key.to_string()]);
    let records = document["key"]["records"].as_array().expect(&errors);
    let live = records.iter().find(|record| record["fate"] == "live");
    live.unwrap()["offset"].as_u64().unwrap()
}
