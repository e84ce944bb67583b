//! The bytes that a model keeps of a token, and the computation of a prefill.
//!
//! Every number comes from the model's public `config.json`: layers, heads and sizes directly,
//! parameters of a layer added up from the sizes of its matrices. Embeddings, norms and biases are
//! left out: below a percent of a prefill. Four models are known by name. Others are read from
//! their files: models with grouped-query attention (Llama, Qwen, Mistral) or MLA (DeepSeek, Kimi),
//! dense ones and mixtures of experts. A model whose layers do not all keep the KV of every token
//! is refused by the name of the difference: its bytes a token would be wrong.
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
    /// Heads of keys and values, which ranks divide among them. 0 for MLA: each rank has the whole.
    kv_heads: u32,
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
        kv_heads: 8,
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
        kv_heads: 8,
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
        kv_heads: 8,
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
        kv_heads: 0,
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

/// Types of models whose layers all have grouped-query attention over all tokens.
const GROUPED_QUERY: [&str; 20] = [
    "arcee",
    "cohere",
    "glm",
    "glm4",
    "glm4_moe",
    "granite",
    "internlm2",
    "internlm3",
    "llama",
    "mistral",
    "mistral3",
    "mixtral",
    "olmo2",
    "olmoe",
    "phi3",
    "qwen2",
    "qwen2_moe",
    "qwen3",
    "qwen3_moe",
    "seed_oss",
];

/// Types of models whose layers all have MLA.
const LATENT: [&str; 3] = ["deepseek_v2", "deepseek_v3", "kimi_k2"];

/// Fields of models that keep a state beside KV, or KV in some layers alone.
const HYBRID: [&str; 9] = [
    "attn_layer_period",
    "full_attention_interval",
    "hybrid_override_pattern",
    "linear_attn_config",
    "linear_num_value_heads",
    "mamba_d_state",
    "mamba_num_heads",
    "ssm_cfg",
    "state_size",
];

/// The fields of a `config.json` that this module uses.
#[derive(Deserialize)]
struct Published {
    model_type: Option<String>,
    num_hidden_layers: u32,
    hidden_size: u32,
    intermediate_size: u32,
    num_attention_heads: u32,
    num_key_value_heads: Option<u32>,
    head_dim: Option<u32>,
    /// The kinds of the layers, where they differ.
    layer_types: Option<Vec<String>>,
    sliding_window: Option<u64>,
    use_sliding_window: Option<bool>,
    max_position_embeddings: Option<u64>,
    /// Of sparse attention with an index of its own.
    index_topk: Option<u32>,
    /// Of MLA.
    kv_lora_rank: Option<u32>,
    q_lora_rank: Option<u32>,
    qk_nope_head_dim: Option<u32>,
    qk_rope_head_dim: Option<u32>,
    v_head_dim: Option<u32>,
    /// Of mixtures of experts, under one of these names.
    #[serde(alias = "num_local_experts", alias = "n_routed_experts")]
    num_experts: Option<u32>,
    num_experts_per_tok: Option<u32>,
    moe_intermediate_size: Option<u32>,
    n_shared_experts: Option<u32>,
    shared_expert_intermediate_size: Option<u32>,
    /// Weights in 8 bits.
    quantization_config: Option<serde_json::Value>,
}

impl Published {
    /// The part of a configuration that describes the text model.
    fn read(text: &str) -> Result<Published, String> {
        let whole: serde_json::Value =
            serde_json::from_str(text).map_err(|error| error.to_string())?;
        let own = match whole.get("num_hidden_layers") {
            Some(_) => &whole,
            None => whole.get("text_config").unwrap_or(&whole),
        };
        let has = |name: &&&str| own.get(**name).is_some_and(|field| !field.is_null());
        if let Some(name) = HYBRID.iter().find(has) {
            return Err(format!(
                "a hybrid model (`{name}`): it keeps a state beside the KV of tokens, whose bytes \
                 are not known here"
            ));
        }
        let own = Published::deserialize(own).map_err(|error| error.to_string())?;
        own.check()?;
        Ok(own)
    }

    /// Refuses what would be computed wrongly.
    fn check(&self) -> Result<(), String> {
        let kinds = self.layer_types.iter().flatten();
        if let Some(kind) = { kinds }.find(|kind| *kind != "full_attention") {
            return Err(format!(
                "a hybrid model: it has layers of `{kind}`, whose bytes a token are not known here"
            ));
        }
        let is_windowed = self.use_sliding_window != Some(false)
            && self.layer_types.is_none()
            && self.sliding_window.is_some_and(|window| {
                self.max_position_embeddings
                    .is_none_or(|most| window < most)
            });
        if is_windowed {
            return Err("a model with `sliding_window`: it does not keep all tokens".to_owned());
        }
        if self.index_topk.is_some() {
            return Err(
                "a model with `index_topk`: sparse attention keeps an index beside the KV, whose \
                 bytes are not known here"
                    .to_owned(),
            );
        }
        let known = match self.kv_lora_rank {
            Some(_) => &LATENT[..],
            None => &GROUPED_QUERY[..],
        };
        match self.model_type.as_deref() {
            Some(kind) if !known.contains(&kind) => Err(format!(
                "a model of type `{kind}`, which is not known here; known are {} and {}",
                GROUPED_QUERY.join(", "),
                LATENT.join(", ")
            )),
            _ => Ok(()),
        }
    }

