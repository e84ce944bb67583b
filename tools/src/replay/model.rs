//! The bytes that a model keeps of a token, and the computation of a prefill.
//!
//! Every number comes from the model's public `config.json`: layers, heads and sizes directly,
//! parameters of a layer added up from the sizes of its matrices. Embeddings, norms and biases are
//! left out: below a percent of a prefill.
//!
//! The time of a prefill follows from its bottleneck: the multiplications, or the memory reads of
//! weights and KV. All layers are alike. Where a model has a few of another kind (the first three
//! of DeepSeek-V3 are dense) their cost is the same within a percent.

use larder_kernels::{Attention, KvShape};

use crate::failure::Failure;

/// A model, by the figures of its configuration.
#[derive(Debug)]
pub struct Model {
    /// The value for `--model`.
    pub name: &'static str,
    /// Layers.
    pub layers: u32,
    attention: Attention,
    /// Bytes that a token leaves in one part of a layer, all ranks: KV is bfloat16.
    row_bytes: u32,
    /// Query heads.
    heads: f64,
    /// Values of a head's key and of its value together: multiply-adds of one token against
    /// another.
    head_values: f64,
    /// Parameters of a layer that a token is multiplied with.
    active: f64,
    /// Bytes of a layer's weights, those of all experts.
    weight_bytes: f64,
}

/// Known models.
pub const MODELS: [Model; 4] = [
    // meta-llama/Llama-3.1-8B: hidden 4096, 32 heads and 8 KV heads of 128, intermediate 14336.
    Model {
        name: "llama-3.1-8b",
        layers: 32,
        attention: Attention::Mha,
        row_bytes: 8 * 128 * 2,
        heads: 32.0,
        head_values: 128.0 + 128.0,
        active: LLAMA_8B,
        weight_bytes: LLAMA_8B * 2.0,
    },
    // meta-llama/Llama-3.1-70B: hidden 8192, 64 heads and 8 KV heads of 128, intermediate 28672.
    Model {
        name: "llama-3.1-70b",
        layers: 80,
        attention: Attention::Mha,
        row_bytes: 8 * 128 * 2,
        heads: 64.0,
        head_values: 128.0 + 128.0,
        active: LLAMA_70B,
        weight_bytes: LLAMA_70B * 2.0,
    },
    // Qwen/Qwen3-32B: hidden 5120, 64 heads and 8 KV heads of 128, intermediate 25600.
    Model {
        name: "qwen3-32b",
        layers: 64,
        attention: Attention::Mha,
        row_bytes: 8 * 128 * 2,
        heads: 64.0,
        head_values: 128.0 + 128.0,
        active: QWEN3_32B,
        weight_bytes: QWEN3_32B * 2.0,
    },
    // deepseek-ai/DeepSeek-V3: hidden 7168, 128 heads (query and key 128 + 64, value 128), q_lora
    // 1536, kv_lora 512, 256 experts of 2048 (8 and a shared one in use), weights in fp8. The cache
    // keeps 512 + 64 values.
    Model {
        name: "deepseek-v3",
        layers: 61,
        attention: Attention::Mla,
        row_bytes: (512 + 64) * 2,
        heads: 128.0,
        head_values: 192.0 + 128.0,
        active: DEEPSEEK_V3_ATTENTION + 9.0 * DEEPSEEK_V3_EXPERT,
        weight_bytes: DEEPSEEK_V3_ATTENTION + 257.0 * DEEPSEEK_V3_EXPERT,
    },
];

const LLAMA_8B: f64 = grouped_query(4096.0, 32.0, 8.0, 14336.0);
const LLAMA_70B: f64 = grouped_query(8192.0, 64.0, 8.0, 28672.0);
const QWEN3_32B: f64 = grouped_query(5120.0, 64.0, 8.0, 25600.0);
/// Down and up of the queries, down and up of keys and values, out.
const DEEPSEEK_V3_ATTENTION: f64 = 7168.0 * 1536.0
    + 1536.0 * 128.0 * 192.0
    + 7168.0 * 576.0
    + 512.0 * 128.0 * 256.0
    + 128.0 * 128.0 * 7168.0;
const DEEPSEEK_V3_EXPERT: f64 = 3.0 * 7168.0 * 2048.0;

/// Parameters of a layer with heads of 128: query and out, key and value, and the three matrices of
/// the gated MLP.
const fn grouped_query(hidden: f64, heads: f64, kv_heads: f64, intermediate: f64) -> f64 {
    hidden * 128.0 * (2.0 * heads + 2.0 * kv_heads) + 3.0 * hidden * intermediate
}

/// The computing power: the accelerators of one server together.
#[derive(Clone, Copy, Debug)]
pub struct Compute {
    /// Floating point operations a second that a prefill reaches.
    pub flops: f64,
    /// Bytes a second of its memory.
    pub memory_bytes_per_second: f64,
}

