//! CUDA.
//!
//! | module | owns |
//! |---|---|
//! | [`image`] | which code the device gets |
//! | [`nvrtc`] | the compiler, where it is installed |

pub mod image;
pub mod nvrtc;
