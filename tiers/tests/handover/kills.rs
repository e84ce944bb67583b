//! A prefill and a decode process on one store: real processes. One of them is killed or stopped in
//! a state of a hand-over. The other one fails within its time, or has the right words, and then
//! holds nothing.

use std::cell::Cell;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use larder_tiers::handover::{Decode, HandoverError, Prefill};
use larder_tiers::prefix::BeginError;
use larder_tiers::{PrefixCache, PrefixOptions};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;

use super::honest::{PATIENCE, Process, eventually};
use super::{LAYERS, PAGE, answered, ask, compute, named, prompt, shape, uncached};

const ROLE: &str = "LARDER_HANDOVER_ROLE";
const STORE: &str = "LARDER_HANDOVER_STORE";

/// Bytes of the store.
const STORE_BYTES: u64 = 128 << 20;

/// Pages of the memory that is lent.
const LENT: u64 = 8;

/// States in which a process may be halted, by role.
const STATES: [[&str; 5]; 2] = [
    ["begun", "offered", "layer", "layers", "ended"],
    ["asked", "taking", "taken", "first", "answered"],
];

/// What a process is to do: a request, its time, and the state in which it halts until it is
/// allowed to go on.
struct Order {
    id: u64,
    millis: u64,
    halt: String,
    /// Times that the state is passed before that.
    passes: Cell<u64>,
}

/// Halts in a state if the order says so.
fn reach(order: &Order, state: &str) {
    if order.halt != state {
        return;
    }
    // It halts once.
    let left = order.passes.replace(order.passes.get().wrapping_sub(1));
    if left == 0 {
        println!("\nat {state}");
        let mut line = String::new();
        // The other end of the pipe ends with the test.
        assert!(std::io::stdin().read_line(&mut line).unwrap() > 0);
    }
}

/// The prompt of a request: few documents, so that both processes have their begins.
fn text(id: u64) -> Vec<u64> {
    let mut dice = Pcg64Mcg::seed_from_u64(id);
    let document = prompt(4 * PAGE, dice.random_range(0..5));
    let shared = dice.random_range(0..=document.len());
    let own = prompt(dice.random_range(1..3 * PAGE), id);
    [&document[..shared], &own].concat()
}

fn open(store: &Path) -> PrefixCache {
    let options = PrefixOptions::new(&named(), 30, 40);
    options.open(store, STORE_BYTES).unwrap()
}

fn prefill(order: &Order, cache: &PrefixCache, prefill: &Prefill) -> Result<(), HandoverError> {
    let tokens = text(order.id);
    let mut sequence = match cache.begin(&tokens) {
        Ok(sequence) => sequence,
        Err(BeginError::NoRoom { .. }) => return Err(HandoverError::Cancelled),
        Err(error) => panic!("{error}"),
    };
    reach(order, "begun");
    let (time, from) = (
        Duration::from_millis(order.millis),
        sequence.cached().tokens(),
    );
    let from = [from, 0][usize::from(order.id.is_multiple_of(3))];
    let mut offer = prefill.offer(&order.id.to_string(), &sequence, from, time)?;
    reach(order, "offered");
    let (mut from, mut word) = (sequence.cached().tokens(), 0);
    while from < tokens.len() {
        let until = (from + 6).min(tokens.len());
        for layer in 0..LAYERS {
            word = compute(&mut sequence, &tokens, layer, from..until).unwrap();
            offer.layer(&sequence, layer, until)?;
            reach(order, "layer");
        }
        sequence.computed(until)?;
        from = until;
    }
    reach(order, "layers");
    offer.end(word, &order.id.to_le_bytes())?;
    sequence.keep()?;
    reach(order, "ended");
    offer.wait()
}

fn decode(order: &Order, decode: &Decode) -> Result<(), HandoverError> {
    let tokens = text(order.id);
    reach(order, "asked");
    let time = Duration::from_millis(order.millis);
    let taking = decode.take(&order.id.to_string(), &ask(&tokens), time / 2, time)?;
    reach(order, "taking");
    let taken = taking.wait()?;
    assert_eq!(
        taken.data,
        order.id.to_le_bytes(),
        "the data of another request"
    );
    reach(order, "taken");
    // Rows that do not come any more break the sequence.
    let answered = answered(taken, &tokens);
    reach(order, "first");
    let Ok((mut sequence, words)) = answered else {
        return Err(HandoverError::Gone);
    };
    if !sequence.verify()? {
        return Err(HandoverError::Gone);
    }
    assert_eq!(words, uncached(&tokens), "words differ");
    reach(order, "answered");
    sequence.keep()?;
    Ok(())
}

