"""The requests of a benchmark and their times: prompts, lengths, arrivals.

Owns: the datasets and the arrival process. Everything follows from the seed, and the first k
prompts of a workload do not depend on the number of the others.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from jaxinfer.core.errors import BenchError

DEFAULT_OUTPUT = 256  # tokens of an answer whose length no row tells
# tokens of the conversations of ShareGPT that are used, as in vLLM's and sglang's benchmarks
SHORTEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048

type Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Query:
    """One request: a prompt as text, token ids or messages, and the number of tokens to generate.

    Requests of one session, which has a number above 0, follow each other: each is sent ``think``
    seconds after the answer before it. With ``continues`` its messages come after those of the
    request before and the answer to it.
    """

    prompt: str | list[int] | Messages
    max_tokens: int
    session: int = 0
    think: float = 0.0
    continues: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)  # of its body alone

    @property
    def messages(self) -> Messages | None:
        """Messages of a chat; None for token ids."""
        if isinstance(self.prompt, str):
            return [{"role": "user", "content": self.prompt}]
        is_chat = bool(self.prompt) and isinstance(self.prompt[0], dict)
        return self.prompt if is_chat else None  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class RandomLengths:
    """Lengths of a random workload, in tokens; they vary by ``range_ratio`` both ways, those of
    answers by ``output_ratio`` if it is given.
    """

    input_len: int = 1024
    output_len: int = 128
    prefix_len: int = 0  # the same tokens before every prompt, in addition to input_len
    range_ratio: float = 0.0
    output_ratio: float | None = None


def random_queries(
    lengths: RandomLengths, vocab: Sequence[int], count: int, seed: int
) -> list[Query]:
    """``count`` prompts of token ids drawn from ``vocab``."""
    ids = np.asarray(vocab)
    prefix = _draw(np.random.default_rng([seed, 0]), ids, lengths.prefix_len)
    ratio, output_ratio = lengths.range_ratio, lengths.output_ratio
    output_ratio = ratio if output_ratio is None else output_ratio
    queries: list[Query] = []
    for index in range(count):
        rng = np.random.default_rng([seed, 1, index])
        num_input = _vary(rng, lengths.input_len, ratio)
        num_output = max(1, _vary(rng, lengths.output_len, output_ratio))
        queries.append(Query(prefix + _draw(rng, ids, num_input), num_output))
    return queries


def _draw(rng: np.random.Generator, ids: np.ndarray, count: int) -> list[int]:
    return ids[rng.integers(0, len(ids), size=count)].tolist()


def _vary(rng: np.random.Generator, length: int, ratio: float) -> int:
    low, high = math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))
    return int(rng.integers(low, high + 1))


@dataclass(frozen=True, kw_only=True)
class Prefixes:
    """Lengths of a workload whose prompts share a few prefixes, in tokens."""

    count: int = 10
    prefix_len: int = 256
    suffix_len: int = 256
    output_len: int = 128


def prefix_queries(lengths: Prefixes, vocab: Sequence[int], count: int, seed: int) -> list[Query]:
    """``count`` prompts, each of a prefix that others share and a suffix of its own."""
    ids = np.asarray(vocab)
    queries: list[Query] = []
    for index in range(count):
        rng = np.random.default_rng([seed, 3, index])
        shared = np.random.default_rng([seed, 2, int(rng.integers(lengths.count))])
        prompt = _draw(shared, ids, lengths.prefix_len) + _draw(rng, ids, lengths.suffix_len)
        queries.append(Query(prompt, lengths.output_len))
    return queries


def read_queries(
    path: Path,
    count: int,
    output_len: int | None,
    seed: int | None,
    *,
    repeats: bool = True,
    count_tokens: Callable[[str], int] | None = None,
) -> list[Query]:
    """Prompts of a file: ShareGPT's JSON list, or JSON lines with ``prompt`` (as HumanEval's);
    shuffled by the seed, or in their order, and if it ``repeats`` again from the first.

    The answer's length is ``output_len``, else the row's ``output_tokens``, else that of the answer
    that a conversation has (if ``count_tokens`` can tell it), else ``DEFAULT_OUTPUT``. Raises
    ``BenchError`` if the file cannot be read, holds no prompts, or one of another form.
    """
    text = file_text(path)
    try:
        if text.lstrip().startswith("["):
            rows: list[Any] = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except json.JSONDecodeError as error:
        raise BenchError(f"{path} is not JSON ({error}); name another --dataset-path") from error
    queries: list[Query] = []
    for number, row in enumerate(rows, 1):
        try:
            prompt = _prompt_of(row) if isinstance(row, dict) else None
            if prompt:
                length = output_len or _length_of(row, count_tokens)
                query = Query(_checked_prompt(prompt), length)
                if _is_usual(query, output_len, count_tokens):
                    queries.append(query)
        except (ValueError, TypeError, LookupError, AttributeError) as error:
            raise BenchError(
                f"row {number} of {path} is no request ({error}); name another --dataset-path"
            ) from error
    if not queries:
        raise BenchError(
            f"{path} has no row with 'prompt' or 'conversations'; name another --dataset-path"
        )
    if seed is None:
        order = np.arange(len(queries))
    else:
        order = np.random.default_rng(seed).permutation(len(queries))
    count = count if repeats else min(count, len(queries))
    return [queries[order[index % len(queries)]] for index in range(count)]


def file_text(path: Path) -> str:
    """The text of a file, which may be gzipped; raises ``BenchError`` if it cannot be read."""
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BenchError(f"{path} cannot be read ({reason}); name another dataset") from error


def _prompt_of(row: Mapping[str, Any]) -> Any:
    if conversations := row.get("conversations"):
        return conversations[0].get("value")
    return row.get("prompt")


def _checked_prompt(prompt: Any) -> str | list[int] | Messages:
    """``prompt`` if it is one; raises ``ValueError`` if not."""
    if isinstance(prompt, str):
        return prompt
    items = cast("list[Any]", prompt if isinstance(prompt, list) else ())
    ids = [one for one in items if isinstance(one, int) and not isinstance(one, bool) and one >= 0]
    messages = [one for one in items if isinstance(one, dict) and "role" in one]
    if not items or len(items) not in (len(ids), len(messages)):
        raise ValueError("its prompt is neither text, token ids nor messages")
    return items


def _is_usual(
    query: Query, output_len: int | None, count_tokens: Callable[[str], int] | None
) -> bool:
    """False for a conversation that vLLM's benchmark leaves out: too short, or too long."""
    if count_tokens is None or not isinstance(query.prompt, str):
        return True
    tokens = count_tokens(query.prompt)
    is_short = tokens < SHORTEST or (output_len is None and query.max_tokens < SHORTEST)
    return not (is_short or tokens > LONGEST_PROMPT or tokens + query.max_tokens > LONGEST)


