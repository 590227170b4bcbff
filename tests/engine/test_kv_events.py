"""KV events: what routers decode is the prefix index, and subscribers get what they missed."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from jaxinfer.cli.replicas import config_of_rank
from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError
from jaxinfer.core.kv_events import KVEventsConfig, endpoint_of_rank, kv_events_config
from jaxinfer.core.limits import Limits
from jaxinfer.core.request import RequestSpec, SamplingParams
from jaxinfer.core.step import PageGroup
from jaxinfer.core.tiers import DIGEST_SIZE, group_of
from jaxinfer.engine.events.blocks import Batch, announced_group, as_integer, block_events
from jaxinfer.engine.events.publisher import END, EventPublisher
from kit.drive import make_limits
from kit.kv_subscriber import Index, decode
from kit.recorded import Run
from kit.tier_traces import TierTrace


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.fixture
def sockets() -> Iterator[list[Any]]:
    opened: list[Any] = []
    yield opened
    for one in opened:
        one.close(linger=0)


def subscribed(endpoint: str, sockets: list[Any], topic: bytes = b"kv") -> Any:
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    sockets.append(subscriber)
    subscriber.setsockopt(zmq.RCVTIMEO, 5000)
    subscriber.connect(endpoint)
    subscriber.subscribe(topic)
    return subscriber


def index_of(engine_run: Run, limits: Limits, group: int = 0) -> set[int]:
    """The hashes of the group's pages in the prefix index of the scheduler."""
    pool = engine_run.engine._loop.state.pools[limits.groups[group].pool]
    length = 16 + bool(group)
    keys = (key for key in pool.page_by_hash if len(key) == length)
    return {int.from_bytes(key[8:16], "big") for key in keys}


@pytest.mark.parametrize(
    "groups", [(PageGroup(),), (PageGroup(8), PageGroup(None), PageGroup(None, pool=1))]
)
def test_a_router_knows_the_prefix_index(groups: tuple[PageGroup, ...], sockets: list[Any]) -> None:
    """After a run with preemptions, failures, sleep and new weights; also of a group behind one
    with a window, whose pages are not announced.
    """
    limits = make_limits(num_pages=tuple([33] * len({g.pool for g in groups})), groups=groups)
    port = free_port()
    config = KVEventsConfig(True, endpoint=f"tcp://*:{port}", topic="kv@host@model")
    publisher = EventPublisher(config, limits)
    subscriber = subscribed(f"tcp://127.0.0.1:{port}", sockets)
    wait_until_subscribed(publisher, subscriber)
    run = Run(limits, publisher)
    run.all_events()
    group = next(i for i, one in enumerate(groups) if one.window is None)
    index, kinds, number = Index(), set[str](), -1
    sent = publisher._number
    assert sent > 20
    while number < sent - 1:
        topic, seq, body = subscriber.recv_multipart()
        assert topic == b"kv@host@model"
        number += 1
        assert int.from_bytes(seq, "big") == number
        events, rank = decode(body)
        assert rank == 0
        for event in events:
            kinds.add(event[0])
            index.apply(event)
            assert (
                event[0] == "AllBlocksCleared"
                or event[{"BlockStored": 9, "BlockRemoved": 3}[event[0]]] == group
            )
    assert kinds == {"BlockStored", "BlockRemoved", "AllBlocksCleared"}
    assert index.blocks.keys() == index_of(run, limits, group) != set()
    publisher.close()


def wait_until_subscribed(publisher: EventPublisher, subscriber: Any) -> None:
    """ZeroMQ drops what is sent before a subscription has arrived: send until something does."""
    subscriber.subscribe(b"hello")
    for _ in range(100):
        publisher._publisher.send_multipart((b"hello",))
        if subscriber.poll(20):
            break
    while subscriber.poll(50):
        assert subscriber.recv_multipart() == [b"hello"]


def test_missed_batches_are_sent_again(sockets: list[Any]) -> None:
    limits, ports = make_limits(), (free_port(), free_port())
    events, replays = (f"tcp://127.0.0.1:{port}" for port in ports)
    config = KVEventsConfig(
        True, endpoint=f"tcp://*:{ports[0]}", replay_endpoint=replays, buffer_steps=4
    )
    publisher = EventPublisher(config, limits)
    run = Run(limits, publisher)
    run.steps(20)
    sent = publisher._number
    assert sent > 4
    end = time.monotonic() + 10
    while not publisher._sent or publisher._sent[-1][0] < sent - 1:  # its thread sends them later
        assert time.monotonic() < end
        time.sleep(0.01)
    client = zmq.Context.instance().socket(zmq.REQ)
    sockets.append(client)
    client.setsockopt(zmq.RCVTIMEO, 5000)
    client.connect(replays)
    client.send((sent - 3).to_bytes(8, "big"))
    # a REQ socket reads one message of a request, so a router uses DEALER for several
    first = client.recv_multipart()
    assert int.from_bytes(first[0], "big") == sent - 3
    dealer = zmq.Context.instance().socket(zmq.DEALER)
    sockets.append(dealer)
    dealer.setsockopt(zmq.RCVTIMEO, 5000)
    dealer.connect(replays)
    dealer.send_multipart((b"", b"short"))  # is not answered
    dealer.send_multipart((b"", (0).to_bytes(8, "big")))
    numbers = []
    while True:
        empty, seq, body = dealer.recv_multipart()
        assert empty == b""
        if seq == END:
            break
        numbers.append(int.from_bytes(seq, "big"))
        assert decode(body)[0]
    assert numbers == list(range(sent - 4, sent))  # the last ``buffer_steps``
    publisher.close()
    del events


