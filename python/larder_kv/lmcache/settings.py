"""The keys of ``adapter_params``, and the weights tag of each model."""

from __future__ import annotations

import os
from typing import Any, Mapping, Optional

from larder_kv import weights
from larder_kv.config import Config
from lmcache.v1.distributed.l2_adapters.config import L2AdapterConfigBase

HELP = """Larder L2 adapter, the keys of adapter_params:
- path (str): directory of the store, or a block device (required)
- size (str): bytes of a store that is created, such as "512GiB"
- weights_tags (object): by model name, a text that changes with its weights
- model_dirs (object): by model name, the directory of its weights, from which the tag is derived
- weights_tag (str): for all other models
- chunk_bytes (int): of the largest chunk; chooses the segments of a store that is created (64 MiB),
  and refuses a store that keeps no such chunk
- ledger (str): file of the keys (PATH/larder.lmcache)
- tenant (str): of the chunks without a cache salt
- timeout, sync, prewrite, codec, lease, disk, policy, write_budget, quota, prefill_rate, key_file,
  key_command, key_credential: as for all engines
- l4, l4_key_file, ...: remotes beneath the store (docs/remote.md)"""

#: The keys that only LMCache's adapter has: type and default of each.
_OWN: dict[str, tuple[type, Any]] = {
    "weights_tags": (dict, None),
    "model_dirs": (dict, None),
    "chunk_bytes": (int, None),
    "ledger": (str, None),
}


#: The shortest lease, in seconds.
LEASE_MIN = 1.0

#: The keys of other engines that LMCache's adapter has no use of.
_OF_OTHERS = ("retry", "transfer")


class LarderL2AdapterConfig(L2AdapterConfigBase):
    """A checked configuration. Weights tags that come from files are derived here."""

    def __init__(self, **keys: Any) -> None:
        """Raises ValueError, which names the key, for an unknown key or a wrong value, and for
        weights without files.
        """
        for key in _OF_OTHERS:
            if key in keys:
                raise ValueError(f"larder: `{key}`: it has no effect with LMCache: leave it out")
        if "mla" in keys:
            raise ValueError(
                "larder: `mla`: LMCache has one rank for all that hold equal bytes, "
                "and the bytes of its ranks differ: remove it"
            )
        own = {key: _own(key, keys.pop(key, None)) for key in _OWN}
        #: The keys that all engines share.
        self.store = Config.parse(keys)
        if self.store.on_error != "fail":
            raise ValueError(
                "larder: `on_error`: LMCache cannot start without its adapter; "
                "it can add one at run time"
            )
        if self.store.lease < LEASE_MIN:
            raise ValueError(
                f"larder: `lease`: LMCache's locks are leases that are renewed: "
                f"it must be at least {LEASE_MIN:.0f} s"
            )
        #: None if it is not configured.
        self.chunk_bytes: Optional[int] = own["chunk_bytes"]
        self.weights_tags = _texts("weights_tags", own["weights_tags"])
        #: By model with a derived tag: the directory.
        self.model_dirs = {
            model: place
            for model, place in _texts("model_dirs", own["model_dirs"]).items()
            if model not in self.weights_tags
        }
        #: By such a model: the fields of its tag.
        self.told: dict[str, dict[str, str]] = {}
        for model, place in self.model_dirs.items():
            self.told[model] = _derived(model, place)
            self.weights_tags[model] = _tag(self.told[model])
        #: Models with files that have changed since.
        self._changed: set[str] = set()
        self.ledger: Optional[str] = own["ledger"] or _beside(self.store.path)

    @classmethod
    def from_dict(cls, d: dict) -> LarderL2AdapterConfig:
        return cls(**{str(key): value for key, value in d.items()})

    @classmethod
    def help(cls) -> str:
        return HELP

    def tag_of(self, model: str) -> Optional[str]:
        """The weights tag of a model; None if its weights cannot be distinguished from others."""
        if model in self._changed:
            return None
        return self.weights_tags.get(model) or self.store.weights_tag

    def find_changed(self) -> list[str]:
        """The models with files that have changed since the last call. From then on they have no
        tag. May wait for the files.
        """
        found = []
        for model, place in self.model_dirs.items():
            try:
                is_same = _derived(model, place) == self.told[model]
            except ValueError:
                # They may be on their way. Other files are found later.
                continue
            if not is_same and model not in self._changed:
                self._changed.add(model)
                found.append(model)
        return found


def _own(key: str, value: Any) -> Any:
    kind, default = _OWN[key]
    if value is None:
        return default
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"larder: `{key}`: {value!r} is not of type {kind.__name__}")
    if key == "chunk_bytes" and value <= 0:
        raise ValueError(f"larder: `{key}`: {value} is not above 0")
    return value


def _texts(key: str, given: Optional[Mapping[Any, Any]]) -> dict[str, str]:
    for model, value in (given or {}).items():
        if not isinstance(value, str) or not value:
            raise ValueError(f"larder: `{key}`: the value of `{model}` is not a text")
    return {str(model): value for model, value in (given or {}).items()}


def _tag(fields: dict[str, str]) -> str:
    return weights.Description(None, fields).tag


def _derived(model: str, place: str) -> dict[str, str]:
    """The facts about a model's weights in LMCache's server."""
    if not os.path.isdir(place):
        raise ValueError(
            f"larder: `model_dirs`: `{model}`: {place} is not a directory with the model's files"
        )
    return {"model": model} | weights.files([weights.Named("model", place)])


def _beside(path: str) -> Optional[str]:
    """The ledger's file; none beside a block device, where the keys are forgotten at the end of the
    process.
    """
    is_directory = os.path.isdir(path) or not os.path.exists(path)
    return os.path.join(path, "larder.lmcache") if is_directory else None
