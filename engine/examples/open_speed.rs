//! How long a store of many pages takes to open, after a clean close and after SIGKILL.
//!
//! `cargo run --release -p larder-engine --example open_speed -- DIRECTORY [PAGES [SEGMENT_MIB
//! [PAGE_KIB]]]` fills a store of pages of 4 KiB in a child process, which then closes it or kills
//! itself, and opens it here, five times each (after the kill each open is left without a close). A
//! store that was closed, and has segments enough for the learned order, is then opened under it,
//! in turns with and without the saved facts of its pages. Needs a quarter more disk than the pages
//! have bytes, and 2 GiB.

use std::io::IoSlice;
use std::num::NonZeroUsize;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use larder_engine::format::{Namespace, PageShape, TokenUnits, page_keys};
use larder_engine::{
    AlignedBuf, CreateOptions, OpenOptions, PageStore, PutOptions, PutPage, Store, create, policy,
};

use rustix::time::{ClockId, clock_gettime};

type Failure = Box<dyn std::error::Error>;

const CHAIN: usize = 2048;
const ROUNDS: usize = 5;

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["fill", path, pages, page_bytes, end] => fill(
            Path::new(path),
            pages.parse()?,
            page_bytes.parse()?,
            end == "close",
        ),
        [directory, ref sizes @ ..] if sizes.len() <= 3 => {
            let size = |at: usize, default| sizes.get(at).map_or(Ok(default), |word| word.parse());
            let (pages, segment_mib, page_kib) = (size(0, 2_000_000)?, size(1, 256)?, size(2, 4)?);
            let page_bytes = u32::try_from(page_kib << 10)?;
            measure(
                Path::new(directory),
                pages as usize,
                segment_mib,
                page_bytes,
            )
        }
        _ => Err("usage: open_speed DIRECTORY [PAGES [SEGMENT_MIB [PAGE_KIB]]]".into()),
    }
}

fn measure(
    directory: &Path,
    pages: usize,
    segment_mib: u64,
    page_bytes: u32,
) -> Result<(), Failure> {
    println!(
        "| ended by | pages | open, s: median of {ROUNDS} | min | max |\n|---|---|---|---|---|"
    );
    for end in ["close", "kill"] {
        let path = directory.join(format!("open-speed-{}", std::process::id()));
        // Room for pages, their descriptors, and the reserve of reclaim, so that nothing is
        // evicted.
        let size = pages as u64 * u64::from(page_bytes) / 4 * 5 + (2 << 30);
        let options = CreateOptions::new(size).with(|o| {
            o.segment_size = Some(segment_mib << 20);
        });
        create(&path, &options)?;
        let status = Command::new(std::env::current_exe()?)
            .args([
                "fill".as_ref(),
                path.as_os_str(),
                pages.to_string().as_ref(),
                page_bytes.to_string().as_ref(),
                end.as_ref(),
            ])
            .status()?;
        if end == "close" && !status.success() {
            return Err("filling the store failed".into());
        }
        let mut times = Vec::new();
        for _ in 0..ROUNDS {
            let started = Instant::now();
            let store = Store::open(&path, OpenOptions::default())?;
            times.push(started.elapsed());
            let found = store.stats().pages;
            if found < pages as u64 {
                return Err(format!("{found} of {pages} pages found").into());
            }
            if end == "close" {
                store.close()?;
            }
        }
        times.sort_unstable();
        let seconds = |time: &Duration| time.as_secs_f64();
        println!(
            "| {end} | {pages} | {:.3} | {:.3} | {:.3} |",
            seconds(&times[times.len() / 2]),
            seconds(&times[0]),
            seconds(&times[times.len() - 1])
        );
        if end == "close" {
            compare(&path)?;
        }
        std::fs::remove_file(&path)?;
    }
    Ok(())
}

/// CPU time of all threads of this process.
fn cpu_seconds() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Compares the CPU time of opens under the learned order with the facts that the last close saved,
/// and without.
fn compare(path: &Path) -> Result<(), Failure> {
    let facts = path.with_added_extension("lessons");
    let open = || -> Result<(f64, Store), Failure> {
        let learned = || OpenOptions::default().with(|o| o.eviction = Some(policy::learned()));
        let started = cpu_seconds();
        let store = Store::open(path, learned())?;
        Ok((cpu_seconds() - started, store))
    };
    open()?.1.close()?;
    if !facts.exists() {
        return Ok(());
    }
    let bytes = facts.metadata()?.len();
    let mut ratios = Vec::new();
    for round in 0..2 * ROUNDS {
        let mut times = [0.0; 2];
        for with in [round % 2 == 0, round % 2 == 1] {
            if !with {
                std::fs::remove_file(&facts)?;
            }
            let (time, store) = open()?;
            times[usize::from(with)] = time;
            store.close()?;
        }
        ratios.push(times[1] / times[0]);
    }
    ratios.sort_unstable_by(f64::total_cmp);
    println!(
        "\nCPU of an open with {bytes} bytes of facts / without: {:.3} ({:.3} to {:.3})\n",
        ratios[ROUNDS],
        ratios[0],
        ratios[2 * ROUNDS - 1]
    );
    Ok(())
}

fn fill(path: &Path, pages: usize, page_bytes: u32, close: bool) -> Result<(), Failure> {
    let store = Store::open(path, OpenOptions::default())?;
    let namespace = store.namespace(
        &Namespace::builder("open-speed", "", 1, PageShape::new(&[page_bytes])?)
            .elements("u8", "page_first_direct")
            .build()?,
    )?;
    let bytes = AlignedBuf::zeroed(page_bytes as usize)?;
    let parts = [IoSlice::new(&bytes)];
    let mut left = pages;
    let mut chain = 0_u64;
    while left > 0 {
        let count = left.min(CHAIN);
        let tokens: Vec<u64> = (0..count as u64).map(|page| chain << 32 | page).collect();
        let keys = page_keys(&tokens, NonZeroUsize::MIN, None, TokenUnits::Single);
        let pages: Vec<PutPage<'_>> = (0..count)
            .map(|at| PutPage {
                key: keys[at],
                parent: at.checked_sub(1).map(|before| keys[before]),
                depth: u32::try_from(at).unwrap_or(u32::MAX),
                parts: &parts,
            })
            .collect();
        let statuses = store.put(
            namespace,
            &pages,
            PutOptions::waiting(Duration::from_secs(60)),
        );
        if let Some(status) = statuses.iter().find(|status| !status.is_present()) {
            return Err(format!("a put ended with {status:?}").into());
        }
        left -= count;
        chain += 1;
    }
    if close {
        store.close()?;
    } else {
        rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL)?;
    }
    Ok(())
}
