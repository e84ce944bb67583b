"""Copies between an engine's tensors and host memory, on the device of machines without a GPU, beside plain copies by torch."""

from __future__ import annotations

import gc
import mmap
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import numpy
import pytest
import torch
from larder_kv.device import Device, DeviceError, Unavailable
from larder_kv.store import Status, Store

LAYOUTS = ("layer_first", "page_first", "page_first_direct")
LAYERS, HEADS, DIM, PAGE_TOKENS, PAGES, HOST_PAGES = 3, 2, 8, 4, 6, 9


@pytest.fixture
def device():
    return Device("host")


def noise(*shape, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def tensors(parts, seed=0):
    """A tensor for each layer of each part."""
    shape = (PAGES * PAGE_TOKENS, HEADS, DIM)
    return [[noise(*shape, seed=seed + 100 * part + layer) for layer in range(LAYERS)] for part in range(parts)]


def pool_of(device, parts):
    named = {"kv": parts[0]} if len(parts) == 1 else {"k": parts[0], "v": parts[1]}
    return device.pool(**named, page_tokens=PAGE_TOKENS)


def pages_of(host, parts):
    """The bytes of a host pool as [page][part][layer][token][...], whatever its layout."""
    shape = {
        "layer_first": (parts, LAYERS, host.pages, PAGE_TOKENS),
        "page_first": (parts, host.pages, PAGE_TOKENS, LAYERS),
        "page_first_direct": (parts, host.pages, LAYERS, PAGE_TOKENS),
    }[host.layout]
    order = {
        "layer_first": (2, 0, 1, 3, 4, 5),
        "page_first": (1, 0, 3, 2, 4, 5),
        "page_first_direct": (1, 0, 2, 3, 4, 5),
    }[host.layout]
    return torch.frombuffer(host.view(), dtype=torch.uint8).view(*shape, HEADS, DIM).permute(order)


def page(parts, number):
    """A page of the tensors as [part][layer][token][...]."""
    slots = slice(number * PAGE_TOKENS, (number + 1) * PAGE_TOKENS)
    return torch.stack([torch.stack([layer[slots] for layer in part]) for part in parts])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("pairs", [[(8, 0), (2, 5), (3, 4)], [(1, 2), (2, 3), (3, 4)], []])
def test_loads_and_stores_move_what_plain_copies_do(device, layout, parts, pairs):
    l1 = tensors(parts)
    pool = pool_of(device, l1)
    assert (pool.pages, pool.layers, pool.page_bytes) == (PAGES, LAYERS, parts * LAYERS * PAGE_TOKENS * HEADS * DIM)
    host = pool.host_pool(HOST_PAGES, layout)
    pages_of(host, parts).copy_(noise(HOST_PAGES, parts, LAYERS, PAGE_TOKENS, HEADS, DIM, seed=7))
    host_pages, device_pages = [pair[0] for pair in pairs], [pair[1] for pair in pairs]

    wanted, before = [page(l1, number).clone() for number in range(PAGES)], pages_of(host, parts).clone()
    for there, here in pairs:
        wanted[here] = before[there]
    loading = pool.load(host, host_pages, device_pages, after=None)
    for layer in range(LAYERS):
        loading.wait(layer)
        assert loading.done(layer)
        for there, here in pairs:
            assert torch.equal(page(l1, here)[:, layer], before[there, :, layer])
    loading.wait()
    assert loading.done()
    assert all(torch.equal(page(l1, number), wanted[number]) for number in range(PAGES))
    assert torch.equal(pages_of(host, parts), before)

    for part in l1:
        for layer in part:
            layer.copy_(noise(*layer.shape, seed=layer.data_ptr() % 1000))
    wanted, before = pages_of(host, parts).clone(), [page(l1, number).clone() for number in range(PAGES)]
    for there, here in pairs:
        wanted[there] = before[here]
    pool.store(host, torch.tensor(host_pages, dtype=torch.int64), numpy.array(device_pages, int), after=loading).wait()
    assert torch.equal(pages_of(host, parts), wanted)
    assert all(torch.equal(page(l1, number), before[number]) for number in range(PAGES))


def test_arrays_and_addresses_do_as_well_as_tensors(device):
    (k,), (v,) = (parts[:1] for parts in tensors(2))
    arrays = [numpy.zeros((PAGES * PAGE_TOKENS, HEADS * DIM), numpy.uint8) for _ in range(2)]
    filled = device.pool(k=[k], v=[v], page_tokens=PAGE_TOKENS)
    for other in (
        device.pool(k=arrays[:1], v=arrays[1:], page_tokens=PAGE_TOKENS),
        device.pool(
            k=[(arrays[0].ctypes.data, arrays[0].nbytes)],
            v=[(arrays[1].ctypes.data, arrays[1].nbytes)],
            page_tokens=PAGE_TOKENS,
            slots=PAGES * PAGE_TOKENS,
        ),
    ):
        for array in arrays:
            array.fill(0)
        every = range(PAGES)
        host = filled.host_pool(PAGES)
        stored = filled.store(host, every, every, after=None)
        # The same pages on both devices' pools: shapes agree, whatever the tensors are.
        other.load(host, every, every, after=stored).wait()
        assert arrays[0].tobytes() == k.numpy().tobytes() and arrays[1].tobytes() == v.numpy().tobytes()


def test_a_buffer_of_ones_own_is_the_host_pool(device):
    l1 = tensors(1)
    pool = pool_of(device, l1)
    mapping = mmap.mmap(-1, PAGES * pool.page_bytes)
    buffer = torch.frombuffer(mapping, dtype=torch.uint8)
    for given in (buffer, (buffer.data_ptr(), buffer.nbytes)):
        buffer.zero_()
        host = pool.host_pool(PAGES, buffer=given)
        pool.store(host, range(PAGES), range(PAGES), after=None).wait()
        assert torch.equal(pages_of(host, 1)[4], page(l1, 4))
        assert bytes(host.view()) == buffer.numpy().tobytes()


@pytest.mark.parametrize("layout", ("page_first", "page_first_direct"))
@pytest.mark.parametrize("parts", (1, 2))
def test_rows_of_a_host_pool_are_pages_of_a_store(device, tmp_path, layout, parts):
    l1 = tensors(parts)
    wanted = [tensor.clone() for part in l1 for tensor in part]
    pool = pool_of(device, l1)
    host, size = pool.host_pool(PAGES, layout), pool.page_bytes // parts
    keys = b"".join(bytes([number]) * 32 for number in range(PAGES))
    facts = {"model": "m", "weights": "w", "dtype": "u8", "layout": layout, "page_tokens": PAGE_TOKENS, "parts": [size]}
    pool.store(host, range(PAGES), range(PAGES), after=None).wait()
    with Store.attach(tmp_path, size=256 << 20) as store:
        region, queue = store.register(host.address, host.nbytes, size, owner=host), store.queue()
        assert region.rows == parts * PAGES
        for submit in ("submit_put", "submit_get"):
            for part in range(parts):
                namespace = store.namespace(**facts, pool=f"part {part}")
                getattr(queue, submit)(namespace, keys, region, range(part * PAGES, (part + 1) * PAGES))
            assert queue.drain(60) and {*b"".join(done.statuses for done in queue.poll())} == {Status.OK}
            if submit == "submit_put":
                torch.frombuffer(host.view(), dtype=torch.uint8).zero_()
    for tensor in sum(l1, []):
        tensor.zero_()
    pool.load(host, range(PAGES), range(PAGES), after=None).wait()
    assert all(map(torch.equal, sum(l1, []), wanted))


def test_tensors_live_as_long_as_what_was_made_of_them(device):
    l1 = tensors(1)
    dead = weakref.ref(l1[0][1])
    pool = pool_of(device, l1)
    host = pool.host_pool(PAGES)
    view = host.view()
    del l1
    loading = pool.load(host, [1], [2], after=None)
    del pool, host
    gc.collect()
    loading.wait()
    assert dead() is not None and len(view) == PAGES * LAYERS * PAGE_TOKENS * HEADS * DIM
    del loading
    # The thread that copied may be the last to let go; a call into Rust is when it does.
    turns = 0
    while dead() is not None and turns < 1_000_000:
        assert device.name
        turns += 1
    assert dead() is None


def refusals():
    """What is given, with what is said of it."""
    right = lambda: [torch.zeros(8, 4) for _ in range(2)]
    whole = torch.zeros(16, 4)
    freed = torch.zeros(8, 4)
    freed.untyped_storage().resize_(0)
    read_only = numpy.zeros((8, 4), numpy.float32)
    read_only.flags.writeable = False
    address = whole.data_ptr()
    yield ValueError, "a pool is of k and v, or of kv alone", dict(k=right())
    yield ValueError, "a pool is of k and v, or of kv alone", dict(k=right(), v=right(), kv=right())
    yield ValueError, "a pool is of k and v, or of kv alone", dict()
    yield ValueError, "one tensor a layer", dict(k=right(), v=right()[:1])
    yield ValueError, "a pool has at least one layer", dict(kv=[])
    yield ValueError, "a page has at least one token", dict(kv=right(), page_tokens=0)
    yield ValueError, r"leave the rest out: tensor\[:6\]", dict(kv=right(), page_tokens=3)
    yield ValueError, r"kv\[1\] has 12 slots, others have 8", dict(kv=[torch.zeros(8, 4), torch.zeros(12, 4)])
    yield ValueError, "the tensor of layer 1 of part 0 has 256 bytes, 2 pages need 128", dict(
        kv=[torch.zeros(8, 4), torch.zeros(8, 8)]
    )
    yield ValueError, r"v\[0\] is not contiguous", dict(k=right()[:1], v=[torch.zeros(4, 8).T])
    yield ValueError, r"kv\[0\] is not contiguous", dict(kv=[numpy.zeros((8, 4))[:, :2]])
    yield ValueError, r"kv\[0\] is read-only", dict(kv=[read_only])
    yield ValueError, r"kv\[0\] is on meta, and has to be in memory of the host", dict(kv=[torch.zeros(8, 4, device="meta")])
    yield ValueError, r"kv\[0\] has no memory: its storage was freed", dict(kv=[freed])
    yield ValueError, "the tensors of layer 0 of part 0 and of layer 1 of part 0 overlap", dict(kv=[whole[:8], whole[4:12]])
    yield ValueError, "the tensors of layer 0 of part 0 and of layer 0 of part 1 overlap", dict(k=[whole], v=[whole])
    yield ValueError, "slots have to be given with addresses", dict(kv=[(address, 256)])
    yield ValueError, "no whole rows", dict(kv=[(address, 255)], slots=16)
    yield ValueError, "there are no 256 bytes of memory at 0x1000", dict(kv=[(4096, 256)], slots=16)
    yield ValueError, "bytes of memory at", dict(kv=[(address, 16 << 30)], slots=1 << 30)
    yield ValueError, "pages is a number from 0 to", dict(kv=[(address, 16 << 50)], slots=1 << 50)
    yield TypeError, r"kv\[0\]: a pair is \(address, bytes\)", dict(kv=[(address, 256.0)], slots=16)
    yield TypeError, r"kv\[0\]: a torch tensor, a numpy array or an \(address, bytes\) pair, not str", dict(kv=["x"])


@pytest.mark.parametrize("kind, said, given", list(refusals()))
def test_tensors_that_make_no_pool_are_refused(device, kind, said, given):
    with pytest.raises(kind, match=said):
        device.pool(**{"page_tokens": 4, **given})


def test_copies_that_cannot_be_are_refused(device):
    l1 = tensors(1)
    pool = pool_of(device, l1)
    host = pool.host_pool(PAGES)
    for kind, said, there, here in (
        (ValueError, "L2 has 6 pages, there is no page 6", [6], [0]),
        (ValueError, "L1 has 6 pages, there is no page 7", [0], [7]),
        (ValueError, "page 1 of L1 is in the same transfer twice", [0, 1], [1, 1]),
        (ValueError, "page 2 of L2 is in the same transfer twice", [2, 2], [1, 0]),
        (ValueError, "1 pages of the device, 2 of the host", [0, 1], [1]),
        (ValueError, "a page is a number from 0 to", [-1], [1]),
        (TypeError, "integer", [0.5], [1]),
    ):
        for copy in (pool.load, pool.store):
            with pytest.raises(kind, match=said):
                copy(host, there, here, after=None)
    with pytest.raises(TypeError, match="after"):
        pool.load(host, [0], [0])
    with pytest.raises(ValueError, match="the host device has no streams"):
        pool.load(host, [0], [0], after=0)
    with pytest.raises(TypeError, match="a stream is torch's or its address, not str"):
        pool.load(host, [0], [0], after="x")
    loading = pool.load(host, [0], [0], after=None)
    with pytest.raises(ValueError, match="there are 3 layers, there is no layer 3"):
        loading.wait(3)
    with pytest.raises(ValueError, match="the host device has no streams"):
        loading.wait_on_stream(0, 0)
    # Of another shape, and of another device.
    with pytest.raises(ValueError, match="different KV shapes"):
        pool_of(device, tensors(2)).load(host, [0], [0], after=None)
    with pytest.raises(ValueError, match="not registered with this device"):
        pool_of(Device("host"), tensors(1)).load(host, [0], [0], after=None)


def test_host_pools_that_cannot_be_are_refused(device):
    pool = pool_of(device, tensors(1))
    for said, pages, more in (
        ("is no layout", 1, {"layout": "page_last"}),
        ("a host pool of 2 pages needs 384 bytes, the memory has 200", 2, {"buffer": torch.zeros(50)}),
        ("buffer is not contiguous", 1, {"buffer": torch.zeros(80, 80)[:, :40]}),
        ("there are no 4096 bytes of memory at 0x1000", 1, {"buffer": (4096, 4096)}),
        ("pages is a number from 0 to", -1, {}),
    ):
        with pytest.raises(ValueError, match=said):
            pool.host_pool(pages, **more)
    # A host pool in the very tensors.
    whole = torch.zeros(64, 64, dtype=torch.uint8)
    pool = device.pool(kv=[whole], page_tokens=4)
    host = pool.host_pool(2, buffer=whole)
    with pytest.raises(ValueError, match="the L1 and the L2 pool overlap"):
        pool.load(host, [0], [1], after=None)


def test_a_storage_that_was_freed_under_a_pool_is_noticed(device):
    l1 = tensors(1)
    pool = pool_of(device, l1)
    host = pool.host_pool(PAGES)
    l1[0][2].untyped_storage().resize_(0)
    with pytest.raises(ValueError, match=r"kv\[2\] is not where it was when the pool was made"):
        pool.load(host, [0], [0], after=None)


def test_devices_that_are_not_there():
    with pytest.raises(ValueError, match="kind is 'auto', 'host' or 'cuda', not 'tpu'"):
        Device("tpu")
    device = Device("host")
    assert (device.kind, device.name, device.why_host) == ("host", "host memory", None)
    if torch.cuda.is_available():
        return
    with pytest.raises(Unavailable, match="no CUDA device"):
        Device("cuda")
    assert issubclass(Unavailable, DeviceError)
    device = Device()
    assert device.kind == "host" and device.why_host.startswith("no CUDA device")


#: What an engine does on a GPU, with the driver called by hand: pages go down, others are loaded over them, and up again.
ON_CUDA = """
import ctypes, sys, threading
from larder_kv.device import Device, DeviceError
cuda = ctypes.CDLL("libcuda.so")
def ask(name, *arguments):
    assert getattr(cuda, name)(*arguments) == 0, name
context, address, stream = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_void_p()
device = Device("cuda", cache=sys.argv[1])
ask("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
ask("cuCtxSetCurrent", context)
ask("cuStreamCreateWithPriority", ctypes.byref(stream), 1, 0)
layers, slots, row, tokens = 3, 32, 64, 4
tensors = []
for layer in range(2 * layers):
    ask("cuMemAlloc_v2", ctypes.byref(address), slots * row)
    ctypes.memset(address.value, layer + 1, slots * row)
    tensors.append((address.value, slots * row))
for wrong in ([(16, slots * row)] * layers, [(ctypes.addressof(context), slots * row)] * layers):
    try:
        device.pool(kv=wrong[:1], page_tokens=tokens, slots=slots)
    except ValueError as error:
        assert "is not in this device's memory" in str(error), error
    else:
        raise AssertionError("taken")
pool = device.pool(k=tensors[:layers], v=tensors[layers:], page_tokens=tokens, slots=slots)
host = pool.host_pool(16, sys.argv[2])
stored = pool.store(host, range(8), range(8), after=stream.value)
assert not stored.done(), "the fake does nothing before a wait"
loading = pool.load(host, range(8, 16), range(8), after=stored)
loading.wait()
assert all(ctypes.string_at(*tensor) == bytes(slots * row) for tensor in tensors)
again = pool.load(host, range(8), range(8), after=stream.value)
for layer in range(layers):
    again.wait_on_stream(layer, stream.value)
ask("cuStreamSynchronize", stream)
assert all(ctypes.string_at(*tensor) == bytes([1 + n]) * (slots * row) for n, tensor in enumerate(tensors))
assert again.done() and stored.done(0)
other, lets_go, gate = pool.host_pool(16, sys.argv[2]), ctypes.c_int.in_dll(cuda, "fake_lets_go"), threading.Lock()
gate.acquire()
ender = threading.Thread(target=lambda: (gate.acquire(), setattr(lets_go, "value", 1)))
ender.start()
sys.setswitchinterval(100)
lets_go.value = 0
gate.release()
# The drop waits for streams: the other thread runs only if it has the interpreter's lock meanwhile.
del other
ender.join()
failing = pool.store(host, range(8), range(8), after=stream.value)
cuda.fake_fail_after(ctypes.c_long(1))
for attempt in (failing.done, failing.wait, lambda: pool.load(host, range(8), range(8), after=failing)):
    try:
        attempt()
    except DeviceError as error:
        assert "no longer used" in str(error), error
    else:
        raise AssertionError("a copy of a lost context counts as done")
print(device.kind, device.name)
"""


@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_a_fake_of_a_gpu_streams_wait_for_layers_and_copies_for_streams(tmp_path, layout):
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None or "LARDER_REQUIRE_GPU" in os.environ:
        pytest.skip("for machines without a GPU and with a C++ compiler")
    kernels = Path(__file__).resolve().parents[2] / "kernels"
    compiled = [compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-I", kernels / "cu", "-I", kernels / "fake/cu"]
    compiled += ["-o", tmp_path / "libcuda.so", kernels / "fake/cu/fake_driver.cc"]
    subprocess.run(compiled, check=True)
    # A compiler of kernels, where one is named, would be asked first.
    inherited = {name: value for name, value in os.environ.items() if name != "LARDER_NVRTC_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", ON_CUDA, tmp_path / "cache", layout],
        env={**inherited, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "cuda fake GPU (kernels: built in)\n"), done.stderr


@pytest.mark.skipif(
    not torch.cuda.is_available() and "LARDER_REQUIRE_GPU" not in os.environ, reason="there is no GPU"
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_on_a_gpu_streams_wait_for_layers_and_copies_for_streams(layout):
    device = Device("cuda")
    shape = (64 * 64, 8, 128)
    k, v = ([torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(8)] for _ in range(2))
    wanted = [tensor.clone() for tensor in k + v]
    pool = device.pool(k=k, v=v, page_tokens=64)
    host = pool.host_pool(64, layout)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        stored = pool.store(host, range(64), range(64), after=stream)
        stored.wait_on_stream(None, stream)
        for tensor in k + v:
            tensor.zero_()
        loading = pool.load(host, range(64), range(64), after=stream)
        sums = []
        for layer in range(8):
            loading.wait_on_stream(layer, stream)
            sums.append((k[layer] == wanted[layer]).all() & (v[layer] == wanted[8 + layer]).all())
    stream.synchronize()
    assert all(bool(right) for right in sums)


@pytest.mark.parametrize("pinned_by", ("none", "cudaHostAlloc", "cudaHostRegister"))
def test_a_store_reads_into_memory_that_the_driver_has_pinned(tmp_path, pinned_by):
    """Direct reads pin the memory again, which a driver's mapping may refuse."""
    if pinned_by != "none" and not torch.cuda.is_available() and "LARDER_REQUIRE_GPU" not in os.environ:
        pytest.skip("there is no GPU")
    pages, page_bytes = 16, 1 << 20
    host = torch.empty(pages * page_bytes + 4096, dtype=torch.uint8, pin_memory=pinned_by == "cudaHostAlloc")
    host = host[-host.data_ptr() % 4096 :][: pages * page_bytes]
    if pinned_by == "cudaHostRegister":
        assert int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.numel(), 0)) == 0
    wanted = noise(pages * page_bytes, seed=7)
    host.copy_(wanted)
    keys = b"".join(bytes([number]) * 32 for number in range(pages))
    facts = {"model": "m", "weights": "w", "dtype": "bf16", "layout": "any", "page_tokens": 64, "parts": [page_bytes]}
    with Store.attach(tmp_path, size=256 << 20) as store:
        namespace, queue = store.namespace(**facts), store.queue()
        region = store.register(host.data_ptr(), host.numel(), page_bytes, owner=host, pinned=True)
        queue.submit_put(namespace, keys, region, range(pages))
        for read in (False, True):
            assert queue.wait(60)
            (done,) = queue.poll()
            assert set(done.statuses) == {Status.OK}, (read, done, region.described)
            if not read:
                host.zero_()
                queue.submit_get(namespace, keys, region, range(pages))
    assert torch.equal(host, wanted)
    if pinned_by != "none":
        assert torch.equal(host.to("cuda", non_blocking=True).cpu(), wanted)
    if pinned_by == "cudaHostRegister":
        assert int(torch.cuda.cudart().cudaHostUnregister(host.data_ptr())) == 0
