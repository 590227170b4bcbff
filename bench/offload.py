"""First tokens of prefixes on the device, in host memory, or computed: ``python -m bench.offload``.

Each length has prompts of its own. One is sent cold, again (its pages are on the device), and once
more after others have evicted it (its pages are in the host tier). The pool holds one prompt of the
longest length, and what ``--others`` decode at the same time. Prints a line for each length, and
writes a JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from jaxinfer.bench.circumstances import host_circumstances, write_report

if TYPE_CHECKING:
    from jaxinfer import AsyncLLM, SamplingParams

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
PAGE = 16
OTHER_TOKENS = 1024  # of a request that decodes in the meantime, at most


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--others", type=int, default=0, help="requests that decode beside it")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--offload-gib", type=float, default=16.0)
    parser.add_argument("--engine", nargs="*", default=[], metavar="NAME=JSON")
    parser.add_argument("--output", type=Path)
    return parser


def main() -> None:
    """Measure every length."""
    options = arguments().parse_args()
    longest = max(options.lengths)
    more = {
        name: json.loads(value) for name, _, value in (e.partition("=") for e in options.engine)
    }
    settings: dict[str, Any] = {
        "load_format": options.load_format,
        "skip_tokenizer_init": options.load_format == "dummy",
        "max_model_len": longest + 64,
        "max_num_seqs": 16,
        "num_pages": pool_pages(options),
        "kv_offloading_size": options.offload_gib,
    } | more
    report = asyncio.run(reported(options, settings))
    print(json.dumps(report, indent=1))
    if options.output:
        write_report(options.output, report)


def pool_pages(options: argparse.Namespace) -> int:
    """Pages for the longest prompt, the others, and a few more."""
    return max(options.lengths) // PAGE + 8 + options.others * (OTHER_TOKENS // PAGE + 2)


async def reported(options: argparse.Namespace, settings: dict[str, Any]) -> dict[str, Any]:
    """The whole report of an engine with these settings."""
    from jaxinfer import AsyncLLM

    llm = await AsyncLLM.create(options.model, **settings)
    longest = max(options.lengths)
    while llm.stats().tiers.host_size < 0.9 * options.offload_gib * 2**30:
        await asyncio.sleep(0.2)  # a GPU's host memory is locked piece by piece
    for seed in range(2):  # each kind of step runs, and the pool is full
        await first_token(llm, prompt(seed, longest))
    others = Others(llm, options.others)
    rows = []
    for length in options.lengths:
        rows.append(await measured(llm, length, options, others))
    tiers = llm.stats().tiers
    await llm.shutdown()
    return {
        **host_circumstances("jaxinfer", "bench"),
        "model": options.model,
        "others": options.others,
        "settings": settings,
        "lengths": rows,
        "fitted_restore_bytes_per_s": tiers.bytes_per_second,
        "save_bytes_per_s": tiers.saved_bytes / max(tiers.save_seconds, 1e-9),
        "num_failed": tiers.num_failed,
    }


class Others:
    """Requests that decode while a first token is measured."""

    def __init__(self, llm: AsyncLLM, count: int) -> None:
        self._llm, self._count = llm, count
        self._times: list[list[float]] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Start them, and wait until all decode."""
        self._times = [[] for _ in range(self._count)]
        self._tasks = [
            asyncio.create_task(self._decode(number, times))
            for number, times in enumerate(self._times)
        ]
        while not all(len(times) > 4 for times in self._times):
            await asyncio.sleep(0.001)

    async def end(self) -> None:
        """Leave them."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def gap_ms(self, start: float, end: float) -> float | None:
        """The mean time between two tokens of a request in this span; None of no tokens."""
        counts = [sum(start <= when <= end for when in times) for times in self._times]
        return 1e3 * (end - start) * len(counts) / sum(counts) if sum(counts) else None

    async def _decode(self, number: int, times: list[float]) -> None:
        async for _ in self._llm.generate(
            {"prompt_token_ids": prompt(-1 - number, 64)},
            sampling(OTHER_TOKENS - 64),
            f"other-{number}-{time.perf_counter_ns()}",
        ):
            times.append(time.perf_counter())


async def measured(
    llm: AsyncLLM, length: int, options: argparse.Namespace, others: Others
) -> dict[str, Any]:
    """Milliseconds to the first token of each kind, bytes per second of the restores, and the time
    between tokens of the others in the meantime. Prefixes that take longer to copy than to compute
    are not restored: ``host_restored`` is how many of the repeats were.
    """
    times: dict[str, list[float]] = {"cold": [], "device": [], "host": []}
    gaps: dict[str, list[float]] = {kind: [] for kind in (*times, "alone")}
    rates: list[float] = []
    from_host: list[int] = []
    longest = max(options.lengths)
    evicting = pool_pages(options) * PAGE // longest + 1  # prompts that fill the pool
    for repeat in range(-1, options.repeats):  # the first one makes XLA record its graphs
        own = prompt(1000 * length + repeat, length)
        for kind in times:
            if kind == "host":
                for other in range(evicting):
                    seed = 10**9 + 10_000 * length + 100 * repeat + other
                    await first_token(llm, prompt(seed, longest))
            await others.begin()
            begun = time.perf_counter()
            await asyncio.sleep(0.05)
            before, start = llm.stats().tiers, time.perf_counter()
            milliseconds, reused = await first_token(llm, own)
            end, after = time.perf_counter(), llm.stats().tiers
            await others.end()
            restored = after.restored_bytes - before.restored_bytes
            if (kind == "device" and reused < length // 2) or (kind != "host" and restored):
                raise SystemExit(
                    f"{kind} at {length}: {reused} tokens reused, {restored} bytes restored"
                )
            if repeat < 0:
                continue
            if kind == "host":
                from_host.append(reused)
            times[kind].append(milliseconds)
            for name, gap in (
                (kind, others.gap_ms(start, end)),
                ("alone", others.gap_ms(begun, start)),
            ):
                gaps[name] += [] if gap is None else [gap]
            if restored:
                rates.append(restored / (after.restore_seconds - before.restore_seconds))
    row: dict[str, Any] = {"length": length, "host_restored": len(rates)}
    row["restore_bytes_per_s"] = median(rates) if rates else None
    row["host_reused_tokens"] = from_host
    for kind, values in times.items():
        row |= {f"{kind}_ms": median(values), f"{kind}_all_ms": values}
    row |= {f"others_{kind}_gap_ms": median(values) for kind, values in gaps.items() if values}
    row["cold_over_host"] = row["cold_ms"] / row["host_ms"]
    row["cold_over_device"] = row["cold_ms"] / row["device_ms"]
    shown = ", ".join(f"{kind} {row[f'{kind}_ms']:.1f} ms" for kind in times)
    rate = f", {median(rates) / 1e9:.1f} GB/s, {from_host} tokens" if rates else ", not restored"
    print(f"{length:6} {shown}{rate}", flush=True)
    return row


async def first_token(llm: AsyncLLM, token_ids: list[int]) -> tuple[float, int]:
    """Milliseconds to the first token, and the tokens that were reused."""
    start, reused = time.perf_counter(), 0
    request = {"prompt_token_ids": token_ids}
    async for output in llm.generate(request, sampling(1), f"own-{time.perf_counter_ns()}"):
        reused = output.num_cached_tokens or 0
    return 1e3 * (time.perf_counter() - start), reused


def sampling(max_tokens: int) -> SamplingParams:
    """Greedy, to the end."""
    from jaxinfer import SamplingParams

    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)


def prompt(seed: int, length: int) -> list[int]:
    """Token ids that no other seed has."""
    draw = random.Random(seed)
    return [draw.randrange(10, 1000) for _ in range(length)]


if __name__ == "__main__":
    main()
