//! The two engines as two processes. One of them is killed or stopped in any state.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use larder_tiers::transfer::{BootstrapPlace, Patience, State, TcpOptions, Transfer};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;

use super::engine::PAGE;
use super::proxy::{Fault, Kind, Proxy};
use super::random::check_untouched;
use super::side::{Side, succeeded, text};
use super::{PATIENCE, number};

/// The role of the process, the place, the ranks, and the port before its first rank.
const CHILD: &str = "LARDER_TRANSFER_CHILD";

/// Both times of a side.
const SHORT: Duration = Duration::from_millis(500);

fn patience() -> Patience {
    Patience {
        bootstrap: SHORT,
        silence: SHORT,
    }
}

fn prompt(seed: u64) -> Vec<u64> {
    let mut dice = Pcg64Mcg::seed_from_u64(seed);
    let (shared, own) = [(PAGE, 3), (2 * PAGE, 7), (2 * PAGE, PAGE)][dice.random_range(0..3)];
    [
        &text(7, shared)[..],
        &text(10 + dice.random_range(0..4), own),
    ]
    .concat()
}

/// One side, in this process or in a child.
struct Role {
    side: Side,
    is_prefill: bool,
    place: std::net::SocketAddr,
}

impl Role {
    fn new(
        is_prefill: bool,
        ranks: u32,
        place: std::net::SocketAddr,
        advertised: Option<std::net::SocketAddr>,
    ) -> Role {
        let side = Side::with(ranks, |rank| {
            TcpOptions::default().with(|o| {
                o.patience = patience();
                o.place = is_prefill.then_some(place);
                o.advertised = advertised.filter(|_| rank == 0);
            })
        });
        Role {
            side,
            is_prefill,
            place,
        }
    }

    /// Begins a request. Returns its transfers, and the first word of a prefill.
    fn begin(&self, room: u64) -> (Vec<Box<dyn Transfer>>, u64) {
        let prompt = prompt(room);
        if !self.is_prefill {
            let sequences = self.side.begin(&prompt);
            return (self.side.receivers(room, self.place, sequences), 0);
        }
        let senders = self.side.senders(room);
        let mut sequences = self.side.begin(&prompt);
        let word = self.side.forward(&mut sequences, &prompt);
        let sent = senders.into_iter().zip(sequences);
        let sent = sent.map(|(sender, of)| sender.send(of, &word.to_le_bytes()));
        (sent.collect(), word)
    }

    /// Ends a request whose transfers have ended. Returns whether it was served.
    fn end(&self, room: u64, transfers: Vec<Box<dyn Transfer>>) -> bool {
        let is_served = transfers.iter().all(|of| of.state() == State::Success);
        if is_served && !self.is_prefill {
            let (sequences, notes) = succeeded(transfers);
            let word = u64::from_le_bytes(notes[0][..].try_into().unwrap());
            for sequence in self.side.answer(sequences, &prompt(room), word) {
                sequence.keep().unwrap();
            }
        } else {
            transfers
                .into_iter()
                .for_each(|of| check_untouched(of.end(), std::thread::yield_now));
        }
        self.side.check_leaks();
        is_served
    }
}

/// A child: answers each line with a room by the states that it sees.
fn child(what: &str) {
    let words: Vec<&str> = what.split(' ').collect();
    let [role, ranks, place, advertised] = words[..] else {
        panic!("{what}");
    };
    let role = Role::new(
        role == "prefill",
        ranks.parse().unwrap(),
        place.parse().unwrap(),
        advertised.parse().ok(),
    );
    println!(
        "ready {}",
        role.side.transports[0].address().map_or(0, |at| at.port())
    );
    for line in std::io::stdin().lines() {
        let room = line.unwrap().parse().unwrap();
        println!("begins");
        let (transfers, _) = role.begin(room);
        for transfer in &transfers {
            assert!(transfer.wait(PATIENCE).is_final());
        }
        let is_served = role.end(room, transfers);
        println!("ended {is_served}");
    }
}

struct Process {
    child: Child,
    stdin: ChildStdin,
    lines: BufReader<ChildStdout>,
}

