"""What is read of a server before it serves: the connector's facts, and the doctor's."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from larder_kv.vllm import connector, doctor
from larder_kv.vllm.settings import SERVER_KEY, Server
from support.vllm_config import changed, configured, model


@pytest.fixture
def server(tmp_path):
    """A configuration of vLLM's own, of a small model."""
    return configured(model(tmp_path / "model"), max_model_len=4096)


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
    config = server
    assert informed(config, tmp_path, **own) == informed(config, tmp_path, **own)
    assert informed(config, tmp_path, **own).tells_packing
    for path, value in (
        ("weight_transfer_config", SimpleNamespace(backend="nccl")),
        ("parallel_config.worker_extension_cls", "trainer.Updates"),
    ):
        may = changed(config, path, value)
        told = [informed(each, tmp_path, **own) for each in (config, may, may)]
        assert len({server.weights for server in told}) == 3, path
        # There is no last start to compare with.
        assert told[0].fields and not told[1].fields


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
        "kv_connector_module_path": "larder_kv.vllm",
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
    from larder_kv.__main__ import main

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
