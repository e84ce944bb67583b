//! The benefit of shared reads: eight processes that read the same pages at the same time, like the
//! ranks of a model whose whole cache every rank holds.
//!
//! Writes pages into a store and, in the layout of SGLang's HiCacheFile, into one raw file each.
//! Then lets one process and eight read all of them, in batches of 128 in the same order, in four
//! ways: through the store, with shared reads; through the store, each for itself; files whose
//! bytes are on the device alone; and memcpy alone, for comparison. The files' reader opens, reads
//! into its buffer, and closes; the kernel shares its page cache between processes, and nothing
//! checks the bytes. All ways take turns, medians are printed; device bytes are the kernel's count
//! for the readers (`/proc/self/io`). Each reader's memory and start-up are outside of its time.
//!
//! `cargo run --release -p larder-engine --example shared_reads -- DIRECTORY [READERS [PAGES
//! [PAGE_BYTES]]]`
//!
//! Needs the space for the pages twice.

#![allow(clippy::unwrap_used, clippy::cast_precision_loss, missing_docs)]

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, IoSlice, IoSliceMut, Read, Write};
use std::num::NonZeroUsize;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::Instant;

use larder_engine::format::{Namespace, PageKey, PageShape, TokenUnits, page_keys};
use larder_engine::{
    AlignedBuf, CreateOptions, GetPage, OpenOptions, PageStore, PutOptions, PutPage, SharedReads,
    Store, create,
};

const BATCH: usize = 128;
const ROUNDS: usize = 5;
const GIB: f64 = (1 << 30) as f64;

/// How a reader reads.
const WAYS: [&str; 4] = ["shared", "alone", "files", "memcpy"];

/// The pages to read.
#[derive(Clone)]
struct Load {
    directory: PathBuf,
    readers: usize,
    pages: usize,
    page_bytes: usize,
}

impl Load {
    fn from_args(args: &[String]) -> Load {
        let number = |at: usize, default| args.get(at).map_or(default, |n| n.parse().unwrap());
        Load {
            directory: args.first().expect("usage: shared_reads DIRECTORY").into(),
            readers: number(1, 8),
            pages: number(2, 2000),
            page_bytes: number(3, 549 << 10),
        }
    }

    fn store(&self) -> PathBuf {
        self.directory.join("shared-reads-store")
    }

    fn file(&self, key: &PageKey) -> PathBuf {
        self.directory
            .join("shared-reads-files")
            .join(key.to_string())
    }

    fn keys(&self) -> Vec<PageKey> {
        let tokens: Vec<u64> = (0..self.pages as u64).collect();
        page_keys(&tokens, NonZeroUsize::MIN, None, TokenUnits::Single)
    }