def test_salts_are_extra_keys_of_the_first_page(sockets: list[Any]) -> None:
    limits, port = make_limits(), free_port()
    publisher = EventPublisher(KVEventsConfig(True, endpoint=f"tcp://*:{port}"), limits)
    subscriber = subscribed(f"tcp://127.0.0.1:{port}", sockets, b"")
    wait_until_subscribed(publisher, subscriber)
    run = Run(limits, publisher)
    spec = RequestSpec([*range(1, 14)], SamplingParams(max_tokens=2), cache_salt="tenant")
    run.engine.add_request("a", spec)
    run.steps(4, 0)
    event = decode(subscriber.recv_multipart()[2])[0][0]
    assert event[0] == "BlockStored" and len(event[1]) == 3
    assert event[2] is None and event[3] == [*range(1, 13)]
    assert event[8] == [["tenant"], None, None]
    publisher.close()


def test_a_router_knows_pages_that_tiers_bring_back() -> None:
    """Random traces: pages are evicted and restored, loads fail, requests are aborted."""
    num_stored = num_restored = 0
    for seed in range(12):
        trace = TierTrace(seed)
        trace.drive.recorded = calls = []
        trace.run()
        if (group := announced_group(trace.limits)) is None:
            continue
        index, afters = Index(), [*(before for before, _, _ in calls[1:]), trace.drive.state]
        for (before, events, output), after in zip(calls, afters, strict=True):
            found = tuple(block_events(group, before, events, output, after))
            for event in decode(msgspec.msgpack.encode(Batch(0.0, found, 0)))[0]:
                index.apply(event)
                num_stored += event[0] == "BlockStored"
        pool = trace.drive.state.pools[trace.limits.groups[group].pool]
        keys = [key for key in pool.page_by_hash if group_of(key) == group]
        assert index.blocks.keys() == {as_integer(key[:DIGEST_SIZE]) for key in keys}
        assert trace.drive.tiers is not None
        num_restored += trace.drive.tiers.stats().num_restored
    assert num_stored > 20 < num_restored


def test_replicas_have_their_own_endpoints_files_and_folders() -> None:
    given = {"enable_kv_cache_events": True, "replay_endpoint": "ipc:///tmp/replay"}
    config = EngineConfig(kv_events_config=given, record="rec", kv_offloading_disk="a/b")  # type: ignore[arg-type]
    assert config_of_rank(config, 0).kv_offloading_disk == "a/b"
    ranked = config_of_rank(config, 2)
    assert ranked.kv_offloading_disk == "a/b/rank2"
    events = kv_events_config(ranked.kv_events_config or "")
    assert ranked.record == "rec.rank2" and events.data_parallel_rank == 2
    assert endpoint_of_rank(events.endpoint, 2) == "tcp://*:5559"
    assert endpoint_of_rank(events.replay_endpoint or "", 2) == "ipc:///tmp/replay_dp2"
    assert endpoint_of_rank("tcp://*:5557", 0) == "tcp://*:5557"


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("{", "is wrong"),
        ('{"topics": "a"}', "topics"),
        ('{"publisher": "kafka"}', "'kafka'; use null or zmq"),
        ('{"endpoint": "5557"}', "endpoint '5557'"),
        ('{"buffer_steps": 0}', "buffer_steps below 1"),
        (7, "JSON object"),
    ],
)
def test_wrong_settings_are_one_sentence(given: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        EngineConfig(kv_events_config=given)
    assert "\n" not in str(caught.value)


def test_an_endpoint_in_use_is_refused() -> None:
    port = free_port()
    config = KVEventsConfig(True, endpoint=f"tcp://*:{port}")
    first = EventPublisher(config, make_limits())
    with pytest.raises(ConfigError, match="cannot be opened"):
        EventPublisher(config, make_limits())
    first.close()


def test_vllms_fields_are_all_known(tmp_path: Path) -> None:
    """The names of vLLM's KVEventsConfig, in its order, with its defaults."""
    del tmp_path
    names = (
        *("enable_kv_cache_events", "publisher", "endpoint", "replay_endpoint", "buffer_steps"),
        *("hwm", "max_queue_size", "topic"),
    )
    assert KVEventsConfig.__struct_fields__[: len(names)] == names
    default = msgspec.to_builtins(KVEventsConfig())
    assert default["endpoint"] == "tcp://*:5557" and default["buffer_steps"] == 10_000
    assert json.loads(json.dumps(default)) == default
