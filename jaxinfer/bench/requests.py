"""The requests that the flags of a command describe."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast

from jaxinfer.bench.arguments import request_fields
from jaxinfer.bench.offer import Turn
from jaxinfer.bench.sessions import Rows, read_sessions, session_queries, session_times
from jaxinfer.bench.tokens import tokenizer_of, vocabulary
from jaxinfer.bench.traces import queries_of, read_trace
from jaxinfer.bench.workload import (
    Prefixes,
    Query,
    Ramp,
    RandomLengths,
    arrivals,
    body_of,
    fingerprint,
    prefix_queries,
    ramped,
    random_queries,
    read_queries,
)
from jaxinfer.core.errors import BenchError

TRACES = ("mooncake", "azure")
WARM_UP_ROUND = 10_000  # beyond any round that is measured
FILES = ("custom", "sharegpt", "humaneval", "sessions")


@dataclass(frozen=True)
class Load:
    """Requests, their bodies, and the seconds from the start at which they are sent.

    Of a session all requests have the time at which it begins.
    """

    queries: list[Query]
    bodies: list[bytes]
    times: list[float]

    @cached_property
    def turns(self) -> list[int]:
        """The number of each request in its session, from 0."""
        found: list[int] = []
        for number, query in enumerate(self.queries):
            follows = number and query.session and query.session == self.queries[number - 1].session
            found.append(found[-1] + 1 if follows else 0)
        return found

    @property
    def sent_tokens(self) -> list[int | None]:
        """The number of ids of each prompt; None for texts, which the server counts alone."""
        return [
            None if isinstance(one.prompt, str) or one.messages else len(one.prompt)
            for one in self.queries
        ]

    @property
    def sessions(self) -> tuple[list[list[Turn]], list[float]]:
        """The turns of each session, and the time at which it begins."""
        sessions: list[list[Turn]] = []
        for query, body, turn in zip(self.queries, self.bodies, self.turns, strict=True):
            if not turn:
                sessions.append([])
            sessions[-1].append(Turn(body, query.think, query.continues))
        begins = zip(self.times, self.turns, strict=True)
        return sessions, [when for when, turn in begins if not turn]

    @property
    def workload(self) -> str:
        """SHA-256 of prompts, lengths and times, whatever server they are sent to."""
        return fingerprint(self.queries, self.times)


class Requests:
    """The dataset that the flags name. Raises ``BenchError`` if it lacks a file or a vocabulary."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given = given
        if given.dataset_name in (*TRACES, *FILES) and given.dataset_path is None:
            raise BenchError(f"a {given.dataset_name} dataset needs --dataset-path; name its file")
        ramp = (given.ramp_up_strategy, given.ramp_up_start_rps, given.ramp_up_end_rps)
        if any(ramp) and not all(ramp):
            raise BenchError(
                "a ramp needs all of --ramp-up-strategy, --ramp-up-start-rps and --ramp-up-end-rps"
            )

    @cached_property
    def vocab(self) -> Sequence[int]:
        """Token ids to draw from: all but the special ones."""
        return vocabulary(self.tokenizer, self.given.vocab_size)

    @property
    def tokenizer(self) -> str | None:
        """The tokenizer that the flags name, or else the model, as in vLLM's benchmark."""
        return self.given.tokenizer or getattr(self.given, "model", None)

    def queries(self, count: int, round_: int = 0) -> list[Query]:
        """The first ``count`` prompts; those of another round are different ones."""
        given, seed = self.given, self.given.seed + round_
        match given.dataset_name:
            case "random":
                lengths = RandomLengths(
                    input_len=given.random_input_len,
                    output_len=given.output_len or given.random_output_len,
                    prefix_len=given.random_prefix_len,
                    range_ratio=given.random_range_ratio[0],
                    output_ratio=given.random_range_ratio[-1],
                )
                return random_queries(lengths, self.vocab, count, seed)
            case "prefix_repetition":
                prefixes = Prefixes(
                    count=given.prefix_repetition_num_prefixes,
                    prefix_len=given.prefix_repetition_prefix_len,
                    suffix_len=given.prefix_repetition_suffix_len,
                    output_len=given.output_len or given.prefix_repetition_output_len,
                )
                return prefix_queries(prefixes, self.vocab, count, seed)
            case "sessions":
                return self._of_sessions(read_sessions(given.dataset_path, count), seed)
            case "mooncake" | "azure":
                return queries_of(
                    read_trace(given.dataset_path, count),
                    self.vocab,
                    seed,
                    max_input_len=given.max_input_len,
                    max_output_len=given.output_len or given.max_output_len,
                )
        return read_queries(
            given.dataset_path,
            count,
            given.output_len,
            None if given.disable_shuffle else seed,
            repeats=not given.no_oversample,
            count_tokens=self._count_tokens,
        )

    @cached_property
    def _count_tokens(self) -> Callable[[str], int] | None:
        """Counts the tokens of a recorded text; None without a tokenizer."""
        if self.given.dataset_name != "sharegpt" or self.given.tokenizer is None:
            return None
        encode = tokenizer_of(self.given.tokenizer).encode
        return lambda text: len(encode(text, add_special_tokens=False))

    def _of_sessions(self, sessions: list[Rows], seed: int) -> list[Query]:
        given = self.given
        has_lengths = any("input_length" in row for rows in sessions for row in rows)
        return session_queries(
            sessions,
            self.vocab if has_lengths else (),
            seed,
            scale=given.time_scale,
            max_input_len=given.max_input_len,
            output_len=given.output_len,
        )

    def warm_up(self) -> list[Query]:
        """One prompt like those of the workload, but none of them, so that no prefix is cached."""
        made = self.queries(1, WARM_UP_ROUND)[:1]
        if made[0].messages is not None and made[0].session:
            return [Query([{"role": "user", "content": "Begin."}], made[0].max_tokens)]
        return made

    def load(self, model: str, count: int, rate: float, round_: int = 0) -> Load:
        """``count`` requests (or sessions) at ``rate`` a second, or at a file's own times."""
        fields = request_fields(self.given)
        queries = self.as_sent(self.queries(count, round_))
        bodies = [body_of(query, self.given.endpoint, model, fields) for query in queries]
        return Load(queries, bodies, self._times(queries, count, rate, round_))

    def warm_up_load(self, model: str) -> Load:
        """``warm_up`` as a load of one request."""
        queries, fields = self.as_sent(self.warm_up()), request_fields(self.given)
        return Load(queries, [body_of(queries[0], self.given.endpoint, model, fields)], [0.0])

    def as_sent(self, queries: list[Query], texts: bool = False) -> list[Query]:
        """Prompts with texts in place of token ids for a chat, which takes none, or if asked.

        Raises ``BenchError`` without a tokenizer.
        """
        if not (texts or self.given.endpoint.endswith("/chat/completions")):
            return queries
        return [
            one
            if one.messages is not None
            else replace(one, prompt=self._decode(cast(list[int], one.prompt)))
            for one in queries
        ]

    @cached_property
    def _decode(self) -> Callable[[list[int]], str]:
        if self.tokenizer is None:
            raise BenchError(
                "a chat, llama.cpp's server and transformers' take no token ids, so prompts are "
                "decoded; give --tokenizer, or another route or other --backends"
            )
        return tokenizer_of(self.tokenizer).decode

    def _times(self, queries: Sequence[Query], count: int, rate: float, round_: int) -> list[float]:
        given, seed = self.given, self.given.seed + round_
        if given.dataset_name in TRACES:
            trace = read_trace(given.dataset_path, count)
            return [one.when * given.time_scale for one in trace]
        if given.dataset_name == "sessions":
            sessions = read_sessions(given.dataset_path, count)
            own = session_times(sessions, given.time_scale)
            begins = own or self._drawn_times(len(sessions), rate, seed)
            return [begins[query.session - 1] for query in queries]
        return self._drawn_times(len(queries), rate, seed)

    def _drawn_times(self, count: int, rate: float, seed: int) -> list[float]:
        given = self.given
        if given.ramp_up_strategy:
            exponential = given.ramp_up_strategy == "exponential"
            ramp = Ramp(given.ramp_up_start_rps, given.ramp_up_end_rps, exponential)
            return ramped(count, ramp, given.burstiness, seed)
        return arrivals(count, rate, given.burstiness, seed)
