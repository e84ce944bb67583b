"""vLLM's tiering on the CPU platform: its spec refuses that platform, whose GPU is ordinary memory.

Everything is vLLM's own but the copies between the GPU's blocks and the rows of the CPU tier, which
are made with memmove on the addresses that vLLM computes.
"""

from __future__ import annotations

import ctypes
import time

import numpy as np
from vllm.utils.math_utils import cdiv
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.gpu_worker import compute_sub_block_ptrs
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

#: The workers of this process.
WORKERS: list[MemmoveWorker] = []


class MemmoveWorker(OffloadingWorker):
    """Copies blocks at once, on the caller's thread."""

    def __init__(self, kv_caches, blocks_per_chunk, region):
        self.region = region
        self.blocks_per_chunk = blocks_per_chunk
        self.finished = []
        self.gpu = [self._blocks(cache) for cache in kv_caches.tensors]
        sizes = [cache.page_size_bytes * blocks_per_chunk for cache in kv_caches.tensors]
        self.cpu = [region.create_next_worker_view(size) for size in sizes]
        self.refs = kv_caches.group_data_refs

    @staticmethod
    def _blocks(cache):
        tensor = cache.tensor
        return tensor.view((-1, cache.page_size_bytes)) if tensor.is_contiguous() else tensor

    def _copy(self, job, source, target, to_cpu):
        start = time.perf_counter()
        layout = source if to_cpu else target
        per_source, per_target = (
            (1, self.blocks_per_chunk) if to_cpu else (self.blocks_per_chunk, 1)
        )
        sources, targets = (self.gpu, self.cpu) if to_cpu else (self.cpu, self.gpu)
        at_source = at_target = copied = 0
        for group, (size, index) in enumerate(zip(layout.group_sizes, layout.block_indices)):
            if not size:
                continue
            skip_source, skip_target = index % per_source, index % per_target
            of_source, of_target = (
                cdiv(size + skip_source, per_source),
                cdiv(size + skip_target, per_target),
            )
            for ref in self.refs[group]:
                reads, writes = np.empty(size, np.uint64), np.empty(size, np.uint64)
                blocks = source.block_ids[at_source : at_source + of_source]
                compute_sub_block_ptrs(
                    blocks, per_source, reads, sources[ref.tensor_idx], skip_count=skip_source
                )
                blocks = target.block_ids[at_target : at_target + of_target]
                compute_sub_block_ptrs(
                    blocks, per_target, writes, targets[ref.tensor_idx], skip_count=skip_target
                )
                for read, write in zip(reads, writes):
                    ctypes.memmove(int(write), int(read), ref.page_size_bytes)
                copied += size * ref.page_size_bytes
            at_source += of_source
            at_target += of_target
        self.finished.append(TransferResult(job, True, copied, time.perf_counter() - start))
        return True

    def submit_store(self, job_id, src_spec, dst_spec):
        return self._copy(job_id, src_spec, dst_spec, True)

    def submit_load(self, job_id, src_spec, dst_spec, expedited=False):
        return self._copy(job_id, src_spec, dst_spec, False)

    def get_finished(self):
        finished, self.finished = self.finished, []
        return finished

    def wait(self, job_ids):
        pass

    def shutdown(self):
        self.gpu.clear()
        self.cpu.clear()
        self.region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """vLLM's spec with that worker."""

    def get_worker(self, kv_caches):
        if not self._worker:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=0 if self.replicated_layout else self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = MemmoveWorker(kv_caches, self.blocks_per_chunk, region)
            WORKERS.append(self._worker)
        return self._worker
