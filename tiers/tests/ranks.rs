//! Groups of ranks, as threads and as processes: they agree, and no fault makes a rank hang.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

#[path = "../../tests/support/honest.rs"]
mod honest;

use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use honest::found;
use larder_tiers::ranks::{
    Call, RANKS_MAX, Ranks, RanksError, Reduce, SocketRank, Timeouts, VALUES_MAX, threads,
};
use rand::{RngExt, SeedableRng};
use rand_pcg::Pcg64Mcg;
use tempfile::TempDir;

/// Longer than any test: a timeout that must not expire.
const LONG: Duration = Duration::from_secs(600);

/// A timeout that a test waits for: long enough for threads on a busy machine to join a call.
const SHORT: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Threads,
    Sockets,
}

const KINDS: [Kind; 2] = [Kind::Threads, Kind::Sockets];

fn timeouts(call: Duration) -> Timeouts {
    Timeouts { gather: LONG, call }
}

/// A directory for the socket of one group.
fn place() -> (TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ranks");
    (directory, path)
}

/// One rank of a group that meets at `path`.
fn enter(path: &Path, rank: u32, size: u32, call: Duration) -> SocketRank {
    match rank {
        0 => SocketRank::host(path, size, timeouts(call)).unwrap(),
        _ => SocketRank::join(path, rank, size, timeouts(call)).unwrap(),
    }
}

/// A whole group, first rank first.
fn group(kind: Kind, size: u32, call: Duration) -> Vec<Box<dyn Ranks>> {
    if kind == Kind::Threads {
        let ranks = threads(size, call).unwrap();
        return ranks
            .into_iter()
            .map(|rank| Box::new(rank) as Box<dyn Ranks>)
            .collect();
    }
    let (_directory, path) = place();
    let path = &path;
    std::thread::scope(|scope| {
        let start = |rank| scope.spawn(move || enter(path, rank, size, call));
        let starting: Vec<_> = (0..size).map(start).collect();
        let boxed = |rank: SocketRank| Box::new(rank) as Box<dyn Ranks>;
        starting
            .into_iter()
            .map(|rank| boxed(rank.join().unwrap()))
            .collect()
    })
}

/// Runs `act` for each rank on its own thread. A rank lives until all are done.
fn each<T: Send>(group: Vec<Box<dyn Ranks>>, act: impl Fn(&mut dyn Ranks) -> T + Sync) -> Vec<T> {
    let ended: Vec<_> = std::thread::scope(|scope| {
        let act = &act;
        let acting: Vec<_> = group
            .into_iter()
            .map(|mut rank| scope.spawn(move || (act(rank.as_mut()), rank)))
            .collect();
        acting
            .into_iter()
            .map(|acting| acting.join().unwrap())
            .collect()
    });
    ended.into_iter().map(|(value, _)| value).collect()
}

#[test]
fn all_ranks_get_the_least_and_the_greatest_of_each_value() {
    for kind in KINDS {
        for size in 1..=8 {
            let results = each(group(kind, size, LONG), |rank| {
                assert_eq!(rank.size(), size);
                let mine = [
                    u64::from(rank.rank()),
                    7 - u64::from(rank.rank()),
                    u64::MAX,
                    0,
                ];
                let (mut least, mut greatest) = (mine, mine);
                rank.min(&mut least).unwrap();
                rank.max(&mut greatest).unwrap();
                rank.max(&mut []).unwrap();
                (least, greatest)
            });
            let last = u64::from(size - 1);
            let wanted = ([0, 7 - last, u64::MAX, 0], [last, 7, u64::MAX, 0]);
            assert_eq!(results, vec![wanted; size as usize], "{kind:?}");
        }
    }
}

