"""The parts of SGLang's configuration that are no part of the weights tag, with the reasons.

SGLang groups its arguments by namespaces (`sglang.srt.arg_groups.fields`). An argument that is in
no list is part of the tag, also one of a later release, unless its whole namespace is left out. An
argument belongs here if pages with the same key have the same bytes for each of its values.
"""

from __future__ import annotations

from typing import Mapping

#: By namespace that is left out as a whole: the reason.
NAMESPACES: Mapping[str, str] = {
    "device": "the place of the process; a pool tells its platform",
    "disagg": "the transfer of pages between servers",
    "observability": "metrics, traces and logs",
    "parallel": "the namespace of the pages has the ranks and sizes of the groups",
    "schedule": "the order of the work, and how much memory there is",
    "serving": "requests and answers: the keys have the tokens",
    "exec.graph": "the capture of the same operations",
    "exec.comm": "how ranks exchange the same sums",
    "exec.overlap": "the order of the work",
    "exec.offload": "the place of the weights",
}

#: Of namespaces that are left out: the arguments that are part of the tag nevertheless.
KEPT = (
    # The parts of a model that are loaded.
    "encoder_only",
    "language_only",
    "language_model_only",
    # Which layers or heads a rank holds.
    "enable_dsa_cache_layer_split",
    "enable_kv_cache_sharding",
    # The pages of windows and of compressed layers.
    "c128_page_size",
    "swa_prefix_tails",
    "disable_hybrid_swa_memory",
    # An exchange that rounds.
    "enable_quant_communications",
    "boundary_reduction",
)

