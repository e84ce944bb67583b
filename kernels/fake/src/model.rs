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
        let mut state = mixed(token.wrapping_mul(GOLDEN).wrapping_add(at));
        for (layer, sum) in (0..).zip(&mut self.sums) {
            for place in 0..self.parts * self.words {
                let number = (place + 1).wrapping_mul(GOLDEN);
                let word = mixed(state.wrapping_add(number).wrapping_add(layer));
                let place = at * self.parts * self.words + place;
                *sum = sum.wrapping_add((word ^ place).wrapping_mul(GOLDEN));
            }
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
