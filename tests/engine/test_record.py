"""Recordings: what is written replays to equal plans, and damage is found."""

from __future__ import annotations

import errno
import itertools
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from jaxinfer.cli.main import cli
from jaxinfer.core.errors import ConfigError, RecordingError
from jaxinfer.core.intlog import IntLog
from jaxinfer.core.limits import Limits
from jaxinfer.core.steering import Steering
from jaxinfer.core.step import Arrive, Event, PageGroup
from jaxinfer.engine.record import recorder as recorder_module
from jaxinfer.engine.record import replay as replay_module
from jaxinfer.engine.record.codec import Call, Checkpoint, decode, encode_call, encode_state
from jaxinfer.engine.record.file import VERSION, FileWriter, older, open_ring
from jaxinfer.engine.record.recorder import Recorder
from jaxinfer.engine.record.replay import Recording, Report, replay
from jaxinfer.engine.record.states import RECORDED
from jaxinfer.sched.schedule import ScheduleOutput, SchedulerState, schedule
from kit.drive import make_limits, make_request, plain
from kit.recorded import Run, recorder_of

LIMITS = make_limits(num_pages=17)


def record(path: Path, *, num_bytes: int = 1 << 20, is_redacted: bool = False) -> Run:
    recorder = recorder_of(path, LIMITS, num_bytes, is_redacted=is_redacted)
    run = Run(LIMITS, recorder)
    run.all_events()
    run.engine.close()
    return run


def replayed(path: Path) -> Report:
    return replay(Recording(path))


@pytest.mark.parametrize("is_redacted", [False, True])
def test_a_recording_replays_to_equal_plans(tmp_path: Path, is_redacted: bool) -> None:
    run = record(tmp_path / "rec", is_redacted=is_redacted)
    report = replayed(tmp_path / "rec")
    assert report.difference is None and not report.is_torn
    assert report.first_call == 0 and report.num_steps > 50
    assert report.last_step == run.engine._loop.state.next_step_id - 1
    assert run.engine.stats().num_preemptions > 5


KINDS = {
    "plain": LIMITS,
    "windows": make_limits(
        num_pages=(33, 33), groups=(PageGroup(), PageGroup(8), PageGroup(None, pool=1))
    ),
    "snapshots": make_limits(num_pages=25, num_snapshots=8, align=4),
}


@pytest.mark.parametrize("limits", KINDS.values(), ids=KINDS)
def test_a_state_is_read_as_it_was(tmp_path: Path, limits: Limits) -> None:
    """Each state of a run, with steps in flight, preempted sequences and cached pages."""
    states: list[SchedulerState] = []

    class Seen(Recorder):
        def scheduled(
            self,
            before: SchedulerState,
            events: Sequence[Event],
            output: ScheduleOutput | None,
            after: SchedulerState,
        ) -> None:
            states.append(after)

    run = Run(limits, Seen(tmp_path / "rec", 1 << 20, recorder_of(tmp_path / "x", limits)._header))
    run.all_events()
    assert any(state.in_flight for state in states)
    assert any(state.waiting and state.waiting[0].page_hashes for state in states)
    assert bool(limits.num_snapshots) == any(state.snapshots.by_hash for state in states)
    for state in states:
        found = decode(memoryview(encode_state(7, state)), limits)
        assert isinstance(found, Checkpoint) and found.number == 7
        assert plain(found.state) == plain(state)


def test_a_ring_keeps_the_newest_calls(tmp_path: Path) -> None:
    path = tmp_path / "rec"
    recorder = recorder_of(path, LIMITS, 40_000)
    run = Run(LIMITS, recorder)
    for _ in range(8):
        run.all_events()
    run.engine.close()
    assert path.stat().st_size + older(path).stat().st_size < 150_000
    whole = replayed(path)
    assert whole.difference is None and whole.first_call > 300
    assert whole.last_step == run.engine._loop.state.next_step_id - 1
    older(path).unlink()  # the newest file alone
    alone = replayed(path)
    assert alone.difference is None and alone.first_call > whole.first_call
    assert alone.last_step == whole.last_step
    assert [reader.header.number > 1 for reader in open_ring(path)] == [True]


