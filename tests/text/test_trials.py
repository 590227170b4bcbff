"""Forms are tried in a process of their own: hostile ones, cancelled ones, and many at a time."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.core.errors import EngineError, QueueFullError, RequestError
from jaxinfer.core.fair_queue import FairQueue
from jaxinfer.core.request import SamplingParams
from jaxinfer.core.structured import DEFAULT_FORM_LIMITS, FormLimits, StructuredOutputsParams
from jaxinfer.text.grammar import forms, table, trial
from jaxinfer.text.grammar.compile import ConstraintCompiler
from jaxinfer.text.grammar.constraint import MAX_ORIGINALS, Grammar
from jaxinfer.text.grammar.grammars import Grammars
from jaxinfer.text.grammar.trial import Accepted, Refused, Vocabulary
from jaxinfer.text.tokenizer import load_tokenizer
from kit.server_process import gone, wait_until
from kit.tokenizers import TINY_EOS_ID, tiny_tokenizer_spec

MULTIPLES = {"allOf": [{"type": "integer", "multipleOf": n} for n in (3, 5, 7, 11, 13, 17, 19, 23)]}


def made(limits: FormLimits = DEFAULT_FORM_LIMITS) -> ConstraintCompiler:
    tokenizer = load_tokenizer(tiny_tokenizer_spec())
    return ConstraintCompiler(tokenizer, 320, (TINY_EOS_ID,), limits=limits)


def of(**form: Any) -> SamplingParams:
    return SamplingParams(structured_outputs=form)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def compiler() -> Iterator[ConstraintCompiler]:
    made_one = made()
    yield made_one
    made_one.close()


@pytest.fixture(scope="module")
def patient() -> Iterator[ConstraintCompiler]:
    """With ten times the CPU time, so that a slow machine meets the other limits first."""
    with closing(made(FormLimits(seconds=10 * DEFAULT_FORM_LIMITS.seconds))) as made_one:
        yield made_one


def chain(link: Callable[[str], dict[str, Any]], size: int) -> dict[str, Any]:
    parts = {str(number): link(f"#/{number + 1}") for number in range(size)}
    return {"$ref": "#/0", **parts, str(size): {"type": "null"}}


RULES = "\n".join(f'r{i}: "a" r{i + 1}' for i in range(9000)) + '\nr9000: "b"'
TERMINALS = "\n".join(f'R{i}: "a" R{i + 1}' for i in range(9000)) + '\nR9000: "b"'
DEEP = "counted through its references, and 1500 are possible"
HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "references": ({"json": chain(lambda ref: {"$ref": ref}, 2500)}, DEEP),
    "items": ({"json": chain(lambda ref: {"items": {"$ref": ref}}, 1099)}, DEEP),
    "properties": ({"json": chain(lambda ref: {"properties": {"a": {"$ref": ref}}}, 946)}, DEEP),
    "choices": ({"json": chain(lambda ref: {"anyOf": [{"$ref": ref}]}, 1042)}, DEEP),
    "rules": ({"grammar": f"start: r0\n{RULES}"}, "nested too deeply, counted through its rules"),
    "terminals": ({"grammar": f"start: R0\n{TERMINALS}"}, "nested too deeply"),
    "repetitions": ({"regex": "a?" * 5000 + "a" * 5000}, "more than 96 MiB to compile"),
    "a text of 250 KB": ({"choice": ["ab " * 80_000]}, "more than 96 MiB to compile"),
    "15,000 items": (
        {"json": {"type": "array", "prefixItems": [{"const": 1}] * 15_000}},
        "more than 32 MiB to compile",
    ),
    "a long regex": ({"regex": "[a-z]?" * 40_000}, "has 240000 bytes; at most 16384"),
    "a long pattern": ({"json": {"pattern": "a" * 20_000}}, "a pattern of 20000 bytes"),
    "blanks": (
        {"json_object": True, "whitespace_pattern": " ?" * 9000},
        "whitespace_pattern has 18000 bytes",
    ),
    "17,000 choices": ({"choice": [str(i) for i in range(17_000)]}, "has 17000 texts"),
    "infinity": ({"json": '{"minItems": Infinity}'}, "Infinity is no number of JSON"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_form_is_refused_in_a_sentence(patient: ConstraintCompiler, name: str) -> None:
    form, reason = HOSTILE[name]
    with pytest.raises(RequestError, match="^structured_outputs") as caught:
        patient.compile(of(**form))
    assert reason in str(caught.value)


@pytest.mark.parametrize("kind", ["json", "structural_tag"])
def test_formats_that_limit_nothing_are_in_the_log_of_details(
    compiler: ConstraintCompiler, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    formats = ("date", "uint8", "my-own")
    schema: dict[str, Any] = {"anyOf": [{"type": "string", "format": one} for one in formats]}
    tag = {"type": "tag", "begin": "<", "content": {"type": "json_schema", "json_schema": schema}}
    form = schema if kind == "json" else {"format": {**tag, "end": ">"}}
    caplog.set_level(logging.DEBUG, "jaxinfer.engine")
    compiler.compile(of(**{kind: form}))
    (record,) = [one for one in caplog.records if one.getMessage() == "annotations"]
    assert record.__dict__["fields"] == {"formats": ["my-own", "uint8"]}
    assert f"{kind}: formats that are annotations: my-own, uint8" in record.__dict__["text"]


def test_an_owner_may_have_other_limits() -> None:
    form, _ = HOSTILE["15,000 items"]
    for limits, reason in (
        (FormLimits(seconds=5.0, num_bytes=96 << 20), None),
        (FormLimits(seconds=5.0, num_bytes=4 << 20), "more than 12 MiB to compile"),
        (FormLimits(seconds=0.01), "more than 0.01 s to compile"),
    ):
        with closing(made(limits)) as compiler:
            if reason is None:
                assert compiler.compile(of(**form)) is not None
                continue
            with pytest.raises(RequestError) as caught:
                compiler.compile(of(**form))
            assert reason in str(caught.value)


def test_a_form_that_explodes_late_fails_alone(compiler: ConstraintCompiler) -> None:
    """The limits of llguidance hold in the engine too; later requests get a new grammar."""
    form = of(regex="[b-z]{600}" + "(" * 8 + "a" + "{0,9})" * 8)
    found = compiler.compile(form)
    assert found is not None and found.grammar is not None
    one = found.begin([ord("c")] * 600)
    mask = found.every_token.copy()
    with pytest.raises(RequestError, match="cannot be followed to the end: lexer error: too many"):
        for _ in range(9):
            one.fill(mask)
            one.push(ord("a"))
    other = compiler.compile(form)
    assert other is not None and other.grammar is not found.grammar
    other.begin([ord("c")] * 60).fill(mask)


def nested_choices(size: int) -> SamplingParams:
    """A schema that is accepted; with a size of 300 it compiles in 0.1 s."""
    words = [f"word {number}" for number in range(20)]
    return of(
        json=chain(lambda ref: {"properties": {"a": {"$ref": ref}, "b": {"enum": words}}}, size)
    )


def test_an_accepted_form_is_compiled_without_the_gil(
    compiler: ConstraintCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process no Python reads it, and other threads run while it is compiled."""
    compiler.compile(of(regex="a"))  # the table of the vocabulary is made
    library = table.load_llguidance()
    make, ticks, calls, done = library.LLMatcher, [0], Counter[str](), threading.Event()
    ticks_within: list[int] = []

    def tick() -> None:
        while not done.wait(0.001):
            ticks[0] += 1

    def counting(*arguments: Any, **options: Any) -> Any:
        before = ticks[0]
        made_one = make(*arguments, **options)
        ticks_within.append(ticks[0] - before)
        return made_one

    def note(frame: Any, event: str, argument: object) -> None:
        if threading.current_thread().name.startswith("jaxinfer-"):
            calls[frame.f_code.co_qualname] += 1

    monkeypatch.setattr(library, "LLMatcher", counting)
    ticker = threading.Thread(target=tick)
    ticker.start()
    threading.setprofile_all_threads(note)
    try:
        assert compiler.compile(nested_choices(300)) is not None
    finally:
        threading.setprofile_all_threads(None)
        done.set()
        ticker.join()
    assert sum(calls.values()) < 3000, calls.most_common(9)  # as for a small form: 600
    assert max(ticks_within) >= 5, "about 80"


