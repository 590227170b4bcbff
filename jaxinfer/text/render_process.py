"""A process that renders chats: ``python -m jaxinfer.text.render_process FD``.

A template may take hours for one operation, which no thread can end. The system ends this process
when a chat has had its CPU time, or ``WALL_TIMES`` as long without getting it, and gives it at most
``MAX_MEMORY``. It answers the requests on the socket ``FD`` one after another, and ends when the
socket is closed and no template runs.
"""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import msgspec

from jaxinfer.core.errors import ContextLengthError, RequestError, TokenizerError
from jaxinfer.text.answers.formats import CallText
from jaxinfer.text.chat import MAX_COMPILED_TEMPLATES, ChatTemplate

WALL_TIMES = 15.0
MAX_MEMORY = 1 << 30  # bytes of address space, of which an idle process has 150 MB
KEPT_MEMORY = 1 << 28  # a process that has had more resident memory is replaced
LENGTH_BYTES = 4  # before each message, little endian


class RenderRequest(msgspec.Struct, frozen=True):
    """A chat, and the template that makes a prompt of it; see ``ChatTemplate.render``."""

    template: str
    messages: tuple[Any, ...]
    max_characters: int
    special_tokens: dict[str, str] = {}
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: dict[str, Any] = {}
    calls: CallText | None = None
    max_seconds: float = 2.0  # of CPU time, so that a busy machine refuses no chat


class Rendered(msgspec.Struct, frozen=True):
    """The prompt, or why there is none: a ``ContextLengthError``, another ``RequestError`` or a
    ``TokenizerError``.
    """

    text: str | None
    length_error: str = ""
    request_error: str = ""
    template_error: str = ""

    def prompt(self) -> str:
        """The prompt; raises the error."""
        if self.text is not None:
            return self.text
        if self.length_error:
            raise ContextLengthError(self.length_error)
        if self.request_error:
            raise RequestError(self.request_error)
        raise TokenizerError(self.template_error)


@lru_cache(maxsize=MAX_COMPILED_TEMPLATES)
def _template(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    return ChatTemplate(source, special_tokens=dict(special_tokens))


def rendered(request: RenderRequest) -> Rendered:
    """The answer to a request, in this process."""
    try:
        template = _template(request.template, tuple(request.special_tokens.items()))
        text = template.render(
            request.messages,
            add_generation_prompt=request.add_generation_prompt,
            continue_final_message=request.continue_final_message,
            variables=request.variables,
            max_characters=request.max_characters,
            calls=request.calls,
        )
    except ContextLengthError as error:
        return Rendered(None, length_error=str(error))
    except RequestError as error:
        return Rendered(None, request_error=str(error))
    except TokenizerError as error:
        return Rendered(None, template_error=str(error))
    return Rendered(text)


def _answer(frame: bytes, decoder: msgspec.json.Decoder[RenderRequest]) -> bytes:
    try:
        request = decoder.decode(frame)
        with _limited(request.max_seconds):
            answer = rendered(request)
        return msgspec.json.encode(answer)
    except (MemoryError, UnicodeEncodeError) as error:  # of the message or of its answer
        why = "needs too much memory" if isinstance(error, MemoryError) else "gives no UTF-8"
        return msgspec.json.encode(Rendered(None, template_error=f"The chat template {why}."))


@contextmanager
def _limited(seconds: float) -> Generator[None]:
    """Let the system end this process with SIGPROF or SIGALRM if the scope takes too long."""
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.setitimer(signal.ITIMER_REAL, WALL_TIMES * seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def main() -> None:
    """Serve the socket whose file descriptor is on the command line."""
    end = socket.socket(fileno=int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    from jaxinfer.text import jinja  # at the start rather than for the first chat

    del jinja
    for number in (signal.SIGPROF, signal.SIGALRM):  # the caller may ignore or block them
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
    decoder = msgspec.json.Decoder(RenderRequest)
    requests = end.makefile("rb")
    while head := requests.read(LENGTH_BYTES):
        frame = requests.read(int.from_bytes(head, "little"))
        answer = _answer(frame, decoder)
        end.sendall(len(answer).to_bytes(LENGTH_BYTES, "little") + answer)
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10 > KEPT_MEMORY:
            break  # between two chats, so the next one gets a new process
    os._exit(0)  # the socket closes with the process


if __name__ == "__main__":
    main()
