"""The parts of vLLM's configuration that are no part of the weights tag, with the reasons.

A field that is in no list is part of the tag, also one of a later release. A field belongs here if
pages with the same key have the same bytes for each of its values.
"""

from __future__ import annotations

from typing import Mapping

#: By part of ``VllmConfig`` that is left out as a whole: the reason.
PARTS: Mapping[str, str] = {
    "parallel_config": "the namespace has the sizes of the groups; see `KEPT`",
    "scheduler_config": "the order of the work",
    "device_config": "the workers describe their kernels",
    "offload_config": "the place of the weights",
    "aux_output_config": "further outputs of a step",
    "watermark_config": "sampling: the tokens are in the keys",
    "structured_outputs_config": "sampling: the tokens are in the keys",
    "reasoning_config": "sampling: the tokens are in the keys",
    "observability_config": "metrics and traces",
    "logging_config": "the log",
    "profiler_config": "profiles",
    "watchdog_config": "the end of a process that hangs",
    "compilation_config": "the compilation of the same operations",
    "optimization_level": "the compilation of the same operations",
    "performance_mode": "the compilation of the same operations",
    "kv_transfer_config": "the tiers of the pages themselves",
    "kv_events_config": "the tiers of the pages themselves",
    "ec_transfer_config": "transfer of the encoder's outputs, by their hashes",
    "ec_manager_config": "the cache of the encoder's outputs, by their hashes",
    "instance_id": "the name of a process",
    "weight_transfer_config": "such a server has namespaces of its own",
    "shutdown_timeout": "the end of the process",
}

#: Of parts that are left out: the fields that are part of the tag nevertheless.
KEPT: Mapping[str, tuple[str, ...]] = {
    # How the tokens of a block are dealt out to the ranks that divide a context.
    "parallel_config": ("cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size"),
}

#: By class, by reason: the fields that are left out.
FIELDS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "ModelConfig": {
        "the keys have the tokens": (
            "tokenizer",
            "tokenizer_mode",
            "tokenizer_revision",
            "skip_tokenizer_init",
            "io_processor_plugin",
            "renderer_num_workers",
        ),
        "the names and permissions of clients": (
            "served_model_name",
            "allowed_local_media_path",
            "allowed_media_domains",
            "hf_token",
            "allow_deprecated_quantization",
        ),
        "sampling and its outputs": (
            "seed",
            "return_sampling_mask",
            "max_logprobs",
            "logprobs_mode",
            "use_fp64_gumbel",
            "enable_trace_replay",
            "logits_processors",
        ),
        "the memory of the process": (
            "enable_sleep_mode",
            "sleep_preserve_parameter_names",
            "sleep_mode_backend",
            "sleep_mode_offload_cudagraph",
            "enable_nccl_comm_suspend",
            "enable_cumem_allocator",
        ),
        "the compilation of the same operations": ("enforce_eager",),
        "the contents of the files are part of the tag": ("hf_config_path", "generation_config"),
    },
    "CacheConfig": {
        "how much memory there is": (
            "gpu_memory_utilization",
            "num_gpu_blocks_override",
            "num_gpu_blocks",
            "num_cpu_blocks",
            "kv_cache_size_tokens",
            "kv_cache_max_concurrency",
            "kv_cache_memory_bytes",
            "simple_cpu_offload_num_blocks",
        ),
        "the tiers of the pages themselves": (
            "kv_offloading_size",
            "kv_offloading_backend",
            "enable_prefix_caching",
        ),
        "how a value was found": ("user_specified_block_size", "_block_size_resolved"),
        "the namespace has it": ("prefix_caching_hash_algo",),
    },
    "LoRAConfig": {
        "how many adapters there are": ("max_loras", "max_cpu_loras", "max_lora_rank"),
        "the division of the work": ("fully_sharded_loras", "specialize_active_lora"),
        "the files are part of the tag": ("default_mm_loras",),
        "the head behind the model": ("max_lora_cls_labels",),
    },
    "MultiModalConfig": {
        "the memory and transport of media": (
            "limit_per_prompt",
            "mm_processor_cache_gb",
            "mm_processor_cache_type",
            "mm_shm_cache_max_object_size_mb",
            "mm_tensor_ipc",
            "mm_ipc_gpu_memory_gb",
            "skip_mm_profiling",
        ),
        "the division of the work": ("mm_encoder_tp_mode",),
        "the keys have the tokens": ("interleave_mm_strings",),
        "a file that is written": (
            "mm_encoder_fp8_scale_save_path",
            "mm_encoder_fp8_scale_save_margin",
        ),
    },
    "KernelConfig": {
        "the compilation of the same operations": (
            "ir_op_priority",
            "enable_flashinfer_autotune",
            "enable_rocm_segmented_attn_autotune",
            "enable_cutedsl_warmup",
            "enable_jit_warmup",
        ),
    },
    "EngramConfig": {
        "the place of the weights": (
            "cpu_offload",
            "embedding_across_dp",
            "dp_shared_memory",
            "use_thp",
        ),
    },
    "SpeculativeConfig": {
        "the model's own configuration": ("target_model_config", "target_parallel_config"),
        "the division of the work": (
            "draft_parallel_config",
            "draft_tensor_parallel_size",
            "tensor_parallel_size",
        ),
        "the compilation of the same operations": ("enforce_eager",),
        "how many tokens are drafted, and which are accepted": (
            "num_speculative_tokens",
            "num_speculative_tokens_per_batch_size",
            "prompt_lookup_max",
            "prompt_lookup_min",
            "suffix_decoding_max_tree_depth",
            "suffix_decoding_max_cached_requests",
            "suffix_decoding_max_spec_factor",
            "suffix_decoding_min_token_prob",
            "rejection_sample_method",
            "synthetic_acceptance_rates",
            "synthetic_acceptance_length",
            "enable_adaptive_verification",
            "draft_sample_method",
            "dspark_draft_topk",
            "xpress_topc",
            "fly_window_size",
            "fly_entropy_threshold",
            "fly_entropy_top_k",
        ),
    },
    "LoadConfig": {
        "how files are read": (
            "download_dir",
            "safetensors_load_strategy",
            "safetensors_prefetch_num_threads",
            "safetensors_prefetch_block_size",
            "device",
            "use_tqdm_on_load",
            "pt_load_map_location",
        ),
    },
}

#: By class: the fields that name the weights. A `weights_tag` of the operator's stands for them.
OF_WEIGHTS: Mapping[str, tuple[str, ...]] = {
    "ModelConfig": ("model", "model_weights", "revision", "code_revision"),
    "SpeculativeConfig": ("model", "revision", "code_revision", "draft_load_config"),
}

#: The parts of ``VllmConfig`` that name the weights.
PARTS_OF_WEIGHTS = ("load_config",)


def names(has_own_tag: bool) -> dict[str, frozenset[str]]:
    """By class: the fields that are left out; with an operator's tag also the fields of weights."""
    found = {kind: set().union(*reasons.values()) for kind, reasons in FIELDS.items()}
    if has_own_tag:
        for kind, of_weights in OF_WEIGHTS.items():
            found[kind].update(of_weights)
    return {kind: frozenset(out) for kind, out in found.items()}
