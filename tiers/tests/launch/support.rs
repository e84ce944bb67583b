//! The fake driver, shared with the tests of the devices.

#[path = "../../../kernels/tests/support/compute.rs"]
pub mod compute;
#[path = "../../../kernels/tests/support/driver.rs"]
pub mod driver;
#[path = "../../../tests/support/honest.rs"]
pub mod honest;
