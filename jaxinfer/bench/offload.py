"""``jaxinfer bench offload``: times to the first token of prompts that are computed, and of those
whose pages are on the device or in host memory, without a server.

Each prompt is sent cold, again (its pages are on the device), and once more after other prompts
have evicted it (its pages are in host memory). The pool holds one prompt of the longest length.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from jaxinfer.bench.arguments import Parser, add_output, count, percents, positive, settings_of
from jaxinfer.bench.folder import Folder, default_path, finished, now
from jaxinfer.bench.offline import ReadSettings, device_of, engine_of, named
from jaxinfer.bench.records import Record, Run, Series
from jaxinfer.bench.report import number as shown
from jaxinfer.bench.results import TIERS
from jaxinfer.bench.serve import conclude
from jaxinfer.bench.workload import RandomLengths, random_queries
from jaxinfer.core.errors import BenchError

if TYPE_CHECKING:
    from jaxinfer import LLM

COLD, DEVICE, HOST = TIERS
LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
PAGE = 16  # tokens, unless the engine's flags say otherwise
MORE_PAGES = 8  # of the pool, beyond those of the longest prompt
LOCKED = 0.9  # share of the host memory that must be there: a GPU's is locked piece by piece


def main(arguments: list[str], read_settings: ReadSettings) -> int:
    """Measure each length, print, write; the exit code."""
    parser = Parser("offload", "First tokens of prompts in the host tier, and computed.")
    parser.add_argument("--lengths", type=_lengths, default=LENGTHS, help="256,512: tokens")
    parser.add_argument("--num-iters", type=count, default=5, help="prompts of each length")
    parser.add_argument("--num-iters-warmup", type=int, default=1, help="prompts not timed")
    parser.add_argument("--kv-offloading-size", type=positive, default=16.0, help="GiB")
    parser.add_argument("--seed", type=int, default=0, help="of the prompts")
    parser.add_argument("--metric-percentiles", type=percents, default=[50.0, 90.0, 99.0])
    add_output(parser)
    given, more = parser.parse_known_args(arguments)
    settings = read_settings(more)
    page = int(settings.get("page_size", PAGE))
    longest = max(given.lengths)
    settings = {
        "max_model_len": longest + 64,
        "max_num_seqs": 16,
        "num_pages": longest // page + MORE_PAGES,
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
        llm = engine_of(settings)
        folder.environment |= device_of(llm)
        _wait(llm, given.kv_offloading_size)
        pages = int(settings["num_pages"])
        for length in given.lengths:
            probe = Probe(llm, (length, longest), pages * page // longest + 1, given.seed)
            for repeat in range(-given.num_iters_warmup, given.num_iters):
                probe.measure(repeat)
            for series, records in probe.series():
                folder.add(series, records)
    result = folder.finish()
    for row in result["tiers"]:
        times = ", ".join(f"{kind} {shown(row[kind])} ms" for kind in TIERS)
        print(f"{row['length']:6} {times}, cold / host {shown(row['cold_over_host'])}")
    return conclude(folder, result)


def _lengths(text: str) -> tuple[int, ...]:
    return tuple(count(part) for part in text.split(","))


def _wait(llm: LLM, gib: float) -> None:
    while llm.stats().tiers.host_size < LOCKED * gib * 2**30:
        time.sleep(0.2)


class Probe:
    """The prompts of one length, and their times; ``evicting`` prompts of the longest one
    fill the pool.
    """

    def __init__(self, llm: LLM, lengths: tuple[int, int], evicting: int, seed: int) -> None:
        self._llm, self._evicting, self._seed = llm, evicting, seed
        self._length, self._longest = lengths
        self._vocab = range(llm.model.config.vocab_size)
        self._records: dict[str, list[Record]] = {kind: [] for kind in TIERS}
        self._reused: dict[str, list[int]] = {kind: [] for kind in TIERS}
        self._restored: list[tuple[int, float]] = []  # bytes and seconds
        self._drawn, self._began = 0, time.perf_counter_ns()

    def measure(self, repeat: int) -> None:
        """Send one prompt three times; those below 0 are not kept.

        Raises ``BenchError`` if the pages are not where they should be.
        """
        own = self._prompt(self._length)
        for kind in TIERS:
            for _ in range(self._evicting if kind == HOST else 0):
                self._first_token(self._prompt(self._longest))
            before = self._llm.stats().tiers
            record, reused = self._first_token(own)
            after = self._llm.stats().tiers
            restored = after.restored_bytes - before.restored_bytes
            if (kind == DEVICE and reused < self._length // 2) or (kind != HOST and restored):
                raise BenchError(
                    f"{kind} at {self._length} tokens: {reused} were reused and {restored} bytes "
                    "restored; give other sizes"
                )
            if repeat < 0:
                continue
            self._records[kind].append(record)
            self._reused[kind].append(reused)
            if restored:
                self._restored.append((restored, after.restore_seconds - before.restore_seconds))

    def series(self) -> list[tuple[Series, list[Record]]]:
        """A series for each kind. Prefixes that take longer to copy than to compute are not
        restored: ``restored_prompts`` says how many were.
        """
        found: list[tuple[Series, list[Record]]] = []
        for kind, records in self._records.items():
            facts = {"reused_tokens": float(median(self._reused[kind]))}
            if kind == HOST:
                facts["restored_prompts"] = float(len(self._restored))
                rates = [size / seconds for size, seconds in self._restored if seconds]
                facts |= {"restored_gb_per_s": median(rates) / 1e9} if rates else {}
            series = Series(name=f"{kind}-{self._length}", requests=len(records), facts=facts)
            found.append((series, records))
        return found

    def _prompt(self, length: int) -> list[int]:
        self._drawn += 1
        lengths = RandomLengths(input_len=length, output_len=1)
        seed = (self._seed << 40) + (self._length << 20) + self._drawn
        (query,) = random_queries(lengths, self._vocab, 1, seed)
        return query.prompt  # type: ignore[return-value]

    def _first_token(self, prompt: Sequence[int]) -> tuple[Record, int]:
        from jaxinfer import SamplingParams

        sampling = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        start = time.perf_counter_ns()
        (output,) = self._llm.generate(
            [{"prompt_token_ids": list(prompt)}], sampling, use_tqdm=False
        )
        spent = time.perf_counter_ns() - start
        record = Record(
            start_ns=start - self._began,
            gaps_ns=[spent],
            end_ns=spent,
            prompt_tokens=len(prompt),
            output_tokens=1,
        )
        return record, output.num_cached_tokens or 0