    /// Parameters of a layer's experts, or of its one MLP: the ones in use for a token, and all.
    fn experts(&self) -> (f64, f64) {
        let hidden = f64::from(self.hidden_size);
        let matrices = |width: u32| 3.0 * hidden * f64::from(width);
        let count = self.num_experts.filter(|experts| *experts > 1);
        let Some(count) = count else {
            let dense = matrices(self.intermediate_size);
            return (dense, dense);
        };
        let width = self.moe_intermediate_size.unwrap_or(self.intermediate_size);
        let shared = matrices(width) * f64::from(self.n_shared_experts.unwrap_or(0))
            + matrices(self.shared_expert_intermediate_size.unwrap_or(0));
        let of = |experts: u32| matrices(width) * f64::from(experts) + shared;
        (of(self.num_experts_per_tok.unwrap_or(1)), of(count))
    }
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

    /// The model of a `config.json`.
    fn published(name: &str, text: &str) -> Result<Model, String> {
        let config = Published::read(text)?;
        let (active, all) = config.experts();
        let model = match config.kv_lora_rank {
            Some(rank) => Model::latent(&config, rank)?,
            None => Model::grouped(&config),
        };
        if model.row_bytes == 0 || model.layers == 0 {
            return Err("a size in it is 0 or too large".to_owned());
        }
        let weight_bytes = match config.quantization_config {
            Some(_) => 1.0,
            None => 2.0,
        };
        Ok(Model {
            name: Cow::Owned(name.to_owned()),
            weight_bytes: (model.active + all) * weight_bytes,
            active: model.active + active,
            ..model
        })
    }

    /// The attention of a model with grouped-query attention.
    fn grouped(config: &Published) -> Model {
        let heads = config.num_attention_heads;
        let derived = config.hidden_size.checked_div(heads).unwrap_or(0);
        let head = config.head_dim.unwrap_or(derived);
        let kv_heads = config.num_key_value_heads.unwrap_or(heads);
        let row_bytes = head.checked_mul(kv_heads);
        let row_bytes = row_bytes.and_then(|row| row.checked_mul(2));
        Model {
            name: Cow::Borrowed(""),
            layers: config.num_hidden_layers,
            attention: Attention::Mha,
            row_bytes: row_bytes.unwrap_or(0),
            kv_heads,
            heads: heads.into(),
            head_values: 2.0 * f64::from(head),
            active: grouped_query(
                config.hidden_size.into(),
                head.into(),
                heads.into(),
                kv_heads.into(),
                0.0,
            ),
            weight_bytes: 0.0,
        }
    }

    /// The attention of a model with MLA, which keeps one vector of this rank for all heads.
    fn latent(config: &Published, rank: u32) -> Result<Model, String> {
        let of = |name: &str, value: Option<u32>| {
            value.ok_or_else(|| format!("a model with MLA without `{name}`"))
        };
        let rope = of("qk_rope_head_dim", config.qk_rope_head_dim)?;
        let nope = of("qk_nope_head_dim", config.qk_nope_head_dim)?;
        let value = of("v_head_dim", config.v_head_dim)?;
        let (hidden, heads) = (
            f64::from(config.hidden_size),
            f64::from(config.num_attention_heads),
        );
        let query = heads * f64::from(nope + rope);
        let queries = match config.q_lora_rank.filter(|rank| *rank > 0) {
            Some(rank) => f64::from(rank) * (hidden + query),
            None => hidden * query,
        };
        let row = rank.saturating_add(rope).checked_mul(2);
        Ok(Model {
            name: Cow::Borrowed(""),
            layers: config.num_hidden_layers,
            attention: Attention::Mla,
            row_bytes: row.unwrap_or(0),
            kv_heads: 0,
            heads,
            head_values: f64::from(nope + rope + value),
            active: queries
                + hidden * f64::from(rank + rope)
                + f64::from(rank) * heads * f64::from(nope + value)
                + heads * f64::from(value) * hidden,
            weight_bytes: 0.0,
        })
    }