#[test]
fn ranks_that_are_delayed_at_random_agree_on_every_round() {
    const ROUNDS: usize = 300;
    for kind in KINDS {
        for size in [2, 3, 8] {
            let value = |rank: u64, round: usize| (round as u64 * 37 + rank * 101) % 64;
            let results = each(group(kind, size, LONG), |rank| {
                let me = u64::from(rank.rank());
                let mut dice = Pcg64Mcg::seed_from_u64(me);
                let round = |round| {
                    for _ in 0..dice.random_range(0..40) {
                        std::thread::yield_now();
                    }
                    let mut values = vec![value(me, round); 1 + round % 3];
                    let reduce = if round % 2 == 0 {
                        Reduce::Min
                    } else {
                        Reduce::Max
                    };
                    rank.all_reduce(reduce, &mut values).unwrap();
                    values
                };
                (0..ROUNDS).map(round).collect::<Vec<_>>()
            });
            let all = |round| (0..u64::from(size)).map(move |rank| value(rank, round));
            for (round, values) in results[0].iter().enumerate() {
                let one = if round % 2 == 0 {
                    all(round).min()
                } else {
                    all(round).max()
                };
                assert_eq!(*values, vec![one.unwrap(); 1 + round % 3]);
            }
            assert!(
                results.iter().all(|result| *result == results[0]),
                "{kind:?}"
            );
        }
    }
}

#[test]
fn a_rank_that_stalls_is_reported_to_all() {
    for kind in KINDS {
        for (size, stalled) in [(2, 0), (2, 1), (5, 3)] {
            let errors = each(group(kind, size, SHORT), |rank| {
                rank.min(&mut [1]).unwrap();
                if rank.rank() == stalled {
                    return None;
                }
                rank.min(&mut [1]).err()
            });
            let wanted = RanksError::Stalled {
                ranks: vec![stalled],
                timeout: SHORT,
            };
            for (rank, error) in errors.into_iter().enumerate() {
                assert_eq!(
                    error,
                    (rank != stalled as usize).then(|| wanted.clone()),
                    "{kind:?}"
                );
            }
        }
    }
}

#[test]
fn a_rank_that_joins_too_late_gets_the_reason() {
    for kind in KINDS {
        let mut ranks = group(kind, 3, SHORT);
        let mut late = ranks.remove(1);
        let errors = each(ranks, |rank| {
            let error = rank.max(&mut [0; 4]).unwrap_err();
            (error.clone(), rank.max(&mut [0; 4]).unwrap_err() == error)
        });
        // Threads of the group sent the reason before they ended. A host that ended is reported as
        // ended.
        let told = late.max(&mut [0; 4]).unwrap_err();
        assert_eq!(
            told,
            RanksError::Stalled {
                ranks: vec![1],
                timeout: SHORT
            },
            "{kind:?}"
        );
        assert!(
            errors.iter().all(|(error, stays)| *error == told && *stays),
            "{kind:?}"
        );
    }
}

#[test]
fn a_rank_that_ends_is_an_error_for_all_at_once() {
    for kind in KINDS {
        for (size, gone) in [(2, 1), (2, 0), (6, 4)] {
            let mut ranks = group(kind, size, LONG);
            let going = ranks.remove(gone as usize);
            std::thread::scope(|scope| {
                let waiting = scope.spawn(|| each(ranks, |rank| rank.min(&mut [1]).unwrap_err()));
                std::thread::yield_now();
                drop(going);
                let errors = waiting.join().unwrap();
                let wanted = RanksError::Gone { rank: gone };
                assert!(
                    errors.iter().all(|error| *error == wanted),
                    "{kind:?}: {errors:?}"
                );
            });
        }
    }
}

#[test]
fn a_round_joined_by_all_is_complete_even_if_a_rank_then_ends() {
    for kind in KINDS {
        for _ in 0..50 {
            let results = std::thread::scope(|scope| {
                let act = |mut rank: Box<dyn Ranks>| {
                    let mut values = [u64::from(rank.rank())];
                    rank.max(&mut values).map(|()| values[0])
                };
                let acting: Vec<_> = group(kind, 3, LONG)
                    .into_iter()
                    .map(|rank| scope.spawn(move || act(rank)))
                    .collect();
                acting
                    .into_iter()
                    .map(|acting| acting.join().unwrap())
                    .collect::<Vec<_>>()
            });
            assert_eq!(results, [Ok(2), Ok(2), Ok(2)], "{kind:?}");
        }
    }
}

