"""The bundle: compiled executables on disk, so that the next start compiles nothing.

Owns: the folder layout (``<root>/<fingerprint>/{manifest.json, <name>.bin}``), the fingerprint that
decides whether a bundle fits. Must not know: how executables are made or used.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import platform
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable

from jaxinfer.core.config import compiler_environment
from jaxinfer.core.errors import CacheError
from jaxinfer.core.progress import Progress
from jaxinfer.exec.program import Program

MANIFEST = "manifest.json"
TRACED_FOLDERS = ("core", "exec", "models", "nn")  # of jaxinfer: what a step is traced from
# of Limits: what shapes depend on; the rest is the scheduler's business
SHAPING_LIMITS = ("num_pages", "page_size", "max_num_seqs", "max_model_len", "buckets")
LOAD_THREADS = 8  # H200: 8 buckets load in 0.50 s on 8 threads, 1.96 s in turn


def fingerprint(program: Program) -> dict[str, str]:
    """Everything an executable depends on; two equal fingerprints can share a bundle."""
    device = jax.devices()[0]
    return {
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "flax": version("flax"),
        "platform": device.client.platform_version,  # on a GPU: the CUDA plugin and driver
        "device": f"{device.platform} {device.device_kind} {_host_cpu()}",
        "environment": json.dumps(compiler_environment()),
        "jax_config": json.dumps(_relevant_jax_config()),
        "model": f"{program.model.family.name} {program.model.config}",
        "limits": repr({name: getattr(program.limits, name) for name in SHAPING_LIMITS}),
        "sources": _source_digest(),
    }


def bundle_path(program: Program, root: Path) -> Path:
    """The folder of the bundle that fits; it may not exist."""
    text = json.dumps(fingerprint(program), sort_keys=True)
    return root / hashlib.sha256(text.encode()).hexdigest()[:24]


def load_bundle(
    folder: Path, names: tuple[str, ...], progress: Progress
) -> dict[str, jax.stages.Compiled]:
    """The executables of a bundle.

    Raises ``CacheError`` naming the folder when it cannot be read, does not hold what its manifest
    promises, or holds what this installation cannot load. Bundles appear whole (``core.staging``),
    so that is damage, which is reported rather than repaired in silence.
    """
    try:
        digests = json.loads((folder / MANIFEST).read_text())["sha256"]
        payloads = [_read(folder / f"{name}.bin", digests[name]) for name in names]
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise _damaged(folder, error) from error
    with (
        progress.task("load executables", len(names)) as advance,
        ThreadPoolExecutor(min(LOAD_THREADS, os.cpu_count() or 1)) as pool,
    ):

        def one(payload: bytes) -> jax.stages.Compiled:
            compiled = serialize_executable.deserialize_and_load(*pickle.loads(payload))
            advance(1)
            return compiled

        try:
            return dict(zip(names, pool.map(one, payloads), strict=True))
        except Exception as error:  # pickle and XLA raise anything on what they cannot read
            raise _damaged(folder, error) from error


def _damaged(folder: Path, error: Exception) -> CacheError:
    return CacheError(
        f"the executables in {folder} cannot be used ({type(error).__name__}: {error}); "
        "delete that folder and run again"
    )


def write_bundle(
    folder: Path, program: Program, executables: Mapping[str, jax.stages.Compiled]
) -> None:
    """Write every executable and the manifest into an empty folder."""
    digests = {name: _write(folder, name, compiled) for name, compiled in executables.items()}
    manifest = {"fingerprint": fingerprint(program), "sha256": digests}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def _write(folder: Path, name: str, compiled: jax.stages.Compiled) -> str:
    payload = pickle.dumps(serialize_executable.serialize(compiled))
    (folder / f"{name}.bin").write_bytes(payload)
    return hashlib.sha256(payload).hexdigest()


def _read(path: Path, digest: str) -> bytes:
    payload = path.read_bytes()
    if hashlib.sha256(payload).hexdigest() != digest:
        raise ValueError(f"{path} is not what its manifest says")
    return payload


def _host_cpu() -> str:
    """What XLA's CPU code generation depends on: architecture, features and thread count."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        features = platform.processor()
    digest = hashlib.sha256(features.encode()).hexdigest()[:12]
    return f"{platform.machine()} {digest} x{os.cpu_count()}"


def _relevant_jax_config() -> dict[str, Any]:
    return {
        "enable_x64": jax.config.jax_enable_x64,  # type: ignore[attr-defined]
        "matmul_precision": jax.config.jax_default_matmul_precision,  # type: ignore[attr-defined]
    }


def _source_digest() -> str:
    """A digest of every source file that a compiled step is traced from."""
    digest = hashlib.sha256()
    for package in ("pallas_kernels", "jaxinfer"):
        for name, source in sorted(_sources(files(package))):
            if package == "pallas_kernels" or name.split("/")[0] in TRACED_FOLDERS:
                digest.update(name.encode() + b"\0" + source)
    return digest.hexdigest()


def _sources(folder: Traversable, prefix: str = "") -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _sources(entry, f"{prefix}{entry.name}/")
        elif entry.name.endswith((".py", ".json")):
            found.append((prefix + entry.name, entry.read_bytes()))
    return found
