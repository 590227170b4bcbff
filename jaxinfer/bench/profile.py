"""``--profile``: the rows of a profile that an engine took, for the run's folder."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from jaxinfer.bench.client import Answer, Client
from jaxinfer.bench.floor import CEILINGS
from jaxinfer.bench.folder import TRACE, Folder
from jaxinfer.bench.profile_table import Profiled
from jaxinfer.bench.profile_trace import kernels_of, read_steps, read_trace
from jaxinfer.core.errors import BenchError
from jaxinfer.engine.loop.profiler import STEPS

START, STOP = "/start_profile", "/stop_profile"  # vLLM's routes


def profiled_in(folder: Path, run: Path) -> Profiled:
    """The rows of a profile's folder, which may be in that of the run.

    Raises ``BenchError`` if it has no trace, or one without events of a device.
    """
    steps = read_steps(folder)
    ceiling = CEILINGS.get(steps.device)
    return Profiled(
        device=steps.device,
        num_devices=steps.num_devices,
        bytes_per_s=None if ceiling is None else ceiling.bytes_per_s,
        flops_per_s=None if ceiling is None else ceiling.flops_per_s,
        costs=steps.costs,
        trace=str(folder.relative_to(run) if folder.is_relative_to(run) else folder),
        steps=steps.steps,
        kernels=kernels_of(read_trace(folder), steps),
    )


async def check_profiler(client: Client) -> None:
    """Raise ``BenchError`` if a server has no profiler, before anything is measured."""
    if (await client.get(START)).status == 404:
        raise BenchError(
            "the server has no profiler; start `jaxinfer serve` with --profiler-dir and "
            "--admin-api-key, and give that key as --header 'Authorization=Bearer KEY'"
        )


async def profile_server(
    client: Client, offer: Callable[[], Awaitable[object]], num_steps: int, folder: Folder
) -> None:
    """Let a server of jaxinfer trace its steps while ``offer`` runs; write its kernels to the run.

    Raises ``BenchError`` if the server is another one, or its profile is not on this machine.
    """
    began = time.time()
    _checked(await client.post(f"{START}?num_steps={num_steps}", b"{}"))
    try:
        await offer()
    finally:
        stopped = await client.post(STOP, b"{}")
    _checked(stopped)
    try:
        own = Path(json.loads(stopped.body)["profiler_dir"])
    except (ValueError, KeyError, TypeError):
        raise BenchError(
            "the server took a profile, but not one of jaxinfer's; it is where that server writes "
            "profiles, and has no table here"
        ) from None
    # of several replicas, each of which writes one, the first that has steps
    found = [one.parent for one in sorted(own.glob(f"*/{STEPS}")) if one.stat().st_mtime >= began]
    found = [one for one in found if read_steps(one).steps]
    if not found:
        raise BenchError(
            f"the server's folder {own} has no new profile with steps on this machine; run the "
            "benchmark where the server runs, with requests that reach it"
        )
    copy = folder.path / TRACE / found[0].name
    shutil.copytree(found[0], copy)
    folder.add_profile(profiled_in(copy, folder.path))


def _checked(answer: Answer) -> None:
    if answer.status == 200:
        return
    if answer.status == 401:
        raise BenchError(
            "the server's profiler needs its admin key; give --header 'Authorization=Bearer KEY'"
        )
    raise BenchError(f"the server takes no profile ({answer.status}: {answer.error})")
