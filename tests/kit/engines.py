"""Engines over tiny random models, for tests of everything above the step.

Owns: ``tiny_engine`` and ``run``. Executables are shared between engines through one bundle folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from jaxinfer.core.config import Limits
from jaxinfer.core.progress import NoProgress
from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.facts import ModelFacts
from jaxinfer.engine.outputs import Collector, RequestOutput
from jaxinfer.engine.prompts import Prompt
from jaxinfer.exec.buckets import bucket_table
from jaxinfer.exec.compile import build_executables
from jaxinfer.exec.executor import Executor
from jaxinfer.exec.program import Program
from jaxinfer.text.tokenizer import load_tokenizer
from kit.tiny_models import tiny_model
from kit.tokenizers import tiny_tokenizer_spec

MAX_PAGES = 129
EOS = 319  # beyond the tiny tokenizer's ids, so that text never ends by chance


def tiny_limits(
    *,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 32,
    num_pages: int = MAX_PAGES,
    page_size: int = 4,
    max_model_len: int = 128,
    enable_prefix_caching: bool = True,
) -> Limits:
    """Small enough that page edges, chunks and full slots are met at once."""
    return Limits(
        num_pages=num_pages,
        page_size=page_size,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        max_num_batched_tokens=max_num_batched_tokens,
        buckets=bucket_table(
            max_num_seqs,
            max_num_batched_tokens,
            decode_start=2,
            prefill_start=64,
            prefill_factor=8,
            mixed_start=16,
        ),
        enable_prefix_caching=enable_prefix_caching,
    )


def tiny_executor(bundles: Path, limits: Limits, model_name: str = "llama") -> Executor:
    """A real executor over a tiny model."""
    model, params = tiny_model(model_name)
    # a smaller pool and no prefix caching are the scheduler's business: share the executables
    shape = replace(limits, num_pages=MAX_PAGES, enable_prefix_caching=True)
    program = Program(model, shape)
    executables = build_executables(program, bundle_root=bundles, progress=NoProgress())
    return Executor(program, executables, params)


def tiny_engine(
    bundles: Path,
    limits: Limits | None = None,
    *,
    model_name: str = "llama",
    overlap: bool = True,
    tokenizer: bool = True,
) -> Engine:
    """An engine over a tiny model; ``bundles`` is the session's folder of executables."""
    limits = limits or tiny_limits()
    executor = tiny_executor(bundles, limits, model_name)
    name = f"tiny-{model_name}"
    return engine_of(executor, limits, name=name, overlap=overlap, tokenizer=tokenizer)


def engine_of(
    executor: Executor,
    limits: Limits,
    *,
    name: str = "tiny",
    overlap: bool = True,
    tokenizer: bool = True,
) -> Engine:
    """An engine over an executor of a tiny model."""
    facts = ModelFacts(
        name=name,
        vocab_size=320,
        eos_token_ids=(EOS,),
        default_sampling=SamplingParams(),
    )
    return Engine(
        executor,
        limits,
        facts,
        load_tokenizer(tiny_tokenizer_spec()) if tokenizer else None,
        overlap=overlap,
    )


def run(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    *,
    together: bool = True,
) -> list[RequestOutput]:
    """Answer prompts, submitted together or one after the other."""
    params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    collectors: dict[str, Collector] = {}
    for number, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
        name = f"r{number}"
        collectors[name] = Collector(name, Prompt(None, tuple(prompt)), one)
        engine.add_request(name, prompt, one)
        if not together:
            drain(engine, collectors)
    drain(engine, collectors)
    return [collector.output for collector in collectors.values()]


def drain(engine: Engine, collectors: dict[str, Collector]) -> None:
    """Step until nothing is left to do."""
    while engine.has_work:
        for delta in engine.step().deltas:
            assert not delta.error, delta.error
            collectors[delta.request_id].add(delta)


def tokens(outputs: Sequence[RequestOutput]) -> list[list[list[int]]]:
    """Token ids of every completion of every request."""
    return [[completion.token_ids for completion in output.outputs] for output in outputs]
