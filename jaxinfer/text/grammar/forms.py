"""``FormCompiler``: forms wait for a trial, fairly between clients, and are compiled if it passes.

Threads that try forms wait for another process; one thread compiles the accepted ones.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from jaxinfer.core.errors import EngineError, JaxinferError, QueueFullError, RequestError
from jaxinfer.core.fair_queue import FairQueue
from jaxinfer.core.log import tell
from jaxinfer.core.structured import FIELD, StructuredOutputsParams
from jaxinfer.text.grammar.constraint import Grammar
from jaxinfer.text.grammar.grammars import Grammars
from jaxinfer.text.grammar.library import load_llguidance
from jaxinfer.text.grammar.prepared import annotated_formats
from jaxinfer.text.grammar.table import GrammarTable
from jaxinfer.text.grammar.trial import COMPILE_STACK, Accepted, Outcome
from jaxinfer.text.grammar.trials import TrialProcess, outcome

LOGGER = "jaxinfer.engine"
MAX_TRIALS = 4  # at once, on as many cores
NUM_ATTEMPTS = 2  # of a trial whose process was ended by something else than the form
STACK_BYTES = 4 * COMPILE_STACK  # so that no form overflows it that has not overflowed its trial's
# Forms that wait for a trial or are tried, and their characters. Forms of the engine's own process
# (of ``LLM`` and files of requests), whose client has no name, are not limited.
MAX_FORMS, MAX_CHARACTERS = 512, 64 << 20
MAX_FORMS_OF_CLIENT, MAX_CHARACTERS_OF_CLIENT = 128, 16 << 20


@dataclass(eq=False)
class _Form:
    """A form without a known grammar."""

    params: StructuredOutputsParams
    client: str  # that has sent it first
    requests: list[_Request] = field(default_factory=list)  # that wait for it
    waits_for: list[str] = field(default_factory=list)  # clients in whose turn it may be tried
    trial: socket.socket | None = None  # while it is tried


@dataclass(eq=False)
class _Request:
    """A caller that waits for the result of ``finish``, which is called with the grammar."""

    client: str
    finish: Callable[[Grammar | None], Any]
    done: Future[Any] = field(default_factory=Future)
    form: _Form | None = None  # whose trial it waits for


class FormCompiler:
    """Compiles forms; ``submit`` may be called on any thread."""

    def __init__(self, table: GrammarTable, max_bytes: int) -> None:
        self._table = table
        self._trials = TrialProcess(table.vocabulary)
        self._changed = threading.Condition()  # the lock of all that follows
        self._grammars = Grammars(max_bytes)
        self._forms: dict[StructuredOutputsParams, _Form] = {}
        self._untried = FairQueue[_Form]()
        self._work = FairQueue[Callable[[], None]]()  # of the thread that compiles
        self._compiles = self._tries = False  # the threads have been started
        self._closed = False

    @property
    def trial_pid(self) -> int | None:
        """The id of the process that forks trials; None before the first form."""
        return self._trials.pid

    def prepare(self) -> None:
        """Make the table of the vocabulary and start the process of trials, on other threads; does
        nothing if no form can be compiled, or if both have been begun.
        """
        with self._changed, suppress(JaxinferError):
            load_llguidance()
            if not self._closed:
                self._start(needs_trial=True)
                self._changed.notify_all()

    def submit[T](
        self,
        params: StructuredOutputsParams | None,
        client: str,
        finish: Callable[[Grammar | None], T],
    ) -> Future[T]:
        """The result of ``finish``, called on the thread that compiles with the form's grammar.

        The future has a ``RequestError`` if the form is refused, and a ``QueueFullError`` if too
        many wait. Once every future of a form is cancelled, its trial ends.
        """
        request = _Request(client, finish)
        try:
            with self._changed:
                if self._closed:
                    raise EngineError("the engine is shut down; build a new one")
                self._queue(request, params)
                self._changed.notify_all()
        except JaxinferError as error:
            request.done.set_exception(error)
        request.done.add_done_callback(lambda done: done.cancelled() and self._leave(request))
        return request.done

    def close(self) -> None:
        """End the threads and the process of trials; requests that wait are cancelled."""
        with self._changed:
            self._closed = True
            waiting = [one for form in self._forms.values() for one in form.requests]
            self._changed.notify_all()
        for request in waiting:
            request.done.cancel()
        self._trials.close()

    # with the lock

    def _queue(self, request: _Request, params: StructuredOutputsParams | None) -> None:
        self._start(needs_trial=params is not None)
        found = None if params is None else self._grammars.find(params)
        if params is None or found is not None:
            self._work.put(request.client, partial(self._finish, request, found))
            return
        form = self._forms.get(params)
        if form is None:
            self._check_room(request.client, params)
            form = self._forms[params] = _Form(params, request.client)
            form.waits_for.append(request.client)
            self._untried.put(request.client, form)
        elif form.waits_for and request.client not in form.waits_for:
            form.waits_for.append(request.client)
            self._untried.put(request.client, form)
        form.requests.append(request)
        request.form = form

    def _start(self, *, needs_trial: bool) -> None:
        """Start the threads that are needed first now."""
        if not self._compiles:
            self._compiles = True
            before = threading.stack_size(STACK_BYTES)  # of threads that start from now on
            try:
                self._thread(self._compile, "jaxinfer-grammar").start()
            finally:
                threading.stack_size(before)
        if needs_trial and not self._tries:
            self._table.check()
            self._tries = True
            self._work.put("", self._table.prepare)
            for number in range(min(os.cpu_count() or 1, MAX_TRIALS)):
                self._thread(self._try_forms, f"jaxinfer-form-{number}").start()

    def _thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        return threading.Thread(target=target, name=name, daemon=True)

    def _check_room(self, client: str, params: StructuredOutputsParams) -> None:
        """Raise ``QueueFullError`` if a further form of a client would be too many."""
        if not client:
            return
        sizes = [(form.client, form.params.num_characters) for form in self._forms.values()]
        own = [size for other, size in sizes if other == client]
        size = params.num_characters
        if (
            len(sizes) >= MAX_FORMS
            or sum(size for _, size in sizes) + size > MAX_CHARACTERS
            or len(own) >= MAX_FORMS_OF_CLIENT
            or sum(own) + size > MAX_CHARACTERS_OF_CLIENT
        ):
            raise QueueFullError(
                f"{FIELD} cannot be compiled now: {len(sizes)} other forms wait, {len(own)} of "
                "them yours; try again later"
            )

    def _unqueue(self, form: _Form) -> None:
        for client in form.waits_for:
            self._untried.remove(client, form)
        form.waits_for.clear()

    def _forget(self, form: _Form) -> list[_Request]:
        """End the wait for a form; returns its requests."""
        self._unqueue(form)
        if self._forms.get(form.params) is form:
            del self._forms[form.params]
        requests, form.requests = form.requests, []
        return requests

    # on any thread

    def _leave(self, request: _Request) -> None:
        """Take back a request; a form that no request waits for any more is not compiled."""
        with self._changed:
            form = request.form
            if form is None or request not in form.requests:
                return
            form.requests.remove(request)
            if not form.requests:
                self._forget(form)
                if form.trial is not None:
                    with suppress(OSError):  # its process has died
                        form.trial.shutdown(socket.SHUT_RDWR)

    def _refuse(self, form: _Form, error: Exception) -> None:
        if not isinstance(error, JaxinferError):
            error = EngineError(f"{FIELD} could not be compiled ({type(error).__name__}: {error})")
        with self._changed:
            requests = self._forget(form)
        for request in requests:
            if request.done.set_running_or_notify_cancel():
                request.done.set_exception(error)

    # on the threads that try forms

    def _try_forms(self) -> None:
        with suppress(Exception):  # each trial reports it
            self._trials.start()
        while (form := self._next_form()) is not None:
            try:
                found = self._outcome(form)
            except Exception as error:
                self._refuse(form, error)
                continue
            if isinstance(found, Accepted):
                with self._changed:
                    self._work.put(form.client, partial(self._build, form, found))
                    self._changed.notify_all()
            elif found is not None:
                error = RequestError(found.message)
                with self._changed:
                    self._grammars.keep(form.params, error)
                self._refuse(form, error)

    def _next_form(self) -> _Form | None:
        """The next form, without which it waits; None once the compiler is closed."""
        with self._changed:
            while not self._untried and not self._closed:
                self._changed.wait()
            if self._closed:
                return None
            form = self._untried.take()
            self._unqueue(form)
            return form

    def _outcome(self, form: _Form) -> Outcome | None:
        """The outcome of a form's trial; None if no request waits for it any more."""
        for _ in range(NUM_ATTEMPTS):
            with self._trials.begin() as end:
                with self._changed:
                    if not form.requests:
                        return None
                    form.trial = end
                found = outcome(end, form.params)
                with self._changed:
                    form.trial = None
                    if found is not None or not form.requests:
                        return found
        raise EngineError(
            f"{FIELD} could not be compiled: the process for it was ended, perhaps because the "
            "system has run out of memory; send the request again"
        )

    # on the thread that compiles

    def _compile(self) -> None:
        while (work := self._next_work()) is not None:
            with suppress(Exception):  # of ``prepare``: every trial reports it
                work()

    def _next_work(self) -> Callable[[], None] | None:
        with self._changed:
            while not self._work and not self._closed:
                self._changed.wait()
            return self._work.take() if self._work else None

    def _build(self, form: _Form, accepted: Accepted) -> None:
        """Compile an accepted form, unless no request waits for it any more."""
        try:
            with self._changed:
                if not form.requests:
                    return
                self._grammars.make_room(accepted.num_bytes)
            grammar = self._table.grammar(form.params.kind, accepted)
        except Exception as error:
            self._refuse(form, error)
            return
        _note_annotations(form.params)
        with self._changed:
            self._grammars.keep(form.params, grammar)
            for request in self._forget(form):
                self._work.put(request.client, partial(self._finish, request, grammar))

    def _finish(self, request: _Request, found: Grammar | RequestError | None) -> None:
        if not request.done.set_running_or_notify_cancel():
            return
        try:
            if isinstance(found, RequestError):
                raise RequestError(str(found))  # each has a traceback of its own
            if found is not None:
                found.grow()
            result = request.finish(found)
        except Exception as error:
            request.done.set_exception(error)
        else:
            request.done.set_result(result)


def _note_annotations(params: StructuredOutputsParams) -> None:
    """Name, in a log of details, what an accepted schema says and its grammar does not follow."""
    logger, text = logging.getLogger(LOGGER), params.json or params.structural_tag
    if text is None or not logger.isEnabledFor(logging.DEBUG):
        return
    if formats := annotated_formats(json.loads(text)):
        words = f"{FIELD}.{params.kind}: formats that are annotations: {', '.join(formats)}"
        tell(logger, logging.DEBUG, "annotations", words[:500], formats=formats)