def children(pid: int | None) -> list[str]:
    """The trials that run."""
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def test_a_trial_that_no_request_waits_for_ends(compiler: ConstraintCompiler) -> None:
    compiler.compile(of(regex="a"))
    wait_until(lambda: not children(compiler.trial_pid), "its trial has ended")
    first, second = (compiler.submit(of(json=MULTIPLES)) for _ in range(2))
    wait_until(lambda: len(children(compiler.trial_pid)) == 1, "both share a trial")
    (trial,) = children(compiler.trial_pid)
    os.kill(int(trial), signal.SIGSTOP)  # it does not end by itself
    first.cancel()
    time.sleep(0.05)
    assert children(compiler.trial_pid) == [trial]
    second.cancel()
    wait_until(lambda: not children(compiler.trial_pid), "it has ended")
    with pytest.raises(CancelledError):
        second.result()
    assert compiler.compile(of(regex="ab")) is not None


def test_the_process_of_trials_is_started_again(compiler: ConstraintCompiler) -> None:
    compiler.compile(of(regex="a"))
    before = compiler.trial_pid
    assert before is not None
    waiting = compiler.submit(of(json={**MULTIPLES, "title": "again"}))
    wait_until(lambda: bool(children(before)), "it is tried")
    os.kill(before, signal.SIGKILL)
    assert compiler.compile(of(regex="abc")) is not None
    assert compiler.trial_pid not in (None, before)
    with pytest.raises(RequestError):  # it was tried again
        waiting.result()


