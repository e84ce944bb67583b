//! The bytes that a model keeps of a token, and the computation of a prefill.
//!
//! Every number comes from the model's public `config.json`: layers, heads and sizes directly,
//! parameters of a layer added up from the sizes of its matrices. Embeddings, norms and biases are
//! left out: below a percent of a prefill. Four models are known by name. Any other dense model
//! with grouped-query attention (Llama, Qwen, Mistral) is read from its file.
//!
//! The time of a prefill follows from its bottleneck: the multiplications, or the memory reads of
//! weights and KV. All layers are alike. Where a model has a few of another kind (the first three
//! of DeepSeek-V3 are dense) their cost is the same within a percent.

use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

use larder_kernels::{Attention, KvShape};
use serde::Deserialize;

use crate::failure::Failure;

/// A model, by the figures of its configuration.
#[derive(Clone, Debug)]
pub struct Model {
    /// The value for `--model`.
    pub name: Cow<'static, str>,
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
pub static MODELS: [Model; 4] = [
    // meta-llama/Llama-3.1-8B: hidden 4096, 32 heads and 8 KV heads of 128, intermediate 14336.
    Model {
        name: Cow::Borrowed("llama-3.1-8b"),
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
        name: Cow::Borrowed("llama-3.1-70b"),
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
        name: Cow::Borrowed("qwen3-32b"),
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
        name: Cow::Borrowed("deepseek-v3"),
        layers: 61,
        attention: Attention::Mla,
        row_bytes: (512 + 64) * 2,
        heads: 128.0,
        head_values: 192.0 + 128.0,
        active: DEEPSEEK_V3_ATTENTION + 9.0 * DEEPSEEK_V3_EXPERT,
        weight_bytes: DEEPSEEK_V3_ATTENTION + 257.0 * DEEPSEEK_V3_EXPERT,
    },
];

const LLAMA_8B: f64 = grouped_query(4096.0, 128.0, 32.0, 8.0, 14336.0);
const LLAMA_70B: f64 = grouped_query(8192.0, 128.0, 64.0, 8.0, 28672.0);
const QWEN3_32B: f64 = grouped_query(5120.0, 128.0, 64.0, 8.0, 25600.0);
/// Down and up of the queries, down and up of keys and values, out.
const DEEPSEEK_V3_ATTENTION: f64 = 7168.0 * 1536.0
    + 1536.0 * 128.0 * 192.0
    + 7168.0 * 576.0
    + 512.0 * 128.0 * 256.0
    + 128.0 * 128.0 * 7168.0;
const DEEPSEEK_V3_EXPERT: f64 = 3.0 * 7168.0 * 2048.0;

/// Parameters of a layer: query and out, key and value, and the three matrices of the gated MLP.
const fn grouped_query(
    hidden: f64,
    head: f64,
    heads: f64,
    kv_heads: f64,
    intermediate: f64,
) -> f64 {
    hidden * head * (2.0 * heads + 2.0 * kv_heads) + 3.0 * hidden * intermediate
}

/// The fields of a `config.json` that this module uses.
#[derive(Deserialize)]
struct Published {
    num_hidden_layers: u32,
    hidden_size: u32,
    intermediate_size: u32,
    num_attention_heads: u32,
    num_key_value_heads: Option<u32>,
    head_dim: Option<u32>,
    /// Of MLA, which has other matrices.
    kv_lora_rank: Option<u32>,
    /// Of mixtures of experts, under one of these names.
    #[serde(alias = "num_local_experts", alias = "n_routed_experts")]
    num_experts: Option<u32>,
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
    /// The model of this name, or of this `config.json`.
    ///
    /// # Errors
    /// A sentence with the known names, or with the fault of the file.
    pub fn named(name: &str) -> Result<Arc<Model>, String> {
        if let Some(known) = MODELS.iter().find(|model| model.name == name) {
            return Ok(Arc::new(known.clone()));
        }
        if Path::new(name).extension().is_some_and(|end| end == "json") {
            let text = std::fs::read_to_string(name).map_err(|error| error.to_string())?;
            return Model::published(name, &text).map(Arc::new);
        }
        let names: Vec<&str> = MODELS.iter().map(|model| &*model.name).collect();
        Err(format!(
            "no such model; there are {}, and any config.json",
            names.join(", ")
        ))
    }

    /// A dense model with grouped-query attention, by the text of its `config.json`.
    fn published(name: &str, text: &str) -> Result<Model, String> {
        let config: Published = serde_json::from_str(text).map_err(|error| error.to_string())?;
        if config.kv_lora_rank.is_some() || config.num_experts.is_some_and(|experts| experts > 1) {
            return Err("not a dense model with grouped-query attention".to_owned());
        }
        let heads = config.num_attention_heads;
        let derived = config.hidden_size.checked_div(heads).unwrap_or(0);
        let head = config.head_dim.unwrap_or(derived);
        let kv_heads = config.num_key_value_heads.unwrap_or(heads);
        let row_bytes = head
            .checked_mul(kv_heads)
            .and_then(|row| row.checked_mul(2));
        let row_bytes = row_bytes.filter(|bytes| *bytes > 0 && config.num_hidden_layers > 0);
        let row_bytes = row_bytes.ok_or("a size in it is 0 or too large")?;
        let active = grouped_query(
            config.hidden_size.into(),
            head.into(),
            heads.into(),
            kv_heads.into(),
            config.intermediate_size.into(),
        );
        Ok(Model {
            name: Cow::Owned(name.to_owned()),
            layers: config.num_hidden_layers,
            attention: Attention::Mha,
            row_bytes,
            heads: heads.into(),
            head_values: 2.0 * f64::from(head),
            active,
            weight_bytes: active * 2.0,
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
    fn a_published_configuration_gives_the_figures_of_the_known_model() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("config.json");
        let text = r#"{"num_hidden_layers": 64, "hidden_size": 5120, "intermediate_size": 25600,
            "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "bias": null}"#;
        std::fs::write(&path, text).unwrap();
        let read = Model::named(path.to_str().unwrap()).unwrap();
        let known = Model::named("qwen3-32b").unwrap();
        let figures = |model: &Model| Model {
            name: Cow::Borrowed(""),
            ..Model::clone(model)
        };
        assert_eq!(
            format!("{:?}", figures(&read)),
            format!("{:?}", figures(&known))
        );
    }

    #[test]
    fn a_configuration_of_another_kind_of_model_is_refused() {
        let dense = r#""num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128"#;
        for (rest, reason) in [
            (r#""num_attention_heads": 0"#, "0 or too large"),
            (r#""num_attention_heads": 4, "kv_lora_rank": 512"#, "dense"),
            (
                r#""num_attention_heads": 4, "n_routed_experts": 8"#,
                "dense",
            ),
            (r#""num_key_value_heads": 4"#, "num_attention_heads"),
        ] {
            let error = Model::published("it", &format!("{{{dense}, {rest}}}")).unwrap_err();
            assert!(error.contains(reason), "{rest}: {error}");
        }
        assert!(Model::named("/none/config.json").is_err());
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
