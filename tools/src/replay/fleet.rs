//! A trace against several nodes with an L4 beneath them: `larder replay l4`.
//!
//! It shows the worth of a remote in a roll-out. Each node is an LRU of whole blocks; the L4 keeps
//! all that it got. A router sends requests with the same first blocks to the same node, or any
//! request to any node. In the middle of the trace all nodes lose their blocks. The hits of the
//! requests after it are compared with those of nodes that lose nothing. No bytes are moved.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use larder_format::PageKey;
use serde::Serialize;

use super::requests::{Request, Requests};
use super::setup::Setup;
use crate::failure::{Ending, Failure};
use crate::interrupt::Interrupt;
use crate::report::{self as reports, Lines, Report, rows};
use crate::usage::ratio;

/// Milliseconds between the use of a block and its publication.
const BEHIND_MS: u64 = 2000;

/// The runs that nodes publish.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Published {
    /// Each block, when it is first used
    Through,
    /// Each block, when it is used again
    SecondTouch,
    /// None: no L4
    None,
}

/// The choice of a node for a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Routing {
    /// By its first two blocks
    Sticky,
    /// At random
    Random,
}

/// Simulate nodes that share an L4 and lose their disks at the middle of a trace, without bytes
#[derive(Args, Clone, Debug)]
pub struct FleetArgs {
    #[command(flatten)]
    setup: Setup,
    /// The runs that nodes publish
    #[arg(long, value_enum, default_value = "second-touch")]
    admission: Published,
    /// Nodes
    #[arg(long, value_name = "N", default_value_t = 8,
        value_parser = clap::value_parser!(u32).range(1..))]
    nodes: u32,
    /// Blocks that the disk of a node keeps
    #[arg(long, value_name = "N", default_value_t = 8000,
        value_parser = clap::value_parser!(u32).range(1..))]
    node_blocks: u32,
    /// How requests find their node
    #[arg(long, value_enum, default_value = "sticky")]
    routing: Routing,
    /// Requests after the loss whose hits count
    #[arg(long, value_name = "N", default_value_t = 1500)]
    after: u64,
}

/// Blocks of a node: the least recently used leaves.
#[derive(Default)]
struct Disk {
    used: HashMap<u32, u64>,
    by_age: BTreeMap<u64, u32>,
    clock: u64,
}

impl Disk {
    fn has(&self, block: u32) -> bool {
        self.used.contains_key(&block)
    }

    fn touch(&mut self, block: u32, most: usize) {
        self.clock += 1;
        if let Some(before) = self.used.insert(block, self.clock) {
            self.by_age.remove(&before);
        }
        self.by_age.insert(self.clock, block);
        if self.used.len() > most
            && let Some((_, oldest)) = self.by_age.pop_first()
        {
            self.used.remove(&oldest);
        }
    }
}

/// The blocks of the requests that count.
#[derive(Clone, Copy, Debug, Default, Serialize)]
struct Window {
    requests: u64,
    blocks_requested: u64,
    local_blocks: u64,
    l4_blocks: u64,
    local_hit_rate: f64,
    l4_hit_rate: f64,
}

#[derive(Serialize)]
struct FleetReport {
    /// The trace.
    #[serde(serialize_with = "crate::report::paths")]
    path: PathBuf,
    admission: Published,
    routing: Routing,
    nodes: u32,
    node_blocks: u32,
    requests: u64,
    restart_request: u64,
    /// The requests after the loss.
    lost: Window,
    /// The same requests without a loss.
    kept: Window,
    /// Blocks published in the whole trace.
    published_blocks: u64,
    interrupted: bool,
}

impl Report for FleetReport {
    const COMMAND: &'static str = "replay l4";

    fn lines(&self) -> Lines {
        let mut lines = Lines::default();
        rows! { lines:
            "Nodes" => "{} of {} blocks, {:?}", self.nodes, self.node_blocks, self.routing;
            "L4" => "{:?}, {} blocks", self.admission, self.published_blocks;
        }
        for (label, window) in [("All disks lost", self.lost), ("None lost", self.kept)] {
            rows! { lines:
                label =>
                    "{} requests from {}: {:.3} of the blocks found on the node, {:.3} more in L4",
                    window.requests, self.restart_request, window.local_hit_rate,
                    window.l4_hit_rate;
            }
        }
        if self.interrupted {
            lines.text("Interrupted: the figures are incomplete.");
        }
        lines
    }
}

