//! Pages of each content come back bit by bit, from each form of the code, and all forms write the
//! same bytes.

use larder_codec::{BLOCK_BYTES, BLOCK_VALUES, Codec, Form, Malformed};
use proptest::prelude::*;

const UNIT: usize = 4096;

/// The stream of a page, if it has fewer units than the page.
fn encoded(codec: Codec, page: &[u8]) -> Option<Vec<u8>> {
    let mut into = vec![0xa5; page.len()];
    let length = codec.encode(&[page], UNIT, &mut into)?;
    into.truncate(length);
    Some(into)
}

/// Checks a page with all forms; its stream.
fn check(page: &[u8]) -> Option<Vec<u8>> {
    let streams: Vec<_> = Form::all()
        .iter()
        .map(|form| encoded(Codec::of(*form), page))
        .collect();
    for (form, stream) in Form::all().iter().zip(&streams) {
        assert_eq!(*stream, streams[0], "{}", form.name());
    }
    let stream = streams.into_iter().next()??;
    assert!(stream.len().is_multiple_of(UNIT) && stream.len() < page.len());
    for form in Form::all() {
        let codec = Codec::of(form);
        let mut apart = vec![0x5a; page.len()];
        codec.decode(&stream, &mut [&mut apart]).expect("a stream");
        assert_eq!(apart, page, "{}", form.name());
        let mut within = vec![0x5a; page.len()];
        within[..stream.len()].copy_from_slice(&stream);
        codec
            .decode_in_place(&mut within, stream.len())
            .expect("a stream");
        assert_eq!(within, page, "{} in place", form.name());
    }
    Some(stream)
}

fn page(values: impl IntoIterator<Item = u16>) -> Vec<u8> {
    values.into_iter().flat_map(u16::to_le_bytes).collect()
}

/// A value whose exponent is one of `spread` from `first` on, but for one in `seldom`.
fn value(first: u8, spread: u8, seldom: u32) -> impl Strategy<Value = u16> {
    (any::<u16>(), 0..spread, 0..seldom).prop_map(move |(drawn, step, escape)| {
        let exponent = if escape == 0 {
            (drawn >> 7) as u8
        } else {
            first.wrapping_add(step)
        };
        (drawn & 0x807f) | (u16::from(exponent) << 7)
    })
}

