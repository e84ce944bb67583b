"""How the device arranges the elements of a page.

A host pool copies a device's pages byte for byte, and does not show their arrangement. Pages of
equal length may be arranged in several ways. A page that is read in another arrangement is wrong KV, so the
arrangement is part of the namespace. The usual one adds nothing to it.
"""

from __future__ import annotations

import os
from typing import Any, Optional

from sglang.srt.environ import envs
from sglang.srt.platforms import current_platform

#: The arrangement of most MHA pools: token, head, element.
_USUAL = "nhd"

#: Platforms with kernels that arrange pages in the usual way.
_USUAL_PLATFORMS = ("cuda", "cpu")

#: SGLang's variables that arrange the pages of DeepSeek-V4 and the index keys of DSA, each with its
#: value if it is not set. Their host pools hold plain bytes, without a name of the arrangement.
_VARIABLES = {
    "SGLANG_DSV4_KV_LAYOUT": "v4",
    "SGLANG_DSV4_COMPRESSED_KV_LAYOUT": "auto",
    "SGLANG_DSV4_UNIFIED_KV_FP8": "false",
    # Kernels that write index keys in one step leave out their rotation. These variables turn such
    # kernels off: of CUDA, then of ROCm.
    "SGLANG_DISABLE_DSA_INDEXER_FUSION": "false",
    "SGLANG_DISABLE_AITER_FUSED_FP8_DSA_INDEXER": "false",
    "SGLANG_DSA_HIP_DISABLE_PRESHUFFLE": "false",
    # Without AITER ROCm has no such kernel.
    "SGLANG_USE_AITER": "false",
}


def facts_of(pool: Any) -> dict[str, str]:
    """The facts of a host pool's arrangement that differ from the usual one, by name.

    Raises RuntimeError for an MHA pool without a name of its arrangement.
    """
    told = _arrangements(pool)
    if told is None:
        return _platform() | _variables()
    return _platform() | ({} if set(told) == {_USUAL} else {"device_layout": ",".join(told)})


def layers_of_stages(pp_size: int) -> dict[str, str]:
    """The layers of each pipeline stage, if the operator divides them. Host pools of hybrid models
    do not show their first layer: stages with equally many layers look alike.
    """
    given = os.environ.get("SGLANG_PP_LAYER_PARTITION")
    return {"stage_layers": given} if pp_size > 1 and given else {}


def _arrangements(pool: Any) -> Optional[list[str]]:
    """The arrangement of each device pool behind an MHA pool; None for other host pools."""
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    infos = getattr(pool, "_buffer_infos", None)
    if infos:
        return [str(info.buffers.layout.value) for info in infos]
    if isinstance(pool, MHATokenToKVPoolHost):
        raise RuntimeError(
            f"larder: SGLang's pool {type(pool).__name__} does not show how its pages are arranged: "
            "this release of SGLang is not supported"
        )
    return None


def _platform() -> dict[str, str]:
    """Kernels of other platforms than CUDA's arrange index keys and states in their own way."""
    name = current_platform.device_name
    if name in _USUAL_PLATFORMS:
        return {}
    return {"platform": f"{name}+fnuz" if name == "rocm" and _has_fnuz() else name}


def _has_fnuz() -> bool:
    """Whether the 8-bit floats of this GPU have AMD's own encoding (MI300)."""
    from sglang.kernels.ops.quantization.fp8_kernel import is_fp8_fnuz

    return is_fp8_fnuz()


def _variables() -> dict[str, str]:
    given = {name: str(getattr(envs, name).get()).lower() for name in _VARIABLES}
    facts = {name: value for name, value in given.items() if value != _VARIABLES[name]}
    return facts | ({"index_k": "page8"} if _has_index_k_page8() else {})


def _has_index_k_page8() -> bool:
    """Whether SGLang arranges the index keys of DeepSeek-V4.1 by pages of eight. As in SGLang,
    AITER decides too: without its kernel the variable has no effect.
    """
    if current_platform.device_name != "rocm" or not envs.SGLANG_HIP_DSV41_INDEX_K_PAGE8.get():
        return False
    from sglang.kernels.ops.attention.dsv4.fp4_indexer_hip import aiter_has_fp4_rowgroup

    return aiter_has_fp4_rowgroup()
