//! The parts of the `larder` binary. It stores pages of LLM key-value caches on local disks, and
//! shows them.
//!
//! Each subcommand has a file of its own. Shared code is in the small library beside them. Public
//! are the parts that other crates use: the command line as a whole, and the readers of foreign
//! text.
//!
//! | module | content |
//! |---|---|
//! | [`cli`] | the command line |
//! | `create` | creates a store, or enlarges one |
//! | `volume` | adds a volume to a store, or retires one |
//! | `inspect`, `verify` | examine a store without opening it: its content, its integrity |
//! | `findings`, `repair` | their report of damage, and its repair |
//! | `compact` | orders the pages of a store |
//! | `export`, `import` | pages of a store to a file (`archive`), and from one into a store |
//! | `remote` | shares runs of pages between nodes |
//! | `delete` | deletes the pages of chosen namespaces, also in a served store |
//! | `bench` | measures puts, gets, lookups and loads |
//! | `replay` | runs a request trace against a store, or through all three tiers |
//! | `ack_log` | the pages that a store had acknowledged to a replay before a kill |
//! | `doctor` | shows the features and the obstacles of this machine |
//! | `serve`, `stat` | own a store for other processes; query its owner |
//! | `exporter`, `metrics` | the owner's answer as metrics, over HTTP |
//! | `demo` | a first minute without preparation |
//! | `device`, `conversations` | for the demo: the disk's own speed, and the load |
//! | [`disk`] | the disk that moves a store's bytes, as documents state it |
//! | `drives` | the drives under a store, and their health |
//! | [`size`] | sizes and durations |
//! | [`trace`] | request traces |
//! | `open`, `l1` | opening a store and a device |
//! | [`policy`] | the policies of eviction |
//! | `workload`, `session` | test pages, serving requests |
//! | `usage`, `turns` | meters, taking turns |
//! | `misses` | the reasons of misses |
//! | `selection` | namespaces by fingerprint or model |
//! | [`log`] | the log on stderr |
//! | `manuals` | completions and manual pages |
//! | `report`, `failure`, `interrupt` | output, exit codes, signals |
//!
//! Conventions: `--json` prints one document on stdout, people get lines. Progress goes to stderr
//! and only to a terminal.

#![forbid(unsafe_code)]

mod ack_log;
mod archive;
mod bench;
pub mod cli;
mod compact;
mod conversations;
mod create;
mod delete;
mod demo;
mod device;
pub mod disk;
mod doctor;
mod drives;
mod export;
mod exporter;
mod failure;
mod findings;
mod import;
mod inspect;
mod interrupt;
mod l1;
pub mod l4;
pub mod log;
mod losses;
mod manuals;
mod metrics;
mod misses;
mod open;
pub mod place;
pub mod policy;
mod remote;
mod repair;
mod replay;
mod report;
mod selection;
mod serve;
mod session;
pub mod size;
mod stat;
pub mod trace;
mod turns;
mod usage;
mod verify;
mod volume;
mod workload;
