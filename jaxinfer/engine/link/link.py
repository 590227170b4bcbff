"""``Link``: the connection of a client to an engine, wherever it runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from jaxinfer.core.errors import EngineError
from jaxinfer.core.limits import Limits
from jaxinfer.engine.link.wire import Command, Listener
from jaxinfer.engine.requests.facts import ModelFacts
from jaxinfer.engine.requests.news import EngineStats
from jaxinfer.text.tokenizer import Tokenizer


class Link(ABC):
    """A connection to a ready engine on a thread of this process or in another process."""

    limits: Limits
    facts: ModelFacts
    tokenizer: Tokenizer | None  # loaded in this process
    stats: EngineStats  # of the start
    _ended: EngineError | None = None  # why the engine answers no more

    @property
    def alive(self) -> bool:
        """True if requests are still answered."""
        return self._ended is None

    @property
    def start_stats(self) -> Sequence[EngineStats]:
        """The counters of each engine when it was ready."""
        return (self.stats,)

    @property
    def num_replicas(self) -> int:
        """The number of engines behind the link, each with the slots of ``limits``."""
        return 1

    def send(self, command: Command) -> None:
        """Send a command; raises ``EngineError`` if the engine has ended."""
        if self._ended is not None:
            raise self._ended
        self._pass(command)

    @abstractmethod
    def connect(self, listener: Listener) -> None:
        """Start a thread that calls ``listener`` with the engine's answers. Called once."""

    @abstractmethod
    def stop(self) -> None:
        """End the engine after its current iteration; open requests are refused."""

    @abstractmethod
    def _pass(self, command: Command) -> None:
        """Pass a command to the engine's thread or process."""
