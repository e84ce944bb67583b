"""Checks of an ``--l2-adapter`` before a server is started. Changes nothing."""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any, Optional

from larder_kv import _larder

#: The release that the tests run against.
TESTED = "0.5.6"

#: The name of our adapter.
NAMES = {"type": "plugin", "module_path": "larder_kv.lmcache", "class_name": "LarderL2Adapter"}


def check(config: dict[str, Any], chunk_bytes: Optional[str]) -> int:
    """Prints the facts, each on a line, then the facts of the store and the machine. Returns
    the exit code.
    """
    facts = examine(config)
    for level, name, what in facts:
        print(f"{level:<4}  {name:<14}  {what}", flush=True)
    code = int(any(level == "fail" for level, _, _ in facts))
    parameters = config.get("adapter_params")
    if not isinstance(parameters, dict):
        return code
    keys = {key: value for key, value in parameters.items() if key not in _own_keys()}
    store = json.dumps(keys, default=str)
    own = parameters.get("chunk_bytes")
    # A wrong value is a fact already.
    if chunk_bytes is None and isinstance(own, int) and own > 0:
        chunk_bytes = str(own)
    return max(code, _larder.check_config(store, chunk_bytes, derives=False))


def examine(config: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Facts about a configuration, (level, name, text); facts of the store's own keys come from
    elsewhere.
    """
    facts = [_version()]
    for key, value in NAMES.items():
        if config.get(key) != value:
            facts.append(("fail", "LMCache", f'`{key}` must be "{value}"'))
    if config.get("serde") is not None:
        facts.append(
            (
                "warn",
                "LMCache",
                "`serde`: lookups ask for the layout before it, so that nothing is found",
            )
        )
    parameters = config.get("adapter_params")
    if not isinstance(parameters, dict):
        return [*facts, ("fail", "adapter", "`adapter_params` is not a table of keys and values")]
    return [*facts, *_parameters(parameters)]


def _parameters(parameters: dict[str, Any]) -> list[tuple[str, str, str]]:
    try:
        from larder_kv.lmcache.settings import LarderL2AdapterConfig
    except ImportError as error:
        return [("warn", "adapter", f"its own keys are not checked: {error}")]
    try:
        config = LarderL2AdapterConfig.from_dict(parameters)
    except ValueError as error:
        return [("fail", "adapter", str(error).removeprefix("larder: "))]
    facts = [("ok", "weights", f"{model}: {tag}") for model, tag in config.weights_tags.items()]
    if config.store.weights_tag is None:
        level = "ok" if facts else "fail"
        facts.append(
            (
                level,
                "weights",
                "models in neither `weights_tags` nor `model_dirs` are not kept: name the model there, "
                "or set `weights_tag` for all others",
            )
        )
    else:
        facts.append(("ok", "weights", f"all other models: {config.store.weights_tag}"))
    if config.ledger is None:
        facts.append(
            (
                "warn",
                "ledger",
                "beside a block device there is no file of keys: lists and usage begin empty; "
                "set `ledger`",
            )
        )
    return facts


def _own_keys() -> tuple[str, ...]:
    return ("weights_tags", "model_dirs", "chunk_bytes", "ledger", "mla")


def _version() -> tuple[str, str, str]:
    try:
        version = importlib.metadata.version("lmcache")
    except importlib.metadata.PackageNotFoundError:
        return (
            "warn",
            "LMCache",
            f"not installed in this environment; the release tested is {TESTED}",
        )
    if version == TESTED:
        return "ok", "LMCache", version
    return "warn", "LMCache", f"{version} is not the release tested: {TESTED}"
