//! The device that holds L1: the host's memory, or a GPU.

use std::sync::Arc;

use larder_kernels::{CudaDevice, CudaOptions, Device, HostDevice};

use crate::failure::Failure;

/// The CUDA device of this number, or the host if none is given.
///
/// # Errors
/// The device does not exist, or does not work.
pub fn device(cuda: Option<u32>) -> Result<Arc<dyn Device>, Failure> {
    let opened: Result<Arc<dyn Device>, _> = match cuda {
        None => HostDevice::new().map(|device| Arc::new(device) as _),
        Some(ordinal) => {
            let options = CudaOptions {
                ordinal,
                ..CudaOptions::default()
            };
            CudaDevice::open(&options).map(|device| Arc::new(device) as _)
        }
    };
    opened.map_err(|error| {
        Failure::environment(format!(
            "the device that is to hold L1: {error}; leave --cuda out to do without a GPU"
        ))
    })
}