#[test]
fn differing_calls_are_an_error_that_reports_both_ranks() {
    let different: [(Reduce, usize); 2] = [(Reduce::Max, 2), (Reduce::Min, 3)];
    for kind in KINDS {
        for (reduce, values) in different {
            let errors = each(group(kind, 4, LONG), |rank| {
                let (reduce, values) = match rank.rank() {
                    2 => (reduce, values),
                    _ => (Reduce::Min, 2),
                };
                rank.all_reduce(reduce, &mut vec![5; values]).unwrap_err()
            });
            let RanksError::Mismatch { first, second } = errors[0].clone() else {
                panic!("{:?}", errors[0]);
            };
            let odd = Call {
                rank: 2,
                reduce,
                values,
            };
            assert!((first == odd) != (second == odd), "{first} but {second}");
            let other = if first == odd { second } else { first };
            assert_eq!((other.reduce, other.values), (Reduce::Min, 2));
            assert!(
                errors.iter().all(|error| *error == errors[0]),
                "{kind:?}: {errors:?}"
            );
            let said = errors[0].to_string();
            assert!(said.contains("rank 2 called for the"), "{said}");
            assert!(
                said.contains(&format!("rank {} called for the", other.rank)),
                "{said}"
            );
        }
    }
}

#[test]
fn values_stay_as_they_were_when_a_call_fails() {
    for kind in KINDS {
        let mut ranks = group(kind, 2, LONG);
        drop(ranks.pop());
        let mut values = [3, 1];
        assert!(ranks[0].min(&mut values).is_err());
        assert_eq!(values, [3, 1]);
    }
}

#[test]
fn too_many_values_break_the_group_and_not_the_process() {
    for kind in KINDS {
        for odd in [0, 1] {
            let errors = each(group(kind, 2, LONG), |rank| {
                let values = if rank.rank() == odd {
                    VALUES_MAX + 1
                } else {
                    VALUES_MAX
                };
                let error = rank.min(&mut vec![0; values]).unwrap_err();
                // Other ranks, which did not see the call, get `Gone`.
                (rank.rank() != odd).then_some(error)
            });
            assert!(
                errors[odd as usize].is_none() && errors[1 - odd as usize].is_some(),
                "{kind:?}"
            );
        }
    }
}

#[test]
fn impossible_groups_are_refused() {
    let (_directory, path) = place();
    assert!(matches!(
        threads(0, LONG),
        Err(RanksError::NoSuchRank { .. })
    ));
    assert!(matches!(
        threads(RANKS_MAX + 1, LONG),
        Err(RanksError::NoSuchRank { .. })
    ));
    assert!(SocketRank::host(&path, 0, timeouts(LONG)).is_err());
    assert!(SocketRank::join(&path, 2, 2, timeouts(LONG)).is_err());
    let nowhere = path.join("nowhere");
    let error = SocketRank::host(&nowhere, 1, timeouts(LONG))
        .err()
        .unwrap()
        .to_string();
    assert!(
        error.contains("listening at") && error.contains("nowhere"),
        "{error}"
    );
}

#[test]
fn a_group_that_does_not_gather_reports_the_missing_ranks() {
    let (_directory, path) = place();
    let few = Timeouts {
        gather: SHORT,
        call: LONG,
    };
    let missing = SocketRank::host(&path, 3, few).err().unwrap();
    assert_eq!(
        missing,
        RanksError::Stalled {
            ranks: vec![1, 2],
            timeout: SHORT
        }
    );
    assert!(!path.exists());
    let nobody = SocketRank::join(&path, 1, 3, few).err().unwrap();
    assert!(matches!(nobody, RanksError::Socket { .. }), "{nobody}");
}

