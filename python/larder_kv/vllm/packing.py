"""How a server packs the pages of its KV cache, which no size shows.

Two attention backends may keep the same numbers of a page in another order, in the same bytes. The
order follows from the release of vLLM, the backend of each layer, environment variables of its
kernels, and the shapes and strides of its views. Only the workers have all of them: they describe
the packing, and the scheduler makes digests of their descriptions.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any, Mapping, NamedTuple, Optional


class Packing(NamedTuple):
    """Digests of the packing of a server."""

    #: Digest of all that does not depend on how the model is divided among ranks.
    kinds: str
    #: Digest of the pages of each layer on each rank.
    pages: str


#: Packing of a server if its operator's ``weights_tag`` stands for it too.
UNTOLD = Packing("", "")


class Described(NamedTuple):
    """The pages of a worker, in words, with the same fields as ``Packing``."""

    kinds: tuple[str, ...]
    pages: tuple[str, ...]


def describe(
    release: str, layers: Mapping[str, Any], caches: Mapping[str, Any], blocks: int
) -> Optional[Described]:
    """The pages of a worker with these ``caches`` of ``blocks`` blocks, by layer; ``layers`` has
    the modules. None if a layer has none: then the kernels that use its pages are unknown.
    """
    if not caches or any(name not in layers for name in caches):
        return None
    kinds, pages = set(), []
    for name in sorted(caches):
        views = _views(caches[name])
        bound = _views(getattr(layers[name], "kv_cache", None))
        kind = _kind(layers[name], [*views, *bound], blocks)
        kinds.add(kind)
        pages.append(json.dumps([name, kind, *map(_form, [*views, *bound])]))
    return Described((release, *_environment(), *sorted(kinds)), tuple(pages))


def merged(ranks: Mapping[Any, Described]) -> Packing:
    """The packing of a server, from the descriptions of its workers by rank."""
    kinds = sorted({kind for described in ranks.values() for kind in described.kinds})
    pages = [described.pages for _, described in sorted(ranks.items())]
    return Packing(_digest(kinds), _digest(pages))


def _kind(layer: Any, views: list[Any], blocks: int) -> str:
    """The code that reads a layer's pages. A page may be divided into blocks of the kernel's."""
    # Models subclass a backend for their own purposes, under names of their own.
    backend = [_name(base) for base in layer.get_attn_backend().__mro__]
    parts = [view.shape[0] / blocks for view in views]
    types = [str(view.dtype) for view in views]
    # Kernels for CPUs pack keys by the instructions that the processor has.
    instructions = str(getattr(layer, "isa", ""))
    return json.dumps([_name(type(layer)), backend, instructions, types, parts])


def _environment() -> list[str]:
    """The variables that may change the layout in ways that no shape shows."""
    return sorted(
        f"{name}={value}"
        for name, value in os.environ.items()
        if name.startswith("VLLM_") and ("LAYOUT" in name or name.startswith("VLLM_ROCM_"))
    )


def _views(cache: Any) -> list[Any]:
    """The tensors of a cache: a layer with several states has one for each."""
    if isinstance(cache, (list, tuple)):
        return [view for part in cache for view in _views(part)]
    return [cache] if len(getattr(cache, "shape", ())) > 0 else []


def _form(view: Any) -> list[list[int]]:
    """Shape and strides. The number of blocks is left out, since it depends on free memory."""
    return [list(view.shape[1:]), list(view.stride())]


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _digest(words: Any) -> str:
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:32]
