"""The engine: validated requests in, deltas out. It runs the loop, on one thread at a time.

Owns: seeds of unseeded requests, the n sequences of a request, counters, late compiles.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import msgspec

from jaxinfer.core.constraint import Constraint
from jaxinfer.core.errors import ArgumentError, EngineError, RequestError
from jaxinfer.core.limits import Limits
from jaxinfer.core.request import Request, RequestSpec
from jaxinfer.core.step import Abort, Arrive, Event, TokenEvent
from jaxinfer.engine.loop.interfaces import SLEEP_TAGS, Observer, Tiers, Weights
from jaxinfer.engine.loop.late_compiles import LateCompiles
from jaxinfer.engine.loop.later import LaterBuckets
from jaxinfer.engine.loop.loop import LOGGER, EngineLoop, StepExecutor
from jaxinfer.engine.loop.processor import SequenceProcessor, delta_of
from jaxinfer.engine.loop.profiler import Profiler
from jaxinfer.engine.loop.timeline import Timeline
from jaxinfer.engine.requests.facts import ModelFacts
from jaxinfer.engine.requests.news import NO_TIERS, EngineStats, News
from jaxinfer.engine.requests.outputs import Delta
from jaxinfer.engine.requests.points import SteeringVectors
from jaxinfer.engine.requests.seeds import seed_of
from jaxinfer.engine.requests.validate import ValidatedRequest, check_request, resolved_max_tokens
from jaxinfer.text.grammar.compile import ConstraintCompiler

if TYPE_CHECKING:
    from jaxinfer.exec.compile.build import LaterExecutables
    from jaxinfer.models.base import Params
    from jaxinfer.text.tokenizer import Tokenizer


class Engine:
    """Validates, runs and aborts requests; built by ``engine.start.build``."""

    def __init__(
        self,
        executor: StepExecutor[Any],
        limits: Limits,
        facts: ModelFacts,
        tokenizer: Tokenizer | None,
        *,
        seed: int = 0,
        overlap: bool = True,
        start: EngineStats | None = None,
        weights: Weights | None = None,
        later: LaterBuckets | None = None,
        tiers: Tiers | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.limits = limits
        self.facts = facts
        self.tokenizer, self.steering = tokenizer, SteeringVectors(limits.points)
        self._weights, self._tiers = weights, tiers
        first = None if later is None else later.executor.buckets
        self._observers = tuple(observers)
        self._loop = EngineLoop(
            executor, limits, overlap=overlap, buckets=first, tiers=tiers, observers=observers
        )
        self._later = later
        of_model = (tokenizer, facts.vocab_size, facts.eos_token_ids)
        self.constraints = ConstraintCompiler(*of_model, limits.max_num_seqs, limits.form)
        self._seed = seed
        self._start, self._counters = start or EngineStats(), Counter[str]()
        self._arrivals = 0
        self._pending: list[Event] = []
        # by the scheduler's ids: unique numbers, so that late events of an ended sequence are not
        # taken for those of a later request with the same name
        self._sequences: dict[str, SequenceProcessor] = {}
        self._children: dict[str, tuple[str, ...]] = {}  # unfinished sequences of each request
        self.profiler = Profiler(self._loop, self._parent_of, weights)
        self._timeline = Timeline()
        self._late_compiles = LateCompiles()
        self.weight_version = 0  # raised by every change of weights
        self.asleep: tuple[str, ...] = ()  # what is not on the device, of ``SLEEP_TAGS``
        self._sleep_level = 0
        self._failure: EngineError | None = None

    @property
    def has_work(self) -> bool:
        """True if ``step`` has something to do."""
        warms_up = self._later is not None and self._later.warms_up
        return self._failure is None and bool(warms_up or self._pending or not self._loop.idle)

    @property
    def saves_ahead(self) -> bool:
        """True if ``step`` saves pages before they are evicted, or notes that some are saved,
        though there is no work.
        """
        return self._failure is None and not self.asleep and self._loop.saves_ahead

    @property
    def executor(self) -> StepExecutor[Any]:
        """The object that runs the steps; a replay drives it without the loop."""
        return self._loop.executor

    @property
    def is_compiling(self) -> bool:
        """True while executables that would make some steps faster are not there yet."""
        return self._later is not None and not self._later.is_complete

    def load_others(self, deliver: Callable[[LaterExecutables], None]) -> None:
        """Let the executables that are not there yet be compiled or loaded on another thread.

        It calls ``deliver`` with each; the engine's thread passes them to ``add_executables``.
        """
        if self._later is not None:
            self._later.later.begin(deliver)

    def add_executables(self, loaded: LaterExecutables) -> None:
        """Let later steps use executables that ``load_others`` has delivered."""
        assert self._later is not None, "it delivers none"
        self._pending += self._later.add(loaded)
        self._start = msgspec.structs.replace(
            start := self._start,
            num_executables=start.num_executables + len(loaded.by_name),
            num_awaited=start.num_awaited - len(loaded.by_name),
            num_compiled=start.num_compiled + loaded.num_compiled,
        )

    def check(
        self, spec: RequestSpec, constraint: Constraint | Future[Any] | None = None
    ) -> ValidatedRequest:
        """Validate a request for ``add_validated``; raises ``RequestError`` if the engine can never
        answer it.

        ``constraint``: that of its parameters, or its future, from ``constraints``; else it is
        compiled now, which may take seconds.
        """
        prompt = check_request(spec, self.limits, self.facts, self.tokenizer)
        if constraint is None and spec.sampling.is_constrained:
            constraint = self.constraints.submit(spec.sampling)
        compiled = constraint.result() if isinstance(constraint, Future) else constraint
        spec = msgspec.structs.replace(spec, prompt_token_ids=prompt)
        return ValidatedRequest(spec, compiled, self.steering.resolved(spec.sampling))

    def add_request(
        self, request_id: str, spec: RequestSpec, constraint: Constraint | None = None
    ) -> None:
        """Validate and add a request, see ``check``; raises ``RequestError`` if it is refused."""
        self.add_validated(request_id, self.check(spec, constraint))

    def add_validated(self, request_id: str, validated: ValidatedRequest) -> None:
        """Add a request that ``check`` has validated."""
        self._check_accepting(request_id)
        spec = validated.spec
        requests = [self._request(validated, index) for index in range(spec.sampling.n)]
        for index, request in enumerate(requests):
            self._sequences[request.request_id] = SequenceProcessor(
                request, request_id, index, self.tokenizer
            )
            self._pending.append(Arrive(request))
        children = tuple([request.request_id for request in requests])
        self._arrivals += len(children)
        self._children[request_id] = children
        self._timeline.arrive(children)
        self._counters["num_requests"] += 1
        self._counters["num_prompt_tokens"] += len(spec.prompt_token_ids) * len(children)

    def abort(self, request_id: str) -> None:
        """End a request; its pages are free after the next step. Unknown ids are ignored."""
        self._pending += [Abort(child) for child in self._children.get(request_id, ())]

    def abort_all(self) -> None:
        """``abort`` every request; they have ended once ``has_work`` is False."""
        for request_id in self._children:
            self.abort(request_id)

    def wait_until_launchable(self) -> None:
        """Return once another step may be launched, so that requests that arrive before the next
        ``step`` can join it.
        """
        try:
            with self._late_compiles:
                if self._loop.wait_until_launchable():
                    self._timeline.step_ended()
        except Exception as error:
            raise self._stop(error) from error

    def drain(self) -> News:
        """Wait for the steps in flight without launching another; requests stay open."""
        return self.step(launches=False)

    def step(self, *, launches: bool = True) -> News:
        """One iteration of the loop: schedule and launch a step, return the news."""
        iterate = self._loop.iterate if launches else self._loop.drain
        events, self._pending = tuple(self._pending), []
        try:
            later, excluded = self._later, events or self.asleep
            if later is not None and later.warms_up and not excluded and self._loop.idle:
                later.warm_up_next()
            with self._late_compiles:
                iteration = iterate(events)
                steps, newly_started = self._timeline.record(iteration)
                started = self._parents_of(newly_started)  # before an event can end one of them
                processed = [self._process(event) for event in iteration.events]
                deltas = [delta for delta in processed if delta is not None]
        except Exception as error:
            raise self._stop(error) from error
        self._counters["num_iterations"] += 1
        return News(tuple(deltas), started, steps, self.stats())

    @property
    def weights(self) -> Weights:
        """The weights; raises ``EngineError`` for an engine that was built without them."""
        if self._weights is None:
            raise EngineError(
                "this engine gives no access to its weights; build it with LLM or AsyncLLM"
            )
        return self._weights

    def replace_weights(self, params: Params, reference: str = "") -> None:
        """Let later steps read weights that ``weights.prepared`` returned, and forget all prefixes.
        ``reference``: what they were read from, for observers; empty: a tree.

        Requests that are open after a ``drain`` go on with them: their KV is computed again. Raises
        ``EngineError`` if a step is in flight.
        """
        weights = self.weights
        self._reset_prefix_cache(weights_changed=True)
        weights.replace(params)
        for observer in self._observers:
            observer.weights_changed(reference)
        self.weight_version += 1
        self._note_awake("weights")

    def reset_prefix_cache(self) -> None:
        """Forget all prefixes, also in tiers, so that no later request reuses a page computed
        before.

        The KV of requests that are open after a ``drain`` is computed again. Raises ``EngineError``
        if a step is in flight.
        """
        self._reset_prefix_cache(weights_changed=False)

    def _reset_prefix_cache(self, *, weights_changed: bool) -> None:
        self._check_drained()
        self._loop.give_up_pages()
        if self._tiers is not None:
            self._tiers.clear(weights_changed=weights_changed)

    def sleep(self, level: int = 1) -> None:
        """Give the device's memory of weights, pages and slots back until ``wake_up``.

        At level 1 the weights are kept in host memory, at level 2 they are dropped: then the next
        ``replace_weights`` brings them back. Open requests keep their tokens, as in
        ``reset_prefix_cache``. Raises ``EngineError`` if a step is in flight, and ``ArgumentError``
        for another level.
        """
        if level not in (1, 2):
            raise ArgumentError(f"level must be 1 or 2, got {level!r}")
        self._check_drained()
        weights = self.weights
        if "kv_cache" not in self.asleep:
            self._loop.free_state()
        weights.sleep(level)
        self.asleep, self._sleep_level = SLEEP_TAGS, level

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the device's memory again: for ``weights``, ``kv_cache``, or by default both.

        Weights that were dropped stay away. Raises ``ArgumentError`` for another tag, and
        ``EngineError`` if the device has no memory for it.
        """
        for tag in tags or ():
            if tag not in SLEEP_TAGS:
                raise ArgumentError(f"tags must be of {', '.join(SLEEP_TAGS)}, got {tag!r}")
        given = SLEEP_TAGS if tags is None else tags
        if "weights" in given and "weights" in self.asleep and self.weights.wake_up():
            self._note_awake("weights")
        if "kv_cache" in given and "kv_cache" in self.asleep:
            self._loop.make_state()
            self._note_awake("kv_cache")

    def _note_awake(self, awake: str) -> None:
        self.asleep = tuple(tag for tag in self.asleep if tag != awake)

    def _check_drained(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._loop.state.in_flight:
            raise EngineError(
                "requests are open; finish or abort them before the prefix cache or the weights "
                "change"
            )

    def stats(self) -> EngineStats:
        """The counters and present values."""
        state = self._loop.state
        return msgspec.structs.replace(
            self._start,
            num_preemptions=state.num_preemptions,
            num_restored_tokens=state.num_restored_tokens,
            num_late_compiles=self._late_compiles.count,
            num_running=len(state.running),
            num_waiting=len(state.waiting),
            num_live_pages=sum(state.num_live_pages),
            num_live_pages_of_groups=state.num_live_pages,
            num_cached_pages=sum([pool.num_cached for pool in state.pools]),
            num_fresh_pages=sum([pool.num_fresh for pool in state.pools]),
            weight_version=self.weight_version,
            sleep_level=self._sleep_level if self.asleep else 0,
            tiers=NO_TIERS if self._tiers is None else self._tiers.stats(),
            **self._counters,
        )

    def close(self) -> None:
        """End work in the background; the engine is not used again."""
        self.constraints.close()
        if self._tiers is not None:
            self._tiers.close()
        for observer in self._observers:
            observer.close()
        if self._later is not None:
            self._later.later.close()

    def _stop(self, error: Exception) -> EngineError:
        """Stop the engine, as its state can no longer be trusted; returns its last error."""
        self._failure = EngineError(f"the engine stopped: {error}; build a new one")
        logging.getLogger(LOGGER).critical(str(self._failure), exc_info=error)
        return self._failure

    def _parents_of(self, sequences: tuple[str, ...]) -> tuple[str, ...]:
        """The request ids of those sequences that are the first of their request."""
        known = (self._sequences.get(child) for child in sequences)
        return tuple(child.parent_id for child in known if child and child.index == 0)

    def _parent_of(self, child: str) -> str:
        """The request of a sequence; its own id if it has ended while a step computed for it."""
        known = self._sequences.get(child)
        return child if known is None else known.parent_id

    def _process(self, event: TokenEvent) -> Delta | None:
        sequence = self._sequences.get(event.request_id)
        if sequence is None:
            return None  # a stop string ended it while this token was in flight
        delta = delta_of(sequence, event, self.weight_version)
        if event.token_ids or event.output.pooled is not None:
            if self._timeline.token(event.request_id):
                self._counters["num_prefilled_tokens"] += sequence.num_prompt_tokens
                self._counters["num_looked_up_tokens"] += sequence.num_looked_up
                self._counters["num_cached_tokens"] += delta.num_cached_tokens
            self._counters["num_generated_tokens"] += len(delta.token_ids)
        if delta.finish_reason is not None and event.finish_reason is None:
            self._pending.append(Abort(event.request_id, delta.finish_reason))
        if delta.finish_reason is not None:
            self._forget(event.request_id, sequence.parent_id)
            return msgspec.structs.replace(delta, times=self._timeline.finish(event.request_id))
        return delta

    def _check_accepting(self, request_id: str) -> None:
        """Raise if the engine has stopped or sleeps, or the request id is in use."""
        if self._failure is not None:
            raise self._failure
        if self.asleep:
            raise EngineError(
                f"the engine sleeps without its {' and '.join(self.asleep)}; call wake_up, and "
                "after sleep(level=2) update_weights"
            )
        if request_id in self._children:
            raise RequestError(f"request id {request_id!r} is in use; choose another")

    def _forget(self, child: str, parent: str) -> None:
        del self._sequences[child]
        left = tuple(other for other in self._children[parent] if other != child)
        if left:
            self._children[parent] = left
        else:
            del self._children[parent]

    def _request(self, validated: ValidatedRequest, index: int) -> Request:
        """Sequence ``index`` of the next request."""
        arrival, spec = self._arrivals + index, validated.spec
        num_tokens, sampling = len(spec.prompt_token_ids), spec.sampling
        given = msgspec.structs.asdict(spec)
        if index and sampling.prompt_logprobs is not None:  # the prompt is scored once
            given["sampling"] = msgspec.structs.replace(sampling, prompt_logprobs=None)
        # a complete answer ends: nothing may follow it
        continues = sampling.ignore_eos and sampling.structured_outputs is None
        most = 1 if spec.pools else resolved_max_tokens(num_tokens, sampling, self.limits)
        return Request(
            **given,
            request_id=str(arrival),
            max_tokens=most,
            seed=seed_of(sampling, index, arrival, self._seed),
            eos_token_ids=() if continues else self.facts.eos_token_ids,
            arrival=arrival,
            steering=validated.steering,
            constraint=validated.constraint,
        )
