"""The configuration of the backend: its keys, the weights that its pages are of, and the doctor."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from unittest import mock

import pytest
from support.backend import config, extra, make


@pytest.mark.parametrize(
    "change, name",
    [
        ({"sise": "1GiB"}, "sise"),
        ({"size": "1GB"}, "size"),
        ({"path": 7}, "path"),
        ({"weights_tag": 7}, "weights_tag"),
        ({"timeout": 60}, "timeout"),
        ({"on_error": "ignore"}, "on_error"),
        ({"retry": 0}, "retry"),
        ({"prewrite": "on"}, "prewrite"),
        ({"policy": "mru"}, "policy"),
        ({"transfer": "fast"}, "transfer"),
    ],
)
def test_a_wrong_key_or_value_is_refused_by_its_name(tmp_path, change, name):
    with pytest.raises(ValueError, match=f"`{name}`"):
        make(tmp_path, extra_config=extra(tmp_path) | change)


def test_a_path_that_cannot_be_used_is_refused_by_its_name(tmp_path):
    file = tmp_path / "file"
    file.write_text("text")
    with pytest.raises(RuntimeError, match="`path`"):
        make(file)
    with pytest.raises(RuntimeError, match="`size` is missing"):
        make(tmp_path, extra_config={key: value for key, value in extra(tmp_path).items() if key != "size"})


@pytest.fixture
def started(tmp_path):
    """Starts a server with some arguments, without a weights tag or with one, and says which weights its pages are of."""
    weights, adapter = tmp_path / "weights", tmp_path / "adapter"
    for directory in (weights, adapter):
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(b"1")
    bare = {key: value for key, value in extra(tmp_path / "store").items() if key != "weights_tag"}

    def start(tag=None, attached="at the start", **more):
        args = {"model_path": str(weights), "revision": None, "kv_cache_dtype": "auto"} | more
        memory = {"hicache_storage_backend": "dynamic" if attached == "at the start" else None}
        from larder import sglang

        with (
            mock.patch("sglang.srt.runtime_context.get_server_args", return_value=SimpleNamespace(**args)),
            mock.patch("sglang.srt.runtime_context.get_memory", return_value=SimpleNamespace(**memory)),
            mock.patch.object(sglang._larder, "Backend", wraps=sglang._larder.Backend) as backend,
        ):
            make(tmp_path, extra_config=bare | ({"weights_tag": tag} if tag else {})).close()
            return json.loads(backend.call_args.args[1])["weights"]

    return start, weights, adapter


def test_without_a_weights_tag_one_is_derived_from_arguments_and_files(started):
    start, weights, adapter = started
    tag = start()
    assert start() == tag
    assert start(quantization="fp8") != tag
    (weights / "model.safetensors").write_bytes(b"22")
    assert start() != tag


def test_an_attach_to_a_running_server_needs_a_tag(started):
    start, _, _ = started
    with pytest.raises(ValueError, match="a running server .*`weights_tag`"):
        start(attached="later")
    assert start("mine", attached="later") == start("mine")


def test_a_tag_of_ones_own_stands_for_the_weights_and_for_nothing_else(started):
    start, weights, _ = started
    told = start("mine")
    assert told.startswith("mine+")
    # Whichever files they are, the tag says so.
    (weights / "model.safetensors").write_bytes(b"22")
    assert start("mine") == start("mine", model_path="nobody/no-such-model") == told
    assert start("other") != told
    for decides in (
        {"kv_cache_dtype": "fp8_e5m2"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"quantization": "fp8"},
        {"json_model_override_args": '{"rope_scaling": {"factor": 4.0}}'},
        {"speculative_draft_kv_cache_dtype": "fp8_e4m3"},
        {"kt_method": "AMXINT4"},
        {"dsv4_attn_backend": "flashmla_mega"},
        {"enable_dsa_fused_indexer": False},
    ):
        assert start("mine", **decides) not in (told, "mine"), decides
    assert start("mine", kv_cache_dtype="fp8_e5m2") != start("mine", kv_cache_dtype="fp8_e4m3")
    assert start("mine", dsv4_attn_backend="auto", enable_dsa_fused_indexer=True) == told


def test_an_adapter_that_is_replaced_at_its_path_changes_the_tag(started):
    start, _, adapter = started
    given = [SimpleNamespace(lora_name="a", lora_path=str(adapter), lora_id="x")]
    tag = start(lora_paths=given)
    assert start() != tag
    assert start(lora_paths=[f"a={adapter}"]) == start(lora_paths={"a": str(adapter)}) == tag
    (adapter / "model.safetensors").write_bytes(b"22")
    assert start(lora_paths=given) != tag


@pytest.mark.parametrize("name", ["decrypted_config_file", "decrypted_draft_config_file"])
def test_the_content_of_a_decrypted_configuration_changes_the_tag(started, name, tmp_path):
    start, weights, _ = started
    plain, again = tmp_path / "plain", tmp_path / "again"
    plain.write_text("{}")
    again.write_text("{}")
    tag = start(**{name: str(plain)})
    assert start() != tag and start(**{name: "  "}) == start()
    # Decrypted anew, or a path in the directory of the model.
    assert start(**{name: str(again)}) == tag
    again.write_text('{"rope_theta": 1}')
    assert start(**{name: str(again)}) != tag
    (weights / "plain").write_text("{}")
    assert start(**{name: "plain"}) == tag
    plain.unlink()
    with pytest.raises(ValueError, match="`weights_tag`"):
        start(**{name: str(plain)})
    assert start("mine", **{name: str(plain)}) == start("mine")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Makes a snapshot of a model in a cache of the hub, the library's own or another, as a download in part leaves it behind."""
    from huggingface_hub import constants

    own = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(own))

    def download(commit, files, cache=own):
        folder = cache / "models--org--model"
        listed = {"files": [{"path": name} for name in (*files, "README.md")]}
        for file, content in {
            "refs/main": commit,
            f"trees/{commit}.json": json.dumps(listed),
            **{f"snapshots/{commit}/{name}": content for name, content in files.items()},
        }.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_text(content)

    return download


