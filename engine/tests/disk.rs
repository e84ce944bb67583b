//! The common behaviour of all disks, on real files: each test runs on io_uring, where there is
//! one, and on threads.

#![allow(clippy::unwrap_used)]

#[path = "../../tests/support/honest.rs"]
mod honest;

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use honest::skipped;
use larder_disk::probe::{Want, direct_io, open_disk};
use larder_disk::threads::Threads;
use larder_disk::uring::{Features, Uring};
use larder_disk::{
    Action, Buffer, Disk, DiskError, DiskOptions, Done, Kind, Op, Pacing, Piece, Purpose, Sink,
};
use larder_engine::AlignedBuf;
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64;
use rustix::fs::{FlockOperation, OFlags};

const BLOCK: usize = 4096;

/// The features of io_uring here; `None` where there is none.
fn io_uring() -> Option<Features> {
    let features = Features::probe();
    features
        .inspect_err(|error| skipped("the disk on io_uring", error))
        .ok()
}

/// Opens each kind of disk in turn.
fn on_each_disk(test: impl Fn(&dyn Fn(Vec<Option<Arc<OwnedFd>>>, u32) -> Arc<dyn Disk>)) {
    test(&|files, depth| {
        Arc::new(
            Threads::open(
                DiskOptions {
                    files,
                    depth,
                    latencies: Arc::default(),
                    pacing: Arc::new(Pacing::create()),
                    board: Arc::default(),
                },
                "tested".to_owned(),
            )
            .unwrap(),
        )
    });
    if let Some(features) = io_uring() {
        test(&|files, depth| {
            Arc::new(
                Uring::open(
                    DiskOptions {
                        files,
                        depth,
                        latencies: Arc::default(),
                        pacing: Arc::new(Pacing::create()),
                        board: Arc::default(),
                    },
                    features,
                )
                .unwrap(),
            )
        });
    }
}

/// A file of zeros without a name, with direct I/O where that is available.
fn file(blocks: usize) -> Arc<OwnedFd> {
    let file = tempfile::tempfile_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    file.set_len((blocks * BLOCK) as u64).unwrap();
    let flags = rustix::fs::fcntl_getfl(&file).unwrap();
    let _ = rustix::fs::fcntl_setfl(&file, flags | OFlags::DIRECT);
    Arc::new(OwnedFd::from(file))
}

struct Mailbox(mpsc::Sender<Done>);

impl Sink for Mailbox {
    fn done(&self, answers: Vec<Done>) {
        assert!(!answers.is_empty());
        answers.into_iter().for_each(|answer| {
            let _ = self.0.send(answer);
        });
    }
}

fn mailbox() -> (Arc<dyn Sink>, mpsc::Receiver<Done>) {
    let (sender, receiver) = mpsc::channel();
    (Arc::new(Mailbox(sender)), receiver)
}

fn op(sink: &Arc<dyn Sink>, tag: u64, action: Action) -> Op {
    Op {
        volume: 0,
        action,
        purpose: Purpose::Call,
        deadline: None,
        tag,
        sink: Arc::clone(sink),
    }
}

fn read(offset: usize, len: usize) -> Action {
    Action::Read {
        offset: offset as u64,
        buffer: Buffer::Owned(AlignedBuf::zeroed(len).unwrap()),
    }
}

fn write(offset: usize, len: usize, byte: u8) -> Action {
    let mut memory = AlignedBuf::zeroed(len).unwrap();
    memory.fill(byte);
    Action::Write {
        offset: offset as u64,
        buffer: Buffer::Owned(memory),
    }
}

/// Submits operations that own their memory.
fn submit(disk: &dyn Disk, ops: Vec<Op>) {
    let travels = |op: &Op| match &op.action {
        Action::Read { buffer, .. } | Action::Write { buffer, .. } => {
            matches!(buffer, Buffer::Owned(_))
        }
        Action::Sync => true,
    };
    assert!(ops.iter().all(travels));
    // SAFETY: nothing is borrowed.
    unsafe { disk.submit(ops) }
}

fn carry_out(disk: &dyn Disk, action: Action) -> Done {
    let (sink, answers) = mailbox();
    submit(disk, vec![op(&sink, 0, action)]);
    answers.recv().unwrap()
}

