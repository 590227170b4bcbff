"""The report of ``generate --stats``."""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from jaxinfer.cli.output import format_bytes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from jaxinfer.core.request import SamplingParams
    from jaxinfer.engine.requests.news import EngineStats

SHOWN_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed")


class RunClock:
    """Times of one run: call ``token`` whenever tokens arrive."""

    def __init__(self) -> None:
        self._start = self._last = time.monotonic()
        self.first_token_age: float | None = None

    def token(self) -> None:
        """Note that tokens have arrived."""
        if self.first_token_age is None:
            self.first_token_age = process_age()
        self._last = time.monotonic()

    @property
    def seconds(self) -> float:
        """From the first request to the last token."""
        return self._last - self._start


def process_age() -> float:
    """Seconds since the operating system started this process."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # field 22 of proc(5), since boot
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started
    except (OSError, AttributeError):  # not Linux: without the start of the interpreter
        return time.monotonic() - _IMPORTED


def peak_rss_bytes() -> int:
    """The peak resident memory of this process."""
    try:
        # not ru_maxrss, which starts at the memory of the parent process
        lines = Path("/proc/self/status").read_text().splitlines()
        (high_water,) = (line.split()[1] for line in lines if line.startswith("VmHWM:"))
        return int(high_water) * 1024
    except (OSError, ValueError):  # not Linux, or a kernel without this field
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def describe_sampling(
    used: SamplingParams, model: SamplingParams, sources: Mapping[str, str], engine_seed: int
) -> str:
    """Each sampling value of the run and its source: as in ``sources``, the model, or a default.

    Without a seed of their own, prompts get seeds that are derived from the engine's.
    """
    defaults = type(used)()
    words: list[str] = []
    for name in dict.fromkeys((*SHOWN_SAMPLING, *sources)):
        value = getattr(used, name)
        if name in sources:
            source = sources[name]
        elif getattr(model, name) != getattr(defaults, name):
            source = "model"
        elif name == "seed":
            value, source = engine_seed, "engine"
        else:
            source = "default"
        words.append(f"{name} {value} ({source})")
    return ", ".join(words)


def describe_run(stats: EngineStats, clock: RunClock) -> list[tuple[str, str]]:
    """(name, text) lines about a finished run."""
    seconds, tokens = clock.seconds, stats.num_generated_tokens
    rate = f", {tokens / seconds:.1f} tokens/s" if tokens and seconds else ""
    cached = stats.num_executables - stats.num_compiled
    first = "none"
    if clock.first_token_age is not None:
        first = f"{clock.first_token_age:.2f} s after process start"
    return [
        (
            "compile",
            f"{stats.compile_seconds:.2f} s: {stats.num_compiled} executables compiled, "
            f"{cached} from the cache",
        ),
        ("load", f"{stats.load_seconds:.2f} s for the weights"),
        ("first token", first),
        ("prompt", f"{stats.num_prompt_tokens} tokens, {stats.num_cached_tokens} from the cache"),
        ("generated", f"{tokens} tokens in {seconds:.2f} s{rate}"),
        ("late compiles", str(stats.num_late_compiles)),
        ("peak RSS", format_bytes(peak_rss_bytes())),
    ]


_IMPORTED = time.monotonic()
