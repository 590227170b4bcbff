"""The raw records of a run, from which every figure follows, and their JSON forms.

Times are whole nanoseconds of the client's monotonic clock, so that they survive a file unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from jaxinfer.bench.client import NO_TEXT, Answer
from jaxinfer.core.errors import BenchError

FORMAT = 2  # of a run's folder; another one is refused
COMPLETE, PARTIAL, MISSING = "complete", "partial", "missing"  # states of a series and of a run


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request as the client saw it, or the ``values`` of one measured process."""

    start_ns: int = 0  # since the start of its series
    gaps_ns: list[int] = []  # to the first chunk since the start; then between chunks
    closing_ns: int = 0  # from the last chunk with text to one that only says why the answer ended
    end_ns: int = 0  # of the response, since the request's start
    queued_ns: int = 0  # that the request waited in the client before its start
    prompt_tokens: int = 0  # as the server counted
    output_tokens: int = 0  # as the server counted
    cached_tokens: int | None = None  # of the prompt, as the server counted, where it does
    sent_tokens: int | None = None  # ids of the prompt, where it was sent as such
    turn: int = 0  # its number in its session
    listed_tokens: int | None = None  # ids that the chunks listed, where they did
    error: str = ""
    text: str | None = None  # with --save-detailed
    values: dict[str, float] = {}

    @property
    def latency_ns(self) -> int:
        """Until the last chunk."""
        return sum(self.gaps_ns) + self.closing_ns

    @property
    def is_counted(self) -> bool:
        """True if the server told how many tokens there are."""
        return bool(self.prompt_tokens or self.output_tokens)

    def with_counts(self, prompt_tokens: int, output_tokens: int) -> Record:
        """The same with the server's counts."""
        return msgspec.structs.replace(
            self, prompt_tokens=prompt_tokens, output_tokens=output_tokens
        )


class Series(msgspec.Struct, kw_only=True):
    """One server or engine under one load. ``facts`` are measured values that no record holds."""

    name: str  # the file of its records is records/NAME.jsonl
    backend: str = "jaxinfer"
    round: int = 0
    rate: float | None = None  # requests a second offered; None: all at once
    requests: int = 0
    workload: str = ""  # SHA-256 of the requests' bodies and times
    state: str = COMPLETE
    reason: str = ""  # for which it is not complete
    facts: dict[str, float] = {}


class Run(msgspec.Struct, kw_only=True):
    """A run as a whole: what was asked, and what came of it."""

    format: int = FORMAT
    command: str
    created: str  # UTC
    settings: dict[str, str]
    percentiles: tuple[float, ...] = (50.0, 90.0, 99.0)
    metrics: tuple[str, ...] = ("ttft", "tpot", "itl", "e2el")
    goodput: dict[str, float] = {}  # metric: ms
    limits: list[str] = []  # of a sweep
    gates: list[str] = []
    series: list[Series] = []
    state: str = COMPLETE
    reason: str = ""


_encode = msgspec.json.Encoder().encode
_record = msgspec.json.Decoder(Record).decode


def records_of(
    answers: Sequence[Answer],
    start: float,
    turns: Sequence[int] | None = None,
    sent: Sequence[int | None] | None = None,
    *,
    texts: bool = False,
) -> list[Record]:
    """Records of the answers of one series that began at ``start`` of ``time.perf_counter``.

    ``sent``: the number of token ids of each prompt that was sent as such.
    """
    numbers = turns if turns is not None else [0] * len(answers)
    lengths = sent if sent is not None else [None] * len(answers)
    rows = zip(answers, numbers, lengths, strict=True)
    return [_record_of(answer, start, turn, length, texts) for answer, turn, length in rows]


def _record_of(answer: Answer, start: float, turn: int, sent: int | None, texts: bool) -> Record:
    times = [_ns(when - answer.start) for when in answer.times]
    last = times[-1] if times else 0
    closing = max(0, _ns(answer.closed - answer.start) - last) if times else 0
    listed = sum(map(len, answer.token_ids.values())) if answer.token_ids else None
    return Record(
        start_ns=_ns(answer.start - start),
        gaps_ns=[b - a for a, b in zip([0, *times], times, strict=False)],
        closing_ns=closing,
        end_ns=max(_ns(answer.end - answer.start), last + closing),
        queued_ns=_ns(answer.queued),
        prompt_tokens=answer.prompt_tokens,
        output_tokens=answer.output_tokens,
        cached_tokens=answer.cached_tokens,
        sent_tokens=sent,
        turn=turn,
        listed_tokens=listed,
        error=answer.error or ("" if times else NO_TEXT),
        text="".join(answer.text) if texts else None,
    )


def _ns(seconds: float) -> int:
    return round(1e9 * seconds)


def as_lines(records: Sequence[msgspec.Struct]) -> bytes:
    """One JSON object a line."""
    return b"".join(_encode(record) + b"\n" for record in records)


def read_lines(data: bytes, name: str) -> list[Record]:
    """The records of a file; raises ``BenchError`` that names the line it cannot read."""
    found: list[Record] = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            found.append(_record(line))
        except msgspec.DecodeError as error:
            raise BenchError(
                f"{name} has no record in line {number} ({error}); the run must be repeated"
            ) from error
    return found


def read_run(data: bytes, name: str) -> Run:
    """A run's description; raises ``BenchError`` for another format."""
    try:
        version = msgspec.json.decode(data, type=dict[str, msgspec.Raw]).get("format")
        found = bytes(version or b"none").decode()
        if found != str(FORMAT):
            raise BenchError(
                f"{name} has format {found} and this jaxinfer reads {FORMAT}; use the version that "
                "wrote it"
            )
        return msgspec.json.decode(data, type=Run)
    except msgspec.DecodeError as error:
        raise BenchError(f"{name} describes no benchmark ({error}); name another folder") from error