#: By reason: the arguments of other namespaces that are left out.
FIELDS: Mapping[str, tuple[str, ...]] = {
    "how files are read": (
        "download_dir",
        "startup_weight_load_mode",
        "weight_loader_disable_mmap",
        "weight_loader_prefetch_checkpoints",
        "weight_loader_prefetch_num_threads",
        "weight_loader_drop_cache_after_load",
        "delete_ckpt_after_loading",
        "model_checksum",
    ),
    "weights from elsewhere than files: such a server has no derived tag": (
        "remote_instance_weight_loader_seed_instance_ip",
        "remote_instance_weight_loader_seed_instance_service_port",
        "remote_instance_weight_loader_send_weights_group_ports",
        "remote_instance_weight_loader_backend",
        "remote_instance_weight_loader_start_seed_via_transfer_engine",
        "engine_info_bootstrap_port",
        "modelexpress_config",
        "checkpoint_engine_wait_weights_before_ready",
        "weight_cache_mode",
        "weight_cache_socket",
        "weight_cache_timeout",
    ),
    "a file that is written": (
        "modelopt_checkpoint_save_path",
        "modelopt_export_path",
        "spec_trace_dir",
    ),
    "the contents of the files are part of the tag": (
        "decrypted_config_file",
        "decrypted_draft_config_file",
        "lora_paths",
    ),
    "how many adapters there are, and when they are loaded": (
        "enable_lora_overlap_loading",
        "max_loaded_loras",
        "max_loras_per_batch",
        "lora_eviction_policy",
        "lora_drain_wait_threshold",
        "lora_strict_loading",
    ),
    "the memory and transport of media": (
        "enable_broadcast_mm_inputs_process",
        "enable_prefix_mm_cache",
        "mm_enable_dp_encoder",
        "mm_processor_worker_num",
        "mm_io_worker_num",
        "allowed_media_domains",
        "media_url_max_file_size_mb",
        "mm_preprocess_cache_size_mb",
        "limit_mm_data_per_request",
        "enable_mm_global_cache",
        "mm_global_cache_backend",
        "mm_feature_transport",
    ),
    "how many tokens are drafted, and which are accepted": (
        "speculative_num_steps",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
        "speculative_accept_threshold_single",
        "speculative_accept_threshold_acc",
        "speculative_use_rejection_sampling",
        "speculative_use_block_verification",
        "speculative_adaptive",
        "speculative_adaptive_config",
        "speculative_dspark_sps_table_path",
        "speculative_dspark_confidence_sts_path",
        "speculative_dspark_align_verify_tokens_to_graph_tier",
        "speculative_ngram_min_bfs_breadth",
        "speculative_ngram_max_bfs_breadth",
        "speculative_ngram_match_type",
        "speculative_ngram_max_trie_depth",
        "speculative_ngram_capacity",
        "speculative_ngram_external_corpus_path",
        "speculative_ngram_external_sam_budget",
        "speculative_ngram_external_corpus_max_tokens",
    ),
    "how a value was found": (
        "_speculative_draft_quantization_explicitly_set",
        "_radix_eviction_policy_explicitly_set",
    ),
    "sampling and further outputs: the keys have the tokens": (
        "sampling_backend",
        "grammar_backend",
        "enable_fp32_lm_head",
        "enable_custom_logit_processor",
        "enable_watermark",
        "watermark_config",
        "watermark_key",
        "watermark_key_b",
        "watermark_context_window",
        "watermark_mixing_probability",
        "watermark_max_probability",
        "watermark_default_enabled",
        "watermark_enforce_all",
        "enable_return_hidden_states",
        "return_hidden_states_mode",
        "enable_return_aux_hidden_states",
        "aux_hidden_state_capture",
        "return_aux_hidden_state_layer_ids",
        "enable_return_routed_experts",
        "enable_return_indexer_topk",
        "sampling_mask_max_tokens",
        "disable_outlines_disk_cache",
    ),
    "the memory of the process": (
        "enable_memory_saver",
        "enable_weights_cpu_backup",
        "enable_draft_weights_cpu_backup",
        "enable_paged_experts",
        "paged_experts_num_resident",
        "mamba_max_states_per_path",
        "int8_mamba_ckpt_size",
    ),
    "the compilation and tuning of the same operations": (
        "disable_flashinfer_autotune",
        "flashinfer_autotune_skip_ops",
        "triton_attention_num_kv_splits",
        "triton_attention_split_tile_size",
    ),
    "the place of the experts": (
        "ep_num_redundant_experts",
        "ep_dispatch_algorithm",
        "init_expert_location",
        "enable_eplb",
        "eplb_algorithm",
        "eplb_rebalance_num_iterations",
        "eplb_rebalance_layers_per_chunk",
        "eplb_min_rebalancing_utilization_threshold",
        "expert_distribution_recorder_mode",
        "expert_distribution_recorder_buffer_size",
        "expert_balancedness_report_mode",
        "deepep_config",
        "elastic_ep_backend",
        "enable_elastic_expert_backup",
        "mooncake_ib_device",
        "enable_waterfill",
        "ep_join_mode",
        "elastic_ep_scale_timeout",
        "kt_cpuinfer",
        "kt_threadpool_count",
    ),
    "the tiers of the pages themselves": (
        "radix_eviction_policy",
        "radix_eviction_policy_config",
        "disable_radix_cache",
        "enable_session_radix_cache",
        "radix_cache_backend",
        "enable_hierarchical_cache",
        "hicache_host_memory_mode",
        "hicache_ratio",
        "hicache_size",
        "hicache_host_memory_fraction",
        "hicache_write_policy",
        "hicache_io_backend",
        "hicache_storage_backend",
        "hicache_storage_prefetch_policy",
        "hicache_storage_backend_extra_config",
        "hicache_storage_prefetch_retry_poll_interval",
        "hicache_storage_prefetch_retry_max_attempts",
        "enable_unified_cache_external_linker",
        "unified_cache_external_linker_backend",
        "unified_cache_external_linker_config",
        "enable_linker_mla_dedup",
        "enable_lmcache",
        "lmcache_config_file",
        "enable_flexkv",
        "flexkv_config_file",
    ),
    "the namespace of the pages has it": ("hicache_mem_layout",),
}

#: Arguments that name the weights. A `weights_tag` of the operator's stands for them.
OF_WEIGHTS = (
    "model_path",
    "revision",
    "load_format",
    "model_loader_extra_config",
    "custom_weight_loader",
    "quantization_param_path",
    "modelopt_checkpoint_restore_path",
    "kt_weight_path",
    "speculative_draft_model_path",
    "speculative_draft_model_revision",
    "speculative_draft_load_format",
    "uno_lora_path",
)

#: The argument of a namespace that is left out which names the weights.
KEPT_OF_WEIGHTS = ("weight_version",)

#: Attributes of `ModelConfig` that are left out: arguments, the weights' name, sampling.
OF_MODEL = (
    "model_path",
    "revision",
    "model_override_args",
    "speculative_algorithm",
    "quantization",
    "sampling_defaults",
    "think_end_ids",
    "self_opened_think_start_ids",
    "request_selectable_think_end_id_sequences",
)

ALL = frozenset(name for names in FIELDS.values() for name in names)
