"""The report of ``jaxinfer inspect --bundle``: a bundle's content, and whether it fits here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxinfer.cli.output import format_bytes


def describe(folder: Path) -> dict[str, Any]:
    """The facts of a bundle as JSON values; sizes in bytes and tokens.

    ``machine`` has every field of the installation that compiled the bundle, with its value there
    and here.
    """
    import msgspec

    from jaxinfer.engine.start.build import check_device
    from jaxinfer.exec.compile.bundle import open_bundle
    from jaxinfer.exec.compile.fingerprint import differences, of_machine
    from jaxinfer.nn.placement import default_placement

    manifest = open_bundle(folder).manifest
    check_device()
    here = of_machine(default_placement())
    made_for = manifest.fingerprint
    different = differences(made_for.machine, here)
    names = dict.fromkeys((*made_for.machine, *here))
    memory = manifest.memory
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
            for name in names
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
        "memory": {
            "weight_bytes": memory.weight_bytes,
            "kv_bytes": memory.kv_bytes,
            "slot_bytes": memory.slot_bytes,
            "state_bytes": memory.state_bytes,
            "batch_bytes": memory.batch_bytes,
            "workspace_bytes": manifest.workspace_bytes,
            "planned_workspace_bytes": memory.workspace_bytes,
            "device_bytes": memory.device and memory.device.total_bytes,
        },
    }


def lines(report: dict[str, Any]) -> list[tuple[str, str]]:
    """The report as lines of (name, text)."""
    memory = report["memory"]
    device = memory["device_bytes"]
    kinds = (
        "weight_bytes",
        "kv_bytes",
        "slot_bytes",
        "state_bytes",
        "batch_bytes",
        "workspace_bytes",
    )
    total = sum(memory[name] for name in kinds)
    state = format_bytes(memory["state_bytes"])
    state = f"state of sequences and snapshots {state}, " if memory["state_bytes"] else ""
    share = f", {total / device:.1%} of the device" if device else ""
    sizes = " ".join(f"{name} {value}" for name, value in report["limits"].items())
    found = [
        ("bundle", report["bundle"]),
        ("created", f"{report['created_at']} by {report['created_by']}"),
        ("model", " ".join(f"{name} {value}" for name, value in report["model"].items())),
        ("limits", sizes),
        (
            "memory",
            f"weights {format_bytes(memory['weight_bytes'])}, KV cache "
            f"{format_bytes(memory['kv_bytes'])}, slots {format_bytes(memory['slot_bytes'])}, "
            f"{state}batches {format_bytes(memory['batch_bytes'])}, "
            f"workspace {format_bytes(memory['workspace_bytes'])}: {format_bytes(total)}{share}",
        ),
    ]
    for name, cases in report["tuned"].items():
        found.append((name, f"tuned for {', '.join(cases)}"))
    for name, one in report["executables"].items():
        size, workspace = format_bytes(one["size_bytes"]), format_bytes(one["workspace_bytes"])
        found.append((name, f"{size}, workspace {workspace}"))
    for name, field in report["machine"].items():
        if field["fits"]:
            found.append((name, f"{field['bundle']}, as here"))
        else:
            found.append((name, f"{_text(field['bundle'])}, but {_text(field['here'])} here"))
    found.append(("fits", "yes" if report["fits"] else "no: see the fields with `but`"))
    return found


def _text(value: str | None) -> str:
    return "not set" if value is None else value