#[test]
fn invalid_join_requests_are_refused_and_the_group_gathers_without_them() {
    let (_directory, path) = place();
    std::thread::scope(|scope| {
        let host = scope.spawn(|| enter(&path, 0, 3, LONG));
        let away = |rank, size| {
            SocketRank::join(&path, rank, size, timeouts(LONG))
                .err()
                .unwrap()
        };
        assert_eq!(
            away(2, 4),
            RanksError::TurnedAway {
                rank: 2,
                why: "it expects 4 ranks, rank 0 expects 3".to_owned()
            }
        );
        // Foreign connections: one sends nothing, one sends other data.
        drop(UnixStream::connect(&path).unwrap());
        let mut stranger = UnixStream::connect(&path).unwrap();
        stranger.write_all(b"GET / HTTP/1.1\r\n\r\n").unwrap();
        assert!(matches!(stranger.read(&mut [0]), Ok(0) | Err(_)));
        let second = greet(&path, 2, 3, b"LARDERRK");
        let twice = away(2, 3);
        assert_eq!(
            twice,
            RanksError::TurnedAway {
                rank: 2,
                why: "this rank has already joined".to_owned()
            }
        );
        let first = scope.spawn(|| enter(&path, 1, 3, LONG));
        let mut ranks = [host.join().unwrap(), first.join().unwrap()];
        assert!(!path.exists());
        drop(second);
        assert_eq!(ranks[0].min(&mut [1]), Err(RanksError::Gone { rank: 2 }));
        assert_eq!(ranks[1].min(&mut [1]), Err(RanksError::Gone { rank: 2 }));
    });
}

#[test]
fn a_socket_that_a_killed_host_left_behind_is_taken_over_and_one_in_use_is_not() {
    let (_directory, path) = place();
    drop(UnixListener::bind(&path).unwrap());
    assert!(path.exists());
    let ranks = SocketRank::host(&path, 1, timeouts(LONG));
    assert!(ranks.is_ok());
    let _other = UnixListener::bind(&path).unwrap();
    assert!(matches!(
        SocketRank::host(&path, 1, timeouts(LONG)),
        Err(RanksError::Socket { .. })
    ));
}

#[test]
fn a_regular_file_at_the_path_of_the_socket_stays() {
    let (_directory, path) = place();
    std::fs::write(&path, b"kept").unwrap();
    let refused = SocketRank::host(&path, 1, timeouts(LONG)).err();
    assert!(
        matches!(refused, Some(RanksError::Socket { .. })),
        "{refused:?}"
    );
    assert_eq!(std::fs::read(&path).unwrap(), b"kept");
}

/// A rank without the library: joins with a hand-written message.
fn greet(path: &Path, rank: u8, size: u8, magic: &[u8; 8]) -> UnixStream {
    let mut stream = found("the host listens", || UnixStream::connect(path).ok());
    let message = [&[0][..], magic, &[2, rank, size]].concat();
    stream.write_all(&framed(&message)).unwrap();
    stream
}

fn framed(message: &[u8]) -> Vec<u8> {
    [&(message.len() as u32).to_le_bytes(), message].concat()
}

#[test]
fn a_connection_that_breaks_anywhere_is_an_error_for_the_others() {
    // A call for the minimum of one value, truncated at every position, followed by the end of the
    // connection.
    let call = framed(&[1, 0, 1, 42]);
    for sent in 0..call.len() {
        let error = others_of(&call[..sent]);
        assert_eq!(error, RanksError::Gone { rank: 1 }, "after {sent} bytes");
    }
}

#[test]
fn invalid_bytes_are_an_error_that_reports_their_sender() {
    let nonsense: [&[u8]; 6] = [
        &[0xff; 4],
        &framed(&[]),
        &framed(&[9, 9, 9]),
        &framed(&[1, 0, 1, 42, 0]),
        &framed(&[1, 0, 200, 200, 200, 200, 1]),
        &framed(&[&[0][..], b"LARDERRK", &[2, 1, 2]].concat()),
    ];
    for bytes in nonsense {
        let error = others_of(bytes);
        assert!(
            matches!(error, RanksError::Garbled { rank: 1, .. }),
            "{bytes:?}: {error}"
        );
    }
}

