"""The trial of one form: it is compiled and followed under limits of time, memory and stack.

It runs in a process of its own, which ``trial_process`` forks. Some forms take llguidance minutes,
gigabytes or more stack than there is, and a thread in its code cannot be stopped.
"""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec

from jaxinfer.core.errors import RequestError
from jaxinfer.core.structured import FIELD, FormLimits, StructuredOutputsParams
from jaxinfer.text.grammar.library import load_llguidance
from jaxinfer.text.grammar.rules import splitter
from jaxinfer.text.grammar.source import grammar_source, limits, unusable

BYTES_OF_TRIAL = 200 << 10  # that every trial takes, for its threads
MAX_TOKEN_SECONDS = 0.1  # of CPU time for a mask and the token before it; all rows wait for it
# The thread that compiles in the engine has a stack four times as large, so it never overflows
# there; llguidance's threads, which compute masks, have 2 MiB.
COMPILE_STACK = 16 << 20
FOLLOW_STACK = 1 << 20
NUM_REHEARSALS = 2
REHEARSED_TOKENS = 64  # that were not the only possible ones
MAX_REHEARSED_TOKENS = 512
CANDIDATES = 4  # the longest of so many tokens is drawn in every second rehearsal
# Of a text that a grammar forces, here and in the engine: its first token is used, and llguidance
# drops those at the end that could have been longer.
FORCED_CHARACTERS = 1024
CHARACTER_BYTES = 4  # of UTF-8, at most
NUM_BYTES = 243  # that occur in UTF-8
NO_TOKEN = "NoExtensionBias"  # llguidance's word for a state in which no token is allowed
STATUS = Path("/proc/self/status")  # exists on Linux only; elsewhere memory is not limited


class Vocabulary(msgspec.Struct, frozen=True):
    """The vocabulary of an engine, as the process of trials gets it."""

    tokens: list[bytes]  # by id
    special: dict[str, int]  # ids of special tokens by their text
    special_token_ids: list[int]
    eos_token_ids: list[int]
    limits: FormLimits


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """A form that may be compiled in the engine: its grammar as llguidance reads it, and the memory
    that one matcher has taken.
    """

    source: str
    num_bytes: int


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A form that is refused, with the message of the ``RequestError``."""

    message: str


type Outcome = Accepted | Refused


class TrialTable:
    """llguidance's table of a vocabulary, which all trials share, and their limits."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.limits = vocabulary.limits
        self.special = vocabulary.special
        splitter(tuple(self.special))  # compiled here, and not in each trial
        self.eos_mask = sum(1 << token_id for token_id in vocabulary.eos_token_ids)
        self.lengths = bytes(min(len(token), 255) for token in vocabulary.tokens)
        encoder = _ForcedText(vocabulary)
        self.table = load_llguidance().LLTokenizer(encoder, eos_token=vocabulary.eos_token_ids)
        encoder.tokens = ()  # 8 MB for 150,000 tokens, which the table has copied


class _ForcedText:
    """A vocabulary for ``llguidance.LLTokenizer``, and the tokens of a text that a grammar forces:
    any that spell its beginning will do.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens: Sequence[bytes] = vocabulary.tokens
        self.special_token_ids = special = vocabulary.special_token_ids
        self.eos_token_id = vocabulary.eos_token_ids[0]
        tokens = enumerate(vocabulary.tokens)
        short = [(token, i) for i, token in tokens if 0 < len(token) <= CHARACTER_BYTES]
        short = [(token, i) for token, i in short if i not in special]
        bytes_alone = {token: i for token, i in short if len(token) == 1}
        self._of_bytes = {token[0]: i for token, i in bytes_alone.items()}
        self._ids = {} if len(bytes_alone) >= NUM_BYTES else dict(short)

    def __call__(self, text: str | bytes) -> list[int]:
        data = (text if isinstance(text, bytes) else text.encode())[:FORCED_CHARACTERS]
        if not self._ids:
            return [self._of_bytes[byte] for byte in data if byte in self._of_bytes]
        ids: list[int] = []
        while data:
            sizes = range(CHARACTER_BYTES, 0, -1)
            found = next((size for size in sizes if data[:size] in self._ids), 0)
            if found:
                ids.append(self._ids[data[:found]])
            data = data[found or 1 :]
        return ids


def run_trial(params: StructuredOutputsParams, table: TrialTable) -> Outcome:
    """Compile and follow a form. It limits the process, so it is called once."""
    try:
        before = _limit_process(table.limits)
        source, matcher = _on_stack(COMPILE_STACK, lambda: _compiled(params, table))
        _on_stack(FOLLOW_STACK, lambda: _follow(params.kind, matcher, table))
    except RequestError as error:
        return Refused(str(error))
    except MemoryError:
        return Refused(_takes_memory(params.kind, table.limits.most_bytes))
    taken = max(_memory("RssAnon") - before - BYTES_OF_TRIAL, 0)
    if taken > table.limits.num_bytes:
        return Refused(_takes_memory(params.kind, table.limits.num_bytes))
    return Accepted(source, taken)


def died(kind: str, number: int, limits: FormLimits) -> Outcome | None:
    """The outcome of a trial whose process was ended by a signal; None if the form is no reason."""
    match number:
        case signal.SIGPROF:
            return Refused(
                f"{FIELD}.{kind} takes more than {limits.seconds:g} s to compile "
                "(--max-form-seconds); make it smaller, with fewer patterns, multipleOf and "
                "patternProperties that hold at once"
            )
        case signal.SIGABRT:  # Rust's answer to an allocation that fails
            return Refused(_takes_memory(kind, limits.most_bytes))
        case signal.SIGSEGV | signal.SIGBUS:
            return Refused(
                f"{FIELD}.{kind} is nested too deeply, counted through its rules or references; "
                "use fewer levels"
            )
        case _:
            return None


def _takes_memory(kind: str, limit: int) -> str:
    return (
        f"{FIELD}.{kind} takes more than {limit >> 20} MiB to compile (--max-form-bytes); "
        "use shorter texts, fewer alternatives and smaller bounds of repetitions"
    )


def _limit_process(limits: FormLimits) -> int:
    """Limit CPU time and memory; returns the memory that the process has now."""
    signal.setitimer(signal.ITIMER_PROF, limits.seconds)  # its signal ends the process
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not STATUS.exists():
        return 0
    most = _memory("VmSize") + COMPILE_STACK + FOLLOW_STACK + limits.most_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    return _memory("RssAnon")


def _memory(name: str) -> int:
    """A field of the process's status, in bytes."""
    if not STATUS.exists():
        return 0
    found = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(found.split()[1]) << 10