impl Model {
    /// The model of this name.
    ///
    /// # Errors
    /// A sentence with the known names.
    pub fn named(name: &str) -> Result<&'static Model, String> {
        let found = MODELS.iter().find(|model| model.name == name);
        found.ok_or_else(|| {
            let names: Vec<&str> = MODELS.iter().map(|model| model.name).collect();
            format!("no such model; there are {}", names.join(", "))
        })
    }

    /// A page of this many tokens.
    ///
    /// # Errors
    /// There is no such page.
    pub fn page(&self, page_tokens: u32) -> Result<KvShape, Failure> {
        self.shape(self.layers, self.row_bytes, page_tokens)
    }

    /// A page of about `1 / scale` of the bytes: fewer layers, down to two, then shorter rows.
    ///
    /// # Errors
    /// There is no such page.
    pub fn scaled_page(&self, page_tokens: u32, scale: u32) -> Result<KvShape, Failure> {
        let layers = (self.layers / scale).max(2).min(self.layers);
        let bytes = u64::from(self.row_bytes) * u64::from(self.layers) / u64::from(scale);
        let row_bytes = u32::try_from(bytes / u64::from(layers)).unwrap_or(u32::MAX);
        self.shape(layers, row_bytes.clamp(1, self.row_bytes), page_tokens)
    }

    fn shape(&self, layers: u32, row_bytes: u32, page_tokens: u32) -> Result<KvShape, Failure> {
        KvShape::of_rows(self.attention, layers, row_bytes, page_tokens).map_err(|error| {
            Failure::usage(format!(
                "a page of {page_tokens} tokens of {}: {error}; choose another --page-size",
                self.name
            ))
        })
    }

    /// Seconds that a layer computes for `computed` tokens behind `past` others.
    pub fn layer_seconds(&self, compute: &Compute, computed: u64, past: u64) -> f64 {
        let (computed, past) = (float(computed), float(past));
        let context = past + computed / 2.0;
        let operations =
            2.0 * computed * self.active + 2.0 * computed * context * self.heads * self.head_values;
        let parts = if self.attention == Attention::Mha {
            2.0
        } else {
            1.0
        };
        let bytes = self.weight_bytes + (past + computed) * parts * f64::from(self.row_bytes);
        (operations / compute.flops).max(bytes / compute.memory_bytes_per_second)
    }
}

#[expect(clippy::cast_precision_loss, reason = "tokens of a request are few")]
fn float(tokens: u64) -> f64 {
    tokens as f64
}

/// Loading layer by layer from a moment on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Load {
    /// When the first layer starts to be copied.
    pub from: u64,
    /// How long each takes.
    pub layer: u64,
}

/// The end of a prefill that may start at `from` and computes `layer` for each layer, each after
/// its part of the load. Any unit of time.
pub fn prefill_end(from: u64, layers: u32, layer: u64, load: Option<Load>) -> u64 {
    (1..=u64::from(layers)).fold(from, |free, number| {
        let loaded = load.map_or(0, |load| load.from + load.layer * number);
        free.max(loaded) + layer
    })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[test]
    fn pages_have_the_bytes_that_the_models_keep() {
        for (name, kib) in [
            ("llama-3.1-8b", 128.0),
            ("llama-3.1-70b", 320.0),
            ("qwen3-32b", 256.0),
            ("deepseek-v3", 68.625),
        ] {
            let page = Model::named(name).unwrap().page(64).unwrap();
            assert_eq!(f64::from(page.page_bytes()), kib * 64.0 * 1024.0, "{name}");
        }
        let error = Model::named("gpt-2").unwrap_err();
        assert!(error.contains("qwen3-32b"), "{error}");
    }

    #[test]
    fn a_scaled_page_keeps_parts_and_tokens_and_at_least_two_layers() {
        for model in &MODELS {
            let whole = model.page(64).unwrap();
            assert_eq!(model.scaled_page(64, 1).unwrap(), whole);
            for scale in [4, 16, 100, 1024, 1 << 30] {
                let page = model.scaled_page(64, scale).unwrap();
                assert_eq!((page.parts(), page.page_tokens()), (whole.parts(), 64));
                assert!(page.layers() >= 2);
                let least = page.parts() * page.layers() * 64;
                let asked = whole.page_bytes() / scale;
                assert!(
                    page.page_bytes() <= asked.max(least),
                    "{} / {scale}",
                    model.name
                );
                assert!(page.page_bytes() * 2 > asked, "{} / {scale}", model.name);
            }
        }
    }

    #[test]
    fn a_layer_of_the_8b_model_takes_what_its_operations_take() {
        let compute = Compute {
            flops: 600e12,
            memory_bytes_per_second: 4.8e12,
        };
        let model = Model::named("llama-3.1-8b").unwrap();
        let micros = |computed, past| model.layer_seconds(&compute, computed, past) * 1e6;
        assert_eq!(micros(1024, 8192).round(), 988.0);
        // One token is bound by the weights, 436 MB, and the KV that it reads.
        assert_eq!(micros(1, 8192).round(), 98.0);
    }

    #[test]
    fn a_prefill_ends_with_the_slower_of_load_and_compute_and_one_layer_of_the_other() {
        for (load, compute) in [(610, 988), (610, 121), (5, 5)] {
            let of_load = Load {
                from: 70,
                layer: load,
            };
            let end = prefill_end(70, 32, compute, Some(of_load));
            assert_eq!(end - 70, (load + 32 * compute).max(32 * load + compute));
        }
        assert_eq!(prefill_end(70, 32, 3, None), 70 + 96);
        let over = Load { from: 0, layer: 1 };
        assert_eq!(prefill_end(70, 32, 3, Some(over)), 70 + 96);
    }
}
