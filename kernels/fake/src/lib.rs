//! A CUDA driver without a GPU, and a forward pass that runs on it or on a GPU. For tests and
//! examples only.
//!
//! The driver (`cu/fake_driver.cc`) is lazy, unordered and strict: streams run as late as they may,
//! and undefined use ends the process. It has its own time.
//!
//! | module | content |
//! |---|---|
//! | [`driver`] | processes with the fake driver, and its control |
//! | [`forward`] | the forward pass of a small model |
//! | [`model`] | the model on the CPU |
//! | [`compute`] | a stand-in for the forward pass, for tests of order and time |

#![allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a failed expectation is a test result"
)]

pub mod compute;
pub mod driver;
pub mod forward;
pub mod model;
