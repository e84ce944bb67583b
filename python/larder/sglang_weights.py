"""The weights tag of an SGLang server, from SGLang's arguments and the files that they name."""

from __future__ import annotations

import logging
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
)

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
    """A tag from SGLang's own arguments and the files they name."""
    try:
        args = _server_args()
    except Exception as error:
        raise ValueError(f"SGLang's arguments are not to be had ({error}), {weights.HELP}") from error
    way = getattr(args, "load_format", None) or "auto"
    if getattr(way, "value", way) not in _FROM_FILES:
        raise ValueError(f"with --load-format {way} weights do not come from the model's files, {weights.HELP}")
    if getattr(args, "checkpoint_engine_wait_weights_before_ready", False):
        raise ValueError(f"weights come from a checkpoint engine, {weights.HELP}")
    told = _told(args, _TOLD + _TOLD_OF_WEIGHTS)
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


def _told(args: Any, names: Sequence[str]) -> dict[str, str]:
    return {name: str(getattr(args, name)) for name in names if getattr(args, name, None) is not None}


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
