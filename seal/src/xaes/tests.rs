#![allow(clippy::unwrap_used, clippy::indexing_slicing)]

use sha3::Shake128;
use sha3::digest::{ExtendableOutput, Update, XofReader};

use super::*;

/// The vectors of the specification: one for each value of the first bit of L.
#[test]
fn the_vectors_of_the_specification_hold() {
    let vectors: [(u8, &[u8], [u8; 28]); 2] = [
        (
            1,
            b"",
            [
                0xce, 0x54, 0x6e, 0xf6, 0x3c, 0x9c, 0xc6, 0x07, 0x65, 0x92, 0x36, 0x09, 0xb3, 0x3a,
                0x9a, 0x19, 0x74, 0xe9, 0x6e, 0x52, 0xda, 0xf2, 0xfc, 0xf7, 0x07, 0x5e, 0x22, 0x71,
            ],
        ),
        (
            3,
            b"c2sp.org/XAES-256-GCM",
            [
                0x98, 0x6e, 0xc1, 0x83, 0x25, 0x93, 0xdf, 0x54, 0x43, 0xa1, 0x79, 0x43, 0x7f, 0xd0,
                0x83, 0xbf, 0x3f, 0xdb, 0x41, 0xab, 0xd7, 0x40, 0xa2, 0x1f, 0x71, 0xeb, 0x76, 0x9d,
            ],
        ),
    ];
    for (key, associated, expected) in vectors {
        let (key, nonce) = (&[key; 32], b"ABCDEFGHIJKLMNOPQRSTUVWX");
        let mut text = *b"XAES-256-GCM";
        let tag = seal(key, nonce, associated, &mut text).unwrap();
        assert_eq!([&text[..], &tag].concat(), expected);
        assert_eq!(open(key, nonce, associated, &mut text, &tag), Ok(true));
        assert_eq!(&text, b"XAES-256-GCM");
    }
}

#[test]
fn the_accumulated_vector_of_ten_thousand_messages_holds() {
    let mut random = Shake128::default().finalize_xof();
    let mut sum = Shake128::default();
    let text_of = |random: &mut dyn XofReader| {
        let mut length = [0];
        random.read(&mut length);
        let mut text = vec![0; length[0].into()];
        random.read(&mut text);
        text
    };
    for _ in 0..10_000 {
        let (mut key, mut nonce) = ([0; KEY_BYTES], [0; LONG_NONCE_BYTES]);
        random.read(&mut key);
        random.read(&mut nonce);
        let plain = text_of(&mut random);
        let associated = text_of(&mut random);
        let mut text = plain.clone();
        let tag = seal(&key, &nonce, &associated, &mut text).unwrap();
        sum.update(&text);
        sum.update(&tag);
        assert_eq!(open(&key, &nonce, &associated, &mut text, &tag), Ok(true));
        assert_eq!(text, plain);
    }
    let mut digest = [0; 32];
    sum.finalize_xof().read(&mut digest);
    let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(
        hex,
        "e6b9edf2df6cec60c8cbd864e2211b597fb69a529160cd040d56c0c210081939"
    );
}

#[test]
fn a_text_with_a_wrong_tag_is_zeroed() {
    let (key, nonce) = (&[1; 32], &[2; 24]);
    let mut text = *b"a namespace";
    let mut tag = seal(key, nonce, b"place", &mut text).unwrap();
    let mut elsewhere = text;
    assert_eq!(open(key, nonce, b"other", &mut elsewhere, &tag), Ok(false));
    assert_eq!(elsewhere, [0; 11]);
    tag[0] ^= 1;
    assert_eq!(open(key, nonce, b"place", &mut text, &tag), Ok(false));
    assert_eq!(text, [0; 11]);
}
