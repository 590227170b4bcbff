"""Messages between an engine and its client, and a socket for them between two processes.

On the socket a message is a msgpack frame (``core.frames``). ``Channel`` sends messages without
blocking the sender.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Literal, Self

import msgspec
import numpy as np
from msgspec.structs import replace

from jaxinfer.core import errors
from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import EngineError, JaxinferError
from jaxinfer.core.frames import read_frame, send_frame
from jaxinfer.core.intlog import IntLog
from jaxinfer.core.limits import Limits
from jaxinfer.core.log import LogSettings
from jaxinfer.core.request import RequestSpec
from jaxinfer.core.structured import StructuredOutputsParams
from jaxinfer.engine.requests.facts import ModelFacts
from jaxinfer.engine.requests.news import EngineStats, News
from jaxinfer.text.tokenizer_config import TokenizerSpec


class Build(msgspec.Struct, frozen=True, tag=True):
    """First message to the engine: build one. ``log``: of its start, on stderr; None: nothing."""

    config: EngineConfig
    log: LogSettings | None


class Submission(msgspec.Struct, frozen=True, tag=True):
    """A new request."""

    request_id: str
    spec: RequestSpec
    client: str = ""  # whose forms are compiled in turn with those of others; none: this process
    # structured_outputs are those of the last submission that had any: of 256 KB they are sent once
    # for 2,000 prompts of a request
    has_last_form: bool = False
    is_whole: bool = False  # its deltas may come late: see ``engine.link.whole``
    prompt: bytes = b""  # int32[N]: the prompt's tokens on a socket, where ``spec`` has none

    def packed(self) -> Submission:
        """The submission for a socket: 16,384 tokens as numbers would take the engine's process
        0.3 ms to read, and 1 ms whenever the garbage collector meets them.
        """
        tokens = IntLog(self.spec.prompt_token_ids).array()
        return replace(self._with_prompt(()), prompt=tokens.tobytes())

    def unpacked(self) -> Submission:
        """The submission that was ``packed``."""
        tokens = IntLog(np.frombuffer(self.prompt, np.int32))
        return replace(self._with_prompt(tokens), prompt=b"")

    def _with_prompt(self, tokens: Sequence[int]) -> Submission:
        return replace(self, spec=replace(self.spec, prompt_token_ids=tokens))

    def with_form(self, form: StructuredOutputsParams | None) -> Submission:
        """The submission with this form; None: with the last one."""
        sampling = replace(self.spec.sampling, structured_outputs=form)
        spec = replace(self.spec, sampling=sampling)
        return replace(self, spec=spec, has_last_form=form is None)


class AbortRequest(msgspec.Struct, frozen=True, tag=True):
    """End a request; its pages are free within one step. Unknown ids are ignored."""

    request_id: str


class Ping(msgspec.Struct, frozen=True, tag=True):
    """Request a ``Pong``, which comes at once, whatever the engine's loop does."""


type Action = Literal[
    "pause",
    "resume",
    "reset_prefix_cache",
    "update_weights",
    "sleep",
    "wake_up",
    "report",
    "start_profile",
    "stop_profile",
]
type Mode = Literal["wait", "abort", "keep"]
MODES: tuple[Mode, ...] = ("wait", "abort", "keep")


class Control(msgspec.Struct, frozen=True, tag=True):
    """Change the engine between two steps; answered by ``Controlled``.

    ``mode``: whether open requests are completed first, aborted, or kept and continued afterwards.
    ``path``: of the new weights, or a profile's folder; ``version``: of weights, 0 for the next
    one. ``level``, ``tags``: of ``sleep`` and ``wake_up``. ``num_steps``: of ``start_profile``.
    """

    number: int
    action: Action
    mode: Mode = "wait"
    path: str = ""
    level: int = 1
    tags: tuple[str, ...] | None = None
    version: int = 0
    num_steps: int = 0


class SetSteering(msgspec.Struct, frozen=True, tag=True):
    """Keep a steering vector by name, or remove it; answered by ``Controlled``."""

    number: int
    name: str
    vector: bytes | None  # float32[W]


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Finish the current iteration and end."""


class Planned(msgspec.Struct, frozen=True, tag=True):
    """From the engine, before weights are loaded: the server prepares itself with these."""

    limits: Limits
    tokenizer: TokenizerSpec | None


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From the engine: it answers requests from now on."""

    facts: ModelFacts
    stats: EngineStats


class Pong(msgspec.Struct, frozen=True, tag=True):
    """From the engine: how long its loop has had work without finishing a part of it."""

    stalled_seconds: float = 0.0


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Last message from the engine: why it could not be built or has ended."""

    kind: str  # the name of a class of ``core.errors``
    message: str

    @classmethod
    def of(cls, error: JaxinferError) -> Self:
        """The message with the class and the text of ``error``."""
        return cls(type(error).__name__, str(error))

    @property
    def error(self) -> JaxinferError:
        """An error of the same class and text."""
        return getattr(errors, self.kind, EngineError)(self.message)


class Refused(msgspec.Struct, frozen=True, tag=True):
    """From the engine: one request was refused, or cannot be completed."""

    request_id: str
    failure: Failed


class EngineState(msgspec.Struct, frozen=True):
    """The state of an engine: paused or not, the memory it has freed, its weights' version."""

    paused: bool = False
    asleep: tuple[str, ...] = ()  # of ``SLEEP_TAGS``
    weight_version: int = 0


class Controlled(msgspec.Struct, frozen=True, tag=True):
    """From the engine: a ``Control`` or ``SetSteering`` has been executed, or why not.

    ``state`` is that after it.
    """

    number: int
    state: EngineState
    failure: Failed | None = None


type LoopCommand = Submission | AbortRequest | Control | SetSteering | Stop
type Command = LoopCommand | Ping
type Answer = News | Refused | Pong | Controlled | Failed
type Listener = Callable[[Answer], None]  # returns at once, and may be called on any thread
type ToEngine = Build | Command
type FromEngine = Planned | Ready | Answer


class Channel[Sent, Received]:
    """One end of a socket. A thread of its own sends queued messages; receiving blocks.

    If the peer has closed its end, ``messages`` ends and sent messages are lost.
    """

    def __init__(self, end: socket.socket, received: Any) -> None:  # ``Received``, for msgspec
        self._socket = end
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(received)
        self._frames: SimpleQueue[bytes | None] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="jaxinfer-wire", daemon=True)
        self._writer.start()

    def send(self, message: Sent) -> None:
        """Queue a message for sending. Raises ``ValueError`` for text that has no UTF-8 form."""
        self._frames.put(self._encoder.encode(message))

    def messages(self) -> Generator[Received]:
        """Received messages, until the peer has closed its end."""
        while (frame := read_frame(self._socket)) is not None:
            yield self._decoder.decode(frame)

    def flush(self) -> None:
        """Wait until all messages are sent or the peer has closed. Send none afterwards."""
        self._frames.put(None)
        self._writer.join()

    def hang_up(self) -> None:
        """Close the socket; unsent messages are lost and ``messages`` ends on both sides."""
        with suppress(OSError):  # the peer has closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        self.flush()
        self._socket.close()

    def _write(self) -> None:
        while (frame := self._frames.get()) is not None:
            try:
                send_frame(self._socket, frame)
            except OSError:
                return  # the peer has closed, which ends ``messages`` too