/// Cuts `len` bytes into pieces at random places of an arena, none overlapping.
fn random_pieces(rng: &mut Pcg64, arena: &mut AlignedBuf, len: usize) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let (mut place, mut left) = (0, len);
    while left > 0 {
        place += BLOCK * rng.random_range(0..4);
        let part = left.min(BLOCK * rng.random_range(1..=8));
        let memory = &mut arena[place..place + part];
        pieces.push(Piece {
            ptr: memory.as_mut_ptr(),
            len: part,
        });
        (place, left) = (place + part, left - part);
    }
    pieces
}

fn bytes_of(arena: &AlignedBuf, pieces: &[Piece]) -> Vec<u8> {
    let start = arena.as_ptr().addr();
    let slice = |piece: &Piece| &arena[piece.ptr.addr() - start..][..piece.len];
    pieces
        .iter()
        .flat_map(|piece| slice(piece).iter().copied())
        .collect()
}

/// The file must always have the last written bytes, whatever the memory looks like.
fn matches_a_model(disk: &dyn Disk, file_blocks: usize, arena: &mut AlignedBuf, seed: u64) {
    let mut rng = Pcg64::seed_from_u64(seed);
    let mut model = vec![0u8; file_blocks * BLOCK];
    let (sink, answers) = mailbox();
    for round in 0..200 {
        let blocks = rng.random_range(1..=48);
        let offset = BLOCK * rng.random_range(0..file_blocks - blocks);
        let whole = rng.random_bool(0.3);
        let pieces = if whole {
            vec![Piece {
                ptr: arena.as_mut_ptr(),
                len: blocks * BLOCK,
            }]
        } else {
            random_pieces(&mut rng, arena, blocks * BLOCK)
        };
        let buffer = Buffer::Borrowed(pieces.clone());
        let action = if rng.random_bool(0.5) {
            rng.fill(&mut arena[..]);
            model[offset..][..blocks * BLOCK].copy_from_slice(&bytes_of(arena, &pieces));
            Action::Write {
                offset: offset as u64,
                buffer,
            }
        } else {
            arena.fill(0xee);
            Action::Read {
                offset: offset as u64,
                buffer,
            }
        };
        let reading = matches!(action, Action::Read { .. });
        // SAFETY: the arena outlives the answer, and is not touched before it.
        unsafe { disk.submit(vec![op(&sink, round, action)]) };
        let answer = answers.recv().unwrap();
        assert_eq!((answer.tag, answer.result), (round, Ok(())), "seed {seed}");
        if reading {
            assert!(
                bytes_of(arena, &pieces) == model[offset..][..blocks * BLOCK],
                "seed {seed}, round {round}"
            );
        }
    }
    assert_eq!(carry_out(disk, Action::Sync).result, Ok(()));
    let all = carry_out(disk, read(0, model.len()));
    assert!(all.buffer.unwrap()[..] == model[..], "seed {seed}");
}

#[test]
fn random_reads_and_writes_match_a_model() {
    on_each_disk(|open| {
        let mut arena = AlignedBuf::zeroed(2 << 20).unwrap();
        let disk = open(vec![Some(file(512))], 4);
        matches_a_model(&*disk, 512, &mut arena, 1);
    });
}

#[test]
fn registered_memory_reads_and_writes_the_same_bytes() {
    on_each_disk(|open| {
        let mut arena = AlignedBuf::zeroed(2 << 20).unwrap();
        let disk = open(vec![Some(file(512))], 4);
        let (front, back) = arena.split_at_mut(128 << 10);
        let memory = [front, back].map(|part| Piece {
            ptr: part.as_mut_ptr(),
            len: part.len(),
        });
        // SAFETY: the arena is dropped after the disk.
        let what = unsafe { disk.register(&memory) };
        assert!(what.contains("registered"), "{what}");
        matches_a_model(&*disk, 512, &mut arena, 2);
        drop(disk);
    });
}

