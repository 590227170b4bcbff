"""``EventPublisher``: sends the events of the KV cache over ZeroMQ, as vLLM's publisher does.

A message has three parts: the topic, the number of the batch (8 bytes, big endian) and the batch in
msgpack. A subscriber that misses a number sends the first one that it lacks, 8 bytes, to the replay
endpoint, and gets a message (number, batch) for each that is kept, then one of the number -1.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, cast

import msgspec

from jaxinfer.core.errors import ConfigError
from jaxinfer.core.kv_events import BOUND, KVEventsConfig, endpoint_of_rank
from jaxinfer.core.limits import Limits
from jaxinfer.core.step import Event
from jaxinfer.engine.events.blocks import Batch, announced_group, block_events, has_events
from jaxinfer.sched.schedule import ScheduleOutput, SchedulerState

LOGGER = "jaxinfer.engine"
END = (-1).to_bytes(8, "big", signed=True)  # the number of the last message of a replay
POLL_SECONDS = 0.1  # between looks for requests of a replay, while no event comes
CLOSE_SECONDS = 2.0


class _Called(NamedTuple):
    number: int  # of the batch
    time: float
    before: SchedulerState
    events: Sequence[Event]
    output: ScheduleOutput
    after: SchedulerState


class EventPublisher:
    """Follows the calls of an engine's scheduler; see ``engine.loop.interfaces.Observer``.

    Nothing is announced for a model without a group of layers that attend to the whole context.
    """

    def __init__(self, config: KVEventsConfig, limits: Limits) -> None:
        """Raises ``ConfigError`` if an endpoint cannot be opened, or pyzmq is not installed."""
        self._config, self._rank = config, config.data_parallel_rank
        self._group = announced_group(limits)
        self._topic = config.topic.encode()
        self._number = 0  # of the next batch
        self._waiting: SimpleQueue[_Called | None] = SimpleQueue()
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self._encoder = msgspec.msgpack.Encoder()
        self._open()
        self._thread = threading.Thread(target=self._run, name="jaxinfer-kv-events", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def scheduled(
        self,
        before: SchedulerState,
        events: Sequence[Event],
        output: ScheduleOutput | None,
        after: SchedulerState,
    ) -> None:
        """A call of the scheduler. If too many batches wait, its number is missing on the wire."""
        if output is None or self._group is None or not has_events(events, output):
            return
        number, self._number = self._number, self._number + 1
        if self._waiting.qsize() < self._config.max_queue_size:
            self._waiting.put(_Called(number, time.time(), before, events, output, after))

    def weights_changed(self, reference: str) -> None:
        """Nothing: the prefix index is emptied before, which is an event."""

    def close(self) -> None:
        """Send what waits, and close the sockets."""
        atexit.unregister(self.close)
        self._waiting.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _open(self) -> None:
        try:
            import zmq
        except ImportError as error:
            raise ConfigError("kv_events_config needs pyzmq; install jaxinfer[events]") from error
        context = cast("Any", zmq.Context.instance())
        endpoint = endpoint_of_rank(self._config.endpoint, self._rank)
        self._publisher: Any = context.socket(zmq.PUB)
        self._publisher.set_hwm(self._config.hwm)
        self._replays: Any = None
        try:
            is_bound = any(part in endpoint for part in BOUND) or not endpoint.startswith("tcp")
            (self._publisher.bind if is_bound else self._publisher.connect)(endpoint)
            if self._config.replay_endpoint is not None:
                self._replays = context.socket(zmq.ROUTER)
                endpoint = endpoint_of_rank(self._config.replay_endpoint, self._rank)
                self._replays.bind(endpoint)
        except zmq.ZMQError as error:
            self._close_sockets()
            raise ConfigError(
                f"kv_events_config has the endpoint {endpoint}, which cannot be opened ({error}); "
                "choose another one"
            ) from error

    # on the publisher's thread

    def _run(self) -> None:
        try:
            while True:
                if self._replays is not None:
                    while self._replays.poll(0):
                        self._replay(self._replays.recv_multipart())
                try:
                    timeout = None if self._replays is None else POLL_SECONDS
                    called = self._waiting.get(timeout=timeout)
                except Empty:
                    continue
                if called is None:
                    break
                self._publish(called)
        except Exception:
            logging.getLogger(LOGGER).exception("KV events have ended; the engine goes on")
        finally:
            self._close_sockets()

    def _publish(self, called: _Called) -> None:
        number, now, before, scheduled, output, after = called
        assert self._group is not None, "nothing is announced else"
        events = tuple(block_events(self._group, before, scheduled, output, after))
        body = self._encoder.encode(Batch(now, events, self._rank))
        self._publisher.send_multipart((self._topic, number.to_bytes(8, "big"), body))
        self._sent.append((number, body))

    def _replay(self, message: Sequence[bytes]) -> None:
        """Answer a request (client, empty, number); another one is not answered."""
        if len(message) != 3 or len(message[2]) != 8:
            return
        client, first = message[0], int.from_bytes(message[2], "big")
        for number, body in tuple(self._sent):
            if number >= first:
                self._replays.send_multipart((client, b"", number.to_bytes(8, "big"), body))
        self._replays.send_multipart((client, b"", END, b""))

    def _close_sockets(self) -> None:
        for socket in (self._publisher, self._replays):
            if socket is not None:
                socket.close(linger=int(1000 * CLOSE_SECONDS / 2))
