//! Random and adversarial pages through all forms of the code: the streams are equal, and each form
//! gives the page back, apart and in place. Ends at the first difference.
//!
//! `codec_soak [VALUES] [SEED]`: by default 10^9 values.

use std::env;

use larder_codec::{Codec, Form};

const UNIT: usize = 4096;
/// Most values of a page: 1 MiB.
const VALUES_MAX: u64 = 512 << 10;
/// Most values of a run of one kind.
const RUN_MAX: u64 = 9000;

fn main() {
    let number = |at: usize, default: u64| {
        let given = env::args().nth(at);
        given.map_or(default, |text| text.parse().expect("a number"))
    };
    let (wanted, seed) = (number(1, 1_000_000_000), number(2, 1));
    let mut dice = Dice(seed);
    let (mut values, mut pages, mut plain) = (0, 0_u64, 0_u64);
    while values < wanted {
        let page = dice.page();
        values += page.len() as u64 / 2;
        pages += 1;
        plain += u64::from(!comes_back(&page));
    }
    println!(
        "{values} values in {pages} pages, {plain} of them no shorter encoded: 0 wrong in {} forms",
        Form::all().len()
    );
}

/// Whether the page has a stream. Panics if a form writes or reads it otherwise.
fn comes_back(page: &[u8]) -> bool {
    let mut first: Option<Option<Vec<u8>>> = None;
    for form in Form::all() {
        let codec = Codec::of(form);
        let mut stream = vec![0xa5; page.len()];
        let length = codec.encode(&[page], UNIT, &mut stream);
        let stream = length.map(|length| stream[..length].to_vec());
        let known = first.get_or_insert_with(|| stream.clone());
        assert!(*known == stream, "{} writes another stream", form.name());
        let Some(stream) = stream else {
            continue;
        };
        let mut apart = vec![0x5a; page.len()];
        let read = codec.decode(&stream, &mut [&mut apart]);
        assert!(
            read.is_ok() && apart == page,
            "{}: {read:?}, or other values",
            form.name()
        );
        apart[..stream.len()].copy_from_slice(&stream);
        let read = codec.decode_in_place(&mut apart, stream.len());
        assert!(
            read.is_ok() && apart == page,
            "{} in place: {read:?}, or other values",
            form.name()
        );
    }
    first.flatten().is_some()
}

/// A generator of Lehmer's kind, by its upper bits.
struct Dice(u64);

impl Dice {
    fn draw(&mut self) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        self.0 >> 32
    }

    fn below(&mut self, end: u64) -> u64 {
        self.draw() % end
    }

    /// Runs of one kind of values each. A page is whole units.
    fn page(&mut self) -> Vec<u8> {
        let units = 1 + self.below(VALUES_MAX * 2 / UNIT as u64);
        let values = units as usize * UNIT / 2;
        let mut page = Vec::with_capacity(values);
        while page.len() < values {
            let run = (1 + self.below(RUN_MAX) as usize).min(values - page.len());
            let (kind, base) = (self.below(9), self.below(256) as u16);
            let spread = 1 + self.below(20);
            let seldom = 2 + self.below(200);
            let constant = self.draw() as u16;
            page.extend((0..run).map(|at| {
                let any = self.draw() as u16;
                let signed = any & 0x807f;
                match kind {
                    0 => any,
                    1 => constant,
                    // NaN with any payload.
                    2 => signed | 0x7f80,
                    // Infinities.
                    3 => (any & 0x8000) | 0x7f80,
                    // Subnormals and zeros.
                    4 => signed,
                    // All exponents in turn.
                    5 => signed | (at as u16 & 0xff) << 7,
                    // Few exponents, around the last and the first one too.
                    6 => signed | ((base + (u64::from(any >> 7) % spread) as u16) & 0xff) << 7,
                    // The same with escapes.
                    7 if u64::from(any) % seldom == 0 => any,
                    7 => signed | ((base + (u64::from(any >> 7) % 15) as u16) & 0xff) << 7,
                    // Many zeros among others.
                    _ if any & 3 != 0 => 0,
                    _ => signed | 0x3f80,
                }
            }));
        }
        page.into_iter().flat_map(u16::to_le_bytes).collect()
    }
}