def _on_stack[T](size: int, function: Callable[[], T]) -> T:
    """The result of a function that is called on a stack of this size."""
    done: Future[T] = Future()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    threading.stack_size(size)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return done.result()


def _compiled(params: StructuredOutputsParams, table: TrialTable) -> tuple[str, Any]:
    """The grammar of a form and a ``llguidance.LLMatcher`` of it; raises ``RequestError``."""
    source = grammar_source(params, table.special)
    library = load_llguidance()
    matcher = library.LLMatcher(table.table, source, log_level=0, limits=limits())
    if matcher.is_error():
        raise unusable(params.kind, str(matcher.get_error()))
    return source, matcher


def _follow(kind: str, first: Any, table: TrialTable) -> None:
    """Draw a few random texts; raises ``RequestError`` if that fails or takes too long.

    llguidance bounds the work for each token, so a regex that explodes fails in the middle of an
    answer. Most such regexes do so within a few tokens, also in a rehearsal.
    """
    start, reason = _mask(first)
    if not start or reason in ("", NO_TOKEN):
        raise RequestError(f"{FIELD}.{kind} fits no text; check it for contradictions")
    if reason is not None:
        raise unusable(kind, f"it is too complex: {reason}")
    rng = random.Random(0)
    for number in range(NUM_REHEARSALS):
        _rehearse(kind, first.deep_copy(), start, table, rng, CANDIDATES if number % 2 else 1)


def _rehearse(
    kind: str, matcher: Any, mask: int, table: TrialTable, rng: random.Random, candidates: int
) -> None:
    """Draw a random text of which ``mask`` is the first mask; each token is the longest of so many
    ``candidates``. Raises ``RequestError``.
    """
    num_chosen = 0
    for _ in range(MAX_REHEARSED_TOKENS):
        mask &= ~table.eos_mask
        count = mask.bit_count()
        num_chosen += count > 1
        if not count or num_chosen > REHEARSED_TOKENS:
            return
        drawn = [_nth_token(mask, rng.randrange(count)) for _ in range(candidates)]
        begun = time.thread_time()
        matcher.consume_token(max(drawn, key=table.lengths.__getitem__))
        mask, reason = _mask(matcher)
        if reason == NO_TOKEN:
            raise RequestError(
                f"{FIELD}.{kind} has a beginning after which no text fits; check it for "
                "contradictions"
            )
        if reason is not None:
            raise unusable(kind, f"it is too complex: {reason}")
        if (seconds := time.thread_time() - begun) > MAX_TOKEN_SECONDS:
            words = f"a token takes {seconds:.2f} s, and {MAX_TOKEN_SECONDS:g} are possible"
            raise unusable(kind, f"it is too complex: {words}")


def _mask(matcher: Any) -> tuple[int, str | None]:
    """The tokens that may be next, as the bits of a number, and why the matcher has failed."""
    mask = int.from_bytes(matcher.compute_bitmask(), "little")
    failed = matcher.is_error()
    return mask, matcher.get_error().partition("\n")[0] if failed else None


def _nth_token(mask: int, number: int) -> int:
    """The token of the bit before which ``number`` bits are set."""
    token, width = 0, mask.bit_length()
    while width > 1:
        half = width // 2
        low = mask & ((1 << half) - 1)
        count = low.bit_count()
        if number < count:
            mask, width = low, half
        else:
            mask, width, number, token = mask >> half, width - half, number - count, token + half
    return token


def silence() -> None:
    """Send the process's messages on stderr nowhere: Rust writes one when memory is refused."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    os.close(nowhere)
