//! What of the tools reads text that somebody else wrote, apart from the binary so that it can be tried on any text.
//!
//! | module | reads |
//! |---|---|
//! | [`size`] | sizes and durations |
//! | [`trace`] | request traces |

#![forbid(unsafe_code)]

pub mod size;
pub mod trace;
