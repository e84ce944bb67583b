"""The weights tag of SGLang's arguments: each argument counts, or is on a list with its reason."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import shutil
from types import SimpleNamespace
from unittest import mock

import msgspec
import pytest
from larder_kv import sglang_left_out as left_out
from larder_kv import sglang_weights
from larder_kv.store import Store
from sglang.srt.arg_groups import fields as groups
from sglang.srt.server_args import ServerArgs
from support.backend import extra, make

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}

#: The namespaces of SGLang's arguments that are in the tag.
IN = {
    "exec.deterministic",
    "exec.dllm",
    "exec.features",
    "exec.kernel",
    "exec.mamba",
    "exec.moe",
    "lora",
    "memory",
    "mm",
    "model",
    "spec",
}


def namespaces():
    """The names of the arguments of each namespace, from SGLang's own classes."""
    found = {}
    for module in pkgutil.iter_modules(groups.__path__):
        declared = vars(importlib.import_module(f"{groups.__name__}.{module.name}")).values()
        for kind in declared:
            if isinstance(kind, type) and hasattr(kind, "_NS_PATH"):
                found[kind._NS_PATH] = set(kind.__struct_fields__)
    return found


@pytest.fixture
def started(tmp_path):
    """Starts a server with some arguments, without a weights tag or with one, and says which weights its pages are of."""
    weights, adapter = tmp_path / "weights", tmp_path / "adapter"
    for directory in (weights, adapter):
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(b"1")
    (weights / "config.json").write_text(json.dumps(MODEL))
    bare = {key: value for key, value in extra(tmp_path / "store").items() if key != "weights_tag"}

    def start(tag=None, attached="at the start", **more):
        args = ServerArgs(**({"model_path": str(weights)} | more))
        memory = {"hicache_storage_backend": "dynamic" if attached == "at the start" else None}
        from larder_kv import sglang

        with (
            mock.patch("sglang.srt.runtime_context.get_server_args", return_value=args),
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


def test_a_tag_of_ones_own_stands_for_the_weights_and_for_nothing_else(started, tmp_path):
    start, weights, _ = started
    told = start("mine")
    assert told.startswith("mine+")
    # Whichever files they are, the tag says so.
    (weights / "model.safetensors").write_bytes(b"22")
    moved = shutil.copytree(weights, tmp_path / "moved")
    assert start("mine") == start("mine", model_path=str(moved)) == told
    assert start("other") != told
    # A process reads the configuration at a path once.
    edited = shutil.copytree(weights, tmp_path / "edited")
    (edited / "config.json").write_text(json.dumps(MODEL | {"rope_theta": 7}))
    assert start("mine", model_path=str(edited)) != told
    for decides in (
        {"kv_cache_dtype": "fp8_e5m2"},
        {"kv_cache_dtype": "fp8_e4m3"},
        {"quantization": "fp8"},
        {"json_model_override_args": '{"rope_scaling": {"factor": 4.0}}'},
        {"speculative_draft_kv_cache_dtype": "fp8_e4m3"},
        {"kt_method": "AMXINT8"},
        {"dsv4_attn_backend": "flashmla_mega"},
        {"enable_dsa_fused_indexer": False},
    ):
        assert start("mine", **decides) not in (told, "mine"), decides
    assert start("mine", kv_cache_dtype="fp8_e5m2") != start("mine", kv_cache_dtype="fp8_e4m3")


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
    plain.write_text(json.dumps(MODEL))
    again.write_text(json.dumps(MODEL))
    tag = start(**{name: str(plain)})
    assert start() != tag and start(**{name: "  "}) == start()
    # Decrypted anew, or a path in the directory of the model.
    assert start(**{name: str(again)}) == tag
    again.write_text(json.dumps(MODEL | {"rope_theta": 1}))
    assert start(**{name: str(again)}) != tag
    (weights / "plain").write_text(json.dumps(MODEL))
    assert start(**{name: "plain"}) == tag
    plain.unlink()
    with pytest.raises(ValueError, match="`weights_tag`"):
        start(**{name: str(plain)})


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


def test_each_namespace_of_arguments_is_in_or_out():
    out = set(left_out.NAMESPACES)
    assert not IN & out
    found = namespaces()
    assert set(found) - IN == out, "of a new release: decide, in `NAMESPACES` or in `IN`"
    assert IN <= set(found)
    assert set().union(*found.values()) == set(ServerArgs.__struct_fields__)


def test_no_list_has_an_argument_that_does_not_exist():
    found = namespaces()
    inside = set().union(*(found[name] for name in IN))
    outside = set().union(*(found[name] for name in left_out.NAMESPACES))
    listed = [name for names in left_out.FIELDS.values() for name in names]
    assert len(listed) == len(set(listed))
    assert set(listed) <= inside
    assert {*left_out.KEPT, *left_out.KEPT_OF_WEIGHTS} <= outside
    assert set(left_out.OF_WEIGHTS) <= inside - set(listed)


def test_each_argument_counts_or_is_on_a_list(started, monkeypatch):
    # Its model is not made anew from wrong arguments.
    monkeypatch.setattr(sglang_weights, "_model", lambda args: {})
    _, weights, _ = started
    args = ServerArgs(model_path=str(weights))
    monkeypatch.setattr(sglang_weights, "_server_args", lambda: args)
    own = sglang_weights.of_own("mine")
    found = namespaces()
    outside = set().union(*(found[name] for name in left_out.NAMESPACES)) - set(left_out.KEPT)
    for name in ServerArgs.__struct_fields__:
        before = getattr(args, name)
        msgspec.structs.force_setattr(args, name, "a value that no release has")
        counts = sglang_weights.of_own("mine").tag != own.tag
        msgspec.structs.force_setattr(args, name, before)
        assert counts == (name not in outside | left_out.ALL | set(left_out.OF_WEIGHTS)), name
    assert sglang_weights.of_own("mine") == own


def test_arguments_that_name_the_weights_count_in_a_derived_tag(started):
    start, _, _ = started
    tag = start()
    for name in ("weight_version", "custom_weight_loader"):
        assert start(**{name: ["v2"] if name == "custom_weight_loader" else "v2"}) != tag
        assert start("mine", weight_version="v2") == start("mine")


def test_the_configuration_of_the_model_counts_after_overrides(started):
    start, _, _ = started
    nested = {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 2.0}}}
    tags = [
        start("mine"),
        start("mine", context_length=2048),
        start("mine", json_model_override_args=json.dumps({"rope_theta": 5})),
        start("mine", json_model_override_args=json.dumps(nested)),
    ]
    assert len(set(tags)) == len(tags)


def test_a_start_with_other_ports_memory_and_paths_has_the_same_tag(started, tmp_path):
    start, _, _ = started
    other = {
        "port": 12345,
        "nccl_port": 23456,
        "mem_fraction_static": 0.5,
        "max_total_tokens": 4096,
        "hicache_size": 7,
        "download_dir": str(tmp_path / "downloads"),
        "ple_offload_dir": str(tmp_path / "offload"),
        "served_model_name": "other",
        "log_level": "debug",
        "random_seed": 5,
        "tokenizer_path": str(tmp_path / "weights"),
    }
    assert start(**other) == start()
    assert start("mine", **other) == start("mine")


def test_the_log_names_the_argument_that_changed_since_the_last_start(started, tmp_path, caplog):
    start, _, _ = started
    Store.attach(tmp_path / "store", size="128MiB", disk="threads").close()
    start()
    assert "is not that of the last start" not in caplog.text
    start(kv_cache_dtype="fp8_e5m2", port=12345)
    assert 'kv_cache_dtype: "auto" -> "fp8_e5m2"' in caplog.text and "port" not in caplog.text