    /// Bytes that a token leaves on each of so many tensor-parallel ranks, and how many ranks keep
    /// them in the store: ranks with MLA have the same bytes, which are stored once.
    ///
    /// # Errors
    /// The ranks cannot divide the heads.
    pub fn token_bytes(&self, ranks: u32, element_bytes: u32) -> Result<(u64, u32), String> {
        let whole =
            u64::from(self.layers) * u64::from(self.row_bytes) / 2 * u64::from(element_bytes);
        if self.kv_heads == 0 {
            return Ok((whole, 1));
        }
        let kv_heads = u64::from(self.kv_heads);
        let heads = match (kv_heads % u64::from(ranks), u64::from(ranks) % kv_heads) {
            (0, _) => kv_heads / u64::from(ranks),
            // Each head is on several ranks.
            (_, 0) => 1,
            _ => {
                return Err(format!(
                    "{ranks} ranks cannot divide the {kv_heads} heads of keys and values"
                ));
            }
        };
        Ok((2 * whole / kv_heads * heads, ranks))
    }

    /// Seconds of a prefill of so many tokens behind `past` others.
    pub fn prefill_seconds(&self, compute: &Compute, computed: u64, past: u64) -> f64 {
        self.layer_seconds(compute, computed, past) * f64::from(self.layers)
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
    fn a_configuration_that_would_be_computed_wrongly_is_refused_by_name() {
        let dense = r#""num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128"#;
        for (rest, reason) in [
            (r#""num_attention_heads": 0"#, "0 or too large"),
            (
                r#""num_attention_heads": 4, "kv_lora_rank": 512"#,
                "qk_rope",
            ),
            (r#""num_key_value_heads": 4"#, "num_attention_heads"),
            (r#""num_attention_heads": 4, "model_type": "rwkv"#, "line 1"),
            (
                r#""num_attention_heads": 4, "model_type": "gemma3""#,
                "`gemma3`",
            ),
            (
                r#""num_attention_heads": 4, "full_attention_interval": 4"#,
                "hybrid model (`full_attention_interval`)",
            ),
            (
                r#""num_attention_heads": 4, "layer_types": ["sliding_attention"]"#,
                "layers of `sliding_attention`",
            ),
            (
                r#""num_attention_heads": 4, "sliding_window": 4096"#,
                "`sliding_window`",
            ),
            (
                r#""num_attention_heads": 4, "index_topk": 2048"#,
                "`index_topk`",
            ),
        ] {
            let error = Model::published("it", &format!("{{{dense}, {rest}}}")).unwrap_err();
            assert!(error.contains(reason), "{rest}: {error}");
        }
        let unused =
            r#""num_attention_heads": 4, "sliding_window": 9, "use_sliding_window": false"#;
        assert!(Model::published("it", &format!("{{{dense}, {unused}}}")).is_ok());
        assert!(Model::named("/none/config.json").is_err());
    }

    #[test]
    fn a_model_with_mla_and_experts_has_the_figures_of_the_known_one() {
        let text = r#"{"model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168,
            "intermediate_size": 18432, "num_attention_heads": 128, "num_key_value_heads": 128,
            "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
            "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
            "quantization_config": {"quant_method": "fp8"}}"#;
        let read = Model::published("it", text).unwrap();
        let known = Model::named("deepseek-v3").unwrap();
        let same = |read: f64, known: f64| assert!((read / known - 1.0).abs() < 1e-6, "{read}");
        same(read.active, known.active);
        same(read.weight_bytes, known.weight_bytes);
        assert_eq!(
            (read.row_bytes, read.head_values),
            (known.row_bytes, known.head_values)
        );
        let nested = format!("{{\"text_config\": {text}}}");
        assert_eq!(Model::published("it", &nested).unwrap().layers, 61);
        let mixture = r#"{"model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048,
            "intermediate_size": 6144, "num_attention_heads": 32, "num_key_value_heads": 4,
            "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
            "moe_intermediate_size": 768}"#;
        let read = Model::published("it", mixture).unwrap();
        // 3 billion parameters of 30 are active, embeddings left out.
        assert!(
            (2.5e9..3.5e9).contains(&(read.active * 48.0)),
            "{}",
            read.active
        );
        assert!((5.5e10..6.5e10).contains(&(read.weight_bytes * 48.0)));
    }

    #[test]
    fn ranks_divide_the_heads_or_keep_the_same_bytes_once() {
        let of = |name: &str, ranks| Model::named(name).unwrap().token_bytes(ranks, 2);
        assert_eq!(of("llama-3.1-70b", 1), Ok((320 << 10, 1)));
        assert_eq!(of("llama-3.1-70b", 8), Ok((40 << 10, 8)));
        // Two ranks have each head.
        assert_eq!(of("llama-3.1-70b", 16), Ok((40 << 10, 16)));
        assert_eq!(of("deepseek-v3", 8), Ok((61 * 576 * 2, 1)));
        assert!(of("llama-3.1-70b", 3).unwrap_err().contains("8 heads"));
        let half = Model::named("llama-3.1-70b").unwrap().token_bytes(8, 1);
        assert_eq!(half, Ok((20 << 10, 8)));
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