/// How long the registration of untouched memory took, and the longest read meanwhile.
fn reads_beside_a_registration(features: Features) -> (Duration, Duration) {
    let options = DiskOptions {
        files: vec![Some(file(1))],
        depth: 4,
        latencies: Arc::default(),
        pacing: Arc::default(),
        board: Arc::default(),
    };
    let disk = Uring::open(options, features).unwrap();
    let mut arena = AlignedBuf::zeroed(512 << 20).unwrap();
    let memory = Piece {
        ptr: arena.as_mut_ptr(),
        len: arena.len(),
    };
    let (sink, answers) = mailbox();
    let mut longest = Duration::ZERO;
    let begun = Instant::now();
    std::thread::scope(|scope| {
        // SAFETY: the arena is dropped after the disk.
        let registering = scope.spawn(|| unsafe { disk.register(&[memory]) });
        while !registering.is_finished() {
            let begun = Instant::now();
            submit(&disk, vec![op(&sink, 0, read(0, BLOCK))]);
            answers.recv().unwrap().result.unwrap();
            longest = longest.max(begun.elapsed());
        }
    });
    let took = begun.elapsed();
    drop(disk);
    (took, longest)
}

/// The kernel faults the memory in and clears it, which takes a hundred times as long as pinning
/// it.
#[test]
fn reads_are_answered_while_memory_is_registered() {
    let Some(features) = io_uring() else { return };
    // A busy machine may delay any read now and then, though not each time.
    let runs: Vec<_> = (0..20)
        .map_while(|_| {
            let (took, longest) = reads_beside_a_registration(features);
            (longest > took / 2).then_some((took, longest))
        })
        .collect();
    assert!(runs.len() < 20, "{runs:?}");
}

#[test]
fn memory_that_cannot_be_registered_is_named_and_still_used() {
    let Some(features) = io_uring() else { return };
    let disk = Uring::open(
        DiskOptions {
            files: vec![Some(file(512))],
            depth: 4,
            latencies: Arc::default(),
            pacing: Arc::default(),
            board: Arc::default(),
        },
        features,
    )
    .unwrap();
    let nowhere = Piece {
        ptr: std::ptr::without_provenance_mut(1 << 20),
        len: 1 << 20,
    };
    // SAFETY: nothing is mapped there, and nothing will be: the kernel refuses it.
    let what = unsafe { disk.register(&[nowhere]) };
    assert!(
        what.contains("0 of 1 MiB registered") && what.contains("plain I/O"),
        "{what}"
    );
    matches_a_model(&disk, 512, &mut AlignedBuf::zeroed(2 << 20).unwrap(), 3);
}

#[test]
fn ten_thousand_operations_at_depth_four_are_answered_once_each() {
    on_each_disk(|open| {
        let disk = open(vec![Some(file(64))], 4);
        let (sink, answers) = mailbox();
        let action = |tag: usize| match tag % 100 {
            0 => Action::Sync,
            1..50 => write(tag % 64 * BLOCK, BLOCK, 7),
            _ => read(tag % 64 * BLOCK, BLOCK),
        };
        submit(
            &*disk,
            (0..10_000)
                .map(|tag| op(&sink, tag as u64, action(tag)))
                .collect(),
        );
        let mut seen = vec![0; 10_000];
        for _ in 0..10_000 {
            let answer = answers.recv().unwrap();
            assert_eq!(answer.result, Ok(()));
            seen[answer.tag as usize] += 1;
        }
        assert!(seen.iter().all(|times| *times == 1));
        disk.shutdown();
        assert!(answers.try_recv().is_err());
    });
}

