//! What the `larder` binary is made of: it stores pages of LLM key-value caches on local disks, and shows what is in there.
//!
//! Each subcommand has a file of its own; what they share is the small library beside them. Public is what others use too:
//! the command line as a whole, and what reads text that somebody else wrote.
//!
//! | module | what it is |
//! |---|---|
//! | [`cli`] | the command line |
//! | `create` | makes a store, or enlarges one |
//! | `inspect`, `verify` | look at a store without opening it: what is in it, and whether it is whole (`findings`, `repair`) |
//! | `compact` | puts a store in order |
//! | `export`, `import` | pages of a store to a file (`archive`), and from one into a store |
//! | `bench` | measures puts, gets, lookups and loads |
//! | `replay` | runs a request trace against a store (`ack_log`: what was promised before a kill), or through all three tiers |
//! | `doctor` | says what this machine offers and what is in the way |
//! | `serve`, `stat` | own a store for other processes; ask who does |
//! | `demo` | a first minute with nothing to prepare (`device`: the disk's own speed, `conversations`: its load) |
//! | [`disk`] | which disk moves a store's bytes, as documents tell it |
//! | [`size`] | sizes and durations |
//! | [`trace`] | request traces |
//! | `open`, `l1`, `workload`, `session` | opening a store and a device, made-up pages, serving requests |
//! | `usage`, `turns`, `report`, `failure`, `interrupt` | meters, taking turns, output, exit codes, signals |
//!
//! Conventions: `--json` prints one document on stdout, people get lines; progress goes to stderr and only to a terminal;
//! `LARDER_LOG` (`warn` unless set) chooses what the engine logs to stderr.

#![forbid(unsafe_code)]

mod ack_log;
mod archive;
mod bench;
pub mod cli;
mod compact;
mod conversations;
mod create;
mod demo;
mod device;
pub mod disk;
mod doctor;
mod export;
mod failure;
mod findings;
mod import;
mod inspect;
mod interrupt;
mod l1;
mod losses;
mod open;
pub mod place;
mod repair;
mod replay;
mod report;
mod serve;
mod session;
pub mod size;
mod stat;
pub mod trace;
mod turns;
mod usage;
mod verify;
mod workload;
