"""How pages are packed: what vLLM's workers tell of it, and that chunks of another packing are not
found.
"""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import torch
from larder_kv.vllm import connector, packing
from larder_kv.vllm.packing import Packing
from support.vllm import keys, steps, tier
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.v1.attention.backends.b12x import B12xPagedAttentionBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.rocm_attn import RocmAttentionBackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, compute_layer_kv_cache_shape_bytes
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.outputs import KVConnectorOutput

CHAIN = keys(4)
TOLD_LATER = {"larder_server": {"weights": "test", "tells_packing": True}}
BLOCKS = 8
LAYERS = ("layers.0", "layers.1")


class Layer:
    """A layer of a model, as far as its pages go."""

    def __init__(self, backend, cache):
        self.backend = backend
        self.kv_cache = cache

    def get_attn_backend(self):
        return self.backend


def cache(backend, blocks=BLOCKS, heads=2, kernel_block=None):
    """The pages of a layer, as vLLM views them for this backend."""
    spec = FullAttentionSpec(block_size=16, num_kv_heads=heads, head_size=64, dtype=torch.bfloat16)
    spec = backend.customize_spec(spec)
    *shape, content = compute_layer_kv_cache_shape_bytes(spec, blocks, kernel_block)
    return torch.empty((*shape, content // 2), dtype=torch.bfloat16)


def layers(backend, **more):
    return {name: Layer(backend, cache(backend, **more)) for name in LAYERS}


def described(made, release="1", blocks=BLOCKS):
    caches = {name: layer.kv_cache for name, layer in made.items()}
    return packing.describe(release, made, caches, blocks)


def told(made, **more):
    return packing.merged({(0, 0): described(made, **more)})


def test_backends_with_pages_of_one_size_and_shape_are_told_apart():
    backends = (FlashAttentionBackend, B12xPagedAttentionBackend, RocmAttentionBackend)
    # With two heads, a slot for each head looks as a slot for keys and one for values.
    assert len({cache(backend).shape for backend in backends}) == 1
    assert len({told(layers(backend)) for backend in backends}) == len(backends)
    # Models make classes of a backend, which may have one name.
    made = [type("OfAModel", (backend,), {}) for backend in backends]
    assert len({told(layers(backend)) for backend in made}) == len(made)


def test_each_fact_of_a_packing_counts_and_the_number_of_blocks_does_not(monkeypatch):
    usual = layers(FlashAttentionBackend)
    packed = told(usual)
    assert told(layers(FlashAttentionBackend)) == packed
    assert told(layers(FlashAttentionBackend, blocks=99), blocks=99) == packed
    assert told(usual, release="2").kinds != packed.kinds
    assert told(layers(FlashAttentionBackend, heads=4)).pages != packed.pages
    # Blocks of the kernel's in each page.
    parts = {
        name: Layer(FlashAttentionBackend, cache(FlashAttentionBackend, kernel_block=8))
        for name in LAYERS
    }
    assert told(parts).kinds != packed.kinds
    # The processor's instructions decide how kernels for CPUs pack keys.
    instructions = layers(FlashAttentionBackend)
    for layer in instructions.values():
        layer.isa = "amx"
    assert told(instructions).kinds != packed.kinds
    other = layers(FlashAttentionBackend) | {LAYERS[1]: layers(RocmAttentionBackend)[LAYERS[1]]}
    assert told(other).kinds != packed.kinds
    monkeypatch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1")
    shuffled = told(usual)
    monkeypatch.delenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT")
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    assert len({packed.kinds, shuffled.kinds, told(usual).kinds}) == 3


def test_states_of_another_orientation_are_told_apart():
    def states(shape):
        return {"layers.0": Layer(FlashAttentionBackend, (torch.empty(BLOCKS, *shape),))}

    raw = {"layers.0": torch.empty(BLOCKS, 1, 1, 96, dtype=torch.int8)}
    ways = [packing.describe("1", states(shape), raw, BLOCKS) for shape in ((3, 8), (8, 3))]
    assert ways[0] != ways[1]


def test_pages_that_no_layer_is_known_for_are_not_described():
    known = layers(FlashAttentionBackend)
    caches = {name: layer.kv_cache for name, layer in known.items()}
    assert packing.describe("1", known, caches | {"other": caches[LAYERS[0]]}, BLOCKS) is None
    assert packing.describe("1", known, {}, BLOCKS) is None


def test_chunks_of_another_packing_are_not_found(tmp_path):
    usual = Packing("kinds", "pages")

    def found(told, **facts):
        with steps(tier(tmp_path, **TOLD_LATER), **facts) as engine:
            if told is not None:
                engine.tier.tell_packing(told)
            return engine.load(CHAIN)

    with steps(tier(tmp_path, **TOLD_LATER)) as engine:
        engine.tier.tell_packing(usual)
        assert engine.store(CHAIN) == 4
    assert found(usual) == (4, 4)
    for other in (None, Packing("other", "pages"), Packing("kinds", "other"), packing.UNTOLD):
        assert found(other) == (0, 0), other
    # Canonical rows are the same for each number of ranks, whose pages differ.
    canonical = {"canonical": True, "parallel": {"is_parallelism_agnostic": True}}
    with steps(tier(tmp_path, **TOLD_LATER), **canonical) as engine:
        engine.tier.tell_packing(usual)
        engine.store(CHAIN)
    assert found(Packing("kinds", "other"), **canonical) == (4, 4)
    assert found(Packing("other", "pages"), **canonical) == (0, 0)


def test_before_the_packing_is_told_nothing_is_stored_and_the_log_says_so(tmp_path, caplog):
    with steps(tier(tmp_path, **TOLD_LATER)) as engine:
        assert engine.store(CHAIN) == 0
        assert engine.tier.lookup(CHAIN[0], engine.request(CHAIN)) is LookupResult.MISS
        assert "have not said how pages are packed" in caplog.text
        engine.tier.tell_packing(Packing("kinds", "pages"))
        engine.forget()
        assert engine.store(CHAIN) == 4
        # After a sleep the workers tell it again.
        engine.tier.tell_packing(Packing("kinds", "pages"))
        engine.forget()
        assert engine.load(CHAIN) == (4, 4)


def test_a_reset_stays_after_the_packing_is_told_again(tmp_path):
    with steps(tier(tmp_path, **TOLD_LATER)) as engine:
        engine.tier.tell_packing(Packing("kinds", "pages"))
        engine.store(CHAIN)
        engine.manager.reset_cache()
        engine.tier.tell_packing(Packing("kinds", "pages"))
        assert engine.load(CHAIN) == (0, 0)


def scheduler_of(engine, ranks=1):
    """The connector of the scheduler, above these tiers."""
    made = object.__new__(connector.LarderOffloadingConnector)
    made._vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=ranks))
    made._reported = {}
    made.connector_scheduler = SimpleNamespace(manager=engine.manager, reports=[])
    made.connector_scheduler.update_connector_output = lambda output: (
        made.connector_scheduler.reports.append(output.kv_connector_worker_meta)
    )
    return made


