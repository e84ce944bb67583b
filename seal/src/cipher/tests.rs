#![allow(
    clippy::unwrap_used,
    clippy::indexing_slicing,
    clippy::arithmetic_side_effects,
    clippy::cast_possible_truncation
)]

use super::*;

const VECTORS: &str = include_str!("../../tests/vectors/gcm256.txt");

struct Vector {
    key: [u8; KEY_BYTES],
    nonce: [u8; NONCE_BYTES],
    text: Vec<u8>,
    associated: Vec<u8>,
    encrypted: Vec<u8>,
    tag: [u8; TAG_BYTES],
}

fn bytes(hex: &str) -> Vec<u8> {
    if hex == "-" {
        return Vec::new();
    }
    let digits = hex.as_bytes().as_chunks::<2>().0;
    let byte = |pair: &[u8; 2]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.iter().map(byte).collect()
}

fn vectors() -> impl Iterator<Item = Vector> {
    let lines = VECTORS.lines().filter(|line| !line.starts_with('#'));
    lines.map(|line| {
        let fields: Vec<Vec<u8>> = line.split(' ').map(bytes).collect();
        let [key, nonce, text, associated, encrypted, tag] = fields.try_into().unwrap();
        Vector {
            key: key.try_into().unwrap(),
            nonce: nonce.try_into().unwrap(),
            text,
            associated,
            encrypted,
            tag: tag.try_into().unwrap(),
        }
    })
}

/// The text in pieces of a length, each in memory that begins `shift` bytes behind a boundary.
fn pieces(text: &[u8], cut: usize, shift: usize) -> Vec<Vec<u8>> {
    let piece = |piece: &[u8]| [&vec![0xee; shift], piece].concat();
    text.chunks(cut).map(piece).collect()
}

fn run(vector: &Vector, direction: Direction, cut: usize, shift: usize, copies: bool) -> Vec<u8> {
    let (from, to) = match direction {
        Direction::Seal => (&vector.text, &vector.encrypted),
        Direction::Open => (&vector.encrypted, &vector.text),
    };
    let mut gcm = Gcm::begin(direction, &vector.key, &vector.nonce, &vector.associated).unwrap();
    let mut done = Vec::new();
    for mut piece in pieces(from, cut, shift) {
        if copies {
            let mut out = vec![0; piece.len()];
            gcm.copy(&piece[shift..], &mut out[shift..]).unwrap();
            piece = out;
        } else {
            gcm.in_place(&mut piece[shift..], |_| ()).unwrap();
        }
        done.extend_from_slice(&piece[shift..]);
    }
    match direction {
        Direction::Seal => assert_eq!(gcm.tag(), Ok(vector.tag)),
        Direction::Open => assert!(gcm.has_tag(&vector.tag)),
    }
    assert_eq!(&done, to, "cut {cut}, shift {shift}");
    done
}

#[test]
fn published_vectors_hold_with_all_cuts_and_shifts() {
    assert_eq!(vectors().count(), 100);
    for vector in vectors() {
        for cut in 1..=33 {
            for shift in [0, 1, 7, 15] {
                for direction in [Direction::Seal, Direction::Open] {
                    run(&vector, direction, cut, shift, false);
                    run(&vector, direction, cut, shift, true);
                }
            }
        }
    }
}

#[test]
fn a_long_message_is_the_same_in_all_cuts() {
    let text: Vec<u8> = (0..3 * STEP_BYTES + 5).map(|at| (at * 7) as u8).collect();
    let whole = |cut: usize| {
        let mut text = text.clone();
        let mut gcm = Gcm::begin(Direction::Seal, &[1; 32], &[2; 12], &[3; 70_000]).unwrap();
        for piece in text.chunks_mut(cut) {
            let mut seen = Vec::new();
            gcm.in_place(piece, |step| seen.extend_from_slice(step))
                .unwrap();
            assert_eq!(seen, piece);
        }
        (gcm.tag().unwrap(), text)
    };
    let expected = whole(usize::MAX);
    for cut in [1, 17, 4096, STEP_BYTES - 1, STEP_BYTES, STEP_BYTES + 1] {
        assert!(whole(cut) == expected, "{cut}");
    }
}

#[test]
fn a_changed_tag_key_nonce_or_text_does_not_open() {
    for vector in vectors().step_by(7) {
        let open = |vector: &Vector| {
            let (key, nonce) = (&vector.key, &vector.nonce);
            let mut gcm = Gcm::begin(Direction::Open, key, nonce, &vector.associated).unwrap();
            gcm.in_place(&mut vector.encrypted.clone(), |_| ()).unwrap();
            gcm.has_tag(&vector.tag)
        };
        assert!(open(&vector));
        for bit in 0..8 * TAG_BYTES {
            let mut tag = vector.tag;
            tag[bit / 8] ^= 1 << (bit % 8);
            assert!(!open(&Vector {
                tag,
                ..clone(&vector)
            }));
        }
        let mut bad = clone(&vector);
        bad.key[31] ^= 1;
        assert!(!open(&bad));
        let mut bad = clone(&vector);
        bad.nonce[0] ^= 1;
        assert!(!open(&bad));
        let mut bad = clone(&vector);
        bad.associated.push(0);
        assert!(!open(&bad));
        let mut bad = clone(&vector);
        bad.encrypted.push(0);
        assert!(!open(&bad));
    }
}

fn clone(vector: &Vector) -> Vector {
    Vector {
        text: vector.text.clone(),
        associated: vector.associated.clone(),
        encrypted: vector.encrypted.clone(),
        ..*vector
    }
}

#[test]
fn a_direction_gives_only_its_own_end() {
    let begin = |direction| Gcm::begin(direction, &[1; 32], &[2; 12], b"").unwrap();
    assert_eq!(begin(Direction::Open).tag(), Err(CipherError));
    let tag = begin(Direction::Seal).tag().unwrap();
    assert!(!begin(Direction::Seal).has_tag(&tag));
    assert!(begin(Direction::Open).has_tag(&tag));
    let mut gcm = begin(Direction::Seal);
    assert_eq!(gcm.copy(&[0; 4], &mut [0; 5]), Err(CipherError));
}

/// RFC 4231 has no key of 32 bytes: the digest of Python's `hmac` for this one.
#[test]
fn the_keyed_hash_is_hmac_sha256() {
    const DIGEST: &str = "511a00babc9a6e0428d93c5844a2954def57f58e8caf056b92007e75169660d0";
    let digest = hmac(&[7; 32], b"larder").unwrap();
    assert_eq!(digest, bytes(DIGEST)[..]);
    assert_ne!(hmac(&[8; 32], b"larder").unwrap(), digest);
}

/// FIPS 197, C.3.
#[test]
fn a_block_is_that_of_the_standard() {
    let key: Vec<u8> = (0..32).collect();
    let blocks = Blocks::new(&key.try_into().unwrap()).unwrap();
    let text = bytes("00112233445566778899aabbccddeeff");
    let encrypted = bytes("8ea2b7ca516745bfeafc49904b496089");
    assert_eq!(blocks.encrypt(&text.try_into().unwrap())[..], encrypted);
}
