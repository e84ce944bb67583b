"""Copies between an engine's own KV tensors and host memory, layer by layer: the last hop before
prefill.

::

    # CUDA if there is a driver, else the CPU.
    device = Device()
    # One tensor a layer, [slots, ...]. For MLA: device.pool(kv=...).
    pool = device.pool(k=k_buffers, v=v_buffers, page_tokens=64)
    # In memory of its own, or over the caller's buffer.
    host = pool.host_pool(pages=4096)
    loading = pool.load(host, [7, 8], [0, 1], after=torch.cuda.current_stream())
    for layer in range(pool.layers):
        # The stream waits, the CPU does not.
        loading.wait_on_stream(layer, torch.cuda.current_stream())
        forward(layer)
    stored = pool.store(host, [9], [0], after=torch.cuda.current_stream())

Page ``p`` is the slots from ``p * page_tokens`` on. The caller promises, as for every copy in a
stream: until the tickets of a copy have settled, the pages that it reads are not written, and the
pages that it writes are not used. Layers with settled tickets may be used. Pools and copies hold
their tensors and buffers until no copy is in flight.

Wrong arguments raise ``ValueError`` (sizes, overlaps, gaps, another device, freed memory, missing
pages) or ``TypeError``. Faults of a device raise :class:`DeviceError`.
"""

from __future__ import annotations

import ctypes
import operator
import os
from typing import Any, NamedTuple, Sequence

from larder_kv import _larder
from larder_kv._larder import Busy, DeviceError, Unavailable

__all__ = ["Busy", "Device", "DeviceError", "HostPool", "Pool", "Tickets", "Unavailable"]

#: Pages are numbered with as many bits.
_PAGES_MAX = 2**32


