//! Two processes with a hybrid model on one store, each killed at any moment.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Instant;

use larder_tiers::PrefixOptions;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;

use super::toy::{self, PAGE, WORDS};
use super::{ANSWER, PATIENCE};

const STORE: &str = "LARDER_HYBRID_STORE";
const SEED: &str = "LARDER_HYBRID_SEED";

/// Serves random prompts for ever, or this many. Prints a line for each: its tokens from L3.
fn engine(store: &Path, seed: u64, requests: usize) {
    let mut dice = Pcg64Mcg::seed_from_u64(seed);
    let model = toy::model().unwrap();
    let cache = PrefixOptions::new(&model, 24, 40)
        .open(store, 128 << 20)
        .unwrap();
    println!("open");
    for _ in 0..requests {
        // Prompts of few documents, so that both processes have them.
        let mut text = Pcg64Mcg::seed_from_u64(dice.random_range(0..12));
        let tokens = dice.random_range(1..12 * PAGE);
        let prompt: Vec<u64> = (0..tokens).map(|_| text.random_range(0..WORDS)).collect();
        let (words, cached) = toy::serve(&cache, &prompt, ANSWER).unwrap();
        assert_eq!(words, toy::uncached(&prompt, ANSWER), "{prompt:?}");
        println!("{}", cached.l3);
    }
    assert!(cache.settle(Instant::now() + PATIENCE).unwrap());
    cache.audit([]).unwrap();
    cache.close().unwrap();
}

struct Engine {
    child: Child,
    lines: BufReader<std::process::ChildStdout>,
}

impl Engine {
    fn start(store: &Path, seed: u64) -> Engine {
        let test = "kills::no_word_of_a_hybrid_model_differs_after_kills_of_two_processes";
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(STORE, store)
            .env(SEED, seed.to_string())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Engine { child, lines }
    }

    /// The tokens from L3 of the next request; `None` for other lines.
    fn line(&mut self) -> Option<u64> {
        let mut line = String::new();
        let bytes = self.lines.read_line(&mut line).unwrap();
        assert!(bytes > 0, "an engine has ended: {:?}", self.child.wait());
        line.trim().parse().ok()
    }

    fn kill(mut self) {
        let process = Pid::from_raw(i32::try_from(self.child.id()).unwrap());
        kill(process, Signal::SIGKILL).unwrap();
        let status = self.child.wait().unwrap();
        let signal = std::os::unix::process::ExitStatusExt::signal(&status);
        assert_eq!(signal, Some(Signal::SIGKILL as i32), "it ended itself");
    }
}

/// `LARDER_HYBRID_KILLS` sets the number of kills. The lines that are read before a kill are
/// random; the engine goes on while they are read.
#[test]
fn no_word_of_a_hybrid_model_differs_after_kills_of_two_processes() {
    if let Some(store) = std::env::var_os(STORE) {
        let seed = std::env::var(SEED).unwrap().parse().unwrap();
        return engine(Path::new(&store), seed, usize::MAX);
    }
    let kills = std::env::var("LARDER_HYBRID_KILLS").ok();
    let kills: u64 = kills.map_or(6, |kills| kills.parse().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("kv.store");
    let mut dice = Pcg64Mcg::seed_from_u64(kills);
    let mut engines: Vec<Engine> = (0..2).map(|seed| Engine::start(&store, seed)).collect();
    let (mut requests, mut from_l3) = (0, 0);
    for kill in 0..kills {
        for engine in &mut engines {
            for _ in 0..dice.random_range(0..20) {
                let tokens = engine.line();
                requests += u64::from(tokens.is_some());
                from_l3 += tokens.unwrap_or(0);
            }
        }
        let killed = engines.remove(dice.random_range(0..2));
        killed.kill();
        engines.push(Engine::start(&store, 2 + kill));
    }
    engines.into_iter().for_each(Engine::kill);
    engine(&store, kills, 100);
    println!("{kills} kills, {requests} requests, {from_l3} tokens from L3");
    assert!(requests > 0 && from_l3 > 0);
}
