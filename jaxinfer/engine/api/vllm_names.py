"""vLLM's arguments that jaxinfer does not have, in groups with the sentence that their users get.

The names are those of ``vllm serve`` 0.33 and of older versions whose scripts are still about. The
module imports nothing of the engine, since the command line reads it at each start.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import NamedTuple


class Group(NamedTuple):
    """Arguments with one answer.

    ``values``, as text, name those at which an argument says what jaxinfer does anyway. Without a
    value (None, False, empty) it is accepted in any case.
    """

    advice: str
    names: str  # with spaces between them
    values: tuple[str, ...] = ()

    @property
    def each(self) -> tuple[str, ...]:
        """The names."""
        return tuple(self.names.split())


# accepted with any value, of which a start tells: they change no answer
WITHOUT_EFFECT = (
    Group(
        "models read text alone",
        """language_model_only limit_mm_per_prompt mm_encoder_only media_io_kwargs skip_mm_profiling
        mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type mm_processor_device
        mm_shm_cache_max_object_size_mb mm_hasher_algorithm mm_encoder_tp_mode mm_tensor_ipc
        mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
        mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin interleave_mm_strings
        mm_ipc_gpu_memory_gb mm_device_do_normalize video_pruning_rate video_pruning_method
        trust_request_mm_kwargs disable_chunked_mm_input disable_mm_preprocessor_cache
        allowed_local_media_path allowed_media_domains enable_flash_late_interaction""",
    ),
    Group(
        "kernels follow from the device and the shapes, or from kernels",
        """attention_backend attention_config mamba_backend mamba_ssu_algorithm moe_backend
        linear_backend sparse_indexer_topk_backend gdn_prefill_backend kda_prefill_backend
        kda_decode_backend kernel_config ir_op_priority enable_flashinfer_autotune
        disable_cascade_attn kv_sharing_fast_prefill use_fp64_gumbel monokernel""",
    ),
    Group(
        "every step is compiled before the first request",
        """cudagraph_capture_sizes max_cudagraph_capture_size cuda_graph_sizes optimization_level
        performance_mode jit_monitor_mode jit_monitor_verbose max_seq_len_to_capture
        max_context_len_to_capture full_cuda_graph""",
    ),
    Group(
        "states have one form, are saved where chunks end and are reused (num_snapshots)",
        """mamba_cache_mode mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size
        mamba_cache_philox_rounds enable_mamba_cache_stochastic_rounding use_replayssm
        enable_mamba_shared_prefix_checkpoint replayssm_buffer_len""",
    ),
    Group(
        "pages have BLAKE2 hashes and are kept until others need the memory",
        """prefix_caching_hash_algo prefix_cache_retention_interval prefix_match_unit
        swa_bounded_replay disable_hybrid_kv_cache_manager enable_cumem_allocator
        sleep_mode_backend sleep_mode_offload_cudagraph enable_nccl_comm_suspend""",
    ),
    Group(
        "weights stay on the device",
        """offload_backend cpu_offload_params offload_group_size offload_num_in_group
        offload_prefetch_step offload_params""",
    ),
    Group(
        "safetensors and GGUF files are mapped into memory and read in parallel",
        """safetensors_load_strategy safetensors_prefetch_num_threads ignore_patterns
        safetensors_prefetch_block_size use_tqdm_on_load pt_load_map_location
        max_parallel_loading_workers enable_ep_weight_filter allow_deprecated_quantization
        code_revision""",
    ),
    Group(
        "one process with all devices of a host computes, and another one answers",
        """distributed_executor_backend api_server_count renderer_num_workers numa_bind
        numa_bind_nodes numa_bind_cpus enable_shm_tensor_arena ray_workers_use_nsight""",
    ),
    Group(
        "devices share the work in one way (tensor_parallel_size, enable_expert_parallel)",
        """all2all_backend enable_dbo ubatch_size dbo_decode_token_threshold
        dbo_prefill_token_threshold enable_eplb eplb_config expert_placement_strategy
        dp_sync_interval disable_nccl_for_dp_synchronization enable_batch_sharded_sampling
        enable_hc_sp dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size
        cp_kv_cache_interleave_size cpu_distributed_timeout_seconds""",
    ),
    Group(
        "steps are planned while others run, and tokens are sent when their step ends",
        """stream_interval scheduler_reserve_full_isl prefill_schedule_interval
        long_prefill_token_threshold_adaptive disable_async_output_proc
        use_v2_block_manager multi_step_stream_outputs num_lookahead_slots""",
    ),
    Group(
        "/metrics always has the same series, and the log the same lines",
        """kv_cache_metrics kv_cache_metrics_sample cudagraph_metrics enable_mfu_metrics
        enable_layerwise_nvtx_tracing enable_logging_iteration_details
        show_hidden_metrics_for_version aggregate_engine_logging per_request_spec_decode_metrics
        enable_log_deltas log_error_stack fail_on_environ_validation""",
    ),
    Group(
        "/openapi.json needs no pages from elsewhere", "disable_fastapi_docs enable_offline_docs"
    ),
    Group(
        "marks of thoughts show a model that thinks", "enable_reasoning cohere_is_reasoning_model"
    ),
    Group("system_fingerprint is the version", "fingerprint_mode fingerprint_value"),
)

# refused, with what to use in their place
UNSUPPORTED = (
    Group(
        "KV is not passed between engines; kv_offloading_size and kv_offloading_disk keep it, or "
        "a store of your own, kv_connector",
        "kv_transfer_config kv_offloading_backend ec_transfer_config ec_manager_config",
        ("native",),
    ),
    Group("models read text alone; leave it out", "enable_mm_embeds enable_prompt_embeds"),
    Group(
        "llguidance is the only backend, and max_form_seconds and max_form_bytes limit a form; "
        "leave it out",
        "structured_outputs_config",
    ),
    Group(
        "parsers are data; name a form with tool_call_parser or reasoning_parser, or give the "
        "model's tokenizer a response_template",
        "tool_parser_plugin reasoning_parser_plugin reasoning_config",
    ),
    Group(
        "use strict_tool_calls, or strict in the functions of a request",
        "tool_strict_level exclude_tools_when_tool_choice_none",
        ("auto",),
    ),
    Group("no tool runs in the server; clients run them", "tool_server"),
    Group("use num_hosts, for which each host runs the same command", "nnodes", ("1",)),
    Group("use host_rank", "node_rank headless", ("0",)),
    Group("use coordinator, HOST:PORT of host 0", "master_addr master_port"),
    Group("use hosts_timeout", "distributed_timeout_seconds"),
    Group(
        "data_parallel_size starts all engines of this host, and a router serves several hosts",
        """data_parallel_rank data_parallel_start_rank data_parallel_size_local
        data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb
        data_parallel_external_lb data_parallel_multi_port_external_lb data_parallel_supervisor_port
        dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s enable_elastic_ep
        dp_supervisor_probe_failure_threshold elastic_ep_max_dp_size enable_scale_out
        enable_fault_tolerance fault_tolerance_config""",
    ),
    Group("replicas on Ray are those of jaxinfer.ray", "data_parallel_backend", ("mp",)),
    Group(
        "a context is on all devices; use tensor_parallel_size",
        "decode_context_parallel_size prefill_context_parallel_size",
        ("1",),
    ),
    Group("set CUDA_VISIBLE_DEVICES", "device_ids"),
    Group("set JAX_PLATFORMS to cpu or cuda", "device", ("auto",)),
    Group("the server speaks HTTP; leave it out", "grpc grpc_port"),
    Group("use skip_tokenizer_init", "tokens_only"),
    Group("use --tokenizer ORG/NAME@REVISION", "tokenizer_revision"),
    Group("use hf_overrides, or a folder with a config.json of its own", "hf_config_path"),
    Group("use hf_overrides with the keys of config.json", "rope_scaling rope_theta"),
    Group(
        "configs are those of Hugging Face, and families are jaxinfer's (jaxinfer list)",
        "config_format model_impl model_class_overrides engram_config diffusion_config",
        ("auto", "hf", "vllm", "{}"),
    ),
    Group("use quantization, or files that are quantised", "quantization_config"),
    Group("use kv_cache_dtype auto, which keeps all layers in dtype", "kv_cache_dtype_skip_layers"),
    Group("scales of fp8 pages are always of the tokens; leave it out", "calculate_kv_scales"),
    Group("windows stay; use max_model_len for shorter contexts", "disable_sliding_window"),
    Group("use pooling", "pooler_config override_pooler_config"),
    Group(
        "logprobs are the model's own; use temperature_scaled_logprobs in a request",
        "logprobs_mode",
        ("raw_logprobs",),
    ),
    Group(
        "use logit_bias, bad_words, allowed_token_ids or structured_outputs in a request",
        "logits_processors logits_processor_pattern",
    ),
    Group(
        "answers have no such data; tap_points returns activations",
        "enable_return_routed_experts return_sampling_mask aux_output_config io_processor_plugin",
    ),
    Group("watermarks are not supported", "watermark_config"),
    Group("use record, and jaxinfer replay", "enable_trace_replay"),
    Group(
        "load_format and the model's name say all that is read; leave it out",
        "model_loader_extra_config additional_config",
        ("{}",),
    ),
    Group(
        "the scheduler and the executor are not replaced by classes; leave it out",
        "scheduler_cls worker_cls worker_extension_cls preemption_mode",
        ("auto",),
    ),
    Group("use max_num_batched_tokens", "max_num_scheduled_tokens"),
    Group("use max_num_seqs", "max_num_active_seqs"),
    Group("use max_num_mixed_tokens", "long_prefill_token_threshold", ("0",)),
    Group("pages are all used; use max_num_seqs for fewer preemptions", "watermark", ("0", "0.0")),
    Group("sleep takes all parameters; leave it out", "sleep_preserve_parameter_names"),
    Group("weights are replaced by /update_weights and update_weights", "weight_transfer_config"),
    Group("use profiler_dir, and /start_profile", "profiler_config"),
    Group("use log_format and uvicorn_log_level", "logging_config log_level log_config_file"),
    Group("use disable_uvicorn_access_log", "disable_access_log_for_endpoints"),
    Group("histograms have fixed bounds; leave it out", "custom_histogram_buckets"),
    Group(
        "use /metrics, or otlp_traces_endpoint for the times of each request",
        "enable_per_request_metrics enable_server_load_tracking",
    ),
    Group("the log never has the text of answers; leave it out", "enable_log_outputs"),
    Group(
        "the route does not exist; /tokenize and /detokenize do", "enable_tokenizer_info_endpoint"
    ),
    Group("streams have events of tokens alone; leave it out", "sse_keep_alive_interval", ("0",)),
    Group("Cohere's API is not served; use OpenAI's chats", "cohere_format", ("cmd4",)),
    Group("use chat_template_kwargs in a request", "anthropic_disabled_thinking_effort", ("auto",)),
    Group(
        "requests have the efforts that the chat template knows; use chat_template_kwargs there",
        "reasoning_effort_map",
        ("{}",),
    ),
    Group(
        "stacks of a server that hangs are shown by a tool that attaches to it; leave it out",
        "watchdog_config",
        ("{}",),
    ),
    Group(
        "a proxy before the server can do this; leave it out",
        "middleware enable_ssl_refresh ssl_ciphers",
        ("[]",),
    ),
    Group("use h11_max_incomplete_event_size", "h11_max_header_count", ("256",)),
    Group("speculative decoding is not supported", "spec_method spec_model spec_tokens"),
    Group(
        "LoRA is not supported",
        """lora_dtype max_cpu_loras fully_sharded_loras lora_target_modules default_mm_loras
        enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format
        enable_moe_shared_loras max_lora_cls_labels""",
        ("auto",),
    ),
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# the kinds of flags on a command line; all others take one value
SWITCHES = _names(
    """language_model_only mm_encoder_only skip_mm_profiling interleave_mm_strings
    mm_device_do_normalize trust_request_mm_kwargs disable_chunked_mm_input
    disable_mm_preprocessor_cache enable_flash_late_interaction enable_flashinfer_autotune
    disable_cascade_attn kv_sharing_fast_prefill use_fp64_gumbel jit_monitor_verbose
    full_cuda_graph enable_mamba_cache_stochastic_rounding use_replayssm
    enable_mamba_shared_prefix_checkpoint swa_bounded_replay disable_hybrid_kv_cache_manager
    enable_cumem_allocator sleep_mode_offload_cudagraph enable_nccl_comm_suspend use_tqdm_on_load
    enable_ep_weight_filter allow_deprecated_quantization numa_bind enable_shm_tensor_arena
    ray_workers_use_nsight enable_dbo enable_eplb disable_nccl_for_dp_synchronization
    enable_batch_sharded_sampling enable_hc_sp dcp_q_replicate scheduler_reserve_full_isl
    long_prefill_token_threshold_adaptive disable_async_output_proc use_v2_block_manager
    multi_step_stream_outputs kv_cache_metrics cudagraph_metrics enable_mfu_metrics
    enable_layerwise_nvtx_tracing enable_logging_iteration_details aggregate_engine_logging
    enable_log_deltas log_error_stack fail_on_environ_validation disable_fastapi_docs
    enable_offline_docs enable_reasoning cohere_is_reasoning_model enable_mm_embeds
    enable_prompt_embeds exclude_tools_when_tool_choice_none headless data_parallel_hybrid_lb
    data_parallel_external_lb data_parallel_multi_port_external_lb enable_elastic_ep
    enable_scale_out enable_fault_tolerance grpc tokens_only calculate_kv_scales
    disable_sliding_window enable_return_routed_experts return_sampling_mask enable_trace_replay
    enable_per_request_metrics enable_server_load_tracking enable_log_outputs
    enable_tokenizer_info_endpoint enable_ssl_refresh fully_sharded_loras
    enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format
    enable_moe_shared_loras"""
)
SEVERAL = _names(
    """allowed_media_domains cudagraph_capture_sizes cuda_graph_sizes numa_bind_nodes numa_bind_cpus
    cpu_offload_params offload_params ignore_patterns logits_processors kv_cache_dtype_skip_layers
    sleep_preserve_parameter_names lora_target_modules"""
)
# flags of one dash
SHORT = MappingProxyType(
    {
        "api_server_count": "-asc",
        "nnodes": "-n",
        "node_rank": "-r",
        "decode_context_parallel_size": "-dcp",
        "prefill_context_parallel_size": "-pcp",
        "data_parallel_rank": "-dpn",
        "data_parallel_start_rank": "-dpr",
        "data_parallel_size_local": "-dpl",
        "data_parallel_address": "-dpa",
        "data_parallel_rpc_port": "-dpp",
        "data_parallel_backend": "-dpb",
        "data_parallel_hybrid_lb": "-dph",
        "data_parallel_external_lb": "-dpe",
        "data_parallel_multi_port_external_lb": "-dpm",
        "diffusion_config": "-dc",
        "attention_config": "-ac",
    }
)
