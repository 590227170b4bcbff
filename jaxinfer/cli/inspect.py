"""``jaxinfer inspect``: reports on a model and how it would be served, without loading weights, and
on a bundle and whether it fits here.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxinfer.cli.command import SettingsCommand, planned_config, with_model
from jaxinfer.cli.options import MODEL_FORMS, PLANNED_MEMORY, PLANNED_MODEL
from jaxinfer.cli.output import format_bytes, format_count
from jaxinfer.engine.start.progress import progress_on

if TYPE_CHECKING:
    from jaxinfer.core.config import EngineConfig
    from jaxinfer.engine.start.plan import EnginePlan
    from jaxinfer.models.base import Model
    from jaxinfer.nn.placement import Placement

type Report = dict[str, Any]  # JSON values; sizes are in bytes and tokens
type Lines = list[tuple[str, str]]  # (name, text)

LONGEST_SHOWN = 40  # characters of a field of a bundle's model
MEMORY = ("weight_bytes", "kv_bytes", "slot_bytes", "state_bytes", "batch_bytes")  # of a bundle


@click.command(
    cls=SettingsCommand,
    groups=(PLANNED_MODEL, PLANNED_MEMORY),
    help=f"Describe MODEL, or a bundle of `jaxinfer compile`. MODEL: {MODEL_FORMS}.",
)
@click.argument("reference", metavar="[MODEL|BUNDLE]", required=False)
@click.option("--bundle", metavar="FOLDER", help="A bundle, which MODEL may name as well.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def inspect(
    ctx: click.Context, reference: str | None, bundle: str | None, as_json: bool, **flags: Any
) -> None:
    """Print the report of one model or bundle."""
    if bundle is not None and reference is not None:
        raise click.UsageError("give either MODEL or --bundle")
    if bundle is None:
        named = with_model(flags, reference)["model"]
        if named is not None and _is_bundle(named):
            bundle, flags["model"] = named, None
    if bundle is not None:
        if given := [name for name, value in flags.items() if value not in (None, ())]:
            raise click.UsageError(f"a bundle has its sizes; leave out {', '.join(given)}")
        report = describe_bundle(Path(bundle))
        lines = bundle_lines(report)
    else:
        report = describe_model(_plan(planned_config(ctx, flags, reference)))
        lines = model_lines(report)
    if as_json:
        click.echo(json.dumps(report))
        return
    for name, text in lines:
        click.echo(f"{name:16} {text}")


def _is_bundle(reference: str) -> bool:
    """True for a folder of ``jaxinfer compile``; a model's folder has a config.json."""
    from jaxinfer.core.config import BUNDLE_MANIFEST

    folder = Path(reference)
    try:
        return (folder / BUNDLE_MANIFEST).is_file() and not (folder / "config.json").exists()
    except OSError:  # a name that is too long, for example
        return False


def _plan(config: EngineConfig) -> EnginePlan:
    progress = progress_on(sys.stderr)
    with progress.phase("plan the engine"):
        from jaxinfer.engine.start.build import plan_engine

        return plan_engine(config, progress)


def describe_model(plan: EnginePlan) -> Report:
    """The facts of a planned engine. ``weights`` has the bytes in memory of each parameter, by the
    forms of its parts; ``misfit`` is a sentence if they exceed the memory of this machine.
    """
    from jaxinfer.engine.start.summary import sampling_defaults
    from jaxinfer.exec.run.device_memory import memory_bytes, misfit
    from jaxinfer.models.quantised import sizes_by_form

    places = sampling_defaults(plan)
    model, limits, memory = plan.program.model, plan.program.limits, plan.memory
    dtype = model.config.dtype
    sizes = sizes_by_form(model.param_specs, dtype)
    by_path = {spec.path: sizes_by_form([spec], dtype) for spec in model.param_specs}
    return {
        "model": plan.source.name,
        "architecture": model.architecture,
        "family": model.family.name,
        "task": plan.config.task,
        "pooling": plan.config.pooling,
        "layers": len(model.config.layers),
        "vocab_size": model.config.vocab_size,
        "context": model.config.lengths[1],
        "parameters": sum(size.count for size in sizes.values()),
        "experts": _experts(model),
        "parameter_bytes": {form: size.nbytes for form, size in sizes.items()},
        "devices": memory.num_devices,
        "weight_bytes": memory.weight_bytes,
        "memory_bytes": memory_bytes(memory),
        "misfit": misfit(memory),
        "weights": {
            path: {form: size.nbytes for form, size in own.items()} for path, own in by_path.items()
        },
        "quantised_tensors": {name: str(form) for name, form in model.forms},
        "checkpoint_bytes": _checkpoint_bytes(plan),
        "sampling": {name: value for one in places.values() for name, value in one.items()},
        "sampling_from": places,
        "kv_cache_dtype": plan.config.kv_cache_dtype,
        "kv_bytes_per_token": model.state.bytes_per_token,
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "page_size": limits.page_size,
        "num_pages": sum(limits.num_pages),
        "kv_cache_bytes": memory.kv_bytes,
        "workspace_bytes": memory.workspace_bytes,
        "buckets": [bucket.name for bucket in limits.buckets],
    }


