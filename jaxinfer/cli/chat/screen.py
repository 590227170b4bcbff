"""The output of a chat: answers on stdout, remarks and errors on stderr."""

from __future__ import annotations

from types import MappingProxyType
from typing import TextIO

from jaxinfer.cli.chat.events import CallPart, End, Event, Thought

DIM, RED, PLAIN = "\x1b[2m", "\x1b[31m", "\x1b[0m"
# A model's text must not move the cursor or change the terminal: controls but tab and newline.
SHOWN_CONTROLS = MappingProxyType(
    {
        **{code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n\r"},
        **dict.fromkeys(range(0x7F, 0xA0), "\ufffd"),
        ord("\r"): "",
    }
)


class Screen:
    """Writes events as they come. Thoughts and calls are shown on a terminal only."""

    def __init__(self, out: TextIO, err: TextIO, *, colours: bool) -> None:
        """``colours``: where a stream is a terminal, text may have them."""
        self._out, self._err = out, err
        self._is_terminal = out.isatty()
        self._has_colours = colours and self._is_terminal
        self._colours_notes = colours and err.isatty()
        self._kind: type[Event] | None = None  # of the part that is open
        self._call: int | None = None  # the number of the call that is open
        self._line_is_open = False

    def show(self, event: Event) -> None:
        """Write an event; a part of another kind begins on a line of its own."""
        if isinstance(event, End) or (isinstance(event, Thought) and not self._is_terminal):
            return
        number = event.number if isinstance(event, CallPart) else None
        if type(event) is not self._kind or number != self._call:
            self._begin(event)
            self._kind, self._call = type(event), number
        self._write(event.arguments if isinstance(event, CallPart) else event.text)
        self._out.flush()

    def end(self) -> None:
        """End the answer with its line; also after an answer that was cut."""
        self._close()
        if self._line_is_open:
            self._out.write("\n")
        self._line_is_open = False
        self._out.flush()

    def line_break(self) -> None:
        """End the line of the prompt."""
        self._out.write("\n")
        self._out.flush()

    def say(self, text: str) -> None:
        """The output of a command."""
        self._out.write(f"{self.shown(text)}\n")
        self._out.flush()

    def remark(self, text: str) -> None:
        """A line about the conversation."""
        self._note(text, DIM)

    def error(self, text: str) -> None:
        """The sentence of an error."""
        self._note(f"error: {text}", RED)

    def _note(self, text: str, colour: str) -> None:
        begin, end = (colour, PLAIN) if self._colours_notes else ("", "")
        self._err.write(f"{begin}{self.shown(text)}{end}\n")
        self._err.flush()

    def _begin(self, event: Event) -> None:
        self._close()
        if self._line_is_open:
            self._out.write("\n")
        if isinstance(event, Thought):
            self._out.write(self._dim("Thoughts: "))
        elif isinstance(event, CallPart):
            self._out.write(self._dim(f"Call of {self.shown(event.name)}: "))
        if isinstance(event, Thought | CallPart) and self._has_colours:
            self._out.write(DIM)

    def _close(self) -> None:
        """End the open part."""
        if self._kind in (Thought, CallPart) and self._has_colours:
            self._out.write(PLAIN)
        if self._kind is Thought and self._line_is_open:
            self._out.write("\n")
        self._kind = self._call = None

    def _dim(self, text: str) -> str:
        return f"{DIM}{text}{PLAIN}" if self._has_colours else text

    def _write(self, text: str) -> None:
        self._out.write(self.shown(text))
        if text:
            self._line_is_open = not text.endswith("\n")

    def shown(self, text: str) -> str:
        """The text as this stream may have it."""
        return text.translate(dict(SHOWN_CONTROLS)) if self._is_terminal else text
