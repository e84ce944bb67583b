"""The weights tag of an SGLang server, from SGLang's arguments and the files that they name."""

from __future__ import annotations

import hashlib
import logging
import os
from typing import Any, Sequence

from larder import weights

logger = logging.getLogger(__name__)

#: Arguments of a server that decide the bytes of a page, with any weights. Pools do not show all of them: they hold every 8-bit
#: type as plain bytes.
_TOLD = (
    "quantization",
    "modelopt_quant",
    "quantize_and_serve",
    "rl_quant_profile",
    "kv_cache_dtype",
    "qsa_indexer_dtype",
    "enable_deepseek_v4_fp4_indexer",
    "dtype",
    "model_impl",
    "json_model_override_args",
    "kt_method",
    "enable_w4a4_mxfp4_megamoe",
    "flashinfer_mxfp4_moe_precision",
    "speculative_algorithm",
    "speculative_draft_kv_cache_dtype",
    "speculative_draft_model_quantization",
    "dsv4_attn_backend",
    "enable_dsa_fused_indexer",
)

#: The value of arguments that has the effect of none, and adds nothing to a tag: tags of older stores stay valid.
_DEFAULTS = {"dsv4_attn_backend": "auto", "enable_dsa_fused_indexer": True}

#: Arguments that name the weights.
_TOLD_OF_WEIGHTS = (
    "model_path",
    "revision",
    "load_format",
    "model_loader_extra_config",
    "weight_version",
    "quantization_param_path",
    "modelopt_checkpoint_restore_path",
    "kt_weight_path",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "uno_lora_path",
)

#: The arguments among them that name files beside the model's.
_PATHS = ("quantization_param_path", "modelopt_checkpoint_restore_path", "kt_weight_path", "uno_lora_path")

#: Ways to load weights from files at the model's path. By others they come from elsewhere: a server, a socket, nowhere.
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


def derived() -> str:
    """A tag from SGLang's own arguments and the files they name, at the start of a server."""
    try:
        args, is_start = _server_args(), _is_start()
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
    told = _told(args, _TOLD + _TOLD_OF_WEIGHTS) | _configurations(args)
    named = [(args.model_path, getattr(args, "revision", None))]
    named.append((getattr(args, "speculative_draft_model_path", None), getattr(args, "speculative_draft_model_revision", None)))
    named += [(getattr(args, name, None), None) for name in _PATHS]
    for name, path in _adapters(args):
        told[f"adapter {name}"] = path
        named.append((path, None))
    download_dir = getattr(args, "download_dir", None)
    return weights.tag(told, [(path, revision) for path, revision in named if path], download_dir)


def of_own(tag: str) -> str:
    """An operator's tag, completed. It names the weights only, not the arguments that decide the bytes of a page too."""
    try:
        args = _server_args()
    except Exception as error:
        logger.warning("larder: SGLang's arguments are not to be had (%s): `weights_tag` must say all of them", error)
        return tag
    return f"{tag}+{weights.tag(_told(args, _TOLD), [])}"


def _server_args() -> Any:
    from sglang.srt.runtime_context import get_server_args

    return get_server_args()


def _is_start() -> bool:
    """Whether the backend is the one of the server's start. At an attach SGLang has none configured: it notes the new one when the
    attach has succeeded, and its end after a detach.
    """
    from sglang.srt.runtime_context import get_memory

    return get_memory().hicache_storage_backend is not None


def _told(args: Any, names: Sequence[str]) -> dict[str, str]:
    given = {name: getattr(args, name, None) for name in names}
    return {name: str(value) for name, value in given.items() if value not in (None, _DEFAULTS.get(name))}


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
            told[name] = _digest(file, places)
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
    """(name, path) of the LoRA adapters that a server is started with: their keys name both, but not the files there."""
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
