"""Several engines behind one link: where requests go, and what becomes of them when one ends."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from jaxinfer.cli.replicas import replica_environments
from jaxinfer.core.errors import ConfigError, EngineError, RequestError
from jaxinfer.core.request import FinishReason, RequestSpec, SamplingParams
from jaxinfer.core.server_config import ServerConfig
from jaxinfer.core.structured import StructuredOutputsParams
from jaxinfer.engine.link import replicas
from jaxinfer.engine.link.lasting import Lasting
from jaxinfer.engine.link.link import Link
from jaxinfer.engine.link.replicas import Replicas
from jaxinfer.engine.link.routing import BLOCK_TOKENS, SLACK_TOKENS, Router
from jaxinfer.engine.link.wire import (
    AbortRequest,
    Action,
    Answer,
    Command,
    Control,
    Controlled,
    EngineState,
    Failed,
    Listener,
    Ping,
    Pong,
    Refused,
    SetSteering,
    Submission,
)
from jaxinfer.engine.requests.facts import ModelFacts
from jaxinfer.engine.requests.news import EngineStats, News, added
from jaxinfer.engine.requests.outputs import Delta
from kit.engines import tiny_limits

FORM = StructuredOutputsParams(regex="a+")


class FakeLink(Link):
    """Records its commands; a test says what it answers."""

    def __init__(self, max_model_len: int = 128) -> None:
        self.limits = tiny_limits(max_model_len=max_model_len)
        self.facts = ModelFacts("fake", 320, (0,), SamplingParams())
        self.tokenizer, self.stats = None, EngineStats(num_executables=3)
        self.commands: list[Command] = []
        self.listener: Listener | None = None
        self.stopped = False

    def connect(self, listener: Listener) -> None:
        self.listener = listener

    def stop(self) -> None:
        self.stopped = True

    def _pass(self, command: Command) -> None:
        self.commands.append(command)

    def answer(self, answer: Answer) -> None:
        assert self.listener is not None
        self.listener(answer)

    def die(self) -> None:
        error = EngineError("the engine's process was killed by SIGKILL; start again")
        self._ended = error
        self.answer(Failed.of(error))


class Group:
    """Replicas over fake links; ``made`` has every link, ``heard`` what a client hears."""

    def __init__(self, count: int) -> None:
        self.made = [FakeLink()]
        self.failures = 0  # of further starts
        self.heard: list[Answer] = []
        self.link = Replicas(self.made[0], count, self._start)
        self.link.connect(self.heard.append)

    def _start(self, rank: int) -> Link:
        assert rank or len(self.made) > 1
        if self.failures:
            self.failures -= 1
            raise EngineError("no memory")
        self.made.append(FakeLink())
        return self.made[-1]

    def submit(self, name: str, tokens: list[int], **sampling: Any) -> int:
        """The index of the link that got the request."""
        spec = RequestSpec(tokens, SamplingParams(**sampling))
        self.link.send(Submission(name, spec))
        has = [
            any(getattr(one, "request_id", "") == name for one in link.commands)
            for link in self.made
        ]
        assert has.count(True) == 1
        return has.index(True)

    def hear(self, kind: type) -> list[Any]:
        return [one for one in self.heard if isinstance(one, kind)]


@contextmanager
def quick_starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(replicas, "START_AGAIN_SECONDS", (0.0, 0.01, 0.01))
    yield


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def finished(name: str) -> News:
    delta = Delta(request_id=name, index=0, token_ids=(), finish_reason=FinishReason.STOP)
    return News((delta,), (), (), EngineStats(num_running=1))


def test_requests_take_turns_and_prefixes_go_where_they_are_known() -> None:
    router, known = Router(2), list(range(4 * BLOCK_TOKENS))
    assert [router.choose([i] * 9, (0, 1)) for i in range(4)] == [0, 1, 0, 1]
    router.began(1, known)
    router.ended(1, len(known))
    assert {router.choose([*known, i], (0, 1)) for i in range(4)} == {1}
    assert router.choose(known, (0,)) == 0, "only of those that answer"
    other = known[: BLOCK_TOKENS - 1] + [9] + known[BLOCK_TOKENS:]
    assert {router.choose(other, (0, 1)) for _ in range(2)} == {0, 1}, "a block differs"
    router.lost(1)
    assert {router.choose(known, (0, 1)) for _ in range(2)} == {0, 1}


def test_a_prefix_is_left_where_waiting_costs_more() -> None:
    router, known = Router(2), list(range(1024))
    router.began(0, known)
    router.ended(0, len(known))
    router.began(0, [1] * (SLACK_TOKENS + 1000))
    assert router.choose(known, (0, 1)) == 0
    router.began(0, [2] * 1000)
    assert router.choose(known, (0, 1)) == 1
    assert router.choose([3] * 8, (0, 1)) == 1, "without a prefix the load decides"


def test_ended_and_aborted_requests_are_no_load() -> None:
    group = Group(2)
    places = [group.submit(f"r{i}", [i] * 400) for i in range(4)]
    assert sorted(places) == [0, 0, 1, 1]
    for i, place in enumerate(places):
        if place == 0:
            group.made[0].answer(finished(f"r{i}"))
    assert {group.submit(f"s{i}", [50 + i] * 100) for i in range(2)} == {0}
    aborted = next(f"r{i}" for i, place in enumerate(places) if place == 1)
    group.link.send(AbortRequest(aborted))
    assert AbortRequest(aborted) in group.made[1].commands
    group.link.send(AbortRequest(aborted))
    group.link.send(AbortRequest("r0" if places[0] == 0 else "r1"))
    assert sum(isinstance(one, AbortRequest) for link in group.made for one in link.commands) == 1
    assert [news.rank for news in group.hear(News)] == [0, 0]


def test_forms_are_sent_once_to_each_replica() -> None:
    group = Group(2)
    last: StructuredOutputsParams | None = None
    for i in range(6):
        spec = RequestSpec([i] * 9, SamplingParams(structured_outputs=FORM))
        submission = Submission(f"r{i}", spec)
        group.link.send(submission.with_form(None) if FORM is last else submission)
        last = FORM
    for link in group.made:
        first, *others = [one for one in link.commands if isinstance(one, Submission)]
        assert first.spec.sampling.structured_outputs == FORM and not first.has_last_form
        assert others and all(one.has_last_form for one in others)


def test_a_form_that_could_not_be_sent_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    group, other = Group(1), StructuredOutputsParams(regex="b+")
    submission = Submission("r0", RequestSpec([1], SamplingParams(structured_outputs=FORM)))
    group.link.send(submission)

    def refused(_: Command) -> None:
        raise RequestError("the request cannot be sent to the engine")

    with monkeypatch.context() as patch:
        patch.setattr(group.made[0], "_pass", refused)
        wrong = RequestSpec([1], SamplingParams(structured_outputs=other))
        with pytest.raises(RequestError):
            group.link.send(Submission("r1", wrong))
    group.link.send(submission.with_form(None))  # the client's last form is still the first
    group.link.send(Submission("r2", RequestSpec([1], SamplingParams(structured_outputs=other))))
    *_, last, new = group.made[0].commands
    assert isinstance(last, Submission) and last.has_last_form
    assert isinstance(new, Submission) and new.spec.sampling.structured_outputs == other


def test_changes_go_to_all_and_are_answered_once() -> None:
    group, failure = Group(3), Failed("ArgumentError", "no")
    group.link.send(Control(1, "pause"))
    for link in group.made[:2]:
        link.answer(Controlled(1, EngineState(True)))
    assert not group.hear(Controlled)
    group.made[2].answer(Controlled(1, EngineState(True)))
    assert group.hear(Controlled) == [Controlled(1, EngineState(True))]
    group.link.send(Control(2, "wake_up", tags=("all",)))
    for link in group.made:
        link.answer(Controlled(2, EngineState(True), failure))
    assert group.hear(Controlled)[1].failure == failure and not any(x.stopped for x in group.made)


def ended(group: Group, monkeypatch: pytest.MonkeyPatch) -> FakeLink:
    """The link that replaces replica 1, which ends."""
    with quick_starts(monkeypatch):
        number = len(group.made)
        group.made[1].die()
        until(lambda: len(group.made) == number + 1 and group.made[-1].listener is not None)
    return group.made[-1]


def change(group: Group, command: Control | SetSteering, state: EngineState) -> None:
    group.link.send(command)
    for link in group.made[:2]:
        link.answer(Controlled(command.number, state))


def gets_requests(group: Group, link: FakeLink) -> bool:
    # each is another prompt, and ends at once
    names = [f"s{time.monotonic()}{i}" for i in range(2)]
    found = {group.submit(name, [i] * 9) for i, name in enumerate(names)}
    for name in names:
        group.link.send(AbortRequest(name))
    return group.made.index(link) in found


def test_a_replica_that_ends_is_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = Group(2)
    group.failures = 1
    places = [group.submit(f"r{i}", [i] * 9) for i in range(4)]
    group.link.send(Control(3, "reset_prefix_cache"))
    group.made[0].answer(Controlled(3, EngineState()))
    with caplog.at_level(logging.WARNING):
        link = ended(group, monkeypatch)
    lost = {f"r{i}" for i, place in enumerate(places) if place == 1}
    refused = group.hear(Refused)
    assert {one.request_id for one in refused} == lost and len(refused) == len(lost)
    assert "replica 1 has ended (the engine's process was killed" in refused[0].failure.message
    assert group.link.alive and not group.hear(Failed)
    # those that answer have made the change
    assert group.hear(Controlled) == [Controlled(3, EngineState())]
    assert "replica 1 did not start: no memory" in caplog.text
    until(lambda: gets_requests(group, link))


def test_it_follows_the_others_before_it_gets_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(2)
    change(group, SetSteering(1, "joy", b"1234"), EngineState())
    change(group, SetSteering(2, "fear", b"1234"), EngineState())
    change(group, SetSteering(3, "fear", None), EngineState())
    change(group, Control(4, "update_weights", path="/a"), EngineState(weight_version=1))
    change(group, Control(5, "update_weights", "abort", "/b"), EngineState(weight_version=2))
    failed = Control(6, "update_weights", path="/none")
    group.link.send(failed)
    for link in group.made[:2]:
        link.answer(Controlled(6, EngineState(weight_version=2), Failed("CheckpointError", "no")))
    new = ended(group, monkeypatch)
    assert new.commands == [SetSteering(0, "joy", b"1234")], "each waits for the one before"
    assert group.submit("a", [1]) == group.submit("b", [2]) == 0
    new.answer(Controlled(0, EngineState()))
    weights = Control(0, "update_weights", path="/b", version=2)
    assert new.commands[1:] == [weights], "the last ones, under the number that all have"
    group.link.send(Control(7, "pause"))  # it has to follow this too
    new.answer(Controlled(0, EngineState(weight_version=2)))
    assert group.submit("c", [1]) == group.submit("d", [2]) == 0
    group.made[0].answer(Controlled(7, EngineState(True, weight_version=2)))
    assert new.commands[2:] == [Control(0, "pause")]
    new.answer(Controlled(0, EngineState(True, weight_version=2)))
    until(lambda: gets_requests(group, new))


@pytest.mark.parametrize(
    ("changes", "commands"),
    [
        ([("pause", EngineState(True)), ("resume", EngineState())], []),
        ([("sleep", EngineState(asleep=("weights", "kv_cache")))], [Control(0, "sleep", level=2)]),
        (
            [
                ("sleep", EngineState(asleep=("weights", "kv_cache"))),
                ("update_weights", EngineState(asleep=("kv_cache",), weight_version=1)),
            ],
            [
                Control(0, "update_weights", level=2, version=1),
                Control(0, "sleep"),
                Control(0, "wake_up", tags=("weights",)),
            ],
        ),
        (
            [
                ("sleep", EngineState(asleep=("weights", "kv_cache"))),
                ("wake_up", EngineState()),
            ],
            [],
        ),
    ],
)
def test_states_that_it_follows(
    changes: list[tuple[Action, EngineState]], commands: list[Control]
) -> None:
    lasting = Lasting()
    for number, (action, state) in enumerate(changes):
        lasting.note(Control(number, action, level=2), state)
    assert lasting.commands() == commands


def test_one_that_cannot_follow_gets_no_requests(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = Group(2)
    change(group, Control(1, "update_weights", path="/a"), EngineState(weight_version=1))
    first = ended(group, monkeypatch)
    monkeypatch.setattr(replicas, "START_AGAIN_SECONDS", (0.0, 0.01, 0.01))
    first.answer(Controlled(0, EngineState(), Failed("CheckpointError", "it is gone")))
    until(lambda: first.stopped)
    until(lambda: len(group.made) == 4 and bool(group.made[3].commands))
    assert group.submit("a", [1]) == group.submit("b", [2]) == 0
    assert "replica 1 did not start: it is gone" in caplog.text
    group.made[3].die()  # while it follows
    until(lambda: len(group.made) == 5 and bool(group.made[4].commands))
    group.made[4].answer(Controlled(0, EngineState(weight_version=1)))
    until(lambda: gets_requests(group, group.made[4]))


def test_one_that_fails_where_others_do_not_is_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    group = Group(2)
    with quick_starts(monkeypatch):
        group.link.send(Control(1, "update_weights", path="/a"))
        group.made[1].answer(Controlled(1, EngineState(), Failed("EngineError", "no memory")))
        group.made[0].answer(Controlled(1, EngineState(weight_version=1)))
        until(lambda: group.made[1].stopped)
        group.made[1].die()
        until(lambda: len(group.made) == 3 and bool(group.made[2].commands))
    (answer,) = group.hear(Controlled)
    assert answer.failure is None and answer.state.weight_version == 1
    assert "replica 1 is ended, as it could not follow the others: no memory" in caplog.text
    assert group.made[2].commands == [Control(0, "update_weights", path="/a", version=1)]


def test_salts_and_changes_of_weights_make_other_prefixes() -> None:
    router, known = Router(2), list(range(4 * BLOCK_TOKENS))
    router.began(1, known, "mine")
    router.ended(1, len(known))
    assert {router.choose(known, (0, 1), "mine") for _ in range(2)} == {1}
    assert {router.choose(known, (0, 1), "other") for _ in range(2)} == {0, 1}
    router.forget()
    assert {router.choose(known, (0, 1), "mine") for _ in range(2)} == {0, 1}
    group = Group(2)
    place = group.submit("r", known)
    group.link.send(AbortRequest("r"))
    assert {group.submit(f"a{i}", known) for i in range(2)} == {place}
    for i in range(2):
        group.link.send(AbortRequest(f"a{i}"))
    change(group, Control(1, "reset_prefix_cache"), EngineState())
    assert group.submit("b", known) != place, "it is the other's turn"


def test_the_end_of_all_is_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(2)
    group.failures = 99
    with quick_starts(monkeypatch):
        group.made[0].die()
        assert group.submit("r", [1]) == 1
        group.made[1].die()
    (failed,) = group.hear(Failed)
    assert "every replica has ended" in failed.message and not group.link.alive
    with pytest.raises(EngineError, match="every replica"):
        group.submit("s", [1])


def test_a_silent_replica_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(2)
    group.link.send(Ping())
    group.made[0].answer(Pong(0.5))
    assert not group.hear(Pong)
    group.made[1].answer(Pong(0.1))
    assert group.hear(Pong) == [Pong(0.5)]
    now = time.monotonic()
    group.link.send(Ping())
    group.made[0].answer(Pong(0.0))
    monkeypatch.setattr(replicas.time, "monotonic", lambda: now + 30)
    group.link.send(Ping())
    group.made[0].answer(Pong(0.0))
    assert group.hear(Pong)[-1].stalled_seconds == pytest.approx(30, abs=1)


def test_replicas_must_be_alike() -> None:
    first, other = FakeLink(), FakeLink(max_model_len=64)
    with pytest.raises(EngineError, match="replica 1 has max_model_len 64 and replica 0 128"):
        Replicas(first, 2, lambda _: other)
    assert first.stopped and other.stopped


def test_stop_ends_all() -> None:
    group = Group(2)
    group.link.stop()
    assert all(link.stopped for link in group.made) and len(group.hear(Failed)) == 1


def test_devices_of_each_replica() -> None:
    one = replica_environments(2, 1, {}, gpus=2)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in one] == ["0", "1"]
    two = replica_environments(2, 2, {"CUDA_VISIBLE_DEVICES": "3, 1,GPU-a,0"}, gpus=8)
    assert [each["CUDA_VISIBLE_DEVICES"] for each in two] == ["3,1", "GPU-a,0"]
    assert replica_environments(2, 1, {}, gpus=0) == ({}, {})
    assert replica_environments(1, 1, {}, gpus=4) == ({},)
    assert replica_environments(3, 1, {"JAX_PLATFORMS": "cpu"}, gpus=1) == ({},) * 3
    with pytest.raises(ConfigError, match=r"2 engines of 2 GPUs each .* need 4 GPUs, and there"):
        replica_environments(2, 2, {}, gpus=3)


def test_replicas_need_processes() -> None:
    with pytest.raises(ConfigError, match="data_parallel_size 2 needs a process for each engine"):
        ServerConfig(data_parallel_size=2, disable_frontend_multiprocessing=True)


def test_counters_of_several_engines() -> None:
    one = EngineStats(num_running=2, num_live_pages_of_groups=(1, 2), load_seconds=3.0)
    other = EngineStats(num_running=1, num_live_pages_of_groups=(4, 5), load_seconds=1.0)
    total = added([one, other])
    assert (total.num_running, total.load_seconds) == (3, 3.0)
    assert total.num_live_pages_of_groups == (5, 7)
    assert added([one, EngineStats()]).num_live_pages_of_groups == (1, 2)
