"""``jaxinfer inspect``: reports on a model and how it would be served, without loading weights.

Owns: the report on a model; ``inspect_bundle`` has the one on a bundle.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxinfer.cli.options import MODEL_FORMS, SIZE_OPTIONS, given
from jaxinfer.cli.output import format_bytes, format_count
from jaxinfer.engine.start.progress import progress_on

if TYPE_CHECKING:
    from jaxinfer.engine.start.plan import EnginePlan


@click.command(params=[*SIZE_OPTIONS], help=f"Describe MODEL, or a bundle. MODEL: {MODEL_FORMS}.")
@click.argument("model", required=False)
@click.option(
    "--bundle", metavar="FOLDER", help="A folder of `jaxinfer compile`, instead of MODEL."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(model: str | None, bundle: str | None, as_json: bool, **fields: Any) -> None:
    """Print the report of one model or bundle."""
    sizes = given(SIZE_OPTIONS, fields)
    if (model is None) == (bundle is None):
        raise click.UsageError("give either MODEL or --bundle")
    if bundle is not None and sizes:
        raise click.UsageError(f"a bundle has its sizes; leave out {', '.join(sizes)}")
    if bundle is not None:
        from jaxinfer.cli import inspect_bundle

        report = inspect_bundle.describe(Path(bundle))
        lines = inspect_bundle.lines(report)
    else:
        report = describe(_plan(model or "", sizes))
        lines = _lines(report)
    if as_json:
        click.echo(json.dumps(report))
        return
    for name, text in lines:
        click.echo(f"{name:16} {text}")


def _plan(model: str, sizes: dict[str, Any]) -> EnginePlan:
    from jaxinfer.core.config import EngineConfig
    from jaxinfer.engine.start.build import plan_engine

    config = EngineConfig(model=model, skip_tokenizer_init=True, **sizes)
    return plan_engine(config, progress_on(sys.stderr))


def describe(plan: EnginePlan) -> dict[str, Any]:
    """The facts of a planned engine as JSON values; sizes in bytes and tokens."""
    import jax

    from jaxinfer.models.base import abstract_params

    model = plan.program.model
    count: Counter[str] = Counter()
    size: Counter[str] = Counter()
    for leaf in jax.tree.leaves(abstract_params(model)):
        count[str(leaf.dtype)] += leaf.size
        size[str(leaf.dtype)] += leaf.size * leaf.dtype.itemsize
    config, limits, memory = model.config, plan.program.limits, plan.memory
    return {
        "model": plan.source.name,
        "architecture": model.architecture,
        "family": model.family.name,
        "layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "context": config.lengths[1],
        "parameters": count.total(),
        "parameter_bytes": dict(size),
        "checkpoint_bytes": _checkpoint_bytes(plan),
        "sampling": _sampling(plan),
        "kv_bytes_per_token": model.state.bytes_per_token,
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "page_size": limits.page_size,
        "num_pages": limits.num_pages,
        "kv_cache_bytes": memory.kv_bytes,
        "workspace_bytes": memory.workspace_bytes,
        "buckets": [bucket.name for bucket in limits.buckets],
    }


def _checkpoint_bytes(plan: EnginePlan) -> dict[str, int]:
    """Stored bytes, by the format's own dtypes."""
    checkpoint = plan.source.checkpoint
    if checkpoint is None:
        return {}
    stored: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        stored[tensor.dtype] += tensor.nbytes
    return dict(stored)


def _sampling(plan: EnginePlan) -> dict[str, Any]:
    """The model's own sampling defaults that differ from vLLM's."""
    import msgspec

    model = plan.facts.default_sampling
    others = msgspec.structs.asdict(type(model)())
    own = msgspec.structs.asdict(model)
    return {name: value for name, value in own.items() if value != others[name]}


def _by_name(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    stored = _by_dtype(report["checkpoint_bytes"]) or "none; random weights"
    tokens = (report["num_pages"] - 1) * report["page_size"]
    return [
        ("model", report["model"]),
        ("architecture", f"{report['architecture']} (family {report['family']})"),
        ("layers", str(report["layers"])),
        ("vocabulary", f"{report['vocab_size']} tokens"),
        ("context", f"{report['context']} tokens; {report['max_model_len']} served"),
        ("parameters", f"{format_count(report['parameters'])} ({report['parameters']})"),
        ("in memory", _by_dtype(report["parameter_bytes"])),
        ("checkpoint", stored),
        ("sampling", _by_name(report["sampling"]) or "the model has no defaults of its own"),
        ("KV cache", f"{format_bytes(report['kv_bytes_per_token'])} per token"),
        (
            "pages",
            f"{report['num_pages']} of {report['page_size']} tokens: {tokens} tokens in "
            f"{format_bytes(report['kv_cache_bytes'])}",
        ),
        (
            "a step",
            f"up to {report['max_num_seqs']} sequences and {report['max_num_batched_tokens']} "
            "prompt tokens",
        ),
        ("workspace", f"at most {format_bytes(report['workspace_bytes'])}"),
        ("buckets", " ".join(report["buckets"])),
    ]


def _by_dtype(sizes: dict[str, int]) -> str:
    return ", ".join(f"{dtype} {format_bytes(size)}" for dtype, size in sizes.items())
