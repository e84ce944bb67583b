"""Tiny models with random weights and a tokenizer of their own: nothing comes from a hub."""

from __future__ import annotations

import sys

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
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
    """Writes a model: `full` (Llama, 4 layers), `wide` (the same with 16 KiB of KV a token),
    `large` (Llama, 77 million parameters) or `hybrid` (Gemma, five sliding-window layers and a
    full one).
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
            common |= {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128}
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
    else:
        layers = ["sliding_attention"] * 5 + ["full_attention"]
        config = Gemma3TextConfig(
            num_hidden_layers=6, sliding_window=128, pad_token_id=0, layer_types=layers, **common
        )
        model = Gemma3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(place, safe_serialization=True)


if __name__ == "__main__":
    for kind, place in (word.split("=") for word in sys.argv[1:]):
        make(kind, place)