/// Runs of blocks of one kind each.
fn contents() -> impl Strategy<Value = Vec<u8>> {
    let block = prop_oneof![
        4 => (any::<u8>(), 1u8..20, 2u32..500)
            .prop_flat_map(|(first, spread, seldom)| {
                prop::collection::vec(value(first, spread, seldom), BLOCK_VALUES)
            }),
        1 => prop::collection::vec(any::<u16>(), BLOCK_VALUES),
        1 => any::<u16>().prop_map(|value| vec![value; BLOCK_VALUES]),
    ];
    (prop::collection::vec(block, 1..12), 0..BLOCK_BYTES).prop_map(|(blocks, less)| {
        let mut page = page(blocks.into_iter().flatten());
        page.truncate(page.len() - less);
        page
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn pages_come_back_from_each_form(page in contents()) {
        check(&page);
    }

    #[test]
    fn parts_are_one_page(page in contents(), cuts in prop::collection::vec(any::<u16>(), 0..6)) {
        let mut cuts: Vec<_> = cuts.iter().map(|cut| usize::from(*cut) % page.len()).collect();
        cuts.extend([0, page.len()]);
        cuts.sort_unstable();
        let parts: Vec<_> = cuts.windows(2).map(|cut| &page[cut[0]..cut[1]]).collect();
        let mut into = vec![0; page.len()];
        let length = Codec::new().encode(&parts, UNIT, &mut into);
        prop_assert_eq!(length, encoded(Codec::new(), &page).map(|stream| stream.len()));
        if let Some(length) = length {
            let mut apart: Vec<_> = parts.iter().map(|part| vec![0; part.len()]).collect();
            let mut memory: Vec<_> = apart.iter_mut().map(|part| &mut part[..]).collect();
            Codec::new().decode(&into[..length], &mut memory).expect("a stream");
            prop_assert_eq!(apart.concat(), &page[..]);
            let mut within = into[..length].to_vec();
            within.resize(page.len(), 0x5a);
            let mut rest = &mut within[..];
            let cut = |cut: &[usize]| rest.split_off_mut(..cut[1] - cut[0]).unwrap_or_default();
            let mut memory: Vec<_> = cuts.windows(2).map(cut).collect();
            Codec::new().decode_in_parts(&mut memory, length).expect("a stream");
            prop_assert_eq!(within, page);
        }
    }

    #[test]
    fn no_bytes_harm_a_decoder(
        mut stream in contents(),
        plain in 0..10 * BLOCK_BYTES,
        entries in any::<bool>(),
        seed in any::<u64>(),
    ) {
        if entries {
            // Entries that could be right reach the decoders of blocks.
            let count = plain.div_ceil(BLOCK_BYTES);
            let at = stream.len().saturating_sub(8 * count);
            for (number, entry) in stream[at..].chunks_exact_mut(8).enumerate() {
                let drawn = seed.rotate_left(number as u32) as u16 % 300;
                entry[4..6].copy_from_slice(&drawn.to_le_bytes());
                entry[6..].copy_from_slice(&[seed as u8 % 242, 0]);
            }
        }
        let mut said = Vec::new();
        for form in Form::all() {
            let mut page = vec![0; plain];
            said.push((Codec::of(form).decode(&stream, &mut [&mut page]), page));
        }
        let (first, _) = &said[0];
        prop_assert!(said.iter().all(|(answer, _)| answer == first));
        let stored = stream.len().min(plain);
        let mut page = stream;
        page.resize(plain, 0);
        let (one, other) = page.split_at_mut(plain / 3);
        let _ = Codec::new().decode_in_parts(&mut [one, other], stored);
        let _ = Codec::new().decode_in_parts(&mut [one, other], plain + 1);
        let _ = Codec::new().decode_in_place(&mut page, stored);
    }
}

#[test]
fn each_value_comes_back() {
    // Each exponent is the base once, and an escape often.
    for first in 0..=u8::MAX - 14 {
        let values = (0..=u16::MAX).map(|value| {
            let near = first.wrapping_add(value as u8 % 15);
            if value % 16 == 0 {
                value
            } else {
                (value & 0x807f) | (u16::from(near) << 7)
            }
        });
        check(&page(values)).expect("fewer units");
    }
    // All of them, and each alone.
    check(&page(0..=u16::MAX));
    for value in (0..=u16::MAX)
        .step_by(251)
        .chain([0x7f80, 0xff80, 0x7fc1, 0xffff, 1, 0x8000])
    {
        let stream = check(&page(vec![value; 4 * BLOCK_VALUES])).expect("fewer units");
        assert_eq!(stream.len(), 7 * UNIT);
    }
}

#[test]
fn a_last_block_of_each_length_comes_back() {
    for last in (0..130).chain((130..BLOCK_BYTES).step_by(997)) {
        let values = page((0..4 * BLOCK_VALUES).map(|at| 0x3f80 | (at % 128) as u16));
        let length = 3 * BLOCK_BYTES + last;
        check(&values[..length]).expect("fewer units");
    }
}

#[test]
fn a_page_that_does_not_shrink_has_no_stream() {
    for bytes in [0, 1, 63, 64, 4096, 8192] {
        assert_eq!(
            encoded(Codec::new(), &vec![0; bytes]).is_some(),
            bytes > 2 * UNIT
        );
    }
}

#[test]
fn a_wrong_sum_and_a_wrong_number_of_escapes_are_named() {
    let values = page((0..4 * BLOCK_VALUES).map(|at| 0x3f80 | (at % 128) as u16));
    let stream = encoded(Codec::new(), &values).expect("a stream");
    for form in Form::all() {
        let mut page = vec![0; values.len()];
        let mut read = |at: usize, change: u8| {
            let mut changed = stream.clone();
            changed[at] ^= change;
            Codec::of(form).decode(&changed, &mut [&mut page])
        };
        let entries = stream.len() - 4 * 8;
        assert_eq!(read(0, 1), Err(Malformed::Sum { block: 0 }));
        assert_eq!(read(entries + 8, 1), Err(Malformed::Sum { block: 1 }));
        assert_eq!(read(BLOCK_VALUES, 1), Err(Malformed::Escapes { block: 0 }));
        assert_eq!(
            read(entries + 16 + 7, 1),
            Err(Malformed::Entry { block: 2 })
        );
        assert_eq!(
            read(entries + 24 + 6, 0x8f),
            Err(Malformed::Entry { block: 3 })
        );
        assert_eq!(read(entries + 5, 7), Err(Malformed::Escapes { block: 0 }));
        let short = Codec::of(form).decode(&stream[..31], &mut [&mut page]);
        assert!(matches!(short, Err(Malformed::Length { .. })));
    }
}
