"""The weights tag of an SGLang server, from its arguments, its model's configuration and the files
that they name.

The tag has each argument as SGLang has resolved it, except the arguments of
`larder_kv.sglang_left_out`, and the model's `config.json` after overrides.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from typing import Any, Optional, Sequence

from larder_kv import described, sglang_left_out as left_out, weights
from larder_kv.weights import Description, Named

logger = logging.getLogger(__name__)

#: The arguments that name files of weights beside the model's.
_PATHS = ("quantization_param_path", "modelopt_checkpoint_restore_path", "kt_weight_path", "uno_lora_path")

#: Ways to load weights from files at the model's path. Other ways have another source: a server, a
#: socket, or none.
_FROM_FILES = (
    "auto",
    "pt",
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "npcache",
    "sharded_state",
    "presharded",
    "gguf",
    "expert_pack",
    "bitsandbytes",
    "mistral",
    "layered",
    "runai_streamer",
)


def derived() -> Description:
    """The description of a server without an operator's tag, at its start."""
    try:
        args, is_start = _server_args(), _is_start()
        fields = _arguments(args, None)
    except Exception as error:
        raise ValueError(f"SGLang's arguments are not to be had ({error}), {weights.HELP}") from error
    if not is_start:
        raise ValueError(f"a running server may have other weights than the files that are there now, {weights.HELP}")
    way = getattr(args, "load_format", None) or "auto"
    if getattr(way, "value", way) not in _FROM_FILES:
        raise ValueError(f"with --load-format {way} weights do not come from the model's files, {weights.HELP}")
    cache = getattr(args, "weight_cache_mode", None) or "off"
    if cache != "off":
        raise ValueError(f"with --weight-cache-mode {cache} weights come from a daemon, which may hold older ones, {weights.HELP}")
    if getattr(args, "checkpoint_engine_wait_weights_before_ready", False):
        raise ValueError(f"weights come from a checkpoint engine, {weights.HELP}")
    fields |= _model(args) | _configurations(args)
    draft = getattr(args, "speculative_draft_model_path", None)
    named = [
        Named("model", args.model_path, getattr(args, "revision", None)),
        Named("draft", draft, getattr(args, "speculative_draft_model_revision", None)),
        *(Named(name, getattr(args, name, None)) for name in _PATHS),
    ]
    for name, path in _adapters(args):
        fields[f"adapter {name}"] = json.dumps(path)
        named.append(Named(f"adapter {name}", path))
    download_dir = getattr(args, "download_dir", None)
    fields |= weights.files([each for each in named if each.path], download_dir)
    return Description(None, fields)


def of_own(tag: str) -> Description:
    """The description of a server with an operator's tag. It names the weights only, not the other
    settings that decide the bytes of a page too.
    """
    try:
        args = _server_args()
        fields = _arguments(args, tag)
    except Exception as error:
        logger.warning("larder: SGLang's arguments are not to be had (%s): `weights_tag` must say all of them", error)
        return Description(tag, {})
    return Description(tag, fields | _model(args))


def _arguments(args: Any, own: Optional[str]) -> dict[str, str]:
    out = set(left_out.ALL)
    kept = {*left_out.KEPT, *left_out.KEPT_OF_WEIGHTS}
    if own is not None:
        out.update(left_out.OF_WEIGHTS)
        kept.difference_update(left_out.KEPT_OF_WEIGHTS)
    from sglang.srt.arg_groups.arg_utils import namespace_of
    from sglang.srt.arg_groups.overrides import resolution_result

    namespaces = namespace_of(type(args))
    found: dict[str, str] = {}
    for name in described.names(type(args)) or ():
        is_out = namespaces.get(name) in left_out.NAMESPACES and name not in kept
        if name not in out and not is_out:
            # SGLang resolves some values by the platform and the model.
            found |= described.fields(name, resolution_result(args, name), {})
    return found


def _model(args: Any) -> dict[str, str]:
    """SGLang's configuration of the model, with `config.json` after overrides."""
    from sglang.srt.arg_groups.overrides import model_config_of

    try:
        model = model_config_of(args)
    except Exception as error:
        logger.warning(
            "larder: SGLang's configuration of the model is not to be had (%s): "
            "`weights_tag` must say all of it",
            error,
        )
        return {}
    return described.fields("model", model, {type(model).__name__: frozenset(left_out.OF_MODEL)})


def _server_args() -> Any:
    from sglang.srt.runtime_context import get_server_args

    return get_server_args()


def _is_start() -> bool:
    """Whether the backend is that of the server's start. At an attach SGLang has none configured:
    it notes the new backend after the attach has succeeded, and its end after a detach.
    """
    from sglang.srt.runtime_context import get_memory

    return get_memory().hicache_storage_backend is not None


def _configurations(args: Any) -> dict[str, str]:
    """The digest of each decrypted configuration, by its argument. Its path and time do not count:
    a file may be decrypted anew for each start.
    """
    model = (args.model_path, getattr(args, "revision", None))
    draft_path = getattr(args, "speculative_draft_model_path", None)
    draft = (draft_path, getattr(args, "speculative_draft_model_revision", None))
    owners = {
        "decrypted_config_file": model,
        "decrypted_draft_config_file": draft if draft_path else model,
    }
    told = {}
    for name, (path, revision) in owners.items():
        if file := (getattr(args, name, None) or "").strip():
            places = weights.places(path, revision, getattr(args, "download_dir", None))
            told[name] = json.dumps(_digest(file, places))
    return told


def _digest(file: str, places: Sequence[str]) -> str:
    """The digest of a file. Its path is absolute, or relative to its model, as SGLang takes it."""
    for place in places:
        try:
            with open(os.path.join(place, file), "rb") as found:
                return hashlib.sha256(found.read()).hexdigest()
        except OSError:
            continue
    raise ValueError(f"the configuration {file} cannot be read, {weights.HELP}")


def _adapters(args: Any) -> list[tuple[str, str]]:
    """(name, path) of the LoRA adapters that a server is started with: their keys name both, but
    not the files there.
    """
    given = getattr(args, "lora_paths", None) or []
    if isinstance(given, dict):
        given = [{"lora_name": name, "lora_path": getattr(path, "lora_path", path)} for name, path in given.items()]
    found = []
    for adapter in given:
        if isinstance(adapter, str):
            name, _, path = adapter.rpartition("=")
        elif isinstance(adapter, dict):
            name, path = adapter.get("lora_name"), adapter["lora_path"]
        else:
            name, path = adapter.lora_name, adapter.lora_path
        found.append((str(name or path), str(path)))
    return sorted(found)