/// Processes orders until the pipe ends.
fn role(role: &str, store: &Path) {
    let cache = open(store);
    let socket = store.with_extension("handover");
    let bytes = LENT * u64::from(shape().page_bytes());
    let is_prefill = role == "prefill";
    let offers = is_prefill.then(|| Prefill::bind(&socket, &cache, bytes).unwrap());
    let takes = Decode::new(&socket, &cache).unwrap();
    println!("\nopen");
    let mut line = String::new();
    while std::io::stdin().read_line(&mut line).unwrap() > 0 {
        let mut words = line.split_whitespace();
        let mut number = || words.next().unwrap().parse().unwrap();
        let (id, millis) = (number(), number());
        let halt = words.next().unwrap_or_default().to_owned();
        let is_repeated = halt == "layer";
        let passes = Cell::new(if is_repeated {
            id % u64::from(LAYERS)
        } else {
            0
        });
        let order = Order {
            id,
            millis,
            halt,
            passes,
        };
        let begun = Instant::now();
        let outcome = match &offers {
            Some(offers) => prefill(&order, &cache, offers),
            None => decode(&order, &takes),
        };
        if let Some(offers) = &offers {
            assert_eq!(
                offers.free_pages(),
                LENT as usize,
                "memory is lent to no request"
            );
        }
        eventually("nothing is held", || cache.audit([]).is_ok());
        let outcome = outcome.map_or_else(|error| format!("failed: {error}"), |()| "ok".to_owned());
        println!("\ndone {} {outcome}", begun.elapsed().as_millis());
        line.clear();
    }
}

struct Role {
    process: Process,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Role {
    fn start(name: &str, store: &Path) -> Role {
        let test = "kills::no_word_differs_when_one_of_two_processes_is_killed_or_stopped";
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(ROLE, name)
            .env(STORE, store)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (to, from) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
        let mut role = Role {
            process: Process(child),
            to,
            from: BufReader::new(from),
        };
        assert_eq!(role.heard(), "open");
        role
    }

    fn say(&mut self, line: &str) {
        writeln!(self.to, "{line}").unwrap();
    }

    /// The next line that is for the test.
    fn heard(&mut self) -> String {
        loop {
            let mut line = String::new();
            let bytes = self.from.read_line(&mut line).unwrap();
            assert!(
                bytes > 0,
                "a process has ended: {:?}",
                self.process.0.wait()
            );
            let line = line.trim_end();
            if ["open", "at ", "done "]
                .iter()
                .any(|of| line.starts_with(of))
            {
                return line.to_owned();
            }
        }
    }

    /// Whether the request has gone well.
    fn done(&mut self) -> bool {
        let line = self.heard();
        assert!(line.starts_with("done "), "{line}");
        line.ends_with("ok")
    }

    fn signal(&self, signal: Signal) {
        let process = Pid::from_raw(i32::try_from(self.process.0.id()).unwrap());
        kill(process, signal).unwrap();
    }
}

/// `LARDER_HANDOVER_KILLS` sets the number of runs. Each has one request; two of three runs halt
/// one process in a state, and kill or stop it there.
#[test]
fn no_word_differs_when_one_of_two_processes_is_killed_or_stopped() {
    if let Some(store) = std::env::var_os(STORE) {
        return role(&std::env::var(ROLE).unwrap(), Path::new(&store));
    }
    let runs = std::env::var("LARDER_HANDOVER_KILLS").ok();
    let runs: u64 = runs.map_or(12, |runs| runs.parse().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("kv.store");
    let names = ["prefill", "decode"];
    let mut roles = names.map(|name| Role::start(name, &store));
    let mut dice = Pcg64Mcg::seed_from_u64(runs);
    let (mut whole, mut failed, mut killed, mut stopped, mut late) = (0, 0, 0, 0, 0);
    for run in 0..runs {
        let kind = run % 3;
        let halted = dice.random_range(0..2);
        let state = STATES[halted][dice.random_range(0..5)];
        // A stop costs the time of the other process.
        let millis = if kind == 0 { 60_000 } else { 200 };
        let order = |halt: &str| format!("{run} {millis} {halt}");
        roles[1 - halted].say(&order("-"));
        roles[halted].say(&order(if kind == 0 { "-" } else { state }));
        if kind == 0 {
            let ends = roles.each_mut().map(Role::done);
            assert!(ends[1], "a hand-over fails without a fault");
            whole += 1;
            continue;
        }
        let line = roles[halted].heard();
        // It may have failed before that state.
        if line.starts_with("done ") {
            roles[1 - halted].done();
            failed += 1;
            continue;
        }
        assert_eq!(line, format!("at {state}"));
        let begun = Instant::now();
        if kind == 1 {
            roles[halted].signal(Signal::SIGKILL);
            let is_good = roles[1 - halted].done();
            failed += u64::from(!is_good);
            killed += 1;
            roles[halted].process.0.wait().unwrap();
            roles[halted] = Role::start(names[halted], &store);
        } else {
            roles[halted].signal(Signal::SIGSTOP);
            let is_good = roles[1 - halted].done();
            late += u64::from(!is_good);
            roles[halted].signal(Signal::SIGCONT);
            roles[halted].say("go on");
            failed += u64::from(!roles[halted].done());
            stopped += 1;
        }
        assert!(begun.elapsed() < PATIENCE);
    }
    println!(
        "{runs} runs: {whole} without a fault, {killed} kills, {stopped} stops; {late} others were \
         late, {failed} failed"
    );
    assert!(whole > 0 && killed > 0 && stopped > 0 && failed > 0);
}
