//! Incidents of a served store: within seconds every instrument names the cause, and then the
//! recovery. The instruments are the metrics, `stat`, `stat --check`, `doctor`, the owner's log,
//! and the alerts of a real Prometheus, without their `for`.
//!
//! Incidents that need FUSE or root are ignored by default; `tests/run --incidents` runs all.

#![allow(clippy::unwrap_used, missing_docs)]

mod contents;
mod devices;
#[path = "../../../tests/support/fuse.rs"]
mod fuse;
#[path = "../inspect_verify/home.rs"]
mod home;
mod ill;
mod places;
mod processes;
mod remote;
mod room;
mod runbook;
mod scene;
#[path = "../../../tests/support/mod.rs"]
mod support;
mod watch;
