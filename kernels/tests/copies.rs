//! The copies that a transfer consists of.

#![allow(clippy::unwrap_used)]

mod support;

use larder_kernels::{Direction, HostDevice, KvShape, Layout, PagePair};
use support::{Case, Pools};

fn shape() -> KvShape {
    KvShape::mha(3, 2, 8, 2, 4).unwrap()
}

fn case(layout: Layout, direction: Direction) -> Case {
    Case {
        shape: shape(),
        layout,
        direction,
        l1_pages: 8,
        l2_pages: 8,
        pairs: support::pairs(8, 8, 5, 3),
        only: None,
    }
}

fn pairs(pairs: &[(u32, u32)]) -> Vec<PagePair> {
    let pair = |&(l1, l2)| PagePair { l1, l2 };
    pairs.iter().map(pair).collect()
}

#[test]
fn neighbours_in_both_pools_are_one_copy_a_layer_and_part() {
    let device = HostDevice::stepped(Box::new(|_| Ok(())));
    // Pages, rows and bytes of each copy of a layer's first part, for the run 2..6 -> 3..7 and the
    // page 0 -> 0.
    let run = pairs(&[(3, 4), (2, 3), (0, 0), (4, 5), (5, 6)]);
    let row = u64::from(shape().row_bytes());
    let chunk = u64::from(shape().chunk_bytes());
    for (layout, wanted) in [
        (Layout::LayerFirst, [(1, chunk), (1, 4 * chunk)]),
        (Layout::PageFirst, [(4, row), (16, row)]),
        (Layout::PageFirstDirect, [(1, chunk), (4, chunk)]),
    ] {
        let case = Case {
            pairs: run.clone(),
            ..case(layout, Direction::Load)
        };
        let transfer = Pools::new(&device, &case).transfer(&case);
        let copies: Vec<_> = transfer
            .copies(1)
            .map(|copy| (copy.rows.count, copy.rows.width))
            .collect();
        assert_eq!(copies, [wanted, wanted].concat(), "{layout}");
    }
}

#[test]
fn rows_of_neighbours_are_one_copy_where_those_of_a_page_lie_together() {
    let device = HostDevice::stepped(Box::new(|_| Ok(())));
    let row = u64::from(shape().row_bytes());
    for (layout, rows, wanted) in [
        (Layout::LayerFirst, 1..3, vec![(2, 2 * row)]),
        (Layout::PageFirst, 1..3, vec![(2, row), (2, row)]),
        (Layout::PageFirst, 3..4, vec![(2, row)]),
        (Layout::PageFirstDirect, 0..3, vec![(2, 3 * row)]),
    ] {
        let case = Case {
            pairs: pairs(&[(3, 4), (2, 3)]),
            only: Some((1..2, rows)),
            ..case(layout, Direction::Load)
        };
        let transfer = Pools::new(&device, &case).transfer(&case);
        let copies: Vec<_> = transfer
            .copies(1)
            .map(|copy| (copy.rows.count, copy.rows.width))
            .collect();
        assert_eq!(copies, [wanted.clone(), wanted].concat(), "{layout}");
        assert_eq!(
            transfer.bytes(),
            copies.iter().map(|of| of.0 * of.1).sum::<u64>()
        );
    }
}

#[test]
fn layers_and_rows_that_do_not_exist_are_refused() {
    let device = HostDevice::stepped(Box::new(|_| Ok(())));
    let case = case(Layout::PageFirst, Direction::Load);
    let pools = Pools::new(&device, &case);
    for (layers, rows) in [(0..4, 0..4), (2..2, 0..4), (0..3, 0..5), (0..3, 4..4)] {
        let refused = pools.transfer(&case).only(layers.clone(), rows.clone());
        assert!(refused.is_err(), "{layers:?} {rows:?}");
    }
}

#[test]
fn heads_that_lie_apart_are_a_copy_each() {
    let device = HostDevice::stepped(Box::new(|_| Ok(())));
    let case = Case {
        pairs: pairs(&[(3, 4), (2, 3)]),
        ..case(Layout::PageHead, Direction::Load)
    };
    let transfer = Pools::new(&device, &case).transfer(&case);
    let (tokens, head) = (
        u64::from(shape().page_tokens()),
        u64::from(shape().head_bytes()),
    );
    let copies: Vec<_> = transfer
        .copies(1)
        .map(|copy| (copy.rows.count, copy.rows.width))
        .collect();
    // Two parts, two pages, two heads.
    assert_eq!(copies, [(tokens, head); 8]);
}