def test_weights_from_a_hub_need_not_be_all_of_their_snapshot(started, hub):
    start, _, _ = started
    hub("c0ffee", {"model.safetensors": "1", "config.json": "{}"})
    tag = start(model_path="org/model")
    assert start(model_path="org/model") == tag
    assert start(model_path="org/model", revision="c0ffee") != tag
    hub("decade", {"model.safetensors": "22", "config.json": "{}"})
    assert start(model_path="org/model") != tag
    with pytest.raises(ValueError, match="`weights_tag`"):
        start(model_path="org/model", revision="no-such-branch")


def test_weights_count_where_they_were_downloaded_to(started, hub, tmp_path):
    start, _, _ = started
    models = tmp_path / "models"
    hub("c0ffee", {"config.json": "{}"})
    with pytest.raises(ValueError, match="`weights_tag`"):
        start(model_path="org/model")
    hub("c0ffee", {"model.safetensors": "1"}, models)
    tag = start(model_path="org/model", download_dir=str(models))
    hub("decade", {"model.safetensors": "22"}, models)
    assert start(model_path="org/model", download_dir=str(models)) != tag


def test_files_whose_times_are_a_constant_need_a_tag(started):
    start, weights, _ = started
    file = weights / "model.safetensors"
    for constant in (0, 1):
        os.utime(file, (constant, constant))
        with pytest.raises(ValueError, match=f"{file} is before 1990.*`weights_tag`"):
            start()
    assert start("mine").startswith("mine+")


def test_files_beside_the_models_change_the_tag(started):
    start, _, adapter = started
    for beside in ("kt_weight_path", "uno_lora_path", "speculative_draft_model_path"):
        (adapter / "model.safetensors").write_bytes(b"1")
        tag = start(**{beside: str(adapter)})
        assert start() != tag
        (adapter / "model.safetensors").write_bytes(b"22")
        assert start(**{beside: str(adapter)}) != tag, beside


@pytest.mark.parametrize(
    "told",
    [
        {"model_path": "nobody/no-such-model"},
        {"load_format": "dummy"},
        {"load_format": "remote_instance"},
        {"checkpoint_engine_wait_weights_before_ready": True},
        {"weight_cache_mode": "client"},
        {"weight_cache_mode": "daemon"},
    ],
    ids=str,
)
def test_weights_that_cannot_be_told_apart_need_a_tag(started, told):
    start, _, _ = started
    with pytest.raises(ValueError, match="`weights_tag`"):
        start(**told)


def test_a_weight_cache_that_is_off_adds_nothing_to_the_tag(started):
    start, _, _ = started
    assert start(weight_cache_mode="off") == start()


def test_head_splitting_is_refused_by_its_key(tmp_path):
    wrong = config(tmp_path)
    wrong.should_split_heads = True
    from larder.sglang import LarderHiCache

    with pytest.raises(ValueError, match="`tp_lcm_size`"):
        LarderHiCache(wrong, {})


def test_the_doctor_reads_the_config_as_sglang_does(tmp_path, capfd):
    from larder.__main__ import main

    written = tmp_path / "config.json"
    written.write_text(json.dumps(extra(tmp_path / "store")))
    assert main(["doctor", "--sglang", f"@{written}"]) == 0
    assert "every key is known" in capfd.readouterr().out
    assert main(["doctor", "--sglang", json.dumps(extra(tmp_path) | {"sise": 1})]) == 1
    assert "`sise`" in capfd.readouterr().out
    assert main(["doctor", "--sglang", "{"]) == 2
    assert main(["doctor", "--sglang"]) == 2
    fits = ["doctor", "--sglang", f"@{written}", "--page-bytes"]
    assert main([*fits, "1MiB"]) == 0
    assert main([*fits, "1GiB"]) == 1
    assert main([*fits, "big"]) == 2