def test_the_process_of_trials_ends_with_its_parent() -> None:
    script = (
        "from text.test_trials import made, of; import time; "
        "one = made(); one.compile(of(regex='a')); print(one.trial_pid, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {sys.path!r}; {script}"]
    folder = Path(__file__).parents[1]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        os.kill(pid, signal.SIGTERM)  # of a supervisor: requests may still be completed
        parent.kill()
    wait_until(lambda: gone(pid), "it has ended")


class Trials:
    """In place of the process: the outcomes of trials that wait until they may end."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.begun: list[str] = []
        self.go = threading.Semaphore(0)
        monkeypatch.setattr(forms, "outcome", self.outcome)
        monkeypatch.setattr(os, "cpu_count", lambda: 1)

    def outcome(self, end: object, params: StructuredOutputsParams) -> Accepted | Refused:
        self.begun.append(params.regex or "")
        self.go.acquire()
        if params.regex == "no":
            return Refused("structured_outputs.regex is refused")
        return Accepted(f"start: /{params.regex}/", 0)


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Trials:
    return Trials(monkeypatch)


def test_clients_take_turns(trials: Trials) -> None:
    compiler = made()
    asked = [compiler.submit(of(regex=f"a{i}"), "alice") for i in range(4)]
    wait_until(lambda: trials.begun == ["a0"], "the first one is tried")
    asked += [compiler.submit(of(regex=f"b{i}"), "bob") for i in range(2)]
    asked.append(compiler.submit(of(regex="a3"), "carol"))  # as alice's last one
    trials.go.release(9)
    for one in asked:
        assert one.result() is not None
    assert trials.begun == ["a0", "a1", "b0", "a3", "a2", "b1"]
    compiler.close()


def test_equal_forms_have_one_trial(trials: Trials) -> None:
    compiler = made()
    yes = [compiler.submit(of(regex="yes"), client) for client in ("a", "b", "a")]
    no = [compiler.submit(of(regex="no"), "a") for _ in range(2)]
    trials.go.release(9)
    first, *others = [one.result() for one in yes]
    assert first is not None
    assert all(one is not None and one.grammar is first.grammar for one in others)
    for one in (*no, compiler.submit(of(regex="no"))):  # a refusal is known, too
        with pytest.raises(RequestError, match="is refused"):
            one.result()
    assert trials.begun == ["yes", "no"]
    compiler.close()


def test_a_client_may_have_so_many_forms(trials: Trials, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "MAX_FORMS_OF_CLIENT", 2)
    monkeypatch.setattr(forms, "MAX_FORMS", 3)
    compiler = made()
    ok = [compiler.submit(of(regex=f"a{i}"), "alice") for i in (0, 1, 1)]
    ok.append(compiler.submit(of(regex="b"), "bob"))
    for client in ("alice", "carol"):  # too many of hers, and of all
        with pytest.raises(QueueFullError, match="3 other forms wait"):
            compiler.submit(of(regex="c"), client).result()
    local = compiler.submit(of(regex="d"))  # of this process
    ok.pop(1).cancel()
    ok.pop(1).cancel()  # the last request for "a1"
    local.cancel()
    ok.append(compiler.submit(of(regex="c"), "alice"))
    trials.go.release(9)
    assert all(one.result() is not None for one in ok)
    assert "a1" not in trials.begun and "d" not in trials.begun
    compiler.close()


def test_waiting_requests_end_with_the_compiler(trials: Trials) -> None:
    compiler = made()
    waiting = [compiler.submit(of(regex=text)) for text in "ab"]
    wait_until(lambda: bool(trials.begun), "one is tried")
    compiler.close()
    assert all(one.cancelled() for one in waiting)
    with pytest.raises(EngineError, match="shut down"):
        compiler.compile(of(regex="c"))
    trials.go.release(9)


def test_conditions_without_a_form_start_no_process() -> None:
    compiler = made()
    found = compiler.compile(SamplingParams(allowed_token_ids=(97,)))
    assert found is not None and found.grammar is None and compiler.trial_pid is None
    plain: Future[Any] = compiler.submit(SamplingParams())
    assert plain.result() is None
    compiler.close()


def test_a_queue_of_several_clients() -> None:
    queue = FairQueue[int]()
    for client, item in zip("aaaabbc", range(7), strict=True):
        queue.put(client, item)
    queue.remove("a", 1)
    queue.remove("c", 99)
    assert [queue.take() for _ in range(6)] == [0, 4, 6, 2, 5, 3]
    assert not queue
    with pytest.raises(KeyError):
        queue.take()


class Matcher:
    """A matcher that is never asked."""

    def is_error(self) -> bool:
        return False

    def deep_copy(self) -> Matcher:
        return Matcher()


def test_grammars_in_memory_are_bounded() -> None:
    """Those of open requests as well; the least recently used of the others go first."""
    size = 4 << 20
    known, kept = Grammars(10 * size), []
    forms_of = [StructuredOutputsParams(regex=str(number)) for number in range(40)]
    for form in forms_of[:6]:
        known.make_room(size)
        known.keep(form, grammar := Grammar(Matcher, 10, size))
        kept.append(grammar)
    for form in forms_of[6:]:
        assert known.find(forms_of[6]) is not None or form is forms_of[6]
        known.make_room(size)
        known.keep(form, Grammar(Matcher, 10, size))
    found = [form for form in forms_of if known.find(form) is not None]
    assert found == [*forms_of[:7], *forms_of[-3:]]
    with pytest.raises(QueueFullError, match="24 MiB, and 40 MiB are allowed"):
        known.make_room(5 * size)
    kept.clear()
    known.make_room(5 * size)


def test_originals_are_as_many_as_memory_allows_and_are_replaced() -> None:
    small, large = (Grammar(Matcher, 10, size) for size in (1000, 9 << 20))
    for _ in range(20):
        small.grow()
        large.grow()
    assert (len(small._originals), len(large._originals)) == (MAX_ORIGINALS, 1)
    first = large._originals[0]
    for _ in range(70):
        large.matcher()
    large.grow()
    assert large._originals[0] is not first and len(large._originals) == 1


def test_the_beginning_of_a_forced_text_is_spelt_with_short_tokens() -> None:
    """Also in a vocabulary that has no token for some bytes."""
    tokens = [*(bytes([byte]) for byte in range(256)), b"ab", b"<end>"]
    vocabulary = Vocabulary(tokens, {"<end>": 257}, [257], [257], DEFAULT_FORM_LIMITS)
    assert trial._ForcedText(vocabulary)("abé" + "x" * 9000)[:5] == [97, 98, 0xC3, 0xA9, 120]
    sparse = Vocabulary(
        [b"a", "é".encode(), b"ab", b"b", b"<end>"], {}, [4], [4], DEFAULT_FORM_LIMITS
    )
    assert trial._ForcedText(sparse)("abéa?b") == [2, 1, 0, 3]
    assert trial._ForcedText(sparse)("aé".encode()) == [0, 1]


@given(st.sets(st.integers(0, 400), min_size=1))
def test_the_token_of_each_bit_of_a_mask(token_ids: set[int]) -> None:
    mask = sum(1 << token_id for token_id in token_ids)
    assert [trial._nth_token(mask, n) for n in range(len(token_ids))] == sorted(token_ids)