#[test]
fn many_threads_submit_at_once_and_each_gets_its_own_answers() {
    on_each_disk(|open| {
        let disk = open(vec![Some(file(8 * 64)), Some(file(8 * 64))], 8);
        std::thread::scope(|scope| {
            for thread in 0..8u8 {
                let disk = Arc::clone(&disk);
                scope.spawn(move || {
                    let (sink, answers) = mailbox();
                    for round in 0..100usize {
                        let place = BLOCK * (thread as usize * 64 + round % 64);
                        let on = |volume, tag, action| Op {
                            volume,
                            ..op(&sink, tag, action)
                        };
                        let bytes = [thread.wrapping_mul(31) ^ round as u8, !thread ^ round as u8];
                        let writes = [0, 1].map(|volume| {
                            on(volume, volume as u64, write(place, BLOCK, bytes[volume]))
                        });
                        submit(&*disk, writes.into());
                        (0..2).for_each(|_| assert_eq!(answers.recv().unwrap().result, Ok(())));
                        submit(
                            &*disk,
                            [0, 1]
                                .map(|volume| on(volume, volume as u64, read(place, BLOCK)))
                                .into(),
                        );
                        for answer in answers.iter().take(2) {
                            let expected = bytes[answer.tag as usize];
                            assert!(answer.buffer.unwrap().iter().all(|byte| *byte == expected));
                        }
                    }
                });
            }
        });
    });
}

/// A sink that blocks the disk's thread until it is released.
struct Blocker {
    entered: mpsc::Sender<()>,
    release: Mutex<mpsc::Receiver<()>>,
}

impl Sink for Blocker {
    fn done(&self, _: Vec<Done>) {
        let _ = self.entered.send(());
        let _ = self.release.lock().unwrap().recv();
    }
}

#[test]
fn a_queued_operation_past_its_deadline_is_answered_on_expire() {
    on_each_disk(|open| {
        let disk = open(vec![Some(file(4))], 1);
        let (entered, was_entered) = mpsc::channel();
        let (release, released) = mpsc::channel();
        let blocker: Arc<dyn Sink> = Arc::new(Blocker {
            entered,
            release: Mutex::new(released),
        });
        submit(&*disk, vec![op(&blocker, 0, read(0, BLOCK))]);
        was_entered.recv().unwrap();
        // The disk's only thread is busy.
        let (sink, answers) = mailbox();
        let deadline = Instant::now() + Duration::from_millis(20);
        let until = |tag, deadline| Op {
            deadline,
            ..op(&sink, tag, read(0, BLOCK))
        };
        let ops = vec![until(1, None), until(2, Some(deadline)), until(3, None)];
        submit(&*disk, ops);
        disk.expire();
        assert!(answers.recv_timeout(deadline - Instant::now()).is_err());
        while Instant::now() < deadline {
            std::hint::spin_loop();
        }
        disk.expire();
        let late = answers.try_recv().unwrap();
        assert_eq!((late.tag, late.result), (2, Err(DiskError::Deadline)));
        assert!(late.buffer.is_some());
        assert!(answers.try_recv().is_err());
        release.send(()).unwrap();
        let rest = [answers.recv().unwrap(), answers.recv().unwrap()];
        let mut tags = rest.map(|done| done.result.map(|()| done.tag).unwrap());
        tags.sort_unstable();
        assert_eq!(tags, [1, 3]);
    });
}

#[test]
fn an_operation_past_its_deadline_is_not_started() {
    on_each_disk(|open| {
        let disk = open(vec![Some(file(1))], 4);
        let (sink, answers) = mailbox();
        let late = Some(Instant::now() - Duration::from_secs(1));
        let far = Some(Instant::now() + Duration::from_secs(3600));
        submit(
            &*disk,
            vec![Op {
                deadline: late,
                ..op(&sink, 0, write(0, BLOCK, 9))
            }],
        );
        let answer = answers.recv().unwrap();
        assert_eq!(answer.result, Err(DiskError::Deadline));
        assert_eq!(answer.buffer.unwrap().len(), BLOCK);
        submit(
            &*disk,
            vec![Op {
                deadline: far,
                ..op(&sink, 1, read(0, BLOCK))
            }],
        );
        let answer = answers.recv().unwrap();
        assert_eq!(answer.result, Ok(()));
        assert!(answer.buffer.unwrap().iter().all(|byte| *byte == 0));
    });
}

#[test]
fn reading_past_the_end_makes_no_progress() {
    on_each_disk(|open| {
        let short = file(4);
        let disk = open(vec![Some(Arc::clone(&short))], 4);
        assert_eq!(
            carry_out(&*disk, read(4 * BLOCK, BLOCK)).result,
            Err(DiskError::NoProgress)
        );
        assert_eq!(
            carry_out(&*disk, read(3 * BLOCK, 2 * BLOCK)).result,
            Err(DiskError::NoProgress)
        );
        rustix::fs::ftruncate(&short, 3 * BLOCK as u64 + 1000).unwrap();
        assert_eq!(
            carry_out(&*disk, read(BLOCK, 4 * BLOCK)).result,
            Err(DiskError::NoProgress)
        );
        assert_eq!(carry_out(&*disk, read(BLOCK, 2 * BLOCK)).result, Ok(()));
    });
}

