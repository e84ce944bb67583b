//! Ranks that are processes; one of them is killed or stopped at any moment.

use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use larder_tiers::ranks::{RanksError, SocketRank, Timeouts};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;

use super::engine::PAGE;
use super::ranks::{Rank, Run, failure_of, options, text, uncached};
use super::{PATIENCE, toy};

/// The directory, the rank, and the seed of the run.
const RANK: &str = "LARDER_RANK_OF_RUN";

const RANKS: u32 = 4;

/// How long the ranks wait for each other: in a call, and at the start.
const TIMEOUTS: Timeouts = Timeouts {
    gather: Duration::from_secs(10),
    call: Duration::from_secs(1),
};

/// Those of the last group, which has no fault.
const PATIENT: Timeouts = Timeouts {
    gather: PATIENCE,
    call: PATIENCE,
};

/// Set for the last group.
const IS_LAST: &str = "LARDER_LAST_GROUP";

fn join(directory: &Path, name: &str, rank: u32) -> Result<SocketRank, RanksError> {
    let socket = directory.join(name);
    let timeouts = match std::env::var_os(IS_LAST) {
        Some(_) => PATIENT,
        None => TIMEOUTS,
    };
    match rank {
        0 => SocketRank::host(socket, RANKS, timeouts),
        _ => SocketRank::join(socket, rank, RANKS, timeouts),
    }
}

/// How long a rank waits for a store whose owner has stopped.
const CLOSE_WAIT: Duration = Duration::from_secs(2);

/// A rank in its process. It prints a line for each step.
fn rank(directory: &Path, rank: u32, seed: u64) -> Result<u64, String> {
    let failed = |failure: RanksError| failure.to_string();
    println!("step starts");
    let own = join(directory, "cache", rank).map_err(failed)?;
    let engine = join(directory, "engine", rank).map_err(failed)?;
    println!("step opens");
    let options = options(rank, RANKS).with(|o| {
        o.ranks = Some(Box::new(own));
        o.close_wait = CLOSE_WAIT;
    });
    let opened = options.open(&directory.join("kv.store"), 128 << 20);
    let cache = opened.map_err(|error| error.to_string())?;
    // Prompts of few documents, which runs before have stored.
    let document = text(seed % 3, 3 * PAGE);
    let prompts = [(1, 2), (PAGE, 14), (2 * PAGE, 13), (3 * PAGE, 8)];
    let prompts = prompts.map(|(shared, own)| {
        let prompt = [&document[..shared], &text(1000, own)].concat();
        let words = uncached(&prompt, RANKS);
        (prompt, words)
    });
    let rank = Rank::new(cache, toy(), Box::new(engine));
    let mut run = Run::new(rank, seed, &prompts);
    let result = steps(&mut run);
    run.end_all();
    run.cache().audit([]).unwrap();
    let answers = run.answers();
    println!("step closes");
    let closed = run.cache().close().map_err(|error| error.to_string());
    result.map_err(failed).and(closed).map(|()| answers)
}

fn steps(run: &mut Run<'_>) -> Result<(), RanksError> {
    for step in 0..80 {
        println!("step {step}");
        run.step()?;
    }
    println!("step settles");
    run.end_all();
    let settled = run.cache().settle(Instant::now() + PATIENCE);
    assert!(settled.map_err(failure_of)?, "work does not end");
    Ok(())
}

struct Process {
    child: Child,
    lines: BufReader<ChildStdout>,
}

impl Process {
    fn start(directory: &Path, rank: u32, seed: u64, is_last: bool) -> Process {
        let test = "rank_kills::ranks_of_a_group_end_in_time_after_kills_and_stops";
        let mut command = Command::new(std::env::current_exe().unwrap());
        if is_last {
            command.env(IS_LAST, "1");
        }
        let mut child = command
            .args(["--exact", test, "--nocapture"])
            .env(RANK, format!("{} {rank} {seed}", directory.display()))
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Process { child, lines }
    }

    /// The next line of a step or of the end; `None` if it has ended.
    fn line(&mut self) -> Option<String> {
        loop {
            let mut line = String::new();
            if self.lines.read_line(&mut line).unwrap() == 0 {
                return None;
            }
            let is_own = ["step ", "failed ", "done "]
                .iter()
                .any(|of| line.starts_with(of));
            if is_own {
                return Some(line.trim().to_owned());
            }
        }
    }

    fn signal(&self, signal: Signal) {
        let process = Pid::from_raw(i32::try_from(self.child.id()).unwrap());
        kill(process, signal).unwrap();
    }

    /// Its last line, after its end.
    fn end(mut self) -> String {
        let mut last = String::new();
        while let Some(line) = self.line() {
            last = line;
        }
        assert!(
            self.child.wait().unwrap().success(),
            "a rank has panicked: {last}"
        );
        last
    }
}

/// `LARDER_RANKS_KILLS` sets the number of groups, each with a kill or a stop of one rank.
#[test]
fn ranks_of_a_group_end_in_time_after_kills_and_stops() {
    if let Ok(what) = std::env::var(RANK) {
        let words: Vec<&str> = what.split(' ').collect();
        let [directory, number, seed] = words[..] else {
            panic!("{what}");
        };
        let result = rank(
            Path::new(directory),
            number.parse().unwrap(),
            seed.parse().unwrap(),
        );
        match result {
            Ok(answers) => println!("done {answers}"),
            Err(failure) => println!("failed {failure}"),
        }
        return;
    }
    let runs = std::env::var("LARDER_RANKS_KILLS").ok();
    let runs: u64 = runs.map_or(6, |runs| runs.parse().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let mut dice = Pcg64Mcg::seed_from_u64(runs);
    let (mut failed, mut done, mut killed, mut slowest) = (0, 0, 0, Duration::ZERO);
    for seed in 0..runs {
        let start = |rank| Process::start(directory.path(), rank, seed, false);
        let mut ranks: Vec<Process> = (0..RANKS).map(start).collect();
        let mut victim = ranks.remove(dice.random_range(0..ranks.len()));
        // Few end while the group gathers.
        let lines = match dice.random_range(0..16) {
            0 => 1,
            1 => 2,
            _ => dice.random_range(3..86),
        };
        for _ in 0..lines {
            victim.line();
        }
        let is_kill = dice.random_bool(0.5);
        let begun = Instant::now();
        victim.signal(if is_kill {
            Signal::SIGKILL
        } else {
            Signal::SIGSTOP
        });
        for rank in ranks {
            match rank.end() {
                last if last.starts_with("failed ") => failed += 1,
                last if last.starts_with("done ") => done += 1,
                last => panic!("run {seed}: {last}"),
            }
        }
        if lines > 2 {
            slowest = slowest.max(begun.elapsed());
        }
        if is_kill {
            killed += 1;
            let status = victim.child.wait().unwrap();
            let signal = status.signal();
            // It may have ended before.
            assert!(signal == Some(Signal::SIGKILL as i32) || status.success());
        } else {
            victim.signal(Signal::SIGCONT);
            let last = victim.end();
            assert!(!last.starts_with("step "), "run {seed}: {last}");
        }
    }
    // All that is left is a store that a group reads.
    let start = |rank| Process::start(directory.path(), rank, runs, true);
    let ranks: Vec<Process> = (0..RANKS).map(start).collect();
    let ends: Vec<String> = ranks.into_iter().map(Process::end).collect();
    assert!(ends.iter().all(|end| end.starts_with("done ")), "{ends:?}");
    println!(
        "{runs} groups, {killed} kills; of the other ranks {failed} failed and {done} had ended; \
         slowest end {slowest:?}"
    );
}
