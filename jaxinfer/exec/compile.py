"""Every executable an engine needs, ready before the first request.

Owns: ``Executables`` and ``build_executables``, which loads them from a bundle or compiles them in
threads and saves one. Runs before weights are loaded, so that the compiler's memory and the weights
do not add up. Must not know: requests, the scheduler, weights.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxinfer.core.progress import Progress
from jaxinfer.core.staging import build_once
from jaxinfer.core.step import Bucket
from jaxinfer.exec.aot import bundle_path, load_bundle, write_bundle
from jaxinfer.exec.memory import release_free_heap
from jaxinfer.exec.program import ADMIT, Program

type Compiled = Callable[..., Any]  # jax.stages.Compiled: refuses any other shape, never compiles


@dataclass(frozen=True)
class Executables:
    """The compiled functions of an engine. ``compiled`` says how many were not in the bundle."""

    admit: Compiled
    steps: Mapping[Bucket, Compiled]
    compiled: int


def build_executables(
    program: Program, *, bundle_root: Path | None, progress: Progress
) -> Executables:
    """Load every executable from the bundle under ``bundle_root``, or compile and save them all.

    The bundle's folder is made before anything is compiled, so an unwritable cache is known at
    once; a second process that wants the same bundle waits for the first.
    """
    if bundle_root is None:
        return _executables(program, compile_all(program, progress), program.names())
    compiled: dict[str, jax.stages.Compiled] = {}

    def fill(partial: Path) -> None:
        compiled.update(compile_all(program, progress))
        write_bundle(partial, program, compiled)

    folder = bundle_path(program, bundle_root)
    if build_once(folder, fill):
        return _executables(program, compiled, tuple(compiled))
    return _executables(program, load_bundle(folder, program.names(), progress), ())


def _executables(
    program: Program, by_name: Mapping[str, Compiled], compiled: tuple[str, ...]
) -> Executables:
    release_free_heap()
    steps = {bucket: by_name[bucket.name] for bucket in program.limits.buckets}
    return Executables(by_name[ADMIT], steps, len(compiled))


def compile_all(program: Program, progress: Progress) -> dict[str, jax.stages.Compiled]:
    """Compile every executable in parallel threads."""
    names = program.names()
    pool = ThreadPoolExecutor(os.cpu_count() or 1)
    with progress.task("compile", len(names)) as advance:

        def one(name: str) -> jax.stages.Compiled:
            compiled = program.lower(name).compile()
            advance(1)
            return compiled

        try:
            return dict(zip(names, pool.map(one, names), strict=True))
        finally:  # after a failure or Ctrl-C, nobody needs what is still compiling
            pool.shutdown(wait=False, cancel_futures=True)