#[test]
fn errors_of_the_system_come_back_with_the_memory() {
    on_each_disk(|open| {
        let read_only = Arc::new(OwnedFd::from(File::open("/proc/self/exe").unwrap()));
        let disk = open(vec![Some(read_only)], 4);
        let answer = carry_out(&*disk, write(0, BLOCK, 1));
        assert_eq!(answer.result, Err(DiskError::Os(libc::EBADF)));
        assert_eq!(answer.buffer.unwrap().len(), BLOCK);
        let offset = u64::MAX;
        let nowhere = Action::Read {
            offset,
            buffer: Buffer::Owned(AlignedBuf::zeroed(BLOCK).unwrap()),
        };
        assert_eq!(
            carry_out(&*disk, nowhere).result,
            Err(DiskError::Os(libc::EINVAL))
        );
    });
}

#[test]
fn an_empty_transfer_is_done_at_once() {
    on_each_disk(|open| {
        let disk = open(vec![Some(file(1))], 4);
        assert_eq!(carry_out(&*disk, read(0, 0)).result, Ok(()));
        assert_eq!(carry_out(&*disk, write(1 << 40, 0, 0)).result, Ok(()));
    });
}

#[test]
fn a_lost_volume_answers_and_leaves_the_others_alone() {
    on_each_disk(|open| {
        let disk = open(vec![None, Some(file(1))], 4);
        let (sink, answers) = mailbox();
        let ops = (0..3).map(|volume| Op {
            volume,
            ..op(&sink, volume as u64, read(0, BLOCK))
        });
        submit(&*disk, ops.collect());
        let results: HashMap<u64, _> = answers
            .iter()
            .take(3)
            .map(|answer| (answer.tag, answer.result))
            .collect();
        assert_eq!(results[&0], Err(DiskError::Os(libc::ENODEV)));
        assert_eq!(results[&1], Ok(()));
        assert_eq!(results[&2], Err(DiskError::Os(libc::ENODEV)));
    });
}

/// Blocks its disk's thread until it is released.
struct Gate(Mutex<mpsc::Receiver<()>>);

impl Sink for Gate {
    fn done(&self, _: Vec<Done>) {
        let _ = self.0.lock().unwrap().recv();
    }
}

#[test]
fn shutdown_answers_everything_and_refuses_the_rest() {
    on_each_disk(|open| {
        let disk = open(vec![Some(file(64)), None], 1);
        let (let_go, held) = mpsc::channel();
        let gate: Arc<dyn Sink> = Arc::new(Gate(Mutex::new(held)));
        let (sink, answers) = mailbox();
        submit(&*disk, vec![op(&gate, 0, Action::Sync)]);
        submit(
            &*disk,
            (0..2000)
                .map(|tag| op(&sink, tag, read(0, BLOCK)))
                .collect(),
        );
        std::thread::scope(|scope| {
            (0..3).for_each(|_| drop(scope.spawn(|| disk.shutdown())));
            // A closed disk answers on the submitter's thread.
            let (late, refusals) = mailbox();
            while refusals.try_recv().map(|answer| answer.result) != Ok(Err(DiskError::Shutdown)) {
                submit(&*disk, vec![op(&late, 0, Action::Sync)]);
            }
            let_go.send(()).unwrap();
        });
        let results: Vec<_> = answers.try_iter().map(|answer| answer.result).collect();
        assert_eq!(results.len(), 2000);
        let started = results.iter().filter(|result| result.is_ok()).count();
        assert!(started <= 1, "one place, {started} operations started");
        assert!(
            results
                .iter()
                .all(|result| matches!(result, Ok(()) | Err(DiskError::Shutdown)))
        );
        assert_eq!(
            carry_out(&*disk, Action::Sync).result,
            Err(DiskError::Shutdown)
        );
        disk.shutdown();
    });
}

