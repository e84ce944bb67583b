"""What is read of a server before it serves: the weights tag from vLLM's configuration, and the
doctor's facts.
"""

from __future__ import annotations

import copy
import json
import os
from types import SimpleNamespace

import pytest
from larder.vllm import connector, doctor, weights
from larder.vllm.settings import SERVER_KEY, Server


@pytest.fixture
def server(tmp_path):
    """A configuration of vLLM's, as far as it is read, and the directories of its model and an
    adapter.
    """
    model, adapter = tmp_path / "model", tmp_path / "adapter"
    for directory in (model, adapter):
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(b"1")
    made = SimpleNamespace(
        model_config=SimpleNamespace(
            model=str(model),
            model_weights="",
            revision=None,
            quantization=None,
            dtype="bfloat16",
            hf_overrides={},
            max_model_len=4096,
            hf_text_config=SimpleNamespace(rope_scaling=None),
            multimodal_config=None,
        ),
        load_config=SimpleNamespace(
            load_format="auto", download_dir=None, model_loader_extra_config={}
        ),
        cache_config=SimpleNamespace(cache_dtype="auto"),
        lora_config=None,
        speculative_config=None,
    )
    return made, model, adapter


def changed(server, path, value):
    """The same configuration with one value changed."""
    other = copy.deepcopy(server)
    *parts, last = path.split(".")
    at = other
    for part in parts:
        at = getattr(at, part)
    setattr(at, last, value)
    return other


def test_the_tag_is_of_the_arguments_and_the_files(server):
    config, model, adapter = server
    tag = weights.tag(config, None)
    assert weights.tag(copy.deepcopy(config), None) == tag
    draft = SimpleNamespace(method="eagle", model=str(adapter), revision=None, quantization=None)
    others = [
        ("model_config.quantization", "fp8"),
        ("model_config.dtype", "float16"),
        ("model_config.revision", "v2"),
        ("model_config.hf_overrides", {"rope_theta": 1}),
        ("cache_config.cache_dtype", "fp8_e4m3"),
        ("cache_config.swa_bounded_replay", False),
        ("model_config.config_format", "mistral"),
        ("model_config.trust_remote_code", True),
        ("parallel_config", SimpleNamespace(cp_kv_cache_interleave_size=1)),
        ("parallel_config", SimpleNamespace(cp_kv_cache_interleave_size=16)),
        ("additional_config", {"kernel": "one"}),
        ("additional_config", {"kernel": "other"}),
        ("additional_config", SimpleNamespace(compute_hash=lambda: "of a plug-in")),
        ("load_config.load_format", "safetensors"),
        ("attention_config", SimpleNamespace(backend="B12X")),
        ("attention_config", SimpleNamespace(backend_per_kind={"full_attention": "B12X"})),
        ("speculative_config", draft),
        ("lora_config", SimpleNamespace(default_mm_loras={"image": str(adapter)})),
        ("model_config.multimodal_config", SimpleNamespace(mm_processor_kwargs={"size": 1})),
        ("model_config.hf_text_config", SimpleNamespace(rope_scaling={"rope_type": "longrope"})),
    ]
    tags = [weights.tag(changed(config, path, value), None) for path, value in others]
    assert len({tag, *tags}) == len(others) + 1
    # The files of the draft and of adapters that are named count too.
    with_draft = changed(config, "speculative_config", draft)
    before = weights.tag(with_draft, None)
    (adapter / "model.safetensors").write_bytes(b"22")
    assert weights.tag(with_draft, None) != before
    (model / "model.safetensors").write_bytes(b"22")
    assert weights.tag(config, None) != tag


def test_a_tag_of_ones_own_stands_for_the_files_and_for_nothing_else(server):
    config, model, _ = server
    tag = weights.tag(config, "mine")
    assert tag.startswith("mine+")
    (model / "model.safetensors").write_bytes(b"22")
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


def informed(config, path, **more):
    """What the connector tells a tier of the server."""
    written = transfer(path, tier=more)["kv_connector_extra_config"]
    config = changed(
        config, "kv_transfer_config", SimpleNamespace(kv_connector_extra_config=written)
    )
    config.cache_config.prefix_caching_hash_algo = "sha256"
    connector._inform(config, SimpleNamespace(kv_cache_groups=[]))
    (tier,) = config.kv_transfer_config.kv_connector_extra_config["secondary_tiers"]
    return Server.of_config(tier[SERVER_KEY])


