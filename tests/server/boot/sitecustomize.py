"""Makes every process of a real `sglang.launch_server` run on a CPU without AMX, a GPU, triton or
sgl_kernel. Lies first on PYTHONPATH; active with SGLANG_USE_CPU_ENGINE=1.

SGLang's files are unchanged. The list of replacements is complete, and it must not grow:

- missing modules: triton (SGLang's own stub classes for macOS) and sgl_kernel (one function);
- torch.cpu's Stream, Event, stream, current_stream: SGLang's own stubs; all work is synchronous;
- the copies between the KV pool and the host pool (sgl_kernel.kvcacheio): the same copies in torch;
- cudaHostRegister: nothing to register; 1 GiB of host memory is left to others, not 10;
- the prefill attention of torch_native without the rows of the cached prefix, which SGLang's own
  computes again. Sliding windows keep SGLang's own.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

ABSENT = ("triton", "sgl_kernel")

#: Queries per block of the attention: limits the memory of a mask.
QUERIES = 512


def load_stubs(root):
    """SGLang's stubs for platforms without triton, loaded without importing SGLang."""
    name = "_sglang_stubs"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, f"{root}/_platform_stubs.py")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of the packages that are not installed, without contents."""

    def __init__(self, root):
        self.root = root
        self.packages = {name for name in ABSENT if importlib.util.find_spec(name) is None}

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return load_stubs(self.root)._MockModule(spec.name)

    def exec_module(self, module):
        stubs = load_stubs(self.root)
        if module.__name__ == "triton":
            module.__version__ = "3.8.0"
            module.cdiv = stubs._cdiv
            module.next_power_of_2 = stubs._next_power_of_2
            module.Config = stubs._Config
        if module.__name__ == "triton.language":

            class constexpr:
                def __init__(self, value=None):
                    self.value = value

            module.constexpr = constexpr
        if module.__name__ == "sgl_kernel":
            module.assign_req_to_token_pool_cpu = assign_req_to_token_pool_cpu


def assign_req_to_token_pool_cpu(requests, req_to_token, starts, ends, locations, _width):
    at = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist()):
        placed = locations[at : at + end - start]
        req_to_token[request, start:end] = placed.to(req_to_token.dtype)
        at += end - start


class After(importlib.abc.MetaPathFinder):
    """Runs a hook when a module has been imported."""

    def __init__(self, hooks):
        self.hooks = dict(hooks)

    def find_spec(self, name, path=None, target=None):
        hook = self.hooks.pop(name, None)
        if hook is None:
            return None
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def exec_module(module):
            execute(module)
            hook(module)

        spec.loader.exec_module = exec_module
        return spec


# --- copies between the pools: lf and pf are layer first and page first


def _slots(indices):
    return indices.cpu().long()


def _pages(indices, page_size):
    return indices[::page_size].long() // page_size


def transfer_kv_all_layer_direct_lf_pf(src_ptrs, dst_ptrs, src_indices, dst_indices, page_size):
    layers = len(src_ptrs) // len(dst_ptrs)
    here, there = _slots(src_indices), _pages(dst_indices.cpu(), page_size)
    for part, target in enumerate(dst_ptrs):
        for layer in range(layers):
            rows = src_ptrs[part * layers + layer][here]
            target[there, layer] = rows.reshape(len(there), page_size, *target.shape[3:])


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs, dst_ptrs, src_indices, dst_indices, layer_id, page_size
):
    here, there = _pages(src_indices.cpu(), page_size), _slots(dst_indices)
    for source, target in zip(src_ptrs, dst_ptrs):
        target[there] = source[here, layer_id].reshape(len(there), *target.shape[1:])


def transfer_kv_direct(src_layers, dst_layers, src_indices, dst_indices, page_size):
    here, there = _slots(src_indices), _slots(dst_indices)
    for source, target in zip(src_layers, dst_layers):
        target[there] = source[here]


def _rows(address, count, row_bytes):
    """The bytes at an address of a table of pointers."""
    import torch

    memory = (ctypes.c_ubyte * (count * row_bytes)).from_address(address)
    return torch.frombuffer(memory, dtype=torch.uint8).view(count, row_bytes)


def transfer_kv_all_layer_lf_pf(
    src_k_layers,
    dst_k,
    src_v_layers,
    dst_v,
    src_indices,
    dst_indices,
    item_size,
    dst_layout_dim,
    num_layers,
    **_,
):
    import torch

    here, there = _slots(src_indices), _slots(dst_indices)
    count = int(here.max()) + 1
    for table, target in ((src_k_layers, dst_k), (src_v_layers, dst_v)):
        flat = target.view(torch.uint8).view(target.shape[0], num_layers, item_size)
        for layer in range(num_layers):
            flat[there, layer] = _rows(int(table[layer]), count, item_size)[here]


def transfer_kv_per_layer_pf_lf(
    src_k, dst_k, src_v, dst_v, src_indices, dst_indices, layer_id, item_size, src_layout_dim, **_
):
    here, there = _slots(src_indices), _slots(dst_indices)
    for source, target in ((src_k, dst_k), (src_v, dst_v)):
        target[there] = source[here, layer_id]


def transfer_kv_per_layer(
    src_k, dst_k, src_v, dst_v, src_indices, dst_indices, item_size, **_
):
    here, there = _slots(src_indices), _slots(dst_indices)
    dst_k[there] = src_k[here]
    dst_v[there] = src_v[here]


def transfer_kv_all_layer(
    src_k_layers,
    dst_k_layers,
    src_v_layers,
    dst_v_layers,
    src_indices,
    dst_indices,
    item_size,
    num_layers,
    **_,
):
    here, there = _slots(src_indices), _slots(dst_indices)
    sources, targets = int(here.max()) + 1, int(there.max()) + 1
    for source, target in ((src_k_layers, dst_k_layers), (src_v_layers, dst_v_layers)):
        for layer in range(num_layers):
            rows = _rows(int(source[layer]), sources, item_size)[here]
            _rows(int(target[layer]), targets, item_size)[there] = rows


COPIES = (
    transfer_kv_all_layer_direct_lf_pf,
    transfer_kv_per_layer_direct_pf_lf,
    transfer_kv_direct,
    transfer_kv_all_layer_lf_pf,
    transfer_kv_per_layer_pf_lf,
    transfer_kv_per_layer,
    transfer_kv_all_layer,
)


def after_pool(module):
    module._cuda_host_unregister = lambda *_, **__: None
    for copy in COPIES:
        if not hasattr(module, copy.__name__):
            setattr(module, copy.__name__, copy)


def after_common(module):
    module._cuda_host_register = module._cuda_host_unregister = lambda *_, **__: None


def after_base(module):
    module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 1 << 30


def after_attention(module):
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    backend = module.TorchNativeAttnBackend
    own = backend._run_sdpa_forward_extend

    def extend(
        self,
        query,
        output,
        k_cache,
        v_cache,
        req_to_token,
        req_pool_indices,
        seq_lens,
        extend_prefix_lens,
        extend_seq_lens,
        encoder_lens=None,
        scaling=None,
        enable_gqa=False,
        causal=False,
        is_cross_attn=False,
        sliding_window_size=None,
    ):
        is_sliding = sliding_window_size is not None and sliding_window_size > -1
        if encoder_lens is not None or not causal or is_sliding:
            return own(
                self,
                query,
                output,
                k_cache,
                v_cache,
                req_to_token,
                req_pool_indices,
                seq_lens,
                extend_prefix_lens,
                extend_seq_lens,
                encoder_lens,
                scaling,
                enable_gqa,
                causal,
                is_cross_attn,
                sliding_window_size,
            )
        at = 0
        for request, length, before, new in zip(
            req_pool_indices.tolist(),
            seq_lens.tolist(),
            extend_prefix_lens.tolist(),
            extend_seq_lens.tolist(),
        ):
            rows = req_to_token[request, :length].long()
            keys = k_cache[rows].movedim(0, 1).unsqueeze(0).to(query.dtype)
            values = v_cache[rows].movedim(0, 1).unsqueeze(0).to(query.dtype)
            for start in range(0, new, QUERIES):
                stop = min(start + QUERIES, new)
                end = before + stop
                queries = torch.arange(before + start, end).unsqueeze(1)
                mask = torch.arange(end).unsqueeze(0) <= queries
                attended = scaled_dot_product_attention(
                    query[at + start : at + stop].movedim(0, 1).unsqueeze(0),
                    keys[:, :, :end],
                    values[:, :, :end],
                    attn_mask=mask,
                    enable_gqa=enable_gqa,
                    scale=scaling,
                )
                output[at + start : at + stop] = attended.squeeze(0).movedim(0, 1)
            at += new
        return output

    backend._run_sdpa_forward_extend = extend


def main():
    found = importlib.util.find_spec("sglang")
    if found is None or not found.submodule_search_locations:
        return
    root = list(found.submodule_search_locations)[0]

    def after_torch(module):
        stubs = load_stubs(root)
        for name in ("Stream", "Event", "stream", "current_stream"):
            setattr(module.cpu, name, getattr(stubs, name))

    pools = "sglang.srt.mem_cache.pool_host"
    hooks = {
        "torch": after_torch,
        f"{pools}.base": after_base,
        f"{pools}.common": after_common,
        f"{pools}.mha": after_pool,
        f"{pools}.mla": after_pool,
        "sglang.srt.layers.attention.torch_native_backend": after_attention,
    }
    sys.meta_path.insert(0, Absent(root))
    sys.meta_path.insert(0, After(hooks))


if os.environ.get("SGLANG_USE_CPU_ENGINE") == "1":
    main()
