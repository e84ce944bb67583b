//! The model of `cu/forward.cu`, computed on the CPU without any KV: what its output must be.

use larder_kernels::KvShape;

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Different words of the output.
pub const WORDS: u64 = 32_000;

fn mixed(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The inverse of [`mixed`].
fn unmixed(x: u64) -> u64 {
    let x = (x ^ (x >> 31) ^ (x >> 62)).wrapping_mul(0x3196_42b2_d24d_8ec3);
    let x = (x ^ (x >> 27) ^ (x >> 54)).wrapping_mul(0x96de_1b17_3f11_9089);
    x ^ (x >> 30) ^ (x >> 60)
}

/// The state of a token before the first layer.
#[must_use]
pub fn first(token: u64, at: usize) -> u64 {
    mixed(token.wrapping_mul(GOLDEN).wrapping_add(at as u64))
}

/// The words of a token's row in a layer, all parts, from its state before it.
#[must_use]
pub fn row<const N: usize>(layer: u32, state: u64) -> [u64; N] {
    std::array::from_fn(|place| word(state, place as u64, layer.into()))
}

/// The state of a token behind a layer, from its row and the rows of the tokens before it.
#[must_use]
pub fn behind<const N: usize>(layer: u32, own: [u64; N], before: &[[u64; N]]) -> u64 {
    let rows = before.iter().chain([&own]).enumerate();
    let sum = rows.fold(0, |sum, (at, row)| added(sum, at as u64, row));
    let state = unmixed(own[0]).wrapping_sub(GOLDEN.wrapping_add(layer.into()));
    mixed(state.wrapping_add(sum))
}

fn word(state: u64, place: u64, layer: u64) -> u64 {
    let number = (place + 1).wrapping_mul(GOLDEN);
    mixed(state.wrapping_add(number).wrapping_add(layer))
}

/// The sum over the rows of a layer, with another row.
fn added(sum: u64, at: u64, row: &[u64]) -> u64 {
    (at * row.len() as u64..)
        .zip(row)
        .fold(sum, |sum, (place, word)| {
            sum.wrapping_add((word ^ place).wrapping_mul(GOLDEN))
        })
}

/// Words of 8 bytes in a row.
pub(crate) fn row_words(shape: &KvShape) -> u32 {
    shape.row_bytes() / 8
}

/// A sequence of tokens, with the sums over their rows in each layer.
struct Model {
    parts: u64,
    words: u64,
    sums: Vec<u64>,
    tokens: u64,
}

impl Model {
    /// The output behind the next token.
    fn next(&mut self, token: u64) -> u64 {
        let at = self.tokens;
        self.tokens += 1;
        let mut state = first(token, at as usize);
        for (layer, sum) in (0..).zip(&mut self.sums) {
            let places = 0..self.parts * self.words;
            let row: Vec<u64> = places.map(|place| word(state, place, layer)).collect();
            *sum = added(*sum, at, &row);
            state = mixed(state.wrapping_add(*sum));
        }
        state % WORDS
    }
}

/// A prompt with its answer of so many words.
#[must_use]
pub fn answered(shape: &KvShape, prompt: &[u64], answer: usize) -> Vec<u64> {
    let mut model = Model {
        parts: shape.parts().into(),
        words: row_words(shape).into(),
        sums: vec![0; shape.layers() as usize],
        tokens: 0,
    };
    let mut tokens = prompt.to_vec();
    for at in 0..prompt.len() + answer - 1 {
        let word = model.next(tokens[at]);
        tokens.extend((at + 1 == tokens.len()).then_some(word));
    }
    tokens
}
