"""Makes the real SGLang package run on a machine without a GPU. Import before anything of SGLang's.

SGLang's own stub classes stand in for `triton` and for CUDA's streams and events; packages that only its HTTP server needs are
replaced by empty modules; the kernels that copy between device and host pools are replaced by plain tensor assignments. The
tree, the controller, its threads, the host pools and the storage interface are SGLang's, unchanged.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys

import torch

# Tests fork ranks off: a pool of threads would not be there in the children.
torch.set_num_threads(1)

os.environ.pop("SGLANG_USE_CPU_ENGINE", None)
# A model that is not there is not looked for on the network.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Ranks that decide differently end at once; read when SGLang is imported.
os.environ["SGLANG_ENABLE_RANK_CONSENSUS_CHECKER"] = "1"
# SGLang compiles its hash of page keys when it is first used, with the environment's own ninja.
os.environ["PATH"] = f"{sys.prefix}/bin{os.pathsep}{os.environ.get('PATH', '')}"
os.environ.setdefault("TORCH_EXTENSIONS_DIR", f"{sys.prefix}/extensions")

#: Packages that are not installed for the tests and that only other parts of SGLang need.
ABSENT = ("triton", "datasets", "pandas", "av", "uvloop", "uvicorn", "decord")


def _stubs():
    """SGLang's stubs for platforms without triton, loaded without importing SGLang."""
    sglang = importlib.util.find_spec("sglang").submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location("_sglang_stubs", f"{sglang}/_platform_stubs.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


STUBS = _stubs()


class _Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds every module of some packages, empty."""

    def __init__(self, packages):
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return STUBS._MockModule(spec.name)

    def exec_module(self, module):
        if module.__name__ == "triton":
            module.__version__ = "3.8.0"
            module.cdiv = STUBS._cdiv
            module.next_power_of_2 = STUBS._next_power_of_2
            module.Config = STUBS._Config
        if module.__name__ == "triton.language":

            class constexpr:
                def __init__(self, value=None):
                    self.value = value

            module.constexpr = constexpr


sys.meta_path.insert(0, _Absent({name for name in ABSENT if importlib.util.find_spec(name) is None}))

for _name, _stub in {
    "Stream": STUBS.Stream,
    "Event": STUBS.Event,
    "stream": STUBS.stream,
    "current_stream": STUBS.current_stream,
}.items():
    setattr(torch.cpu, _name, _stub)

import sglang.srt.utils as _utils  # noqa: E402
import sglang.srt.utils.common as _utils_common  # noqa: E402
from sglang.srt.mem_cache.pool_host import common as _pool_common  # noqa: E402
from sglang.srt.mem_cache.pool_host.base import HostKVCache  # noqa: E402
from sglang.srt.mem_cache.pool_host.dsa import DSAIndexerPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost  # noqa: E402
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost  # noqa: E402

_utils.get_device = _utils_common.get_device = lambda *_, **__: "cpu"
_pool_common._cuda_host_register = lambda *_, **__: None
_pool_common._cuda_host_unregister = lambda *_, **__: None
HostKVCache.pin_memory = property(lambda self: False, lambda self, value: None)


def _slots(indices):
    return indices.cpu().long()


def _place(pool, slots):
    """The subscript of host slots in a layer's view."""
    if pool.layout == "page_first_direct":
        return slots // pool.page_size, slots % pool.page_size
    return slots


def _mha_layer(pool, layer):
    return (
        (pool.k_data_refs[layer], pool.device_k_buffers[layer]),
        (pool.v_data_refs[layer], pool.device_v_buffers[layer]),
    )


def _mha_backup(self, device_pool, host, device, io_backend):
    host, device = _slots(host), _slots(device)
    for layer in range(self.layer_num):
        for there, here in _mha_layer(self, layer):
            there[_place(self, host)] = here[device]


def _mha_load(self, device_pool, host, device, layer, io_backend, *, is_draft=False):
    host, device = _slots(host), _slots(device)
    for there, here in _mha_layer(self, layer):
        here[device] = there[_place(self, host)]


def _mla_layer(pool, layer):
    if pool.layout == "layer_first":
        return pool.kv_buffer[layer]
    return pool.kv_buffer.transpose(0, 1)[layer]


def _mla_backup(self, device_pool, host, device, io_backend):
    host, device = _slots(host), _slots(device)
    for layer in range(self.layer_num):
        _mla_layer(self, layer)[_place(self, host)] = device_pool.kv_buffer[layer][device]


def _mla_load(self, device_pool, host, device, layer, io_backend, *, is_draft=False):
    host, device = _slots(host), _slots(device)
    device_pool.kv_buffer[layer][device] = _mla_layer(self, layer)[_place(self, host)]


def _mamba_backup(self, device_pool, host, device, io_backend):
    host, device = _slots(host), _slots(device)
    for layer in range(self.num_mamba_layers):
        self.temporal_buffer[host, layer, 0] = self.temporal_device_layers[layer][device]
        for there, here in zip(self.conv_buffer, self.conv_device_layers):
            there[host, layer, 0] = here[layer][device]


def _mamba_load(self, device_pool, host, device, layer, io_backend, *, is_draft=False):
    host, device = _slots(host), _slots(device)
    self.temporal_device_layers[layer][device] = self.temporal_buffer[host, layer, 0]
    for there, here in zip(self.conv_buffer, self.conv_device_layers):
        here[layer][device] = there[host, layer, 0]


def _index_pages(pool, host, device):
    """Views of the pages of each layer that these slots lie in: on the host, on the device."""
    pages = [_slots(slots)[:: pool.page_size] // pool.page_size for slots in (host, device)]
    buffer = pool.index_k_with_scale_buffer
    layers = buffer if pool.layout == "layer_first" else buffer[:, :, 0].transpose(0, 1)
    return list(zip(layers, pool.packed_device_index_buffers)), *pages


def _dsa_backup(self, device_pool, host, device, io_backend):
    layers, host, device = _index_pages(self, host, device)
    for there, here in layers:
        there[host] = here[device]


def _dsa_load(self, device_pool, host, device, layer, io_backend, *, is_draft=False):
    layers, host, device = _index_pages(self, host, device)
    if self._is_device_layer_owned(device_pool, layer):
        there, here = layers[self._host_layer_index(layer)]
        here[device] = there[host]


for _pool, _backup, _load in (
    (DSAIndexerPoolHost, _dsa_backup, _dsa_load),
    (MHATokenToKVPoolHost, _mha_backup, _mha_load),
    (MLATokenToKVPoolHost, _mla_backup, _mla_load),
    (MambaPoolHost, _mamba_backup, _mamba_load),
):
    _pool.backup_from_device_all_layer = _backup
    _pool.load_to_device_per_layer = _load