def _experts(model: Model) -> dict[str, int]:
    """The numbers of experts and of parameters of a mixture; empty for other models."""
    from jaxinfer.models.experts import unused_parameters

    layers = model.config.experts.values()
    if not layers:
        return {}
    return {
        "layers": len(layers),
        "count": max(ffn.count for ffn in layers),
        "chosen": max(ffn.routing.chosen for ffn in layers),
        "unused_parameters": unused_parameters(model.config),
    }


def _experts_text(experts: dict[str, int]) -> str:
    unused = format_count(experts["unused_parameters"])
    return (
        f"{experts['count']} in each of {experts['layers']} layers; a token uses "
        f"{experts['chosen']} of them, so not {unused} of the parameters"
    )


def _checkpoint_bytes(plan: EnginePlan) -> dict[str, int]:
    """Stored bytes, by the format's own dtypes; empty for random weights."""
    stored: Counter[str] = Counter()
    if plan.source.checkpoint is not None:
        for tensor in plan.source.checkpoint.tensors.values():
            stored[tensor.dtype] += tensor.nbytes
    return dict(stored)


def model_lines(report: Report) -> Lines:
    """The report on a model as text."""
    from jaxinfer.engine.start.summary import on_each, sampling_text

    each = on_each(report["devices"])
    tokens = (report["num_pages"] - 1) * report["page_size"]
    return [
        ("model", report["model"]),
        ("architecture", f"{report['architecture']} (family {report['family']})"),
        ("task", report["task"] + (f", pooling {report['pooling']}" if report["pooling"] else "")),
        ("layers", str(report["layers"])),
        ("vocabulary", f"{report['vocab_size']} tokens"),
        ("context", f"{report['context']} tokens; {report['max_model_len']} served"),
        ("parameters", f"{format_count(report['parameters'])} ({report['parameters']})"),
        *([("experts", _experts_text(report["experts"]))] if report["experts"] else []),
        ("in memory", _by_dtype(report["parameter_bytes"]) + each),
        (
            "weights",
            f"{format_bytes(report['weight_bytes'])}{each}; the memory has "
            f"{format_bytes(report['memory_bytes'])}",
        ),
        *([("note", report["misfit"])] if report["misfit"] else []),
        ("checkpoint", _by_dtype(report["checkpoint_bytes"]) or "none; random weights"),
        (
            "sampling",
            sampling_text(report["sampling_from"]) or "the model has no defaults of its own",
        ),
        (
            "KV cache",
            f"{format_bytes(report['kv_bytes_per_token'])} per token{each}"
            + ("" if report["kv_cache_dtype"] == "auto" else f", {report['kv_cache_dtype']}"),
        ),
        (
            "pages",
            f"{report['num_pages']} of {report['page_size']} tokens: {tokens} tokens in "
            f"{format_bytes(report['kv_cache_bytes'])}{each}",
        ),
        (
            "a step",
            f"up to {report['max_num_seqs']} sequences and {report['max_num_batched_tokens']} "
            "prompt tokens",
        ),
        ("workspace", f"at most {format_bytes(report['workspace_bytes'])}"),
        ("buckets", " ".join(report["buckets"])),
    ]