def _length_of(row: Mapping[str, Any], count_tokens: Callable[[str], int] | None) -> int:
    """The length of the answer that a row asks for; raises ``ValueError`` for none."""
    length = row.get("output_tokens")
    turns = row.get("conversations") or ()
    if length is None and count_tokens is not None and len(turns) > 1:
        length = count_tokens(turns[1].get("value") or "")
    length = length or DEFAULT_OUTPUT
    if not isinstance(length, int) or length < 1:
        raise ValueError(f"its output_tokens is {length!r}")
    return length


@dataclass(frozen=True)
class Ramp:
    """Requests a second that change from ``start`` to ``end`` over the requests of a run."""

    start: float
    end: float
    exponential: bool = False

    def rates(self, count: int) -> np.ndarray:
        """The rate at each request."""
        share = np.arange(count) / max(1, count - 1)
        if self.exponential:
            return self.start * (self.end / self.start) ** share
        return self.start + (self.end - self.start) * share


def ramped(count: int, ramp: Ramp, burstiness: float, seed: int) -> list[float]:
    """As ``arrivals``, with the gap before each request drawn for the rate at it, unscaled."""
    rng = np.random.default_rng(seed)
    return np.cumsum(rng.gamma(burstiness, 1 / (ramp.rates(count) * burstiness))).tolist()


def arrivals(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Seconds from the start at which each request is sent; all 0 if ``rate`` is infinite.

    Gaps are gamma distributed with mean 1 / rate (exponential at burstiness 1, so that arrivals are
    a Poisson process), then scaled so that the last request arrives at count / rate exactly, as in
    vLLM's benchmark: two runs then offer the same load for any seed.
    """
    if math.isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), size=count)
    times = np.cumsum(gaps)
    return (times * (count / rate / times[-1])).tolist()


def body_of(
    query: Query, path: str, model: str, extra: Mapping[str, Any], *, usage: bool = True
) -> bytes:
    """JSON of a streamed request to a completions route or a chat route.

    ``usage``: whether the stream is to end with token counts. Raises ``BenchError`` for token ids
    in a chat.
    """
    body: dict[str, Any] = {"model": model, "max_tokens": query.max_tokens, "stream": True}
    if usage:
        body["stream_options"] = {"include_usage": True}
    messages = query.messages
    if path.endswith("/chat/completions"):
        if messages is None:
            raise BenchError("a chat takes text; use --dataset-name custom or sharegpt with it")
        body["messages"] = messages
    elif messages is not None and not isinstance(query.prompt, str):
        raise BenchError("messages need a chat; give --endpoint /v1/chat/completions")
    else:
        body["prompt"] = query.prompt
    return msgspec.json.encode({**body, **extra, **query.fields})


def fingerprint(queries: Sequence[Query], times: Sequence[float]) -> str:
    """SHA-256 of requests and the times at which they are sent."""
    digest = hashlib.sha256()
    for query, when in zip(queries, times, strict=True):
        place = (query.session, query.think, query.fields) if query.session else ()
        digest.update(msgspec.json.encode((query.prompt, query.max_tokens, f"{when:.6f}", *place)))
    return digest.hexdigest()
