"""``jaxinfer bench offload``: times to the first token of prompts that are computed, and of those
whose pages are on the device or in host memory, without a server.

Each prompt is sent cold, again (its pages are on the device), and once more after other prompts
have evicted it (its pages are in host memory). The pool holds one prompt of the longest length, and
what ``--others`` decode at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxinfer.bench.arguments import Parser, add_output, count, percents, positive, settings_of
from jaxinfer.bench.folder import Folder, default_path, finished, now
from jaxinfer.bench.link import link_bytes_per_second
from jaxinfer.bench.offline import ReadSettings, device_of, named
from jaxinfer.bench.records import Record, Run, Series
from jaxinfer.bench.report import number as shown
from jaxinfer.bench.results import TIERS
from jaxinfer.bench.serve import conclude
from jaxinfer.bench.workload import RandomLengths, random_queries
from jaxinfer.core.errors import BenchError
from jaxinfer.core.host_memory import collect_seldom
from jaxinfer.engine.api.vllm_args import RENAMED

if TYPE_CHECKING:
    from jaxinfer import AsyncLLM

COLD, DEVICE, HOST = TIERS
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
PAGE = 16  # tokens, unless the engine's flags say otherwise
MORE_PAGES = 8  # of the pool, beyond those of the longest prompt
LOCKED = 0.9  # share of the host memory that must be there: a GPU's is locked piece by piece
OTHER_PROMPT, OTHER_ANSWER = 64, 960  # tokens of a request that decodes in the meantime, at most
FIRST_TOKENS = 5  # that each of these has drawn before a prompt is sent
ALONE_SECONDS = 0.05  # in which they decode alone before it


def main(arguments: list[str], read_settings: ReadSettings) -> int:
    """Measure each length, print, write; the exit code."""
    parser = Parser("offload", "First tokens of prompts in the host tier, and computed.")
    parser.add_argument("--lengths", type=_lengths, default=LENGTHS, help="256,512: tokens")
    parser.add_argument("--num-iters", type=count, default=5, help="prompts of each length")
    parser.add_argument("--num-iters-warmup", type=int, default=1, help="prompts not timed")
    parser.add_argument("--hits", type=count, default=1, help="times that each is sent again")
    parser.add_argument("--others", type=int, default=0, help="requests that decode beside it")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds before it is sent")
    parser.add_argument("--kv-offloading-size", type=positive, default=16.0, help="GiB")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--metric-percentiles", type=percents, default=[50.0, 90.0, 99.0])
    add_output(parser)
    given, more = parser.parse_known_args(arguments)
    settings = {RENAMED.get(name, name): value for name, value in read_settings(more).items()}
    page = int(settings.get("page_size", PAGE))
    longest = max(given.lengths)
    of_others = given.others * ((OTHER_PROMPT + OTHER_ANSWER) // page + 2)
    settings = {
        "max_model_len": max(longest, OTHER_PROMPT + OTHER_ANSWER if given.others else 0) + 64,
        "max_num_seqs": max(16, given.others + 1),
        "num_pages": longest // page + MORE_PAGES + of_others,
        "kv_offloading_size": given.kv_offloading_size,
    } | settings
    run = Run(
        command="offload",
        created=now(),
        settings=named(settings) | settings_of(given),
        gates=given.gate,
        percentiles=tuple(given.metric_percentiles),
        metrics=("ttft",),
    )
    folder = Folder.create(given.output or default_path("offload"), run)
    with finished(folder):
        asyncio.run(_measure(given, settings, int(settings["num_pages"]) * page, folder))
    result = folder.finish()
    for row in result["tiers"]:
        times = ", ".join(f"{kind} {shown(row[kind])} ms" for kind in TIERS)
        print(f"{row['length']:6} {times}, cold / host {shown(row['cold_over_host'])}")
    return conclude(folder, result)


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(count(part) for part in text.split(","))


async def engine_of(settings: dict[str, Any]) -> AsyncLLM:
    """The engine of these settings."""
    from jaxinfer import AsyncLLM
    from jaxinfer.engine.start.progress import progress_on

    own = dict(settings)
    return await AsyncLLM.create(own.pop("model", None), progress=progress_on(sys.stderr), **own)


async def _measure(
    given: argparse.Namespace, settings: dict[str, Any], pool_tokens: int, folder: Folder
) -> None:
    llm, longest = await engine_of(settings), max(given.lengths)
    try:
        folder.environment |= device_of(llm)
        while llm.stats().tiers.host_size < LOCKED * given.kv_offloading_size * 2**30:
            await asyncio.sleep(0.2)
        link = await asyncio.to_thread(link_bytes_per_second, llm)
        collect_seldom()  # as the server's engine does
        client = Client(llm, given.seed, given.pause)
        for _ in range(2):  # each kind of step runs, and the pool is full
            await client.first_token(client.prompt(longest))
        for length in given.lengths:
            probe = Probe(client, (length, longest), pool_tokens // longest + 1, given, link)
            for repeat in range(-given.num_iters_warmup, given.num_iters):
                await probe.measure(repeat)
            for series, records in probe.series():
                folder.add(series, records)
    finally:
        await llm.shutdown()


class Client:
    """Sends prompts of random tokens to an engine."""

    def __init__(self, llm: AsyncLLM, seed: int, pause: float) -> None:
        self.llm, self.pause = llm, pause
        self._seed, self._drawn = seed, 0
        self._vocab = range(llm.model.config.vocab_size)
        self._began = time.perf_counter_ns()

    def prompt(self, length: int) -> list[int]:
        """Token ids that no other prompt has."""
        self._drawn += 1
        lengths = RandomLengths(input_len=length, output_len=1)
        seed = (self._seed << 40) + (length << 20) + self._drawn
        (query,) = random_queries(lengths, self._vocab, 1, seed)
        return query.prompt  # type: ignore[return-value]

    async def first_token(self, prompt: list[int]) -> tuple[Record, int]:
        """The record of a prompt with one token, and how many of its tokens were reused."""
        start, reused = time.perf_counter_ns(), 0
        async for output in self._answer(prompt, 1):
            reused = output.num_cached_tokens or 0
        spent = time.perf_counter_ns() - start
        record = Record(
            start_ns=start - self._began,
            gaps_ns=[spent],
            end_ns=spent,
            prompt_tokens=len(prompt),
            output_tokens=1,
        )
        return record, reused

    async def note_tokens(self, times: list[int]) -> None:
        """Decode, and append the time of each token in ns."""
        async for _ in self._answer(self.prompt(OTHER_PROMPT), OTHER_ANSWER):
            times.append(time.perf_counter_ns())

    def _answer(self, prompt: list[int], max_tokens: int) -> Any:
        from jaxinfer import SamplingParams

        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        return self.llm.generate({"prompt_token_ids": prompt}, sampling)


class Others:
    """Requests that decode while a first token is measured: an asynchronous context."""

    def __init__(self, client: Client, count: int) -> None:
        self._client = client
        self._times: list[list[int]] = [[] for _ in range(count)]
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Others:
        """Start them, and wait until all decode."""
        note = self._client.note_tokens
        self._tasks = [asyncio.create_task(note(times)) for times in self._times]
        while not all(len(times) >= FIRST_TOKENS for times in self._times):
            await asyncio.sleep(0.001)
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def tpot_ms(self, start: int, end: int) -> list[float]:
        """The mean time between two tokens of a request in this span; none without tokens."""
        counts = [sum(start <= when <= end for when in times) for times in self._times]
        return [1e-6 * (end - start) * len(counts) / sum(counts)] if sum(counts) else []


class Sample(NamedTuple):
    """One prompt that was sent once."""

    record: Record
    reused: int  # tokens
    restored: tuple[int, float]  # bytes and seconds
    tpot_ms: list[float]  # of the others in the meantime, and before it
    tpot_alone_ms: list[float]


class Probe:
    """The prompts of one length, and their times; ``evicting`` prompts of the longest one
    fill the pool. ``link``: bytes per second.
    """

    def __init__(
        self,
        client: Client,
        lengths: tuple[int, int],
        evicting: int,
        given: argparse.Namespace,
        link: float,
    ) -> None:
        self._client, self._evicting, self._link = client, evicting, link
        self._hits, self._others = given.hits, given.others
        self._length, self._longest = lengths
        self._samples: dict[str, list[Sample]] = {kind: [] for kind in TIERS}

    async def measure(self, repeat: int) -> None:
        """Send one prompt cold, on the device and from the host; those below 0 are not kept.

        Raises ``BenchError`` if the pages are not where they should be.
        """
        own = self._client.prompt(self._length)
        for kind in (COLD, *[DEVICE] * self._hits, HOST):
            for _ in range(self._evicting if kind == HOST else 0):
                await self._client.first_token(self._client.prompt(self._longest))
            await asyncio.sleep(self._client.pause)
            sample = await self._sample(own)
            (restored, _), reused = sample.restored, sample.reused
            if (kind == DEVICE and reused < self._length // 2) or (kind != HOST and restored):
                raise BenchError(
                    f"{kind} at {self._length} tokens: {reused} were reused and {restored} bytes "
                    "restored; give other sizes"
                )
            if repeat >= 0:
                self._samples[kind].append(sample)

    async def _sample(self, prompt: list[int]) -> Sample:
        llm = self._client.llm
        async with Others(self._client, self._others) as others:
            begun = time.perf_counter_ns()
            if self._others:
                await asyncio.sleep(ALONE_SECONDS)
            before, start = llm.stats().tiers, time.perf_counter_ns()
            record, reused = await self._client.first_token(prompt)
            end, after = time.perf_counter_ns(), llm.stats().tiers
            return Sample(
                record,
                reused,
                (
                    after.restored_bytes - before.restored_bytes,
                    after.restore_seconds - before.restore_seconds,
                ),
                others.tpot_ms(start, end),
                others.tpot_ms(begun, start),
            )

    def series(self) -> list[tuple[Series, list[Record]]]:
        """A series for each kind. Prefixes that take longer to copy than to compute are not
        restored: ``restored_prompts`` says how many were.
        """
        found: list[tuple[Series, list[Record]]] = []
        for kind, samples in self._samples.items():
            facts = {"reused_tokens": float(median(one.reused for one in samples))}
            if kind == HOST:
                restored = [one.restored for one in samples if one.restored[0]]
                facts["restored_prompts"] = float(len(restored))
                facts["link_gb_per_s"] = self._link / 1e9
                rates = [size / seconds for size, seconds in restored if seconds]
                facts |= {"restored_gb_per_s": median(rates) / 1e9} if rates else {}
            during = [each for one in samples for each in one.tpot_ms]
            alone = [each for one in samples for each in one.tpot_alone_ms]
            for name, values in (("others_tpot_ms", during), ("others_alone_tpot_ms", alone)):
                facts |= {name: median(values)} if values else {}
            series = Series(name=f"{kind}-{self._length}", requests=len(samples), facts=facts)
            found.append((series, [one.record for one in samples]))
        return found
