"""The weights tag of vLLM's configuration: each field counts, or is on a list with its reason.

The configuration is vLLM's own, of a small Llama 4.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import vllm
import vllm.config
from larder_kv.vllm import left_out, weights
from support.vllm_config import bare, changed, configured, model
from vllm.config.diffusion import DiffusionConfig
from vllm.config.engram import EngramConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.config.speculative import SpeculativeConfig

#: The parts of ``VllmConfig`` that are in the tag.
IN = {
    "model_config",
    "cache_config",
    "load_config",
    "attention_config",
    "engram_config",
    "mamba_config",
    "kernel_config",
    "lora_config",
    "speculative_config",
    "diffusion_config",
    "quant_config",
    "additional_config",
}

#: By class: where an object of it is, of the classes that are in the tag.
CLASSES = {
    vllm.config.ModelConfig: "model_config",
    vllm.config.CacheConfig: "cache_config",
    vllm.config.LoadConfig: "load_config",
    vllm.config.AttentionConfig: "attention_config",
    vllm.config.MambaConfig: "mamba_config",
    vllm.config.KernelConfig: "kernel_config",
    vllm.config.LoRAConfig: "lora_config",
    SpeculativeConfig: "speculative_config",
    MultiModalConfig: "model_config.multimodal_config",
    vllm.config.PoolerConfig: "model_config.pooler_config",
    EngramConfig: "engram_config",
    DiffusionConfig: "diffusion_config",
}

#: By release: names on the lists that it does not have.
ABSENT = {
    "0.32.0": {
        "CacheConfig.simple_cpu_offload_num_blocks",
        "SpeculativeConfig.xpress_topc",
        "SpeculativeConfig.fly_window_size",
        "SpeculativeConfig.fly_entropy_threshold",
        "SpeculativeConfig.fly_entropy_top_k",
        "VllmConfig.watchdog_config",
    },
    "0.33.0": set(),
}[vllm.__version__.partition("+")[0]]

#: The contents of their files are part of the tag instead.
BY_CONTENTS = {"hf_config_path", "generation_config"}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def server(tmp_path):
    """A configuration and the directories of its model and of an adapter."""
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "model.safetensors").write_bytes(b"1")
    place = model(tmp_path / "model")
    return configured(place, max_model_len=4096), place, adapter


def names(kind):
    return {field.name for field in dataclasses.fields(kind)}


def out_of(kind):
    """The names of a class that are on a list."""
    lists = left_out.FIELDS.get(kind.__name__, {}).values()
    return {name for listed in lists for name in listed}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_each_field_counts_or_is_on_a_list(server, kind):
    path = CLASSES[kind]
    config = server[0]
    if kind.__name__ not in ("ModelConfig", "CacheConfig", "LoadConfig", "AttentionConfig"):
        config = changed(config, path, bare(kind))
    of_weights = set(left_out.OF_WEIGHTS.get(kind.__name__, ()))
    if path in left_out.PARTS_OF_WEIGHTS:
        of_weights = names(kind)
    own = weights.tag(config, "mine")
    part = config
    for name in path.split("."):
        part = getattr(part, name)
    for name in names(kind) - BY_CONTENTS:
        before = getattr(part, name)
        object.__setattr__(part, name, "a value that no release has")
        counts = weights.tag(config, "mine") != own
        object.__setattr__(part, name, before)
        assert counts == (name not in out_of(kind) | of_weights), name
    assert weights.tag(config, "mine") == own


@pytest.mark.parametrize("path", ["model_config.revision", "load_config.ignore_patterns"])
def test_the_names_of_the_weights_count_in_a_derived_tag(server, path):
    config = server[0]
    other = changed(config, path, ["other"])
    assert weights.tag(other, None) != weights.tag(config, None)
    assert weights.tag(other, "mine") == weights.tag(config, "mine")
    derived = weights.describe(config, None).fields
    for kind, listed in left_out.OF_WEIGHTS.items():
        if kind == "ModelConfig":
            assert {f"model_config.{name}" for name in listed} <= set(derived)


def test_each_part_of_the_configuration_is_in_or_out():
    parts = names(vllm.config.VllmConfig)
    out = set(left_out.PARTS)
    assert not IN & out
    assert parts - IN - out == set(), "of a new release: decide, in `left_out.PARTS` or in `IN`"
    gone = {f"VllmConfig.{name}" for name in (IN | out) - parts}
    assert gone == {name for name in ABSENT if name.startswith("VllmConfig.")}


def test_no_list_has_a_field_that_does_not_exist():
    by_name = {kind.__name__: kind for kind in CLASSES}
    listed = {kind: out_of(by_name[kind]) for kind in left_out.FIELDS}
    for kind, of_weights in left_out.OF_WEIGHTS.items():
        listed[kind] = listed[kind] | set(of_weights)
    gone = {f"{kind}.{name}" for kind in listed for name in listed[kind] - names(by_name[kind])}
    assert gone == {name for name in ABSENT if not name.startswith("VllmConfig.")}
    assert set(left_out.KEPT) == {"parallel_config"} <= set(left_out.PARTS)
    assert set(left_out.KEPT["parallel_config"]) <= names(vllm.config.ParallelConfig)
    assert set(left_out.PARTS_OF_WEIGHTS) <= names(vllm.config.VllmConfig)


@pytest.mark.parametrize("name", ["cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size"])
def test_of_the_parallel_configuration_the_deal_of_tokens_counts(server, name):
    config = server[0]
    tag = weights.tag(config, None)
    assert weights.tag(changed(config, f"parallel_config.{name}", 16), None) != tag
    assert weights.tag(changed(config, "parallel_config.master_port", 1), None) == tag


def test_options_of_a_plug_in_count_by_its_own_digest(server):
    class Options:
        def __init__(self, digest):
            self.digest = digest

        def compute_hash(self):
            return self.digest

    values = [{"kernel": "one"}, {"kernel": "other"}, Options("one"), Options("other")]
    tags = {weights.tag(changed(server[0], "additional_config", value), None) for value in values}
    assert len(tags) == 4
    same = changed(server[0], "additional_config", Options("one"))
    assert weights.tag(same, None) in tags


def tag_of(place, **arguments):
    return weights.tag(configured(place, **arguments), None)


def test_llama_4s_scale_of_attention_by_position_counts(tmp_path):
    """Above 32768 tokens of `max_model_len`, or by the generation config, vLLM scales queries."""
    place = model(tmp_path / "model")
    tuned, plain = tmp_path / "tuned", tmp_path / "plain"
    for directory, value in ((tuned, True), (plain, False)):
        directory.mkdir()
        written = json.dumps({"attn_temperature_tuning": value})
        (directory / "generation_config.json").write_text(written)
    on, off = {"attn_temperature_tuning": True}, {"attn_temperature_tuning": False}
    tags = [
        tag_of(place, max_model_len=30000),
        tag_of(place, max_model_len=40000),
        tag_of(place, max_model_len=30000, override_generation_config=on),
        tag_of(place, max_model_len=40000, override_generation_config=off),
        tag_of(place, max_model_len=30000, generation_config=str(tuned)),
        tag_of(place, max_model_len=30000, generation_config=str(plain)),
    ]
    assert len(set(tags)) == len(tags)
    # The contents count, not the place.
    moved = tuned.rename(tmp_path / "moved")
    assert tag_of(place, max_model_len=30000, generation_config=str(moved)) == tags[4]


def test_the_contents_of_config_json_count_also_beside_a_tag_of_ones_own(tmp_path):
    nested = {"full_attention": {"rope_type": "longrope", "rope_theta": 10000.0}}
    rope = {"rope_parameters": nested}
    place = model(tmp_path / "model")
    tag = weights.tag(configured(place), "mine")
    assert weights.tag(configured(place, max_model_len=8192), "mine") != tag
    assert weights.tag(configured(place, hf_overrides={"attn_scale": 0.2}), "mine") != tag
    moved = model(tmp_path / "moved")
    assert weights.tag(configured(moved), "mine") == tag
    config = configured(place)
    config.model_config.hf_config.update(rope)
    by_type = weights.tag(config, "mine")
    config.model_config.hf_config.rope_parameters["full_attention"]["rope_theta"] = 20000.0
    assert len({tag, by_type, weights.tag(config, "mine")}) == 3


@pytest.mark.once
def test_a_start_with_other_ports_memory_and_paths_has_the_same_tag(tmp_path):
    """In other processes, whose sets and dictionaries have another order."""
    place = model(tmp_path / "model")
    starts = (
        ({}, {"PYTHONHASHSEED": "1"}),
        (
            {
                "gpu_memory_utilization": 0.5,
                "kv_cache_memory_bytes": 1 << 29,
                "download_dir": str(tmp_path / "downloads"),
                "data_parallel_rpc_port": 12345,
                "served_model_name": "other",
                "max_num_seqs": 3,
                "seed": 7,
            },
            {
                "PYTHONHASHSEED": "2",
                "VLLM_CPU_KVCACHE_SPACE": "2",
                "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
                "VLLM_PORT": "23456",
            },
        ),
    )
    said = set()
    for arguments, environment in starts:
        command = [sys.executable, "-m", "support.vllm_config", str(place), json.dumps(arguments)]
        done = subprocess.run(
            command,
            cwd=Path(__file__).parent,
            env=os.environ | environment,
            capture_output=True,
            text=True,
            check=True,
        )
        said.add(next(line for line in done.stdout.splitlines() if line.startswith("tag ")))
    assert len(said) == 1


def test_the_files_of_the_model_a_draft_and_adapters_count(server):
    config, place, adapter = server
    draft = bare(SpeculativeConfig)
    draft.method, draft.model = "eagle", str(adapter)
    lora = bare(vllm.config.LoRAConfig)
    lora.default_mm_loras = {"image": str(adapter)}
    others = {"speculative_config": draft, "lora_config": lora}
    tag = weights.tag(config, None)
    for path, value in others.items():
        other = changed(config, path, value)
        before = weights.tag(other, None)
        assert before != tag
        (adapter / "model.safetensors").write_bytes(os.urandom(3) * len(path))
        assert weights.tag(other, None) != before, path
    (place / "model.safetensors").write_bytes(b"22")
    assert weights.tag(config, None) != tag


def test_a_tag_of_ones_own_stands_for_the_files_and_for_nothing_else(server):
    config, place, _ = server
    tag = weights.tag(config, "mine")
    assert tag.startswith("mine+")
    (place / "model.safetensors").write_bytes(b"22")
    assert weights.tag(config, "mine") == tag
    assert weights.tag(changed(config, "model_config.model", "nobody/no-such-model"), "mine") == tag
    assert weights.tag(changed(config, "cache_config.cache_dtype", "fp8_e4m3"), "mine") != tag


@pytest.mark.parametrize("own", [None, "mine"])
def test_the_files_of_another_configuration_are_part_of_the_tag(server, tmp_path, own):
    place = tmp_path / "configuration"
    place.mkdir()
    file = place / "config.json"
    file.write_text('{"rope_theta": 1}')
    config = changed(server[0], "model_config.hf_config_path", str(place))
    tag = weights.tag(config, own)
    assert tag not in (weights.tag(config, "other"), weights.tag(server[0], own))
    # Other positions, in as many bytes and with the same modification time.
    before = file.stat()
    file.write_text('{"rope_theta": 2}')
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    edited = weights.tag(config, own)
    assert edited != tag
    (place / "modeling.py").write_text("")
    assert weights.tag(config, own) not in (tag, edited)
    nowhere = changed(server[0], "model_config.hf_config_path", "nobody/no-such-model")
    with pytest.raises(ValueError, match="--hf-config-path nobody/no-such-model"):
        weights.tag(nowhere, own)


@pytest.mark.parametrize(
    "path, value",
    [
        ("model_config.model", "nobody/no-such-model"),
        ("load_config.load_format", "dummy"),
        ("load_config.load_format", "tensorizer"),
        ("model_config.model_weights", "s3://bucket/model"),
    ],
)
def test_weights_that_nothing_tells_from_others_need_a_tag(server, path, value):
    with pytest.raises(ValueError, match="`weights_tag`"):
        weights.tag(changed(server[0], path, value), None)
