"""The timed calls of an engine: ``LLM.generate`` from call to return.

Owns: the sizes of cases, the prompts, the number of repeats, each metric's definition. TPOT is
(time of 65 tokens - time of 1) / 64 of a whole batch, the runs in an order that favours neither
(``tpot_seconds``), TTFT the time of 1 token. A batch whose prefill takes several steps decodes its
first rows during the prefill, as it does in use.
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
from jaxinfer.core.limits import Limits
from jaxinfer.exec.compile.page_pools import fewest_pages, most_pages

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
class Workload:
    """The sizes of every case; the results use the defaults, tests smaller ones."""

    tpot_batches: tuple[int, ...] = (1, 8, 16, 32, 64, 128, 256)
    tpot_input: int = 1024
    long_batches: tuple[int, ...] = (1, 16)  # of tpot_batches
    long_input: int = 16384
    ttft_inputs: tuple[int, ...] = (512, 1024, 4096, 16384)
    offline: tuple[int, int, int] = (128, 256, 64)  # prompts, tokens in, tokens out
    gpt2_input: int = 256
    ablation_batches: tuple[int, ...] = (1, 64)
    ablation_input: int = 4096  # of the single prompt
    warm_starts: int = 5
    memory_sequences: int = 512  # the number that an engine of default sizes runs at once on a GPU
    repeats: Repeats = Repeats()

    @property
    def max_model_len(self) -> int:
        """The context of the large model's engine: the longest case and its decode tokens."""
        long = self.long_input if self.long_batches else 0
        return max(self.tpot_input, long, *self.ttft_inputs) + 2 * DECODED

    def num_pages(self, limits: Limits) -> int:
        """Enough for every case, so that the size of the pools does not change times.

        Layers with and without windows have pools of their own, and an engine divides its pages
        among these for sequences of a typical length: shorter ones fill the pool of windows first,
        and would wait for its pages.
        """
        batches = [(batch, self.tpot_input) for batch in self.tpot_batches]
        batches += [(batch, self.long_input) for batch in self.long_batches]
        count, tokens_in, tokens_out = self.offline
        batches += [(count, tokens_in + tokens_out), (1, max(self.ttft_inputs))]
        spare = DECODED + limits.page_size  # the pages in use end in one that is not full
        cases = [(n, limits.pages_needed(tokens + spare)) for n, tokens in batches]
        least = [1 + max(n * own[pool] for n, own in cases) for pool in range(len(cases[0][1]))]
        pairs = zip(least, most_pages(limits), strict=True)
        return fewest_pages(limits, [min(pair) for pair in pairs])


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
