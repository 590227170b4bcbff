"""Tokens per second of several engines on the same prompts, run by run in turns.

Owns: the order of runs, the samples and the figures derived from them.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bench.peer_process import Run
from jaxinfer.bench.numbers import rotated

# continues a batch of prompts greedily by exactly so many tokens: one timed call
type Engine = Callable[[list[list[int]], int], Run]


@dataclass
class Measured:
    """The runs of one engine at one batch size: of one token, and of all of them."""

    batch: int
    num_tokens: int  # per sequence
    first: list[float] = field(default_factory=list)  # seconds
    full: list[float] = field(default_factory=list)  # seconds
    load: list[float] = field(default_factory=list)  # load average of the last minute, at each run
    token_ids: list[list[int]] = field(default_factory=list)

    def tokens_per_second(self) -> list[float]:
        """Output tokens over the whole call, prefill included; one value per repeat."""
        return [self.batch * self.num_tokens / seconds for seconds in self.full]

    def ms_per_token(self) -> list[float]:
        """TPOT: time per token after the first, of each sequence; one value per repeat."""
        steps = self.num_tokens - 1
        pairs = zip(self.first, self.full, strict=True)
        return [1e3 * (full - first) / steps for first, full in pairs]


def measure(
    engines: Mapping[str, Engine],
    prompts: list[list[int]],
    *,
    batches: Sequence[int],
    num_tokens: int,
    repeats: int,
) -> dict[tuple[str, int], Measured]:
    """Run every engine at every batch size, in turns, so that drift of the machine affects all.

    The first, untimed runs warm up and keep the tokens. Raises ``ValueError`` if an engine returns
    another number of tokens than requested.
    """
    results: dict[tuple[str, int], Measured] = {}
    for batch in batches:
        for name, engine in engines.items():
            run = engine(prompts[:batch], num_tokens)
            check_counts(name, run, batch, num_tokens)
            results[name, batch] = Measured(batch, num_tokens, token_ids=run.token_ids)
    for repeat in range(repeats):
        for batch in batches:
            for name in rotated(list(engines), repeat):
                result = results[name, batch]
                result.load.append(round(os.getloadavg()[0], 2))
                for length, seconds in ((1, result.first), (num_tokens, result.full)):
                    run = engines[name](prompts[:batch], length)
                    check_counts(name, run, batch, length)
                    seconds.append(run.seconds)
    return results


def check_counts(name: str, run: Run, batch: int, num_tokens: int) -> None:
    """Raise ``ValueError`` unless the run has ``num_tokens`` tokens for each of the prompts."""
    lengths = [len(answer) for answer in run.token_ids]
    if lengths != [num_tokens] * batch:
        raise ValueError(f"{name} was asked for {batch} x {num_tokens} tokens and gave {lengths}")


def agreement(ours: Measured, peer: Measured) -> int:
    """The number of sequences in which all tokens are equal."""
    return sum(a == b for a, b in zip(ours.token_ids, peer.token_ids, strict=True))
