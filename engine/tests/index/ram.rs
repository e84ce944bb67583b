//! The memory of the index.

use super::*;

#[test]
fn no_page_takes_more_than_64_bytes_even_when_all_are_leaves() {
    let index = Index::new(1, AMPLE_BLOCKS);
    let mut worst = 0;
    for batch in 0..1800 {
        let heads: Vec<Publish> = (0..256)
            .map(|number| page(key(batch, number), Parent::Head, place(0, number)))
            .collect();
        index.publish(&heads);
        if index.len() > 200_000 {
            worst = worst.max(index.ram_bytes() / index.len());
        }
    }
    assert!((40..64).contains(&worst), "{worst} bytes a page");
}

#[test]
fn churn_at_a_fixed_number_of_pages_takes_no_more_than_64_bytes_a_page() {
    const PAGES: u32 = 200_000;
    let index = Index::new(1, AMPLE_BLOCKS);
    let publish = |number| {
        index.publish(&[page(key(number, 0), Parent::Head, place(0, 0))]);
    };
    (0..PAGES).for_each(publish);
    (PAGES..3 * PAGES).for_each(|number| {
        index.evict_coldest(0, |_, _| false, |_| false).unwrap();
        publish(number);
    });
    assert_eq!(index.len(), PAGES as usize);
    assert!(
        index.ram_bytes() / index.len() < 64,
        "{}",
        index.ram_bytes()
    );
    index.check_invariants().unwrap();
}

#[test]
fn pages_that_a_codec_made_smaller_take_four_bytes_more_and_others_none() {
    const PAGES: u32 = 200_000;
    let index = Index::new(1, AMPLE_BLOCKS);
    for number in 0..PAGES {
        index.publish(&[page(key(number, 0), Parent::Head, place(0, number))]);
    }
    // The same index: the size of the table depends on chance.
    let moved = |from: u32, to: u32, saved: u32| {
        for number in 0..PAGES {
            let (from, to) = (place(0, number + from), place(0, number + to));
            let to = Place { saved, ..to };
            assert!(index.relocate(NS, key(number, 0).prefix(), from, to));
        }
        index.check_invariants().unwrap();
        index.ram_bytes()
    };
    let before = index.ram_bytes();
    assert_eq!(moved(0, 1, 0), before);
    let after = moved(1, 2, 5);
    assert_eq!(index.saved_of(NS), u64::from(PAGES * 5));
    // The last chunk is not full.
    let most = (4 * PAGES + (64 << 10) + 4096) as usize;
    assert!((1..=most).contains(&(after - before)), "{after}, {before}");
}

#[test]
fn encrypted_pages_take_28_bytes_more_and_others_none() {
    const PAGES: u32 = 200_000;
    let index = Index::new(1, AMPLE_BLOCKS);
    let put = |number, start, seal: fn(Publish) -> Publish| {
        index.publish(&[seal(page(key(number, 0), Parent::Head, place(0, start)))]);
    };
    (0..PAGES).for_each(|number| put(number, number, |page| page));
    let before = index.ram_bytes();
    (0..PAGES).for_each(|number| put(number, number + 1, sealed));
    index.check_invariants().unwrap();
    let after = index.ram_bytes();
    // The last chunk is not full.
    let most = (28 * PAGES + 28 * (16 << 10) + 4096) as usize;
    assert!((1..=most).contains(&(after - before)), "{after}, {before}");
    let found = index.locate(NS, &key(9, 0)).unwrap();
    let expected = sealed(page(key(9, 0), Parent::Head, place(0, 10)));
    assert_eq!(found.proof, expected.proof);
    put(9, 5, |page| page);
    let found = index.locate(NS, &key(9, 0)).unwrap();
    assert_eq!(found.proof, 6.into());
}