    fn namespace(&self) -> Namespace {
        Namespace::builder(
            "shared_reads",
            "",
            8,
            PageShape::new(&[u32::try_from(self.page_bytes).unwrap()]).unwrap(),
        )
        .build()
        .unwrap()
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if args.first().is_some_and(|arg| arg == "reader") {
        return read(&args[1], &Load::from_args(&args[2..]));
    }
    let load = Load::from_args(&args);
    let made = prepare(&load);
    let owner = Store::attach(&load.store(), OpenOptions::default()).unwrap();
    let gib = (load.pages * load.page_bytes) as f64 / GIB;
    println!(
        "{} pages of {} bytes, {gib:.2} GiB",
        load.pages, load.page_bytes
    );
    let mut seen: BTreeMap<(usize, usize), Vec<Seen>> = BTreeMap::new();
    for round in 0..ROUNDS {
        for (at, way) in WAYS.into_iter().enumerate() {
            for readers in [1, load.readers] {
                if way == "memcpy" && readers > 1 {
                    continue;
                }
                let found = race(way, readers, &load, &made);
                eprintln!("round {round}: {readers} x {way}: {found:?}");
                seen.entry((at, readers)).or_default().push(found);
            }
        }
    }
    let reported = owner.report().unwrap().staging;
    owner.close().unwrap();
    print(&load, &seen);
    println!("{reported:?}");
    std::fs::remove_file(load.store()).unwrap();
    std::fs::remove_dir_all(load.directory.join("shared-reads-files")).unwrap();
}

/// The result of one race: the time until the last reader was done, and the device bytes of all of
/// them.
#[derive(Clone, Copy, Debug)]
struct Seen {
    seconds: f64,
    device_bytes: f64,
}

fn median(seen: &[Seen]) -> Seen {
    let of = |value: fn(&Seen) -> f64| {
        let mut values: Vec<f64> = seen.iter().map(value).collect();
        values.sort_unstable_by(f64::total_cmp);
        values[values.len() / 2]
    };
    Seen {
        seconds: of(|seen| seen.seconds),
        device_bytes: of(|seen| seen.device_bytes),
    }
}

fn print(load: &Load, seen: &BTreeMap<(usize, usize), Vec<Seen>>) {
    let of = |way: usize, readers| median(&seen[&(way, readers)]);
    let memcpy = of(3, 1).seconds;
    println!("one memcpy of all pages: {memcpy:.3} s; medians of {ROUNDS} rounds");
    for (at, way) in WAYS.into_iter().enumerate().take(3) {
        let (one, all) = (of(at, 1), of(at, load.readers));
        let others = (load.readers - 1) as f64;
        println!(
            "{way:>7}: 1 reader {:.3} s, {:.3} GiB; {} readers {:.3} s, {:.3} GiB: \
             device bytes x {:.3}, time {:.3} of 1.5 readers and {others} memcpys",
            one.seconds,
            one.device_bytes / GIB,
            load.readers,
            all.seconds,
            all.device_bytes / GIB,
            all.device_bytes / one.device_bytes,
            all.seconds / (1.5 * one.seconds + others * memcpy),
        );
    }
}

/// Fills the store and the files. Returns the files, for emptying the page cache of them.
fn prepare(load: &Load) -> Vec<File> {
    let _ = std::fs::remove_file(load.store());
    let _ = std::fs::remove_dir_all(load.directory.join("shared-reads-files"));
    let bytes = (load.pages * load.page_bytes) as u64;
    let options = CreateOptions::new((bytes + bytes / 4 + (1 << 30)).next_multiple_of(1 << 20))
        .with(|o| {
            o.prewrite = true;
        });
    create(&load.store(), &options).unwrap();
    std::fs::create_dir(load.directory.join("shared-reads-files")).unwrap();
    let store = Store::open(&load.store(), OpenOptions::default()).unwrap();
    let space = store.namespace(&load.namespace()).unwrap();
    let mut files = Vec::new();
    let mut before = None;
    for (depth, key) in (0..).zip(load.keys()) {
        let page = page(&key, load.page_bytes);
        let put = PutPage {
            key,
            parent: before,
            depth,
            parts: &[IoSlice::new(&page)],
        };
        assert!(store.put(space, &[put], PutOptions::default())[0].is_present());
        before = Some(key);
        let mut file = File::create(load.file(&key)).unwrap();
        file.write_all(&page).unwrap();
        files.push(file);
    }
    store.close().unwrap();
    for file in &files {
        file.sync_all().unwrap();
    }
    files
}

fn page(key: &PageKey, bytes: usize) -> AlignedBuf {
    let mut page = AlignedBuf::zeroed(bytes).unwrap();
    for (some, number) in page.chunks_mut(32).zip(0u8..=255) {
        some.copy_from_slice(&key.as_bytes()[..some.len()]);
        some[0] ^= number;
    }
    page
}

struct Reader {
    child: Child,
    lines: BufReader<ChildStdout>,
}

fn race(way: &str, readers: usize, load: &Load, files: &[File]) -> Seen {
    for file in files {
        let advice = rustix::fs::Advice::DontNeed;
        rustix::fs::fadvise(file.as_fd(), 0, None, advice).unwrap();
    }
    let mut readers: Vec<Reader> = (0..readers).map(|_| start(way, load)).collect();
    for reader in &mut readers {
        assert_eq!(line(reader), "ready");
    }
    let started = Instant::now();
    for reader in &mut readers {
        writeln!(reader.child.stdin.as_mut().unwrap(), "go").unwrap();
    }
    let device_bytes = readers
        .iter_mut()
        .map(|reader| line(reader).parse::<f64>().unwrap())
        .sum();
    let seconds = started.elapsed().as_secs_f64();
    for mut reader in readers {
        drop(reader.child.stdin.take());
        assert!(reader.child.wait().unwrap().success());
    }
    Seen {
        seconds,
        device_bytes,
    }
}

fn start(way: &str, load: &Load) -> Reader {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["reader", way])
        .arg(&load.directory)
        .args([load.readers, load.pages, load.page_bytes].map(|n| n.to_string()))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap());
    Reader { child, lines }
}

