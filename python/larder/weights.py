"""Which weights a server's pages are of: what it was told, and the files they were loaded from.

Pages of other weights must never be served. Where nothing tells the weights from others of the same name there is no tag, and the
server does not start without one of its operator's own.
"""

from __future__ import annotations

import logging
import os
from typing import Any, Optional, Sequence

from larder import _larder

logger = logging.getLogger(__name__)

#: What a server is told that decides the bytes of a page whichever weights it loads, by the names of its arguments. Pools do
#: not tell all of it: they hold every 8-bit type as plain bytes.
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
)

#: What it is told of which weights these are.
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

#: Of those, what names files beside the model's.
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

_HELP = "so that nothing tells these weights from others: set `weights_tag` in the extra config"


def derived() -> str:
    """A tag from SGLang's own arguments and the files they name."""
    try:
        args = _server_args()
    except Exception as error:
        raise ValueError(f"SGLang's arguments are not to be had ({error}), {_HELP}") from error
    way = getattr(args, "load_format", None) or "auto"
    if getattr(way, "value", way) not in _FROM_FILES:
        raise ValueError(f"with --load-format {way} weights do not come from the model's files, {_HELP}")
    if getattr(args, "checkpoint_engine_wait_weights_before_ready", False):
        raise ValueError(f"weights come from a checkpoint engine, {_HELP}")
    told = _told(args, _TOLD + _TOLD_OF_WEIGHTS)
    named = [(args.model_path, getattr(args, "revision", None))]
    named.append((getattr(args, "speculative_draft_model_path", None), getattr(args, "speculative_draft_model_revision", None)))
    named += [(getattr(args, name, None), None) for name in _PATHS]
    for name, path in _adapters(args):
        told[f"adapter {name}"] = path
        named.append((path, None))
    download_dir = getattr(args, "download_dir", None)
    return _larder.weights_tag(told, [_places(path, revision, download_dir) for path, revision in named if path])


def of_own(tag: str) -> str:
    """Somebody's own tag says which weights these are, and not what else decides the bytes of a page."""
    try:
        args = _server_args()
    except Exception as error:
        logger.warning("larder: SGLang's arguments are not to be had (%s): `weights_tag` must say all of them", error)
        return tag
    return f"{tag}+{_larder.weights_tag(_told(args, _TOLD), [])}"


def _server_args() -> Any:
    from sglang.srt.runtime_context import get_server_args

    return get_server_args()


def _told(args: Any, names: Sequence[str]) -> dict[str, str]:
    return {name: str(getattr(args, name)) for name in names if getattr(args, name, None) is not None}


def _places(path: str, revision: Optional[str], download_dir: Optional[str]) -> list[str]:
    """Where a model's files may be on this machine, in the order in which SGLang looks for them."""
    if os.path.exists(path):
        return [path]
    places = _snapshots(path, revision, download_dir)
    if not places:
        raise ValueError(f"the files of {path} are not on this machine, {_HELP}")
    return places


def _snapshots(model: str, revision: Optional[str], download_dir: Optional[str]) -> list[str]:
    """Where caches of the model hub hold this revision, whole or (only weights were asked for, or only the configuration) in part.

    By the cache's layout, as SGLang itself finds them: the hub's library answers for snapshots alone that hold every file of theirs.
    """
    from huggingface_hub import constants

    found = []
    for cache in filter(None, (download_dir, constants.HF_HUB_CACHE)):
        folder = os.path.join(cache, constants.REPO_ID_SEPARATOR.join(["models", *model.split("/")]))
        commit = revision
        reference = os.path.join(folder, "refs", revision or "main")
        if os.path.isfile(reference):
            with open(reference) as file:
                commit = file.read().strip()
        if commit and os.path.isdir(snapshot := os.path.join(folder, "snapshots", commit)):
            found.append(snapshot)
    return found


def _adapters(args: Any) -> list[tuple[str, str]]:
    """(name, path) of the LoRA adapters that a server is started with: their keys name both, but not what lies there."""
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
