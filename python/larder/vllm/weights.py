"""The weights tag of a server, from vLLM's configuration and the files that it names.

Adapters that are loaded while the server runs are part of vLLM's own keys by name and path; their
files are not seen here.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any, Optional

from larder import weights

#: Settings that decide the bytes of a chunk with any weights, by configuration and attribute.
_TOLD = {
    "model_config": (
        "quantization",
        "quantization_config",
        "dtype",
        "hf_overrides",
        "hf_config_path",
        # These two choose the configuration among the model's files, and the code that reads it.
        "config_format",
        "trust_remote_code",
        "model_class_overrides",
        "model_impl",
        "disable_sliding_window",
    ),
    "cache_config": (
        "cache_dtype",
        "kv_cache_dtype_skip_layers",
        "mamba_block_size",
        "mamba_cache_dtype",
        "mamba_ssm_cache_dtype",
        "mamba_cache_mode",
        "kv_sharing_fast_prefill",
        # With it, window layers have pages of a prompt's end alone.
        "swa_bounded_replay",
    ),
    # How the tokens of a block are dealt out to the ranks that divide a context.
    "parallel_config": ("cp_kv_cache_interleave_size",),
    # Kernels that are asked for. The workers tell which are chosen (`larder.vllm.packing`).
    "attention_config": (
        "backend",
        "backend_per_kind",
        "flash_attn_version",
        "use_trtllm_attention",
        "indexer_kv_dtype",
    ),
    "mamba_config": ("backend",),
    "lora_config": ("lora_dtype", "target_modules", "enable_tower_connector_lora"),
    "speculative_config": ("method", "quantization", "kv_cache_dtype"),
}

#: Of multimodal models: settings that decide the processing of an image.
_TOLD_OF_MEDIA = (
    "mm_processor_kwargs",
    "video_pruning_rate",
    "video_pruning_method",
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
)

#: Which weights these are.
_TOLD_OF_WEIGHTS = {
    "model_config": ("model", "model_weights", "revision", "code_revision"),
    "load_config": ("load_format", "model_loader_extra_config", "ignore_patterns"),
    "speculative_config": ("model", "revision", "code_revision"),
}

#: Endings of the files that make a model's configuration.
_CONFIGURATION = (".json", ".py")

#: Ways to load weights from files at the model's path. By others they come from elsewhere: a
#: server, a bucket, nowhere.
_FROM_FILES = (
    "auto",
    "hf",
    "pt",
    "safetensors",
    "instanttensor",
    "npcache",
    "fastsafetensors",
    "sharded_state",
    "gguf",
    "bitsandbytes",
    "mistral",
    "runai_streamer",
    "runai_streamer_sharded",
)


def tag(config: Any, own: Optional[str]) -> str:
    """The tag of the server with this ``VllmConfig``; ``own`` is the operator's, which stands for
    the weight files.

    Raises ValueError where nothing tells the weights from others and there is no tag of the
    operator's.
    """
    told = _told(config, _TOLD) | _told_of_positions(config) | _told_of_media(config)
    told |= _told_of_configuration(config) | _told_of_plugins(config)
    if own:
        return f"{own}+{weights.tag(told, [])}"
    way = getattr(config.load_config.load_format, "value", config.load_config.load_format) or "auto"
    if way not in _FROM_FILES:
        raise ValueError(
            f"larder: with --load-format {way} weights do not come from the model's files, {weights.HELP}"
        )
    told |= _told(config, _TOLD_OF_WEIGHTS)
    return weights.tag(told, _named(config), config.load_config.download_dir)


def may_change(config: Any) -> Optional[str]:
    """Why the weights may change while the server with this ``VllmConfig`` runs. vLLM tells a
    connector of no change, so that the tag would name weights that are gone.
    """
    if getattr(config, "weight_transfer_config", None) is not None:
        return "--weight-transfer-config"
    parallel = getattr(config, "parallel_config", None)
    if getattr(parallel, "worker_extension_cls", ""):
        return "--worker-extension-cls"
    return None


def _told(config: Any, names: dict[str, tuple[str, ...]]) -> dict[str, str]:
    found = {}
    for part, attributes in names.items():
        whole = getattr(config, part, None)
        values = ((name, getattr(whole, name, None)) for name in attributes)
        found |= {
            f"{part}.{name}": str(value)
            for name, value in values
            if value not in (None, "", {}, [])
        }
    return found


def _told_of_configuration(config: Any) -> dict[str, str]:
    """The contents of the files at ``--hf-config-path``: they decide positions, windows and more,
    and lie apart from the weights.
    """
    path = getattr(config.model_config, "hf_config_path", None)
    if not path:
        return {}
    digest = hashlib.sha256()
    for file in _configuration(path, config.model_config.revision):
        with open(file, "rb") as opened:
            content = hashlib.sha256(opened.read()).hexdigest()
        digest.update(f"{os.path.basename(file)} {content}\n".encode())
    return {"hf_config_path.files": digest.hexdigest()}


def _configuration(path: str, revision: Optional[str]) -> list[str]:
    """The files of a configuration. Raises ValueError if none is on this machine."""
    try:
        places = weights.places(path, revision, None)
    except ValueError:
        places = []
    files = [
        os.path.join(place, name)
        for place in filter(os.path.isdir, places)
        for name in sorted(os.listdir(place))
        if name.endswith(_CONFIGURATION)
    ] + [place for place in places if os.path.isfile(place)]
    if not files:
        raise ValueError(
            f"larder: the files of --hf-config-path {path} are not on this machine, so that nothing "
            "tells their changes: give it a local directory"
        )
    return files


def _told_of_positions(config: Any) -> dict[str, str]:
    """Models with scaled positions choose the scale by the longest request."""
    text = getattr(config.model_config, "hf_text_config", None)
    scaling = getattr(text, "rope_scaling", None) or getattr(text, "rope_parameters", None)
    kind = (
        scaling.get("rope_type", scaling.get("type", "default"))
        if isinstance(scaling, dict)
        else "default"
    )
    return (
        {}
        if kind in ("default", "linear")
        else {"max_model_len": str(config.model_config.max_model_len)}
    )


def _told_of_plugins(config: Any) -> dict[str, str]:
    """Options without a field of their own: of platforms' plug-ins, and the kernels of linear
    attention.
    """
    options = getattr(config, "additional_config", None)
    if not options:
        return {}
    is_plain = isinstance(options, dict)
    text = json.dumps(options, sort_keys=True) if is_plain else options.compute_hash()
    return {"additional_config": text}


def _told_of_media(config: Any) -> dict[str, str]:
    media = getattr(config.model_config, "multimodal_config", None)
    return {
        name: str(getattr(media, name))
        for name in _TOLD_OF_MEDIA
        if getattr(media, name, None) is not None
    }


def _named(config: Any) -> list[tuple[str, Optional[str]]]:
    """(path or name at the hub, revision) of everything that is loaded from files."""
    model = config.model_config
    named = [(getattr(model, "model_weights", "") or model.model, model.revision)]
    draft = config.speculative_config
    # A draft that is part of the model has the model's own path.
    if draft is not None and getattr(draft, "model", None):
        named.append((draft.model, getattr(draft, "revision", None)))
    adapters = getattr(config.lora_config, "default_mm_loras", None) or {}
    return named + [(path, None) for _, path in sorted(adapters.items())]