fn line(reader: &mut Reader) -> String {
    let mut line = String::new();
    reader.lines.read_line(&mut line).unwrap();
    line.trim().to_owned()
}

/// A reading process: reports that it is ready, waits for the start, reads everything, and reports
/// its device bytes.
fn read(way: &str, load: &Load) {
    let keys = load.keys();
    let mut memory = AlignedBuf::zeroed(BATCH * load.page_bytes).unwrap();
    memory.fill(1);
    let mut source = AlignedBuf::zeroed(if way == "memcpy" { memory.len() } else { 0 }).unwrap();
    source.fill(2);
    let wait = || {
        println!("ready");
        std::io::stdin().read_line(&mut String::new()).unwrap();
        device_bytes()
    };
    let before;
    match way {
        "files" => {
            before = wait();
            for batch in keys.chunks(BATCH) {
                for (key, page) in batch.iter().zip(memory.chunks_mut(load.page_bytes)) {
                    File::open(load.file(key))
                        .unwrap()
                        .read_exact(page)
                        .unwrap();
                }
            }
        }
        "memcpy" => {
            before = wait();
            for batch in keys.chunks(BATCH) {
                let bytes = batch.len() * load.page_bytes;
                memory[..bytes].copy_from_slice(&source[..bytes]);
                std::hint::black_box(&memory[..bytes]);
            }
        }
        _ => before = read_store(way == "shared", load, &keys, &mut memory, wait),
    }
    println!("{}", device_bytes() - before);
    // The first reader to finish must not disturb the others by exiting.
    std::io::stdin().read_line(&mut String::new()).unwrap();
}

fn read_store(
    shares: bool,
    load: &Load,
    keys: &[PageKey],
    memory: &mut [u8],
    wait: impl FnOnce() -> u64,
) -> u64 {
    let options = OpenOptions::default().with(|o| {
        o.shared_reads = if shares {
            SharedReads::Auto
        } else {
            SharedReads::Off
        }
    });
    let store = Store::attach(&load.store(), options).unwrap();
    let space = store.namespace(&load.namespace()).unwrap();
    let before = wait();
    for batch in keys.chunks(BATCH) {
        let mut parts: Vec<[IoSliceMut<'_>; 1]> = memory
            .chunks_mut(load.page_bytes)
            .map(|page| [IoSliceMut::new(page)])
            .collect();
        let mut pages: Vec<GetPage<'_, '_>> = batch
            .iter()
            .zip(&mut parts)
            .map(|(key, parts)| GetPage { key: *key, parts })
            .collect();
        let statuses = store.get(space, &mut pages, None);
        assert!(statuses.iter().all(|status| status.is_hit()));
        for (key, page) in batch.iter().zip(memory.chunks(load.page_bytes)) {
            assert!(page[1..32] == key.as_bytes()[1..], "wrong bytes");
        }
    }
    before
}

/// Bytes that this process read from the device.
fn device_bytes() -> u64 {
    let reported = std::fs::read_to_string(Path::new("/proc/self/io")).unwrap();
    let line = reported
        .lines()
        .find_map(|line| line.strip_prefix("read_bytes: "));
    line.unwrap().parse().unwrap()
}
