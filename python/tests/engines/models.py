"""Tiny models with random weights and a tokenizer of their own: nothing comes from a hub."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)


def tokenizer():
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=512, special_tokens=["<unk>", "<s>", "</s>"], initial_alphabet=alphabet
    )
    made.train_from_iterator(
        (f"the quick brown fox jumps over the lazy dog {at}" for at in range(2000)), trainer
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def make(kind, place):
    """Writes a model: `full` (Llama, 4 layers), `wide` (the same with 32 KiB of KV a token),
    `large` (Llama, 77 million parameters), `mla` (DeepSeek-V2, 4 dense layers) or `hybrid` (Gemma, five
    sliding-window layers and a full one).
    """
    words = tokenizer()
    words.save_pretrained(place)
    torch.manual_seed(0)
    common = {
        "vocab_size": len(words),
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 16384,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }
    if kind in ("full", "wide"):
        if kind == "wide":
            common |= {"num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128}
        model = LlamaForCausalLM(
            LlamaConfig(num_hidden_layers=4, tie_word_embeddings=False, **common)
        )
    elif kind == "large":
        common |= {
            "hidden_size": 768,
            "intermediate_size": 2048,
            "num_attention_heads": 12,
            "num_key_value_heads": 4,
            "head_dim": 64,
            "max_position_embeddings": 32768,
        }
        config = LlamaConfig(num_hidden_layers=12, tie_word_embeddings=True, **common)
        model = LlamaForCausalLM(config)
    elif kind == "mla":
        model = DeepseekV2ForCausalLM(mla_config(common))
    else:
        layers = ["sliding_attention"] * 5 + ["full_attention"]
        config = Gemma3TextConfig(
            num_hidden_layers=6, sliding_window=128, pad_token_id=0, layer_types=layers, **common
        )
        model = Gemma3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(place, safe_serialization=True)


def mla_config(common):
    """Without experts: their kernels need a GPU. With the scaled positions of DeepSeek, the only
    ones that SGLang has on a CPU.
    """
    positions = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": common["max_position_embeddings"] // 4,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    common = common | {"num_key_value_heads": common["num_attention_heads"]}
    del common["head_dim"]
    return DeepseekV2Config(
        num_hidden_layers=4,
        # Beyond the last layer, of which SGLang asks too.
        first_k_dense_replace=8,
        moe_layer_freq=1,
        q_lora_rank=None,
        kv_lora_rank=64,
        qk_nope_head_dim=32,
        qk_rope_head_dim=32,
        v_head_dim=32,
        rope_parameters=positions,
        tie_word_embeddings=False,
        **common,
    )


def make_adapter(place, seed, layers=4, hidden=128, rank=8):
    """Writes a LoRA adapter for the projections of queries and values of `full`."""
    place = Path(place)
    place.mkdir(parents=True)
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(layers):
        for name, rows in (("q_proj", 128), ("v_proj", 64)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (rank, hidden)), ("lora_B", (rows, rank))):
                made = torch.randn(shape, generator=generator) * 0.1
                weights[f"{at}.{part}.weight"] = made.to(torch.bfloat16)
    save_file(weights, place / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": 2 * rank,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
    }
    (place / "adapter_config.json").write_text(json.dumps(config))


if __name__ == "__main__":
    for kind, place in (word.split("=") for word in sys.argv[1:]):
        make(kind, place)
