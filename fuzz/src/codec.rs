//! The codec: bytes as a page, and the same bytes as a stream of a page of another length.

use larder_codec::{BLOCK_BYTES, Codec, Form};

use crate::feed::Feed;

const UNIT: usize = 512;

/// The first two bytes are the length of the page that the rest is a stream of.
///
/// # Panics
/// If a page does not come back, or two forms of the code differ.
pub fn codec(data: &[u8]) {
    let mut feed = Feed::new(data);
    let plain = usize::from(feed.short());
    let rest = feed.bytes(usize::MAX);
    round_trip(rest);
    hostile(rest, plain);
}

fn round_trip(page: &[u8]) {
    let mut streams = Vec::new();
    for form in Form::all() {
        let codec = Codec::of(form);
        let mut stream = vec![0; page.len()];
        let length = codec.encode(&[page], UNIT, &mut stream);
        if let Some(length) = length {
            let mut back = vec![0; page.len()];
            assert_eq!(codec.decode(&stream[..length], &mut [&mut back]), Ok(()));
            assert_eq!(back, page, "{}: another page", form.name());
            back[..length].copy_from_slice(&stream[..length]);
            assert_eq!(codec.decode_in_place(&mut back, length), Ok(()));
            assert_eq!(back, page, "{}: another page in place", form.name());
        }
        stream.truncate(length.unwrap_or(0));
        streams.push(stream);
    }
    let are_equal = streams.windows(2).all(|pair| pair[0] == pair[1]);
    assert!(are_equal, "two forms write other bytes");
}

fn hostile(stream: &[u8], plain: usize) {
    let mut answers = Vec::new();
    for form in Form::all() {
        let mut page = vec![0; plain];
        answers.push(Codec::of(form).decode(stream, &mut [&mut page]));
        let stored = stream.len().min(plain);
        page[..stored].copy_from_slice(&stream[..stored]);
        let mut again = page.clone();
        let _ = Codec::of(form).decode_in_place(&mut page, stored);
        let (one, other) = again.split_at_mut(plain / 3);
        let _ = Codec::of(form).decode_in_parts(&mut [one, other], stored);
    }
    assert!(
        answers.windows(2).all(|pair| pair[0] == pair[1]),
        "{answers:?}"
    );
}

/// Pages that shrink and that do not, and the stream of a page.
pub(crate) fn seeds() -> Vec<Vec<u8>> {
    let near: Vec<u8> = (0..2 * BLOCK_BYTES as u16 + 64)
        .flat_map(|at| (0x3f00 | (at.wrapping_mul(2741) % 0x300)).to_le_bytes())
        .collect();
    let seldom: Vec<u8> = near
        .chunks_exact(2)
        .zip(0u16..)
        .flat_map(|(value, at)| {
            if at % 37 == 0 {
                [0, at as u8]
            } else {
                [value[0], value[1]]
            }
        })
        .collect();
    let mut stream = vec![0; near.len()];
    let length = Codec::new()
        .encode(&[&near], UNIT, &mut stream)
        .unwrap_or(0);
    stream.truncate(length);
    let plain = u16::try_from(near.len()).unwrap_or(0).to_le_bytes();
    let pages = [
        near,
        seldom,
        vec![0; BLOCK_BYTES],
        (0..=255).cycle().take(9000).collect(),
    ];
    let pages = pages.map(|page| [&[0, 64][..], &page].concat());
    pages
        .into_iter()
        .chain([[&plain[..], &stream].concat()])
        .collect()
}