/// Runs it.
pub fn run(args: &FleetArgs, interrupt: &Interrupt) -> Result<Ending, Failure> {
    let setup = &args.setup;
    let requests = Requests::read(&setup.trace, setup.limit(), interrupt)?;
    let count = requests.iter().len() as u64;
    let restart = count / 2;
    let play = |loses| Fleet::new(args).play(&requests, restart, loses, interrupt);
    let (lost, published) = play(true);
    let (kept, _) = play(false);
    let report = FleetReport {
        path: setup.trace.clone(),
        admission: args.admission,
        routing: args.routing,
        nodes: args.nodes,
        node_blocks: args.node_blocks,
        requests: count,
        restart_request: restart,
        lost,
        kept,
        published_blocks: published,
        interrupted: interrupt.is_raised(),
    };
    reports::print(&report, setup.json)?;
    Ok(Ending::Done.or_interrupted(report.interrupted))
}

/// The nodes and the L4 during a run.
struct Fleet<'a> {
    args: &'a FleetArgs,
    disks: Vec<Disk>,
    l4: HashSet<u32>,
    /// Uses of each block.
    uses: HashMap<u32, u32>,
    /// Blocks to be published, with the time.
    waiting: VecDeque<(u64, u32)>,
}

impl<'a> Fleet<'a> {
    fn new(args: &'a FleetArgs) -> Fleet<'a> {
        Fleet {
            args,
            disks: (0..args.nodes).map(|_| Disk::default()).collect(),
            l4: HashSet::new(),
            uses: HashMap::new(),
            waiting: VecDeque::new(),
        }
    }

    /// The blocks found after request `restart`, and the number of published blocks.
    fn play(
        mut self,
        requests: &Requests,
        restart: u64,
        loses: bool,
        interrupt: &Interrupt,
    ) -> (Window, u64) {
        let mut window = Window::default();
        for (at, request) in (0..).zip(requests.iter()) {
            if interrupt.is_raised() {
                break;
            }
            if at == restart && loses {
                self.disks
                    .iter_mut()
                    .for_each(|disk| *disk = Disk::default());
            }
            let blocks = requests.blocks(request);
            let blocks = &blocks[..blocks.len() - usize::from(request.is_partial)];
            let keys = requests.keys(request);
            let head = keys.get(1).or(keys.first());
            let (local, found) = self.serve(blocks, request, head, at);
            if (restart..restart.saturating_add(self.args.after)).contains(&at) {
                window.requests += 1;
                window.blocks_requested += blocks.len() as u64;
                window.local_blocks += local as u64;
                window.l4_blocks += (found - local) as u64;
            }
        }
        let of_all = |blocks| ratio(blocks, window.blocks_requested);
        window.local_hit_rate = of_all(window.local_blocks);
        window.l4_hit_rate = of_all(window.l4_blocks);
        (window, self.l4.len() as u64)
    }

    /// Serves a request. Returns the length of its prefix on the node, and with the L4.
    fn serve(
        &mut self,
        blocks: &[u32],
        request: &Request,
        head: Option<&PageKey>,
        at: u64,
    ) -> (usize, usize) {
        while let Some((_, block)) = self.waiting.pop_front_if(|(due, _)| *due <= request.at_ms) {
            self.l4.insert(block);
        }
        let node = match self.args.routing {
            Routing::Sticky => head.map_or(0, number),
            // A fixed sequence without a pattern.
            Routing::Random => at.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 33,
        };
        let node = usize::try_from(node % u64::from(self.args.nodes)).unwrap_or_default();
        let most = self.args.node_blocks as usize;
        let disk = &mut self.disks[node];
        let local = blocks.iter().take_while(|block| disk.has(**block)).count();
        let more = blocks[local..].iter();
        let more = more.take_while(|block| disk.has(**block) || self.l4.contains(block));
        let found = local + more.count();
        // The leaf first, so that the head of a chain outlives its tail.
        blocks
            .iter()
            .rev()
            .for_each(|&block| disk.touch(block, most));
        for &block in blocks {
            let uses = self.uses.entry(block).or_default();
            *uses += 1;
            let is_published = match self.args.admission {
                Published::Through => *uses == 1,
                Published::SecondTouch => *uses == 2,
                Published::None => false,
            };
            if is_published {
                let due = request.at_ms.saturating_add(BEHIND_MS);
                self.waiting.push_back((due, block));
            }
        }
        (local, found)
    }
}

/// A number that follows from a key.
fn number(key: &PageKey) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = *key.as_bytes();
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}
