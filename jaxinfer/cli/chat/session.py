"""The loop of a chat: reads an entry, runs a command or shows an answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jaxinfer.cli.chat.conversation import Answer, Conversation, Message
from jaxinfer.cli.chat.events import Answerer, End, Usage
from jaxinfer.cli.chat.reader import PROMPT, QUOTES, Entry, Reader
from jaxinfer.cli.chat.screen import Screen
from jaxinfer.core.errors import ContextLengthError, EngineError, JaxinferError, RequestError

LEAVE = ("exit", "bye", "quit")
HELP: Mapping[str, str] = MappingProxyType(
    {
        "/help": "this list",
        "/reset": "forget the conversation; the system message stays",
        "/system TEXT": "set the system message; without TEXT, show it",
        "/retry": "ask for another answer to the last message",
        "/save FILE": "write the conversation as JSON messages",
        "/load FILE": "go on with the conversation of such a file",
        "/stats": "tokens and times of the last answer, and the context used",
        "/exit": "end, as Ctrl-D does",
    }
)
KNOWN = ", ".join(name.split()[0] for name in HELP)
MULTILINE = f"{QUOTES} begins a message of several lines, and ends it."


@dataclass
class Times:
    """The times of one answer, and its tokens once it has ended."""

    start: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float = 0.0
    usage: Usage | None = None

    def note_text(self) -> None:
        """A part has arrived."""
        self.last = time.monotonic()
        self.first = self.first or self.last

    def lines(self) -> list[tuple[str, str]]:
        """(name, text) for ``/stats``."""
        first = "no token" if self.first is None else f"{self.first - self.start:.2f} s"
        if self.usage is None:
            return [("first token", first), ("tokens", "not reported (the answer was cut)")]
        usage, rate = self.usage, ""
        if self.first is not None and self.last > self.first and usage.generated > 1:
            rate = f", {(usage.generated - 1) / (self.last - self.first):.1f} tokens/s"
        cached = "" if usage.cached is None else f", {usage.cached} of them cached"
        return [
            ("first token", first),
            ("answer", f"{usage.generated} tokens{rate}"),
            ("prompt", f"{usage.prompt} tokens{cached}"),
        ]


class Session:
    """A conversation with one ``Answerer``."""

    def __init__(
        self,
        answerer: Answerer,
        conversation: Conversation,
        screen: Screen,
        sampling: Mapping[str, Any],
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        is_interactive: bool,
    ) -> None:
        """``sampling``: fields of each request. ``is_interactive``: Ctrl-C ends an answer only."""
        self.any_failed = False
        self._answerer = answerer
        self._conversation = conversation
        self._screen = screen
        self._is_interactive = is_interactive
        self._fields = {**sampling, "stream": True, "stream_options": {"include_usage": True}}
        if tools:
            self._fields["tools"] = [*tools]
        self._max_tokens: int | None = sampling.get("max_tokens")
        self._unanswered: Message | None = None
        self._times: Times | None = None  # of the last answer
        self._num_answers = self._num_generated = 0

    def run(self, reader: Reader) -> None:
        """Answer entries until the input ends, or ``/exit``. On a terminal, Ctrl-C clears the line,
        and a second one ends.
        """
        was_interrupted = False
        while True:
            try:
                entry = reader.next(self._prompt())
                if entry is None or entry.command in LEAVE:
                    break
                was_interrupted = False
                self.enter(entry)
            except KeyboardInterrupt:
                if not self._is_interactive:
                    raise
                self._screen.line_break()
                if was_interrupted:
                    return
                was_interrupted = True
                self._screen.remark("Ctrl-C again, Ctrl-D or /exit ends the chat.")
        if self._is_interactive and entry is None:
            self._screen.line_break()

    def _prompt(self) -> str:
        call = self._conversation.open_call
        if call is None:
            return PROMPT
        return f"result of {self._screen.shown(call['function']['name']):.60}> "

    def enter(self, entry: Entry) -> None:
        """Run a command, or answer a message."""
        if entry.command is None:
            self._answer(self._conversation.next_message(entry.text))
            return
        commands: dict[str, Callable[[str], None]] = {
            "help": self._help,
            "?": self._help,
            "reset": self._reset,
            "clear": self._reset,
            "system": self._system,
            "retry": self._retry,
            "save": self._save,
            "load": self._load,
            "stats": self._stats,
        }
        run = commands.get(entry.command)
        if run is None:
            self._fail(f"there is no command /{entry.command:.60}; use one of {KNOWN}")
            return
        try:
            run(entry.text)
        except JaxinferError as error:
            self._fail(str(error))

    # answers

    def _answer(self, asked: Message) -> None:
        """Show the answer to a message. The message stays in the conversation only with an answer;
        ``/retry`` sends it again.
        """
        answer, times, reason = Answer(), Times(), ""
        self._unanswered, self._times = asked, times
        try:
            request = {"messages": self._conversation.to_send(asked), **self._fields}
            with closing(self._answerer.answer(request)) as events:
                for event in events:
                    if isinstance(event, End):
                        reason, times.usage = event.reason, event.usage
                        continue
                    times.note_text()
                    answer.add(event)
                    self._screen.show(event)
        except KeyboardInterrupt:
            if not self._is_interactive:
                raise
            reason = "interrupted"
        except JaxinferError as error:
            self._screen.end()
            self._fail(self._explained(error))
            return
        self._screen.end()
        self._keep(asked, answer, reason)

    def _keep(self, asked: Message, answer: Answer, reason: str) -> None:
        """Add a message and its answer, which has ended, to the conversation."""
        message = answer.message(is_cut=reason in ("interrupted", "length", "abort"))
        usage = self._times.usage if self._times else None
        if message is None:
            endings = {"interrupted": "stopped before an answer", "length": self._limit(usage)}
            ending = endings.get(reason, "ended without an answer")
            self._screen.remark(f"({ending}; /retry sends the message again)")
            return
        self._conversation.messages += (asked, message)
        self._unanswered = None
        self._num_answers += 1
        self._num_generated += usage.generated if usage else 0
        if reason == "interrupted":
            self._screen.remark("(stopped; what was said stays in the conversation)")
        elif reason == "length":
            self._screen.remark(f"(cut: {self._limit(usage)})")
        if message.get("tool_calls"):
            self._screen.remark("(no tool is run here: the next message is the call's result)")

    def _limit(self, usage: Usage | None) -> str:
        """The limit that has ended an answer, and the remedy."""
        length = self._answerer.max_model_len
        if usage is not None and length and usage.prompt + usage.generated >= length:
            return f"the context of {length} tokens is full; /reset begins a new conversation"
        if self._max_tokens is not None:
            return f"the answer has --max-tokens {self._max_tokens}"
        return "the limit of tokens is reached; /reset begins a new conversation"

    def _explained(self, error: JaxinferError) -> str:
        if isinstance(error, ContextLengthError):
            length = self._answerer.max_model_len
            size = f" of {length} tokens" if length else ""
            return (
                f"the context{size} is full, so this message does not fit; /reset begins a new "
                "conversation, /save FILE keeps this one"
            )
        again = "; /retry sends the message again" if isinstance(error, EngineError) else ""
        return f"{str(error).removesuffix('; try again')}{again}"

    def _fail(self, text: str) -> None:
        self.any_failed = True
        self._screen.error(text)

    # commands

    def _help(self, text: str) -> None:
        del text
        lines = [f"{name:14} {words}" for name, words in HELP.items()]
        self._screen.say("\n".join([*lines, MULTILINE]))

    def _reset(self, text: str) -> None:
        del text
        self._conversation.messages.clear()
        self._unanswered = self._times = None
        self._screen.remark("(a new conversation)")

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = text
            self._screen.remark("(the system message is set)")
        else:
            self._screen.say(self._conversation.system or "(no system message)")

    def _retry(self, text: str) -> None:
        del text
        asked = self._unanswered or self._conversation.take_last_turn()
        if asked is None:
            raise RequestError("there is no message to send again; write one")
        self._answer(asked)

    def _save(self, text: str) -> None:
        path = _file(text, "/save FILE")
        self._conversation.save(path)
        self._screen.remark(f"(saved {len(self._conversation.messages)} messages to {path})")

    def _load(self, text: str) -> None:
        path = _file(text, "/load FILE")
        self._conversation.load(path)
        self._unanswered = self._times = None
        self._screen.remark(f"(loaded {len(self._conversation.messages)} messages from {path})")

    def _stats(self, text: str) -> None:
        del text
        lines = [] if self._times is None else self._times.lines()
        used = "no token yet"
        if self._times is not None and (usage := self._times.usage) is not None:
            total, length = usage.prompt + usage.generated, self._answerer.max_model_len
            used = f"{total} tokens"
            if length:
                used = f"{total} of {length} tokens, {100 * total / length:.0f} %"
        lines.append(("context", used))
        answers = "1 answer" if self._num_answers == 1 else f"{self._num_answers} answers"
        whole = f"{answers}, {self._num_generated} tokens generated"
        lines.append(("chat", whole))
        self._screen.say("\n".join(f"{name:14} {words}" for name, words in lines))


def _file(text: str, usage: str) -> Path:
    if not text:
        raise RequestError(f"the command needs a file; write {usage}")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise RequestError(f"{text} is in an unknown home folder; give another file") from None