def worker_of(made, monkeypatch, rank=0):
    """The connector of a worker with these layers, after the start. It also got pages of a layer
    that is not offloaded.
    """
    caches = {name: layer.kv_cache for name, layer in made.items()}
    monkeypatch.setattr(connector.OffloadingConnector, "register_kv_caches", lambda *_: None)
    worker = object.__new__(connector.LarderOffloadingConnector)
    worker._vllm_config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=made),
        parallel_config=SimpleNamespace(rank=rank),
    )
    worker._kv_cache_config = SimpleNamespace(num_blocks=BLOCKS)
    groups = [SimpleNamespace(layer_names=(name,)) for name in LAYERS]
    worker.connector_worker = SimpleNamespace(
        spec=SimpleNamespace(config=SimpleNamespace(groups=groups)),
        build_connector_worker_meta=lambda: None,
    )
    worker.register_kv_caches(caches | {"shared": caches[LAYERS[0]]})
    return worker


@pytest.mark.parametrize("same", [True, False])
def test_the_connector_hands_over_what_all_ranks_say(tmp_path, same):
    def stored_and_found(ranks):
        with steps(tier(tmp_path, **TOLD_LATER)) as engine:
            scheduler_of(engine).set_xfer_handshake_metadata_pp_aware(ranks)
            return engine.load(CHAIN)[0], engine.store(CHAIN)

    backends = (FlashAttentionBackend, FlashAttentionBackend if same else RocmAttentionBackend)
    first, second = (
        {(0, rank): connector.Pages(described(layers(backend))) for rank, backend in enumerate(of)}
        for of in ((FlashAttentionBackend,) * 2, backends)
    )
    assert stored_and_found(first) == (0, 4)
    assert stored_and_found(second) == ((4, 0) if same else (0, 4))


