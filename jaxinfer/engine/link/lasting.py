"""``Lasting``: the changes that replicas have made, for one that starts later."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field

from msgspec.structs import replace

from jaxinfer.core.errors import EngineError, JaxinferError
from jaxinfer.engine.link.link import Link
from jaxinfer.engine.link.wire import Control, Controlled, EngineState, SetSteering
from jaxinfer.engine.loop.interfaces import SLEEP_TAGS

type Change = Control | SetSteering


@dataclass
class Lasting:
    """The weights, steering vectors, pause and sleep of replicas that differ from those of a start.

    Only changes that were made are noted, so a later failure does not undo an earlier change.
    """

    _weights: Control | None = None
    _steering: dict[str, SetSteering] = field(default_factory=dict[str, SetSteering])
    _paused: bool = False
    _asleep: tuple[str, ...] = ()
    _level: int = 1  # of the last sleep

    def note(self, command: Change, state: EngineState) -> Change:
        """A command that was executed, and the state after it.

        Returns the command for an engine that is about to follow; number 0, no request is open.
        """
        if isinstance(command, Control):
            version = state.weight_version if command.action == "update_weights" else 0
            command = replace(command, number=0, mode="wait", version=version)
        else:
            command = replace(command, number=0)
        match command:
            case SetSteering(_, name, None):
                self._steering.pop(name, None)
            case SetSteering(_, name, _):
                self._steering[name] = command
            case Control(_, "update_weights"):
                self._weights = command
            case Control(_, "sleep"):
                self._level = command.level
            case _:
                pass
        self._paused, self._asleep = state.paused, state.asleep
        return command

    def commands(self) -> list[Change]:
        """The commands after which a new engine is as the others; each after the one before."""
        found: list[Change] = [*self._steering.values()]
        if self._weights is not None:
            found.append(self._weights)
        if self._paused:
            found.append(Control(0, "pause"))
        if self._asleep:
            # at level 2 the engine drops weights, so not if they are awake again
            level = self._level if "weights" in self._asleep else 1
            found.append(Control(0, "sleep", level=level))
            if awake := tuple(tag for tag in SLEEP_TAGS if tag not in self._asleep):
                found.append(Control(0, "wake_up", tags=awake))
        return found


@dataclass
class Joining:
    """A replica that was started again, until it is as the others."""

    link: Link
    commands: deque[Change]  # that it has to execute, in their order
    sent: bool = False  # the first of them
    done: Future[None] = field(default_factory=Future[None])

    def send_next(self) -> None:
        """Send the first of the commands, unless it has been sent."""
        if self.sent or self.done.done():
            return
        self.sent = True
        try:
            self.link.send(self.commands[0])
        except EngineError as error:
            self.done.set_exception(error)

    def take(self, answer: Controlled) -> None:
        """The answer to the first of the commands."""
        self.commands.popleft()
        self.sent = False
        if answer.failure is not None:
            self.fail(answer.failure.error)

    def fail(self, error: JaxinferError) -> None:
        """It cannot join."""
        if not self.done.done():
            self.done.set_exception(error)