#[test]
fn a_disk_lets_go_of_its_files_when_it_is_dropped() {
    on_each_disk(|open| {
        let path = tempfile::NamedTempFile::new_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let writable = || {
            File::options()
                .read(true)
                .write(true)
                .open(path.path())
                .unwrap()
        };
        let volume = Arc::new(OwnedFd::from(writable()));
        rustix::fs::flock(&*volume, FlockOperation::NonBlockingLockExclusive).unwrap();
        let disk = open(vec![Some(volume)], 4);
        assert_eq!(carry_out(&*disk, write(0, BLOCK, 1)).result, Ok(()));
        assert_eq!(carry_out(&*disk, Action::Sync).result, Ok(()));
        assert!(rustix::fs::flock(writable(), FlockOperation::NonBlockingLockExclusive).is_err());
        drop(disk);
        rustix::fs::flock(writable(), FlockOperation::NonBlockingLockExclusive).unwrap();
    });
}

/// Submits its next operation when the last one is answered, and releases the disk at the end.
struct Relay {
    disk: Mutex<Option<Arc<dyn Disk>>>,
    left: Mutex<usize>,
    over: mpsc::Sender<()>,
}

struct RelaySink(Arc<Relay>);

impl Sink for RelaySink {
    fn done(&self, answers: Vec<Done>) {
        assert!(answers.iter().all(|answer| answer.result.is_ok()));
        let mut left = self.0.left.lock().unwrap();
        *left -= 1;
        let disk = self.0.disk.lock().unwrap().take();
        let Some(disk) = disk else { return };
        if *left == 0 {
            drop(disk);
            self.0.over.send(()).unwrap();
            return;
        }
        *self.0.disk.lock().unwrap() = Some(Arc::clone(&disk));
        let sink: Arc<dyn Sink> = Arc::new(RelaySink(Arc::clone(&self.0)));
        submit(&*disk, vec![op(&sink, 0, read(0, BLOCK))]);
    }
}

#[test]
fn a_sink_may_submit_and_may_be_the_last_to_hold_the_disk() {
    on_each_disk(|open| {
        // One thread and one place: a submit from a sink must not wait for either.
        let disk = open(vec![Some(file(1))], 1);
        let (over, ended) = mpsc::channel();
        let relay = Arc::new(Relay {
            disk: Mutex::new(None),
            left: Mutex::new(1000),
            over,
        });
        let sink: Arc<dyn Sink> = Arc::new(RelaySink(Arc::clone(&relay)));
        *relay.disk.lock().unwrap() = Some(Arc::clone(&disk));
        let (first, sink) = (Arc::downgrade(&disk), op(&sink, 0, read(0, BLOCK)));
        {
            let starting = disk;
            submit(&*starting, vec![sink]);
        }
        ended.recv().unwrap();
        assert!(first.upgrade().is_none());
    });
}

#[test]
fn the_opened_disk_reports_its_kind() {
    let options = || DiskOptions {
        files: vec![Some(file(1)), None],
        depth: 4,
        latencies: Arc::default(),
        pacing: Arc::default(),
        board: Arc::default(),
    };
    let threads = open_disk(options(), Want::Threads).unwrap();
    assert_eq!(threads.choice().kind, Kind::Threads);
    let auto = open_disk(options(), Want::Auto).unwrap();
    let expected = if Features::probe().is_ok() {
        Kind::Uring
    } else {
        Kind::Threads
    };
    assert_eq!(auto.choice().kind, expected);
    assert!(!auto.choice().reason.is_empty());
    assert_eq!(carry_out(&*auto, read(0, BLOCK)).result, Ok(()));
}

#[test]
fn direct_io_is_reported_with_its_alignment_or_not_at_all() {
    let file = file(1);
    let direct = direct_io(file.as_fd());
    if direct.dio {
        assert!(
            direct.memory_align.is_power_of_two() && direct.offset_align.is_power_of_two(),
            "{direct:?}"
        );
    } else {
        assert_eq!((direct.memory_align, direct.offset_align), (0, 0));
    }
}
