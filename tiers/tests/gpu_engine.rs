//! The engine of `examples/gpu_engine.rs` on the fake driver: words from all tiers, with
//! speculation.
#![allow(clippy::unwrap_used)]

#[path = "../examples/gpu_engine.rs"]
mod gpu_engine;

use larder_fake_cuda::driver::{has_gpu, in_a_process_of_its_own};

#[test]
fn an_engine_on_a_fake_gpu_has_the_right_words_from_all_tiers() {
    let name = "an_engine_on_a_fake_gpu_has_the_right_words_from_all_tiers";
    if !has_gpu() && in_a_process_of_its_own(name, &[]) {
        gpu_engine::on_the_fake().unwrap();
    }
}