@pytest.mark.parametrize("own", [{}, {"weights_tag": "mine"}])
def test_a_server_whose_weights_may_change_shares_with_no_other_start(server, tmp_path, own):
    config = changed(server[0], "weight_transfer_config", None)
    config.parallel_config = SimpleNamespace(worker_extension_cls="")
    assert informed(config, tmp_path, **own) == informed(config, tmp_path, **own)
    assert informed(config, tmp_path, **own).tells_packing
    for path, value in (
        ("weight_transfer_config", SimpleNamespace(backend="nccl")),
        ("parallel_config.worker_extension_cls", "trainer.Updates"),
    ):
        may = changed(config, path, value)
        tags = {informed(each, tmp_path, **own).weights for each in (config, may, may)}
        assert len(tags) == 3, path


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


def transfer(path, **more):
    tier = {"type": "larder", "path": str(path), "size": "144MiB", "prewrite": False} | more.pop(
        "tier", {}
    )
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 1 << 20,
        "secondary_tiers": [tier],
    }
    return {
        "kv_connector": "LarderOffloadingConnector",
        "kv_connector_module_path": "larder.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra | more.pop("extra", {}),
    } | more


def levels(config, **server):
    return {(fact.level, fact.name) for fact in doctor.examine(config, doctor.Server(**server))}


def test_the_doctor_finds_each_mistake(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    good = levels(transfer(tmp_path), chunk_bytes=1 << 20 >> 1)
    assert not {fact for fact in good if fact[0] == "fail"}
    for wrong, fact in (
        ({"kv_connector": "LMCacheConnector"}, ("fail", "connector")),
        ({"kv_connector_module_path": None}, ("fail", "connector")),
        ({"kv_role": "kv_producer"}, ("fail", "connector")),
        ({"kv_connector": "OffloadingConnector"}, ("fail", "tier")),
        ({"extra": {"spec_name": "CPUOffloadingSpec"}}, ("fail", "vLLM")),
        ({"extra": {"store_threshold": 2}}, ("fail", "vLLM")),
        ({"extra": {"cpu_bytes_to_use": 0}}, ("fail", "CPU tier")),
        ({"extra": {"cpu_bytes_to_use": 1 << 60}}, ("fail", "CPU tier")),
        ({"extra": {"secondary_tiers": []}}, ("fail", "tier")),
        ({"tier": {"on_reset": "clear"}}, ("fail", "tier")),
    ):
        assert fact in levels(transfer(tmp_path, **wrong)), wrong
    assert ("fail", "CPU tier") in levels(transfer(tmp_path), chunk_bytes=1 << 20)
    assert ("warn", "chunks") in levels(transfer(tmp_path), chunk_bytes=64 << 10)
    assert ("ok", "chunks") in levels(transfer(tmp_path), chunk_bytes=4 << 20)
    assert ("warn", "hash") in levels(transfer(tmp_path), prefix_hash="xxhash")
    monkeypatch.setenv("PYTHONHASHSEED", "0")
    assert ("ok", "hash") in levels(transfer(tmp_path), prefix_hash="xxhash")


def test_the_doctor_runs_from_the_command_line(tmp_path, capfd):
    from larder.__main__ import main

    written = tmp_path / "transfer.json"
    written.write_text(json.dumps(transfer(tmp_path / "store")))
    assert main(["doctor", "--vllm", f"@{written}", "--page-bytes", "512KiB"]) == 0
    said = capfd.readouterr().out
    assert (
        "derives the weights tag" in said
        and "every key is known" in said
        and "would be created" in said
    )
    assert not (tmp_path / "store").exists()
    assert main(["doctor", "--vllm", json.dumps(transfer(tmp_path, tier={"sise": 1}))]) == 1
    assert "`sise`" in capfd.readouterr().out
    assert main(["doctor", "--vllm", "{"]) == 2
    assert main(["doctor", "--vllm"]) == 2
    assert main(["doctor", "--vllm", f"@{written}", "--page-bytes", "big"]) == 2
    assert main(["doctor", "--sglang", "{}", "--vllm", "{}"]) == 2
