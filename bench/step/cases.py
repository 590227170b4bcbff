"""The timed calls of an engine: ``LLM.generate`` from call to return.

Owns: the prompts, the number of repeats, each metric's definition. TPOT is (time of 65 tokens -
time of 1) / 64 of a whole batch, the runs in an order that favours neither (``tpot_seconds``), TTFT
the time of 1 token. A batch whose prefill takes several steps decodes its first rows during the
prefill, as it does in use.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median

import msgspec
import numpy as np

from jaxinfer import LLM, SamplingParams

DECODED = 64  # tokens that TPOT covers


@dataclass(frozen=True)
class Repeats:
    """Number of repeats: until ``seconds`` have passed, within the bounds."""

    at_least: int = 3
    at_most: int = 9
    seconds: float = 10.0

    def of(self, run: Callable[[], float]) -> list[float]:
        """The samples; the first call is a warm-up and is left out."""
        run()
        samples: list[float] = []
        end = time.perf_counter() + self.seconds
        while len(samples) < self.at_least or (
            len(samples) < self.at_most and time.perf_counter() < end
        ):
            samples.append(run())
        return samples


@dataclass(frozen=True)
class Prompts:
    """Random prompts, the same for the same seed."""

    vocab_size: int
    seed: int

    def __call__(self, count: int, length: int) -> list[list[int]]:
        rng = np.random.default_rng((self.seed, count, length))
        return rng.integers(self.vocab_size, size=(count, length)).tolist()


GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.7, top_p=0.9, top_k=50, ignore_eos=True)


def seconds_of(llm: LLM, prompts: list[list[int]], sampling: SamplingParams, tokens: int) -> float:
    """Seconds of one call; raises ``ValueError`` if an answer has another number of tokens."""
    sampling = msgspec.structs.replace(sampling, max_tokens=tokens)
    start = time.perf_counter()
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - start
    counts = {len(output.outputs[0].token_ids) for output in outputs}
    if len(outputs) != len(prompts) or counts != {tokens}:
        raise ValueError(f"{len(prompts)} x {tokens} tokens were asked for and {counts} came")
    return seconds


def tpot_seconds(run: Callable[[int], float]) -> float:
    """Seconds per token after the first; ``run`` generates so many tokens and returns its seconds.

    Four runs, of 1, 65, 65 and 1 tokens, so that each kind follows the other as often as itself.
    The run before decides the power, hence the clock, of a run's prefill: on an H200 32 prompts
    took 394 ms after prompts and 376 ms after decoding. In pairs of 1 and 65 that difference was
    added to each token (4.07 ms for steps of 3.80 ms); in this order the result is 3.78 ms.
    """
    one, many, again, last = (run(tokens) for tokens in (1, 1 + DECODED, 1 + DECODED, 1))
    return (many + again - one - last) / (2 * DECODED)


def tpot_ms(llm: LLM, prompts: list[list[int]], repeats: Repeats) -> list[float]:
    """Milliseconds per token after the first; see ``tpot_seconds``."""
    run = partial(seconds_of, llm, prompts, GREEDY)
    return repeats.of(lambda: 1e3 * tpot_seconds(run))


def ttft_ms(llm: LLM, prompt: list[int], repeats: Repeats) -> list[float]:
    """Milliseconds until a single prompt has its first token."""
    return repeats.of(lambda: 1e3 * seconds_of(llm, [prompt], GREEDY, 1))


def offline_tok_s(
    llm: LLM, prompts: list[list[int]], sampling: SamplingParams, tokens: int, repeats: Repeats
) -> list[float]:
    """Output tokens a second over the whole call, prefill included."""
    total = len(prompts) * tokens
    return repeats.of(lambda: total / seconds_of(llm, prompts, sampling, tokens))


def middle(samples: list[float]) -> float:
    """The median, rounded as in the file."""
    return round(median(samples), 4)
