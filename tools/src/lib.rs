//! The parts of the `larder` binary. It stores pages of LLM key-value caches on local disks, and
//! shows them.
//!
//! Each subcommand has a file of its own. Shared code is in the small library below them. Public
//! are the parts that other crates use: the command line as a whole, and the readers of foreign
//! text. A module imports only modules below it, or behind it in its row.
//!
//! | module | content |
//! |---|---|
//! | [`cli`] | the command line |
//! | `create` | creates a store, or enlarges one |
//! | `keys` | makes keys of encrypted stores, and rotates them |
//! | `volume` | adds a volume to a store, or retires one |
//! | `superblock` | saves the superblock of a store, and restores it |
//! | `inspect`, `verify` | examine a store without opening it: its content, its integrity |
//! | `repair` | the repair of the damage that `verify` finds |
//! | `compact` | orders the pages of a store |
//! | `erase` | a tenant of an encrypted store: its keys, and with them its pages |
//! | `export`, `import` | pages of a store to a file, and from one into a store |
//! | `remote` | shares runs of pages between nodes |
//! | `delete` | deletes the pages of chosen namespaces, also in a served store |
//! | `pin` | pages that stay until a time |
//! | `sheet` | a report about a store or a trace, in one HTML file |
//! | `plan` | the disk to buy, and whether it is worth it |
//! | `record` | records the traffic of a served store |
//! | `replay` | runs a request trace against a store, or through all three tiers |
//! | `bench` | measures puts, gets, lookups and loads |
//! | `demo` | a first minute without preparation |
//! | `doctor` | shows the features and the obstacles of this machine |
//! | `top` | a live screen of a served store |
//! | `serve`, `stat` | own a store for other processes; query its owner |
//! | `quota` | how much of a store a group of namespaces keeps, may take, and for how long |
//! | `exporter` | the owner's answer as metrics, over HTTP |
//! | `gone` | options of earlier versions, and their replacements |
//! | `manuals` | completions and manual pages |
//! | `losses` | the cost of damage for each namespace |
//! | `findings` | the survey of a store, and the report of its damage |
//! | `archive` | the file of an export |
//! | `metrics` | the owner's answer as metrics |
//! | `owner` | parts of the owner's answer, for people |
//! | `drives` | the drives under a store, and their health |
//! | `ack_log` | the pages that a store had acknowledged to a replay before a kill |
//! | `session` | requests of a server, for a replay and the demo |
//! | `conversations`, `device` | for the demo: the load, and the disk's own speed |
//! | `workload` | test pages |
//! | `selection` | namespaces by fingerprint or model |
//! | `open`, `l1` | opening a store, and the device that holds L1 |
//! | `key` | the options that name the key of an encrypted store |
//! | [`l4`] | the options of a remote beneath a store |
//! | [`policy`] | the policies of eviction |
//! | [`place`] | the place of a store on the command line |
//! | [`disk`] | the disk that moves a store's bytes, as documents state it |
//! | [`trace`] | request traces |
//! | `model` | the bytes that a model keeps of a token, and the computation of a prefill |
//! | `verdict` | whether a store is worth its disk |
//! | `zstd` | compressed text |
//! | `report` | the output: a document, or lines for people |
//! | `failure` | exit codes, and the sentence of a failure |
//! | `refusal` | where permissions refuse this process |
//! | `interrupt` | signals |
//! | [`log`] | the log on stderr |
//! | `program` | the running program: its next start, its messages on stderr |
//! | `usage`, `turns` | meters, taking turns |
//! | `shown` | names from outside, on a screen and in a page |
//! | [`size`] | sizes, durations and dates |
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
mod erase;
mod export;
mod exporter;
mod failure;
mod findings;
mod gone;
mod import;
mod inspect;
mod interrupt;
mod key;
mod keys;
mod l1;
pub mod l4;
pub mod log;
mod losses;
mod manuals;
mod metrics;
mod model;
mod open;
mod owner;
mod pin;
pub mod place;
mod plan;
pub mod policy;
mod program;
pub mod quota;
mod record;
mod refusal;
mod remote;
mod repair;
mod replay;
mod report;
mod selection;
mod serve;
mod session;
mod sheet;
#[cfg(feature = "charts")]
mod shown;
pub mod size;
mod stat;
mod superblock;
mod top;
pub mod trace;
mod turns;
mod usage;
mod verdict;
mod verify;
mod volume;
mod workload;
mod zstd;