class Device:
    """``auto`` is the GPU ``ordinal`` if it works, else the host; ``cuda`` raises
    :class:`Unavailable` instead. Measurements and compiled code for a GPU are kept in the directory
    ``cache``."""

    def __init__(self, kind: str = "auto", *, ordinal: int = 0, cache: str | os.PathLike | None = None):
        if kind not in ("auto", "host", "cuda"):
            raise ValueError(f"kind is 'auto', 'host' or 'cuda', not {kind!r}")
        self._inner = _larder.Device(kind, ordinal, cache)
        self.kind = "host" if self._inner.is_host else "cuda"
        self.ordinal = ordinal

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def why_host(self) -> str | None:
        """The reason why ``auto`` is the host."""
        return self._inner.why_host

    def pool(
        self,
        *,
        k: Sequence[Any] | None = None,
        v: Sequence[Any] | None = None,
        kv: Sequence[Any] | None = None,
        page_tokens: int,
        slots: int | None = None,
    ) -> Pool:
        """An L1 pool of the tensors ``k`` and ``v``, one of each a layer, or of ``kv`` alone (MLA).
        Each is contiguous, ``[slots, ...]``, a multiple of ``page_tokens`` slots, all with the same
        bytes; a torch tensor, a numpy array, or an (address, bytes) pair, with its number of slots
        in ``slots``."""
        if (k is None) != (v is None) or (k is None) == (kv is None):
            raise ValueError("a pool is of k and v, or of kv alone")
        named = {"kv": kv} if k is None else {"k": k, "v": v}
        lengths = {name: len(tensors) for name, tensors in named.items()}
        if len(set(lengths.values())) != 1:
            raise ValueError(f"one tensor a layer: {lengths}")
        memory = [
            _memory(tensor, f"{name}[{layer}]", self)
            for name, tensors in named.items()
            for layer, tensor in enumerate(tensors)
        ]
        if not memory:
            raise ValueError("a pool has at least one layer")
        if page_tokens < 1:
            raise ValueError("a page has at least one token")
        slots = _slots(memory, slots)
        if slots % page_tokens:
            whole = slots - slots % page_tokens
            raise ValueError(f"{slots} slots are no whole pages of {page_tokens}; leave the rest out: tensor[:{whole}]")
        row_bytes, rest = divmod(memory[0].nbytes, slots)
        if rest or row_bytes == 0:
            raise ValueError(f"{memory[0].name}: {memory[0].nbytes} bytes are no whole rows of {slots} slots")
        inner = self._inner.pool(
            len(named),
            _number(row_bytes, "the bytes of a slot"),
            _number(page_tokens, "page_tokens"),
            _number(slots // page_tokens, "pages"),
            [(one.address, one.nbytes) for one in memory],
            [one.tensor for one in memory],
        )
        return Pool(self, inner, memory)


class Pool:
    """An engine's tensors, as the pages of an L1 pool."""

    def __init__(self, device: Device, inner: _larder.DevicePool, memory: list[_Memory]):
        self.device = device
        self._inner = inner
        self._memory = memory

    @property
    def pages(self) -> int:
        return self._inner.pages

    @property
    def layers(self) -> int:
        return self._inner.layers

    @property
    def page_bytes(self) -> int:
        """Of all layers."""
        return self._inner.page_bytes

    def host_pool(
        self, pages: int, layout: str = "page_first_direct", *, buffer: Any = None, is_locked: bool = False
    ) -> HostPool:
        """An L2 pool with pages of the same shape, in memory of its own or in ``buffer`` (a CPU
        tensor, an array, or an (address, bytes) pair). For a GPU it is page-locked, and must begin
        on a memory page (4096 bytes on most machines). ``is_locked``: its owner has page-locked it,
        as SGLang does with its host pools."""
        memory = None if buffer is None else _memory(buffer, "buffer", None)
        inner = self._inner.host_pool(
            layout,
            _number(pages, "pages"),
            None if memory is None else (memory.address, memory.nbytes),
            is_locked,
            buffer,
        )
        return HostPool(inner, memory, pages * self.page_bytes)

    def load(self, host: HostPool, host_pages: Sequence[int], device_pages: Sequence[int], *, after: Any) -> Tickets:
        """Copies pages of the host to pages of the device, layer by layer. ``after`` must be over
        before the first byte is written: a stream (torch's, or its address), the tickets of another
        copy, or None."""
        return self._copy(self._inner.load, host, host_pages, device_pages, after)

    def store(self, host: HostPool, host_pages: Sequence[int], device_pages: Sequence[int], *, after: Any) -> Tickets:
        """Copies pages of the device to pages of the host, all layers. ``after`` must be over
        before the first byte is read: the stream in which the forward writes these pages, as in
        :meth:`load`."""
        return self._copy(self._inner.store, host, host_pages, device_pages, after)

    def _copy(self, copy: Any, host: HostPool, host_pages: Any, device_pages: Any, after: Any) -> Tickets:
        for memory in self._memory + host._memory:
            memory.must_be_there()
        stream = tickets = None
        if isinstance(after, Tickets):
            tickets = after._inner
        elif after is not None:
            stream = _stream(after, self.device)
        moving = copy(host._inner, _pages(host_pages), _pages(device_pages), stream, tickets)
        return Tickets(self.device, moving)


class HostPool:
    """An L2 pool: pages in host memory."""

    def __init__(self, inner: _larder.HostPool, memory: _Memory | None, nbytes: int):
        self._inner = inner
        self._memory = [] if memory is None else [memory]
        self.nbytes = nbytes

    @property
    def pages(self) -> int:
        return self._inner.pages

    @property
    def layout(self) -> str:
        return self._inner.layout

    @property
    def address(self) -> int:
        return self._inner.address

    def view(self) -> memoryview:
        """Its bytes, in the order of its layout."""

        class Bytes(ctypes.c_ubyte * self.nbytes):
            """Holds the pool as long as the view exists."""

        view = Bytes.from_address(self.address)
        view.pool = self
        return memoryview(view).cast("B")


class Tickets:
    """A copy that may be in flight."""

    def __init__(self, device: Device, inner: _larder.Copying):
        self._device = device
        self._inner = inner

    @property
    def layers(self) -> int:
        return self._inner.layers

    def done(self, layer: int | None = None) -> bool:
        """Whether a layer is there, or all of them. Never waits."""
        return self._inner.done(_layer(layer))

    def wait(self, layer: int | None = None) -> None:
        """Waits until a layer is there, or all of them. Other threads of Python go on."""
        self._inner.wait(_layer(layer))

    def wait_on_stream(self, layer: int | None, stream: Any) -> None:
        """Later work of ``stream`` waits for a layer, or for all layers. The CPU does not wait."""
        self._inner.hold(_stream(stream, self._device), _layer(layer))


class _Memory(NamedTuple):
    """Memory of another owner."""

    name: str
    tensor: Any
    address: int
    nbytes: int
    #: Of a tensor: its first dimension.
    slots: int | None

    def must_be_there(self) -> None:
        """Raises ValueError for a tensor with another storage than at the making of the pool."""
        if hasattr(self.tensor, "data_ptr") and self.tensor.data_ptr() != self.address:
            raise ValueError(f"{self.name} is not where it was when the pool was made: its storage was freed or replaced")


def _memory(tensor: Any, name: str, device: Device | None) -> _Memory:
    """Address and sizes of a tensor in the memory of ``device``, or of the host."""
    if isinstance(tensor, tuple):
        if len(tensor) != 2 or not all(isinstance(number, int) and number >= 0 for number in tensor):
            raise TypeError(f"{name}: a pair is (address, bytes), both numbers")
        return _Memory(name, tensor, *tensor, None)
    if hasattr(tensor, "data_ptr"):
        return _torch_memory(tensor, name, device)
    if hasattr(tensor, "__array_interface__"):
        return _array_memory(tensor, name, device)
    raise TypeError(f"{name}: a torch tensor, a numpy array or an (address, bytes) pair, not {type(tensor).__name__}")


def _torch_memory(tensor: Any, name: str, device: Device | None) -> _Memory:
    is_host = device is None or device.kind == "host"
    where = tensor.device
    if where.type != ("cpu" if is_host else "cuda") or not (is_host or where.index == device.ordinal):
        wanted = "the host" if is_host else f"device {device.ordinal}"
        raise ValueError(f"{name} is on {where}, and has to be in memory of {wanted}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous")
    nbytes = tensor.numel() * tensor.element_size()
    begins = tensor.storage_offset() * tensor.element_size()
    if tensor.data_ptr() == 0 or tensor.untyped_storage().nbytes() < begins + nbytes:
        raise ValueError(f"{name} has no memory: its storage was freed")
    return _Memory(name, tensor, tensor.data_ptr(), nbytes, _first(tensor.shape))


def _array_memory(array: Any, name: str, device: Device | None) -> _Memory:
    if device is not None and device.kind != "host":
        raise ValueError(f"{name} is an array of the host's, and has to be in memory of device {device.ordinal}")
    facts = array.__array_interface__
    address, is_read_only = facts["data"]
    if facts.get("strides") is not None:
        raise ValueError(f"{name} is not contiguous")
    if is_read_only:
        raise ValueError(f"{name} is read-only")
    return _Memory(name, array, address, array.nbytes, _first(facts["shape"]))


def _first(shape: Sequence[int]) -> int | None:
    return int(shape[0]) if len(shape) > 0 else None


def _slots(memory: list[_Memory], slots: int | None) -> int:
    """The number of slots, which is the same in all of them."""
    for one in memory:
        if slots is None:
            slots = one.slots
        if slots is None:
            raise ValueError(f"{one.name}: slots have to be given with addresses")
        if one.slots not in (None, slots):
            raise ValueError(f"{one.name} has {one.slots} slots, others have {slots}")
    if slots < 1:
        raise ValueError("a pool has at least one slot")
    return slots


def _stream(stream: Any, device: Device) -> int:
    """The address of a stream of torch's, or that address itself."""
    where = getattr(stream, "device_index", device.ordinal)
    stream = getattr(stream, "cuda_stream", stream)
    if not isinstance(stream, int) or stream < 0:
        raise TypeError(f"a stream is torch's or its address, not {type(stream).__name__}")
    if where != device.ordinal:
        raise ValueError(f"the stream is of device {where}, the pool of device {device.ordinal}")
    return stream


def _layer(layer: int | None) -> int | None:
    return None if layer is None else _number(layer, "a layer")


def _pages(pages: Any) -> list[int]:
    """Numbers of pages: a list, or a tensor."""
    return [_number(page, "a page") for page in (pages.tolist() if hasattr(pages, "tolist") else pages)]


def _number(number: Any, what: str) -> int:
    number = operator.index(number)
    if not 0 <= number < _PAGES_MAX:
        raise ValueError(f"{what} is a number from 0 to {_PAGES_MAX - 1}, not {number}")
    return number
