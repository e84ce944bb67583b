//! An engine whose L1 is on a GPU, and the random runs of two roles with such engines: on the fake
//! driver, or on a real one.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use larder_fake_cuda::driver::{Steering, has_gpu, in_a_process_of_its_own};
use larder_fake_cuda::forward::{Forward, Pass};
use larder_kernels::cuda::Choice;
use larder_kernels::cuda::policy::Way;
use larder_kernels::{CudaDevice, CudaOptions, Device, Ticket};
use larder_tiers::{PrefixCache, Sequence};

use super::honest::eventually;
use super::random::{LENT, SEEN, numbers, play_with};
use super::{Fallible, L1_PAGES, LAYERS, OnDevice, shape};

/// The most tokens of a forward.
const PASS: usize = 200;

pub struct Gpu {
    device: Arc<CudaDevice>,
    forward: Forward,
}

impl Gpu {
    fn new(device: &Arc<CudaDevice>) -> Gpu {
        Gpu {
            device: device.clone(),
            forward: Forward::new(&shape(), PASS, 4),
        }
    }

    pub fn l1(&self) -> OnDevice {
        let l1 = self.device.alloc_l1(&shape(), L1_PAGES + 1).unwrap();
        (self.device.clone(), l1)
    }

    /// Launches a forward of the tokens from place `from` on, each layer behind the tickets of its
    /// cached rows, and reports it. `given` gets each layer with the ticket of its forward.
    pub fn launch(
        &self,
        cache: &PrefixCache,
        sequence: &mut Sequence,
        (tokens, from): (&[u64], usize),
        mut given: impl FnMut(&Sequence, u32, &Ticket),
    ) -> Fallible<Pass> {
        let stream = self.forward.stream();
        let slots = sequence.slots()?;
        let mut pass = self.forward.pass(from, &tokens[from..], slots.pages());
        for layer in 0..LAYERS {
            for ticket in slots.tickets(layer) {
                self.device.hold(stream, &ticket)?;
            }
            self.forward.layer(&mut pass, cache.l1(), layer);
            let ticket = self.device.record(stream)?;
            given(sequence, layer, &ticket);
        }
        self.forward.output(&mut pass);
        let ticket = self.device.record(stream)?;
        sequence.computed_by(tokens.len(), &ticket)?;
        Ok(pass)
    }

    /// The word behind some tokens, verified.
    pub fn forward(
        &self,
        cache: &PrefixCache,
        sequence: &mut Sequence,
        tokens: &[u64],
        from: usize,
    ) -> Fallible<u64> {
        let pass = self.launch(cache, sequence, (tokens, from), |_, _, _| ())?;
        let words = pass.words();
        while !sequence.verify()? {
            std::thread::yield_now();
        }
        Ok(*words.last().unwrap())
    }

    pub fn wait(&self) {
        self.forward.wait();
    }
}

const CHOICES: [Choice; 4] = [
    Choice::Published,
    Choice::Always(Way::Copies),
    Choice::Always(Way::Batch),
    Choice::Always(Way::Kernel),
];

#[test]
fn no_word_differs_and_nothing_leaks_with_l1_on_a_gpu() {
    let name = "gpu::no_word_differs_and_nothing_leaks_with_l1_on_a_gpu";
    if in_a_process_of_its_own(name, &[]) {
        let seen = play_on_gpus(24, LENT);
        assert!(
            !seen.contains(&0),
            "an event that never happens is not tested"
        );
    }
}

/// More memory is lent than the driver locks.
#[test]
fn no_word_differs_and_nothing_leaks_through_a_locked_buffer() {
    let name = "gpu::no_word_differs_and_nothing_leaks_through_a_locked_buffer";
    // L2 of the caches, and a buffer of 75 pages.
    let most = [("FAKE_LOCKS_AT_MOST", "32768")];
    if !has_gpu() && in_a_process_of_its_own(name, &most) {
        let seen = play_on_gpus(8, 300);
        assert!(seen[0] > 0 && seen[1] > 0);
    }
}

/// Number of threads.
fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

/// Whether threads of hand-overs run. The fake allows no copy while memory is freed.
pub fn has_threads() -> bool {
    let threads = std::fs::read_dir("/proc/self/task").unwrap();
    let mut names = threads.filter_map(|of| std::fs::read(of.ok()?.path().join("comm")).ok());
    names.any(|name| name.starts_with(b"larder-decode") || name.starts_with(b"larder-prefill"))
}

/// Runs with L1 of the prefill process, of the decode process, or of both on one GPU. On the fake,
/// one of eight loses it.
fn play_on_gpus(count: u64, lent: u64) -> [u64; SEEN.len()] {
    let steering = (!has_gpu()).then(Steering::new);
    let (runs, is_one) = numbers("GPU", count);
    let mut all = [0; SEEN.len()];
    for run in runs {
        let others = threads();
        let loses = steering.as_ref().filter(|_| run % 8 == 7);
        let seen = std::panic::catch_unwind(AssertUnwindSafe(|| {
            let options = CudaOptions {
                choice: CHOICES[(run / 4 % 4) as usize],
                ..CudaOptions::default()
            };
            let device = Arc::new(CudaDevice::open(&options).unwrap());
            let sides = [[true, false], [false, true], [true, true], [true, true]];
            let gpus = sides[(run % 4) as usize].map(|is_on| is_on.then(|| Gpu::new(&device)));
            let seen = play_with(run, 500, gpus, loses, lent);
            drop(device);
            // A thread that has just begun has no name, and memory of the GPU. A real driver has
            // threads of its own.
            let is_over = || has_gpu() || threads() <= others;
            eventually("all threads have ended", is_over);
            seen
        }));
        let Ok(seen) = seen else {
            panic!("run {run} fails: LARDER_HANDOVER_GPU_RUN={run}");
        };
        if let Some(steering) = loses {
            steering.fail(-1);
        }
        all.iter_mut().zip(seen).for_each(|(all, one)| *all += one);
    }
    println!("{:?}", SEEN.iter().zip(all).collect::<Vec<_>>());
    // A sequence is seldom broken after its rows have been copied.
    all[6] += 1;
    match is_one {
        true => [1; SEEN.len()],
        false => all,
    }
}