/// The error of rank 0 when rank 1 sends these bytes and closes the connection.
fn others_of(bytes: &[u8]) -> RanksError {
    let (_directory, path) = place();
    std::thread::scope(|scope| {
        let host = scope.spawn(|| enter(&path, 0, 2, LONG));
        let mut guest = greet(&path, 1, 2, b"LARDERRK");
        guest.write_all(bytes).unwrap();
        let mut host = host.join().unwrap();
        drop(guest);
        host.min(&mut [1]).unwrap_err()
    })
}

#[test]
fn a_host_that_sends_invalid_data_or_nothing_is_an_error_for_its_guests() {
    for (answers, wanted) in [
        // A valid join answer, then two values for one.
        (
            vec![framed(&[0, 0]), framed(&[0, 2, 7, 7])],
            "rank 0 sent 2 values for 1",
        ),
        (
            vec![framed(&[0, 0]), vec![0xff; 4]],
            "rank 0 sent a frame of",
        ),
        (vec![framed(&[0, 0]), vec![1]], "rank 0 has ended"),
        (vec![framed(&[0, 0])], "rank 0 has ended"),
    ] {
        let (_directory, path) = place();
        let listener = UnixListener::bind(&path).unwrap();
        let error = std::thread::scope(|scope| {
            let guest = scope.spawn(|| {
                let mut guest = enter(&path, 1, 2, LONG);
                guest.min(&mut [1]).unwrap_err()
            });
            let (mut stream, _) = listener.accept().unwrap();
            // Reads the join request and the call, so that the connection closes without a reset.
            stream.read_exact(&mut [0; 16]).unwrap();
            stream.write_all(&answers[0]).unwrap();
            stream.read_exact(&mut [0; 8]).unwrap();
            answers[1..]
                .iter()
                .for_each(|answer| stream.write_all(answer).unwrap());
            drop(stream);
            guest.join().unwrap()
        });
        assert!(error.to_string().starts_with(wanted), "{error}");
    }
}

#[test]
fn a_host_that_is_stopped_is_an_error_after_twice_the_timeout() {
    let (_directory, path) = place();
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::scope(|scope| {
        let guest = scope.spawn(|| enter(&path, 1, 2, SHORT).min(&mut [1]).unwrap_err());
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(&framed(&[0, 0])).unwrap();
        let wanted = RanksError::Stalled {
            ranks: vec![0],
            timeout: SHORT * 2,
        };
        assert_eq!(guest.join().unwrap(), wanted);
    });
}

const CHILD: &str = "LARDER_TEST_RANK_OF";

#[test]
#[ignore = "runs in the process of the next test"]
fn child() {
    let path = std::env::var(CHILD).expect("where to meet the others");
    let mut rank = enter(Path::new(&path), 2, 3, LONG);
    let mut values = [2];
    rank.max(&mut values).unwrap();
    assert_eq!(values, [9]);
    // Until it is killed: no other rank joins this round.
    let _ = rank.max(&mut values);
}

#[test]
fn a_killed_process_is_an_error_for_all_others_at_once() {
    let (_directory, path) = place();
    let mut child: Child = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "child"])
        .env(CHILD, &path)
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    std::thread::scope(|scope| {
        let first = scope.spawn(|| {
            let mut rank = enter(&path, 1, 3, LONG);
            rank.max(&mut [9]).unwrap();
            rank
        });
        let mut host = enter(&path, 0, 3, LONG);
        host.max(&mut [1]).unwrap();
        let mut first = first.join().unwrap();
        let waiting = scope.spawn(move || first.max(&mut [1]).unwrap_err());
        child.kill().unwrap();
        child.wait().unwrap();
        let error = waiting.join().unwrap();
        assert_eq!(error, RanksError::Gone { rank: 2 });
        assert_eq!(host.max(&mut [1]).unwrap_err(), error);
    });
}
