//! Host memory is registered in pieces. A copy must not cross from one piece into the next.
//!
//! Arithmetic only, no CUDA.

use std::ops::Range;

use crate::transfer::{Copy2d, Rows};

/// A byte range of a host pool, as offsets.
pub(super) type Piece = Range<u64>;

/// Divides `bytes` bytes from address `start` into pieces of about `piece_bytes`, at least one page
/// of the host (`page` bytes). No two pieces share a page, because a page cannot be registered
/// twice.
pub(super) fn pieces(start: u64, bytes: u64, piece_bytes: u64, page: u64) -> Vec<Piece> {
    let piece_bytes = piece_bytes.max(page);
    let mut pieces = Vec::new();
    let mut at = 0;
    while at < bytes {
        let cut = (start + at).saturating_add(piece_bytes) / page * page;
        let end = (cut - start).min(bytes);
        pieces.push(at..end);
        at = end;
    }
    pieces
}

/// Splits a copy so that no part crosses a boundary between pieces of the L2 pool.
pub(super) fn within(copy: Copy2d, pieces: &[Piece], each: &mut impl FnMut(Copy2d)) {
    let after = pieces.partition_point(|piece| piece.end <= copy.l2);
    let Some(end) = pieces.get(after).map(|piece| piece.end) else {
        return;
    };
    let rows = copy.rows;
    let reach = copy.l2 + (rows.count - 1) * rows.l2_pitch + rows.width;
    if reach <= end {
        each(copy);
        return;
    }
    // Three groups: the rows before the boundary, the row across it, and the rest.
    let room = end - copy.l2;
    let before = room
        .checked_sub(rows.width)
        .map_or(0, |room| room / rows.l2_pitch.max(1) + 1)
        .min(rows.count);
    if before > 0 {
        each(some_rows(copy, 0, before));
        if before < rows.count {
            within(some_rows(copy, before, rows.count - before), pieces, each);
        }
        return;
    }
    let (head, tail) = (room, rows.width - room);
    each(part_of_row(copy, 0, head));
    within(part_of_row(copy, head, tail), pieces, each);
    if rows.count > 1 {
        within(some_rows(copy, 1, rows.count - 1), pieces, each);
    }
}

fn some_rows(copy: Copy2d, first: u64, count: u64) -> Copy2d {
    let rows = copy.rows;
    Copy2d {
        l1: copy.l1 + first * rows.l1_pitch,
        l2: copy.l2 + first * rows.l2_pitch,
        rows: Rows { count, ..rows },
    }
}

fn part_of_row(copy: Copy2d, from: u64, width: u64) -> Copy2d {
    Copy2d {
        l1: copy.l1 + from,
        l2: copy.l2 + from,
        rows: Rows {
            width,
            count: 1,
            l1_pitch: width,
            l2_pitch: width,
        },
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Page sizes of hosts.
    const PAGES: [u64; 3] = [4 << 10, 16 << 10, 64 << 10];

    proptest! {
        #[test]
        fn pieces_cover_everything_once_and_share_no_page(
            start in 0..100_000u64, bytes in 1..200_000u64, piece_bytes in 0..50_000u64,
            page in prop::sample::select(&PAGES[..]),
        ) {
            let pieces = pieces(start, bytes, piece_bytes, page);
            prop_assert_eq!(pieces.first().map(|piece| piece.start), Some(0));
            prop_assert_eq!(pieces.last().map(|piece| piece.end), Some(bytes));
            for pair in pieces.windows(2) {
                prop_assert_eq!(pair[0].end, pair[1].start);
                prop_assert_eq!((start + pair[0].end) % page, 0);
            }
            let longest = piece_bytes.max(page);
            prop_assert!(pieces
                .iter()
                .all(|piece| piece.start < piece.end && piece.end - piece.start <= longest));
        }

        #[test]
        fn cut_copies_move_the_same_bytes_and_cross_no_boundary(
            l1 in 0..1000u64, l2 in 0..20_000u64, width in 1..9000u64, count in 1..9u64,
            gaps in (0..5000u64, 0..5000u64), start in 0..5000u64, piece_bytes in 4096..20_000u64,
        ) {
            let rows = Rows { width, count, l1_pitch: width + gaps.0, l2_pitch: width + gaps.1 };
            let copy = Copy2d { l1, l2, rows };
            let pieces = pieces(start, 200_000, piece_bytes, 4096);
            let mut moved = Vec::new();
            let mut crossed = false;
            within(copy, &pieces, &mut |copy| {
                moved.extend(runs(&copy));
                let reach = copy.l2 + (copy.rows.count - 1) * copy.rows.l2_pitch + copy.rows.width;
                crossed |= !pieces.iter().any(|piece| piece.start <= copy.l2 && reach <= piece.end);
            });
            prop_assert!(!crossed);
            prop_assert_eq!(joined(moved), joined(runs(&copy)));
        }
    }

    /// Offsets and length of each row.
    fn runs(copy: &Copy2d) -> Vec<(u64, u64, u64)> {
        let rows = copy.rows;
        let row = |row| {
            (
                copy.l1 + row * rows.l1_pitch,
                copy.l2 + row * rows.l2_pitch,
                rows.width,
            )
        };
        (0..rows.count).map(row).collect()
    }

    /// Joins runs that are adjacent on both sides.
    fn joined(mut runs: Vec<(u64, u64, u64)>) -> Vec<(u64, u64, u64)> {
        runs.sort_unstable();
        let mut joined: Vec<(u64, u64, u64)> = Vec::new();
        for (l1, l2, bytes) in runs {
            match joined.last_mut() {
                Some(last) if last.0 + last.2 == l1 && last.1 + last.2 == l2 => last.2 += bytes,
                _ => joined.push((l1, l2, bytes)),
            }
        }
        joined
    }
}