impl Process {
    fn start(is_prefill: bool, ranks: u32, place: &BootstrapPlace, proxy: &Proxy) -> Process {
        let test = "kills::the_other_side_fails_in_time_after_kills_and_stops";
        let role = if is_prefill { "prefill" } else { "decode" };
        let (place, proxied) = (place.address(), proxy.address());
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .env(CHILD, format!("{role} {ranks} {place} {proxied}"))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        let stdin = child.stdin.take().unwrap();
        let mut process = Process {
            child,
            stdin,
            lines,
        };
        let port: u16 = process.line("ready ").parse().unwrap();
        if port > 0 {
            proxy.lead_to((std::net::Ipv4Addr::LOCALHOST, port).into());
        }
        process
    }

    /// The rest of the next line that begins so.
    fn line(&mut self, start: &str) -> String {
        loop {
            let mut line = String::new();
            let bytes = self.lines.read_line(&mut line).unwrap();
            assert!(bytes > 0, "the child has ended: {:?}", self.child.wait());
            if let Some(rest) = line.trim().strip_prefix(start) {
                return rest.to_owned();
            }
        }
    }

    fn signal(&self, signal: Signal) {
        let process = Pid::from_raw(i32::try_from(self.child.id()).unwrap());
        kill(process, signal).unwrap();
    }

    fn kill(mut self) {
        self.signal(Signal::SIGKILL);
        let status = self.child.wait().unwrap();
        let signal = std::os::unix::process::ExitStatusExt::signal(&status);
        assert_eq!(signal, Some(Signal::SIGKILL as i32), "it ended itself");
    }
}

/// `LARDER_TRANSFER_KILLS` sets the number of requests, each with a kill or a stop.
#[test]
fn the_other_side_fails_in_time_after_kills_and_stops() {
    if let Ok(what) = std::env::var(CHILD) {
        return child(&what);
    }
    let runs = number("LARDER_TRANSFER_KILLS").unwrap_or(12);
    let mut dice = Pcg64Mcg::seed_from_u64(runs);
    // By the state of this side in which the other one was hit, and whether it was killed.
    let (mut hit, mut served, mut slowest) = ([[0_u64; 2]; 5], 0, Duration::ZERO);
    for group in 0..runs.div_ceil(6) {
        let place = BootstrapPlace::start((std::net::Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let proxy = Proxy::start();
        let is_prefill = group.is_multiple_of(2);
        let ranks = |dice: &mut Pcg64Mcg| [1, 2, 4][dice.random_range(0..3)];
        let (own, other) = (ranks(&mut dice), ranks(&mut dice));
        let role = Role::new(is_prefill, own, place.address(), Some(proxy.address()));
        if let Some(address) = role.side.transports[0].address() {
            proxy.lead_to(address);
        }
        let start = || Process::start(!is_prefill, other, &place, &proxy);
        let mut process = start();
        for room in group * 6..(group * 6 + 6).min(runs) {
            let state = [
                State::Bootstrapping,
                State::WaitingForInput,
                State::Transferring,
                State::Success,
            ][dice.random_range(0..4)];
            let is_kill = dice.random_bool(0.5);
            // Keeps most requests in a state, on one of their connections.
            let after = 1 << dice.random_range(6..14);
            proxy.set((dice.random_range(0..4) > 0).then_some(Fault {
                kind: Kind::Hold,
                is_to_receiver: true,
                after,
            }));
            writeln!(process.stdin, "{room}").unwrap();
            if state > State::Bootstrapping {
                process.line("begins");
            }
            let (transfers, _) = role.begin(room);
            let all = |state| transfers.iter().all(|of| of.state() >= state);
            let late = Instant::now() + SHORT / 2;
            while !all(state) && Instant::now() < late {
                std::thread::yield_now();
            }
            let seen = transfers.iter().map(|of| of.state()).min().unwrap();
            hit[seen as usize][usize::from(is_kill)] += 1;
            let begun = Instant::now();
            if is_kill {
                process.kill();
                process = start();
            } else {
                process.signal(Signal::SIGSTOP);
            }
            for transfer in &transfers {
                let state = transfer.wait(PATIENCE);
                assert!(state.is_final(), "{state:?} after {PATIENCE:?}");
            }
            slowest = slowest.max(begun.elapsed());
            served += u64::from(role.end(room, transfers));
            proxy.release();
            if !is_kill {
                process.signal(Signal::SIGCONT);
                process.line("ended ");
            }
        }
        process.kill();
        role.side.check_empty();
    }
    println!("{runs} requests, {served} served, hit by state {hit:?}, slowest {slowest:?}");
}
