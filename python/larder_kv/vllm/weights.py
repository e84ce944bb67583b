"""The weights tag of a server, from vLLM's configuration and the files that it names.

The tag has each field of vLLM's configuration except the fields of `larder_kv.vllm.left_out`, and the
model's `config.json` after overrides. Adapters that are loaded while the server runs are part of
vLLM's own keys by name and path; their files are no part of the tag.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from typing import Any, Optional

from larder_kv import described, weights
from larder_kv.vllm import left_out
from larder_kv.weights import Description, Named

#: Endings of the files that make a model's configuration.
_CONFIGURATION = (".json", ".py")

#: Ways to load weights from files at the model's path. Other ways have another source: a server, a
#: bucket, or none.
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


def describe(config: Any, own: Optional[str]) -> Description:
    """The description of the server with this ``VllmConfig``; ``own`` is the operator's tag, which
    stands for the weight files.

    Raises ValueError if the weights cannot be distinguished from others and there is no tag of the
    operator's.
    """
    fields = _configured(config, bool(own)) | _contents(config.model_config)
    if own:
        return Description(own, fields)
    way = getattr(config.load_config.load_format, "value", config.load_config.load_format) or "auto"
    if way not in _FROM_FILES:
        raise ValueError(
            f"larder: with --load-format {way} weights do not come from the model's files, {weights.HELP}"
        )
    fields |= weights.files(_named(config), config.load_config.download_dir)
    return Description(None, fields)


def tag(config: Any, own: Optional[str]) -> str:
    """The tag of that description."""
    return describe(config, own).tag


def may_change(config: Any) -> Optional[str]:
    """The reason why the weights may change while the server with this ``VllmConfig`` runs. vLLM reports no
    change to a connector, so that the tag would name weights that are gone.
    """
    if getattr(config, "weight_transfer_config", None) is not None:
        return "--weight-transfer-config"
    parallel = getattr(config, "parallel_config", None)
    if getattr(parallel, "worker_extension_cls", ""):
        return "--worker-extension-cls"
    return None


def _configured(config: Any, has_own_tag: bool) -> dict[str, str]:
    out = left_out.names(has_own_tag)
    skipped = set(left_out.PARTS)
    if has_own_tag:
        skipped.update(left_out.PARTS_OF_WEIGHTS)
    found: dict[str, str] = {}
    for part in (field.name for field in dataclasses.fields(config)):
        value = getattr(config, part)
        if part == "additional_config" and hasattr(value, "compute_hash"):
            # Of a platform's plug-in, which selects the relevant fields itself.
            value = value.compute_hash()
        if part not in skipped:
            found |= described.fields(part, value, out)
        for name in left_out.KEPT.get(part, ()):
            if hasattr(value, name):
                found |= described.fields(f"{part}.{name}", getattr(value, name), out)
    return found


def _contents(model: Any) -> dict[str, str]:
    """The contents of the files of configuration that lie apart from the weights: they decide
    positions, windows, scales of attention and more.
    """
    apart = {"--hf-config-path": model.hf_config_path}
    # The other values stand for the model's own file.
    if model.generation_config not in ("auto", "vllm"):
        apart["--generation-config"] = model.generation_config
    found = {}
    for option, path in apart.items():
        if not path:
            continue
        digest = hashlib.sha256()
        for file in _configuration(option, path, model.revision):
            with open(file, "rb") as opened:
                content = hashlib.sha256(opened.read()).hexdigest()
            digest.update(f"{os.path.basename(file)} {content}\n".encode())
        found[f"files.{option}"] = json.dumps(digest.hexdigest())
    return found


def _configuration(option: str, path: str, revision: Optional[str]) -> list[str]:
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
            f"larder: the files of {option} {path} are not on this machine, so that their "
            "changes are not seen: give it a local directory"
        )
    return files


def _named(config: Any) -> list[Named]:
    """Everything that is loaded from files."""
    model = config.model_config
    named = [Named("model", getattr(model, "model_weights", "") or model.model, model.revision)]
    draft = config.speculative_config
    # A draft that is part of the model has the model's own path.
    if draft is not None and getattr(draft, "model", None):
        named.append(Named("draft", draft.model, getattr(draft, "revision", None)))
    adapters = getattr(config.lora_config, "default_mm_loras", None) or {}
    return named + [Named(f"adapter {name}", path) for name, path in sorted(adapters.items())]