def test_calls_are_left_out_while_the_disk_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The replay goes on after the gap, from the state that the next file begins with."""
    monkeypatch.setattr(recorder_module, "MOST_WAITING", 3)
    add, written = FileWriter.add, threading.Event()

    def slow(self: FileWriter, body: bytes) -> None:
        if len(calls) == 30:
            written.wait(10)
        calls.append(body)
        add(self, body)

    calls: list[bytes] = []
    monkeypatch.setattr(FileWriter, "add", slow)
    recorder = recorder_of(tmp_path / "rec", LIMITS)
    run = Run(LIMITS, recorder)
    while len(calls) < 30:
        run.steps(1, 1)
    run.steps(12)
    monkeypatch.setattr(recorder_module, "MOST_WAITING", 4096)
    written.set()
    while recorder._waiting.qsize():
        time.sleep(0.001)
    run.steps(20)
    run.engine.close()
    recording = Recording(tmp_path / "rec")
    numbers = [one.number for one in recording.records() if isinstance(one, Call)]
    assert any(after - before > 5 for before, after in itertools.pairwise(numbers))
    report = replayed(tmp_path / "rec")
    assert report.difference is None and report.num_calls == len(numbers)


def test_a_full_disk_ends_the_recording_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(self: FileWriter, body: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(FileWriter, "add", full)
    record(tmp_path / "rec")
    assert "cannot be written (No space left on device); the engine goes on" in caplog.text


def test_the_recording_of_the_run_before_is_kept(tmp_path: Path) -> None:
    """As the engine may have been started again because it failed."""
    path, previous = tmp_path / "rec", tmp_path / "rec.previous"
    recorder_of(path, LIMITS).close()  # it has recorded nothing
    for number in range(3):
        recorder = recorder_of(path, LIMITS, 100_000)
        run = Run(LIMITS, recorder)
        for _ in range(8 if number == 1 else 1):
            run.all_events()
        run.engine.close()
        assert previous.exists() == (number > 0)
        assert older(path).exists() == (number == 1)
    assert replayed(previous).difference is None and replayed(previous).first_call > 100
    assert older(previous).exists()
    assert replayed(path).first_call == 0
    recorder_of(path, LIMITS).close()
    assert not older(previous).exists() and replayed(previous).first_call == 0


def test_another_plan_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "rec")

    def changed(
        state: SchedulerState, events: Sequence[Event]
    ) -> tuple[SchedulerState, ScheduleOutput]:
        after, output = schedule(state, events)
        if output.step is not None and output.step.step_id == 31:
            row = output.step.decodes[0]
            row = replace(row, num_computed_tokens=row.num_computed_tokens + 1)
            step = replace(output.step, decodes=(row, *output.step.decodes[1:]))
            output = replace(output, step=step)
        return after, output

    monkeypatch.setattr(replay_module, "schedule", changed)
    found = CliRunner().invoke(cli, ["replay", str(tmp_path / "rec")])
    assert found.exit_code == 3
    assert "step 31: the plan has decodes[0] (" in found.stdout


def test_a_torn_end_is_found(tmp_path: Path) -> None:
    """A recording cut at each byte of its end replays up to there, or says that it is empty."""
    path, cut = tmp_path / "rec", tmp_path / "cut"
    record(path)
    data, whole = path.read_bytes(), replayed(path).num_calls
    for size in range(len(data) - 120, len(data), 7):
        cut.write_bytes(data[:size])
        report = replayed(cut)
        assert report.difference is None and whole - 5 < report.num_calls < whole
    cut.write_bytes(data[:-1] + b"?")
    assert replayed(cut).is_torn
    result = CliRunner().invoke(cli, ["replay", str(cut)])
    assert result.exit_code == 0 and "its last calls are missing" in result.stdout


def test_bad_files_are_errors_of_one_sentence(tmp_path: Path) -> None:
    path, bad = tmp_path / "rec", tmp_path / "bad"
    record(path)
    data = path.read_bytes()
    first = b"jaxinfer recording %d\n" % VERSION
    assert data.startswith(first)
    for content, words in (
        (b"", "is no recording"),
        (b"jaxinfer recording 99\n" + data[len(first) :], "version 99 of the format"),
        (data[: len(first) + 40], "ends within its first record"),
        (data[: len(first) + 20] + b"\xff" + data[len(first) + 21 :], "first record"),
    ):
        bad.write_bytes(content)
        with pytest.raises(RecordingError, match=words):
            replayed(bad)
        result = CliRunner().invoke(cli, ["replay", str(bad)])
        assert result.exit_code == 1 and result.stderr.count("\n") == 1
    with pytest.raises(RecordingError, match="cannot be read"):
        replayed(tmp_path / "none")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="choose another file"):
        recorder_of(tmp_path / "none" / "rec", LIMITS)


def test_redacted_recordings_have_no_token(tmp_path: Path) -> None:
    """No prompt, answer or hash of one is in the file; equal tokens are equal."""
    record(tmp_path / "rec", is_redacted=True)
    prompts = [
        tuple(event.request.prompt_token_ids)
        for one in Recording(tmp_path / "rec").records()
        if isinstance(one, Call)
        for event in one.events
        if isinstance(event, Arrive)
    ]
    assert len({prompt[:9] for prompt in prompts}) == 1  # all begin with the same tokens
    assert len({prompt[9] for prompt in prompts}) == 5
    assert not {*range(1, 10)} & {token for prompt in prompts for token in prompt}


def test_requests_are_read_as_they_were() -> None:
    """With every kind of prompt and with steering; of a constraint, that there was one."""
    request = make_request(
        "r",
        [5, 6],
        logit_bias={3: 1.5},
        stop=["end"],
        structured_outputs={"regex": "a+"},
        steering=Steering(b"1234", b"digest"),
        cache_salt="salt",
    )
    for prompt in ((5, 6), [5, 6], IntLog([5, 6])):
        given = replace(request, prompt_token_ids=prompt, constraint=cast("Any", object()))
        event = Arrive(given)
        found = decode(memoryview(encode_call(3, (event,), None)), LIMITS)
        assert isinstance(found, Call) and found.number == 3 and found.summary is None
        assert isinstance(found.events[0], Arrive)
        read = found.events[0].request
        assert list(read.prompt_token_ids) == [5, 6] and read.constraint is RECORDED
        assert replace(read, prompt_token_ids=(5, 6), constraint=None) == request


def test_a_record_of_wrong_values_is_an_error() -> None:
    for value in (("call", 1, [["arrive", {}]], None), ("state", 1, {"limits": 3}), (), ("x", 1)):
        with pytest.raises(RecordingError, match="cannot be read"):
            decode(memoryview(msgspec.msgpack.encode(value)), LIMITS)
