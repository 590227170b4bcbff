"""Sends a workload to a server at its arrival times and gathers the answers.

Owns: pacing, the limit on open requests, waiting for the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import resource
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import uvloop

from jaxinfer.bench.client import NO_TEXT, Answer, Client
from jaxinfer.core.errors import BenchError

RETRY_SECONDS = 0.5
OPEN_FILES = 65_536
BUSY = (408, 425, 429)  # statuses that ask for the request again, later


class NotReady(BenchError):
    """The server did not answer a request in time."""


@dataclass(frozen=True)
class Outcome:
    """Answers in the order of the requests; wall seconds; CPU seconds of this process."""

    answers: list[Answer]
    start: float  # of ``time.perf_counter``
    seconds: float
    cpu_seconds: float

    @property
    def cpu_us_per_chunk(self) -> float:
        """CPU time of the client itself."""
        chunks = sum(len(answer.times) for answer in self.answers)
        return 1e6 * self.cpu_seconds / max(1, chunks)


class Ended(asyncio.CancelledError):
    """The run was ended, as by Ctrl-C: ``outcome`` has the answers of jobs that were done."""

    def __init__(self, outcome: Outcome, is_done: Sequence[bool]) -> None:
        """``is_done``: of each request, or session."""
        super().__init__("the run was ended")
        self.outcome, self.is_done = outcome, is_done


type Job = Callable[[], Awaitable[list[Answer]]]


async def offer(
    client: Client,
    path: str,
    bodies: Sequence[bytes],
    times: Sequence[float],
    max_concurrency: int | None = None,
    on_answer: Callable[[], None] = lambda: None,
) -> Outcome:
    """Send each body at its time; a request's clock starts when the concurrency limit admits it.

    ``on_answer`` is called after each answer.
    """

    async def ask(body: bytes) -> list[Answer]:
        answer = await client.post(path, body)
        on_answer()
        return [answer]

    return await _paced([partial(ask, body) for body in bodies], times, max_concurrency)


@dataclass(frozen=True)
class Turn:
    """One request of a session: see ``workload.Query``."""

    body: bytes
    think: float = 0.0
    continues: bool = False


async def offer_sessions(
    client: Client,
    path: str,
    sessions: Sequence[Sequence[Turn]],
    times: Sequence[float],
    max_concurrency: int | None = None,
    on_answer: Callable[[], None] = lambda: None,
) -> Outcome:
    """Begin each session at its time, and send each later turn after the answer before it.

    The answers are those of one session after the other. The concurrency limit counts sessions.
    After a failed turn no other of its session is sent: they fail too.
    """

    async def talk(turns: Sequence[Turn]) -> list[Answer]:
        answers: list[Answer] = []
        said: list[Any] = []  # all messages of a session whose turns continue
        for turn in turns:
            if answers and answers[-1].error:
                now = time.perf_counter()
                answers.append(Answer(now, error="not sent: the turn before failed", end=now))
                continue
            if answers:
                await _sleep_until(answers[-1].end + turn.think)
            body = turn.body
            if turn.continues:
                fields = msgspec.json.decode(body)
                fields["messages"] = said + fields["messages"]
                body = msgspec.json.encode(fields)
            answers.append(await client.post(path, body))
            on_answer()
            if len(turns) > 1 and turns[1].continues:
                reply = {"role": "assistant", "content": "".join(answers[-1].text)}
                said = [*msgspec.json.decode(body)["messages"], reply]
        return answers

    return await _paced([partial(talk, turns) for turns in sessions], times, max_concurrency)


async def _paced(
    jobs: Sequence[Job], times: Sequence[float], max_concurrency: int | None
) -> Outcome:
    """Begin each job at its time, or when the concurrency limit admits it; all their answers.

    Raises ``Ended`` if it is cancelled.
    """
    limit = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()

    async def limited(job: Job, due: float) -> list[Answer]:
        async with limit:
            answers = await job()
        answers[0].queued = max(0.0, answers[0].start - due)
        return answers

    tasks: list[asyncio.Task[list[Answer]]] = []
    start, cpu = time.perf_counter(), time.process_time()

    def outcome(found: Sequence[list[Answer]]) -> Outcome:
        answers = [answer for done in found for answer in done]
        return Outcome(answers, start, time.perf_counter() - start, time.process_time() - cpu)

    try:
        for job, when in zip(jobs, times, strict=True):
            await _sleep_until(start + when)
            tasks.append(asyncio.create_task(limited(job, start + when)))
        return outcome(await asyncio.gather(*tasks))
    except asyncio.CancelledError:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        done = [not isinstance(one, BaseException) for one in ended]
        done += [False] * (len(jobs) - len(tasks))
        found = [one for one in ended if not isinstance(one, BaseException)]
        raise Ended(outcome(found), done) from None


async def _sleep_until(when: float) -> None:
    """Wait until this time of ``time.perf_counter``, not earlier."""
    while (delay := when - time.perf_counter()) > 0:
        await asyncio.sleep(delay)  # uvloop rounds it to milliseconds, also down


async def wait_until_ready(client: Client, path: str, body: bytes, seconds: float) -> None:
    """Send ``body`` until it succeeds. Raises ``NotReady`` with the last error.

    A server that takes a request and never answers it has no more than ``seconds`` either.
    """
    deadline = time.monotonic() + seconds
    while True:
        answer = await client.post(path, body, max(RETRY_SECONDS, deadline - time.monotonic()))
        error = answer.error or ("" if answer.times else NO_TEXT)
        if not error:
            return
        # an error of the request itself will not change, unless the server is only busy
        refused = 400 <= answer.status < 500 and answer.status not in BUSY
        if refused or answer.status == 200 or time.monotonic() > deadline:
            raise NotReady(f"the server does not answer: {error}")
        await asyncio.sleep(RETRY_SECONDS)


def in_loop[T](main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in uvloop, in which a chunk takes 11 us of CPU instead of 25 (EPYC).

    Each open request takes a file, so the process gets as many as the system allows it.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return asyncio.run(main, loop_factory=uvloop.new_event_loop)


def rate_of(text: str) -> float:
    """A request rate of the command line; ``inf`` sends all at once."""
    rate = float(text)
    if not rate > 0 or math.isnan(rate):
        raise ValueError(f"a request rate is above 0, or inf; this is {text}")
    return rate