def _short(name: str, text: str) -> str:
    """A field of a bundle's model for a line: tensors are counted, long values are cut."""
    if name.startswith("weights "):
        return f"{len(text.split())} tensors"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _by_dtype(sizes: dict[str, int]) -> str:
    return _named({dtype: format_bytes(size) for dtype, size in sizes.items()}, ", ")


def _named(values: dict[str, Any], separator: str = " ") -> str:
    return separator.join(f"{name} {value}" for name, value in values.items())


def describe_bundle(folder: Path) -> Report:
    """The facts of a bundle. ``machine`` has every field of the installation that compiled it, with
    its value there and here.
    """
    import msgspec

    from jaxinfer.engine.start.build import check_device
    from jaxinfer.exec.compile.bundle import open_bundle
    from jaxinfer.exec.compile.fingerprint import differences, of_machine

    manifest = open_bundle(folder).manifest
    check_device()
    here = of_machine(_placement_for(manifest.settings.get("tensor_parallel_size") or 1))
    made_for, memory = manifest.fingerprint, manifest.memory
    different = differences(made_for.machine, here)
    return {
        "bundle": str(folder),
        "created_by": manifest.created_by,
        "created_at": manifest.created_at,
        "fits": not different,
        "machine": {
            name: {
                "bundle": made_for.machine.get(name),
                "here": here.get(name),
                "fits": name not in different,
            }
            for name in dict.fromkeys((*made_for.machine, *here))
        },
        "model": made_for.model,
        "limits": {
            name: value
            for name, value in msgspec.to_builtins(manifest.limits).items()
            if name not in ("buckets", "enable_prefix_caching", "prefill_first")
        },
        "settings": manifest.settings,
        "tuned": manifest.tuned,
        "executables": {
            name: {"size_bytes": one.size_bytes, "workspace_bytes": one.workspace_bytes}
            for name, one in manifest.executables.items()
        },
        "memory": {name: getattr(memory, name) for name in MEMORY}
        | {
            "workspace_bytes": manifest.workspace_bytes,
            "planned_workspace_bytes": memory.workspace_bytes,
            "device_bytes": memory.device and memory.device.total_bytes,
        },
    }


def _placement_for(count: int) -> Placement:
    """So many devices, or one if there are fewer: the report then says that they differ."""
    from jaxinfer.core.errors import ConfigError
    from jaxinfer.nn.placement import default_placement

    try:
        return default_placement(count)
    except ConfigError:
        return default_placement()


def bundle_lines(report: Report) -> Lines:
    """The report on a bundle as text."""
    sizes, device = report["memory"], report["memory"]["device_bytes"]
    total = sum(sizes[name] for name in (*MEMORY, "workspace_bytes"))
    memory = {name: format_bytes(size or 0) for name, size in sizes.items()}
    state = f"state of sequences and snapshots {memory['state_bytes']}, "
    share = f", {total / device:.1%} of the device" if device else ""
    found = [
        ("bundle", report["bundle"]),
        ("created", f"{report['created_at']} by {report['created_by']}"),
        ("model", _named({name: _short(name, text) for name, text in report["model"].items()})),
        ("limits", _named(report["limits"])),
        (
            "memory",
            f"weights {memory['weight_bytes']}, KV cache {memory['kv_bytes']}, "
            f"slots {memory['slot_bytes']}, {state if sizes['state_bytes'] else ''}"
            f"batches {memory['batch_bytes']}, workspace {memory['workspace_bytes']}: "
            f"{format_bytes(total)}{share}",
        ),
    ]
    for name, cases in report["tuned"].items():
        found.append((name, f"tuned for {', '.join(cases)}"))
    for name, one in report["executables"].items():
        size, workspace = format_bytes(one["size_bytes"]), format_bytes(one["workspace_bytes"])
        found.append((name, f"{size}, workspace {workspace}"))
    for name, field in report["machine"].items():
        sides = (field["bundle"], field["here"])
        there, here = ("not set" if side is None else side for side in sides)
        found.append((name, f"{there}, as here" if field["fits"] else f"{there}, but {here} here"))
    found.append(("fits", "yes" if report["fits"] else "no: see the fields with `but`"))
    return found