@pytest.mark.parametrize("kind", ["unknown", "foreign", "nothing"])
def test_what_nobody_knows_is_shared_with_no_other_start(tmp_path, kind):
    pages = connector.Pages(described(layers(FlashAttentionBackend)))
    ranks = {
        "unknown": {(0, 0): pages, (0, 1): connector.Pages(None)},
        "foreign": {(0, 0): pages, (0, 1): object()},
        "nothing": {},
    }[kind]
    for _ in range(2):
        with steps(tier(tmp_path, **TOLD_LATER)) as engine:
            scheduler_of(engine).set_xfer_handshake_metadata_pp_aware(ranks)
            assert engine.load(CHAIN) == (0, 0)
            assert engine.store(CHAIN) == (4 if kind == "unknown" else 0)


def test_a_worker_describes_the_pages_that_are_offloaded(monkeypatch):
    made = layers(FlashAttentionBackend)
    worker = worker_of(made, monkeypatch)
    release = connector.vllm.__version__
    pages = worker.get_handshake_metadata()
    assert pages == connector.Pages(described(made, release=release))
    # It goes to the scheduler's process.
    assert pickle.loads(pickle.dumps(pages)) == pages
    assert worker.build_connector_worker_meta() is None


class Other:
    """Another connector of a `MultiConnector`, with a handshake of its own."""

    def get_handshake_metadata(self):
        return "theirs"

    def set_xfer_handshake_metadata_pp_aware(self, metadata):
        assert set(metadata.values()) == {"theirs"}

    def build_connector_worker_meta(self):
        return None

    def update_connector_output(self, output):
        assert output.kv_connector_worker_meta is None


def test_a_multi_connector_knows_the_statistics_of_larders_by_its_name():
    """They reach the process that logs them as a dictionary; an exception would end the server."""
    stats = {"LarderOffloadingConnector": {}}
    assert set(MultiConnector.build_kv_connector_stats(stats).data) == set(stats)


@pytest.mark.parametrize("order", [1, -1], ids=["after another", "before another"])
def test_inside_a_multi_connector_the_workers_tell_it_after_a_step(tmp_path, monkeypatch, order):
    def inside(one):
        multi = object.__new__(MultiConnector)
        multi._connectors = [Other(), one][::order]
        return multi

    made = layers(FlashAttentionBackend)
    workers = [worker_of(made, monkeypatch, rank) for rank in range(2)]
    handshake = {(0, rank): worker.get_handshake_metadata() for rank, worker in enumerate(workers)}
    with steps(tier(tmp_path, **TOLD_LATER)) as engine:
        scheduler_of(engine).set_xfer_handshake_metadata_pp_aware(handshake)
        assert engine.store(CHAIN) == 4

    monkeypatch.setattr(connector, "has_kv_transfer_group", lambda: True)
    groups = [inside(worker) for worker in workers]

    def step(scheduler, jobs):
        """A step in which these jobs end, each on the worker of its index."""
        reports = []
        for group, worker, job in zip(groups, workers, jobs, strict=True):
            monkeypatch.setattr(connector, "get_kv_transfer_group", lambda group=group: group)
            ended = OffloadingWorkerMetadata({job: 1}) if job else None
            worker.connector_worker.build_connector_worker_meta = lambda ended=ended: ended
            report = group.build_connector_worker_meta()
            reports += [pickle.loads(pickle.dumps(report))] if report else []
        merged = reports[0].aggregate(reports[1]) if len(reports) == 2 else (reports or [None])[0]
        output = KVConnectorOutput(kv_connector_worker_meta=merged)
        scheduler.update_connector_output(output)
        assert output.kv_connector_worker_meta is merged

    with steps(tier(tmp_path, **TOLD_LATER)) as engine:
        larder = scheduler_of(engine, ranks=2)
        scheduler = inside(larder)
        monkeypatch.setattr(connector, "get_kv_transfer_group", lambda: groups[0])
        told = {(0, rank): group.get_handshake_metadata() for rank, group in enumerate(groups)}
        scheduler.set_xfer_handshake_metadata_pp_aware(told)
        assert engine.load(CHAIN) == (0, 0)
        for jobs in ((0, 7), (7, 7), (8, 0), (0, 0)):
            step(scheduler, jobs)
            # What a server outside of a `MultiConnector` stored is found too.
            engine.forget()
            assert engine.load(CHAIN) == (4, 4)
        ended = [report and report.completed_jobs for report in larder.connector_scheduler.reports]
        assert ended == [{7: 1}, {7: 2}, {8: 1}, None]
