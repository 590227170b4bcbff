"""``jaxinfer doctor``: checks of the installation, the devices, the kernels and the caches.

Owns: the checks. A check reports its findings and never raises; the command fails if one is
``broken``.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from jaxinfer.cli.output import format_bytes
from jaxinfer.core.errors import CacheError, ConfigError
from jaxinfer.engine.start.progress import progress_on

if TYPE_CHECKING:
    from pallas_kernels.harness.registry import Impl, KernelOp

ELSEWHERE = "it runs on "  # how the reason begins of a kernel for another platform
OPTIONAL_PACKAGES = ("triton", "jax-triton")  # the languages of the kernels for NVIDIA GPUs

type Status = Literal["ok", "absent", "broken"]


@dataclass(frozen=True)
class Finding:
    """The result of one check. ``absent``: missing, and not needed on this machine."""

    section: str
    name: str
    status: Status
    detail: str


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Check the installation, devices, kernels and caches.

    The exit code is 1 when something that jaxinfer needs is broken.
    """
    with progress_on(sys.stderr).phase("check devices and kernels"):
        findings = [*_interpreter(), *_packages(), *_devices(), *_caches()]
    broken = [finding for finding in findings if finding.status == "broken"]
    if as_json:
        click.echo(json.dumps({"ok": not broken, "findings": [asdict(f) for f in findings]}))
    else:
        _print(findings, broken)
    ctx.exit(1 if broken else 0)


def _print(findings: list[Finding], broken: list[Finding]) -> None:
    """The verdict, what is broken, then all findings; kernels for other devices in one line."""
    if broken:
        click.echo(f"{len(broken)} broken: {', '.join(finding.name for finding in broken)}\n")
    else:
        click.echo(f"nothing broken: jaxinfer runs here on {_devices_of(findings)}\n")
    width = max(len(finding.name) for finding in findings)
    for section, group in groupby(findings, key=lambda finding: finding.section):
        click.echo(section)
        absent: list[str] = []
        for finding in group:
            if finding.status == "absent" and finding.detail.startswith(ELSEWHERE):
                absent.append(finding.name)
            else:
                click.echo(f"  {finding.status:7} {finding.name:{width}}  {finding.detail}")
        if absent:
            click.echo(f"  absent  for other devices: {', '.join(absent)}")


def _devices_of(findings: list[Finding]) -> str:
    return ", ".join(one.name for one in findings if one.section == "devices") or "no device"


def _interpreter() -> Iterator[Finding]:
    implementation = f"{platform.python_implementation()} {platform.python_version()}"
    host = f"{platform.system()} {platform.machine()}"
    yield Finding("interpreter", "python", "ok", f"{implementation} on {host}, {sys.executable}")


def _packages() -> Iterator[Finding]:
    """Every requirement of the installed distribution, from its metadata: nothing is imported."""
    for name in ("jaxinfer", "jaxlib", *_required(), *OPTIONAL_PACKAGES):
        version = _version(name)
        if version is not None:
            yield Finding("packages", name, "ok", version)
        elif name in OPTIONAL_PACKAGES:
            yield Finding("packages", name, "absent", "only kernels for NVIDIA GPUs need it")
        else:
            yield Finding("packages", name, "broken", "not installed; reinstall jaxinfer")


def _required() -> list[str]:
    from importlib import metadata  # importing it takes a tenth of the start of every other command

    lines = metadata.requires("jaxinfer") or []
    names = (re.match(r"[\w.-]+", line) for line in lines if "extra ==" not in line)
    return [name[0] for name in names if name]


def _version(package: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _devices() -> Iterator[Finding]:
    """The devices and, if there are any, the kernels: both need a working JAX."""
    from jaxinfer.core.config import prepare_backend

    prepare_backend(1.0)  # so that JAX does not reserve the device's memory
    try:
        import jax

        from jaxinfer.exec.run.device_memory import device_memory

        devices = jax.devices()
    except Exception as error:  # jax has no exception class for a missing device
        detail = " ".join(f"{type(error).__name__}: {error}".split())
        yield Finding("devices", "jax", "broken", f"{detail}; check JAX_PLATFORMS")
        return
    for device in devices:
        memory = device_memory(device)
        detail = device.device_kind + (f", {format_bytes(memory.total_bytes)}" if memory else "")
        yield Finding("devices", f"{device.platform}:{device.id}", "ok", detail)
    yield from _kernels()


def _kernels() -> Iterator[Finding]:
    """Compare every implementation that supports this platform with its definition, once."""
    from pallas_kernels.harness.registry import all_ops

    yield _native_library()
    for op in all_ops():
        findings = [_try_kernel(op, impl) for impl in op.impls]
        yield from findings
        if all(finding.status == "absent" for finding in findings):
            yield Finding("kernels", op.name, "broken", "no implementation runs on this platform")


def _native_library() -> Finding:
    from pallas_kernels.native.library import MISSING, BrokenLibrary, variants

    name = "native library"
    try:
        found = variants()
    except BrokenLibrary as error:
        return Finding("kernels", name, "broken", str(error))
    if not found:
        return Finding("kernels", name, "absent", f"{MISSING}; XLA is used instead")
    return Finding("kernels", name, "ok", f"uses {found[0]}")


def _try_kernel(op: KernelOp, impl: Impl) -> Finding:
    from pallas_kernels.harness.testing import mismatch, runnable
    from pallas_kernels.native.library import BrokenLibrary

    name = f"{op.name}/{impl.name}"
    reason = "no test case"
    for case in op.cases:
        if "ci" not in case.tags:
            continue
        try:
            inputs = op.build(case, 0)
            reason = runnable(impl, inputs)
            problem = None if reason else mismatch(op, impl, case, inputs)
        except BrokenLibrary:
            reason = "the native library is broken"
            continue
        if problem:
            return Finding("kernels", name, "broken", problem)
        if reason is None:
            return Finding("kernels", name, "ok", f"right on case {case.name}")
    return Finding("kernels", name, "absent", reason)


def _caches() -> Iterator[Finding]:
    import tempfile

    from jaxinfer.core.config import cache_root
    from jaxinfer.core.owners import check_tree

    try:
        root = cache_root()
    except ConfigError as error:
        yield Finding("caches", "folder", "broken", str(error))
        return
    try:
        existing = next(folder for folder in (root, *root.parents) if folder.exists())
        with tempfile.TemporaryFile(dir=existing):
            pass
        if existing != root:
            yield Finding("caches", str(root), "ok", "not there yet; writable")
            return
        check_tree(root)
        yield Finding("caches", str(root), "ok", f"{format_bytes(_size(root))}; writable")
        for folder in sorted(path for path in root.iterdir() if path.is_dir()):
            yield Finding("caches", str(folder), "ok", format_bytes(_size(folder)))
    except CacheError as error:
        yield Finding("caches", str(root), "broken", str(error))
    except OSError as error:
        detail = f"not usable ({error.strerror}); set JAXINFER_CACHE_DIR to a writable folder"
        yield Finding("caches", str(root), "broken", detail)


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
