"""The offline API under vLLM's names: ``LLM(...).generate(prompts, SamplingParams(...))``.

``LLM`` runs the engine on the caller's thread; between calls nothing runs.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import batched, count
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, Self, cast

from jaxinfer.core.errors import EngineError, RequestError, TaskError
from jaxinfer.core.host_memory import full_collections_deferred, gc_paused
from jaxinfer.core.progress import NO_PROGRESS, Progress
from jaxinfer.core.request import RequestSpec, SamplingParams
from jaxinfer.engine.api.beam_search import BeamMethods
from jaxinfer.engine.api.pooling import PoolingMethods
from jaxinfer.engine.api.vllm_args import engine_config
from jaxinfer.engine.loop.interfaces import reference_of
from jaxinfer.engine.loop.profiler import NUM_STEPS
from jaxinfer.engine.requests.news import EngineStats
from jaxinfer.engine.requests.outputs import Collector, Delta, RequestOutput
from jaxinfer.engine.requests.prompts import Prompt, encode, parse_prompts
from jaxinfer.engine.requests.validate import ValidatedRequest
from jaxinfer.engine.start.progress import progress_on
from jaxinfer.engine.start.start import start_engine
from jaxinfer.text.answers.formats import answer_format

if TYPE_CHECKING:
    from jaxinfer.core.config import EngineConfig
    from jaxinfer.engine.api.language_model import LanguageModel
    from jaxinfer.engine.loop.engine import Engine
    from jaxinfer.models.base import Params
    from jaxinfer.text.tokenizer import Tokenizer

ADDED_AT_ONCE = 64  # requests between checks for Ctrl-C; a check takes as long as adding one


class LLM(PoolingMethods, BeamMethods):
    """A model that answers prompts. Arguments are vLLM's; ``EngineConfig`` describes them.

    ``progress`` shows the start and, with ``use_tqdm``, generation; by default as bars on stderr.
    Raises a ``JaxinferError`` if the model or a setting cannot be used.
    """

    def __init__(
        self, model: str | None = None, *, progress: Progress | None = None, **arguments: Any
    ) -> None:
        self._progress = progress or progress_on(sys.stderr)
        config = engine_config(model, arguments)
        if config.prefill_first is None:  # no token is streamed
            config = replace(config, prefill_first=True)
        self._serve(start_engine(config, self._progress), config)

    @classmethod
    def of_engine(cls, engine: Engine, config: EngineConfig, progress: Progress) -> Self:
        """An ``LLM`` over an engine that has been built with these settings."""
        llm = cls.__new__(cls)
        llm._progress = progress
        llm._serve(engine, config)
        return llm

    def _serve(self, engine: Engine, config: EngineConfig) -> None:
        self.config = config
        self._engine = engine
        self._numbers = count()
        self._answering = False

    @property
    def model(self) -> LanguageModel:
        """The weights that are served now, as ``jaxinfer.load`` gives them, without a copy; on
        several devices a copy, as their parts are in another order.

        After ``update_weights`` the property gives another object, with the new weights.
        """
        from jaxinfer.engine.api.language_model import model_of_engine  # imports JAX

        return model_of_engine(self._engine, self.generate)

    def update_weights(self, weights: Params | str | Path) -> None:
        """Serve other weights of the same model from the next step on, and forget all prefixes.

        ``weights`` is a tree of parameters as ``llm.model.params``, or a folder or other reference
        to a model. Matrices that the engine keeps quantised may be floats, as ``jaxinfer.load``
        gives them: they are quantised to the same form. Nothing is compiled. Arrays that are on the
        device are not copied: they must not be donated to a later call. Both old and new weights
        are in memory until this returns. If the weights do not fit, the old ones stay:
        ``ArgumentError`` names the parameter whose path, shape or dtype is wrong, or that is not
        finite, and ``ConfigError`` or ``SourceError`` says what is wrong with a folder. Raises
        ``EngineError`` while a stream is open.
        """
        self._check_no_request()
        prepared = self._engine.weights.prepared(weights)
        with interrupts_deferred():
            self._engine.replace_weights(prepared, reference_of(weights))

    def reset_prefix_cache(self) -> bool:
        """Forget all prefixes; returns True, as in vLLM.

        Raises ``EngineError`` while a stream is open.
        """
        self._check_no_request()
        self._engine.reset_prefix_cache()
        return True

    def set_steering(self, name: str, vector: Any) -> None:
        """Keep a steering vector, which requests add by ``SamplingParams(steer=[{"point": ...,
        "name": name, "scale": 4.0}])``; None removes it. Nothing is compiled.

        ``vector`` float32[W] is a list or an array, as wide as an activation at one of the engine's
        ``tap_points``. Requests that have started keep the vector of their start. Raises
        ``RequestError`` for any other vector.
        """
        self._engine.steering.set(name, vector)

    def sleep(self, level: int = 1) -> None:
        """Free the device's memory of KV cache, slots and weights until ``wake_up``.

        Other arrays of this process can then use it, such as a trainer's; JAX's allocator does not
        return it to other processes. At level 1 the weights are copied to host memory first
        (Qwen3-4B on an H100: 3.3 to 4.1 s, and 2.0 s to wake up). At level 2 they are dropped, and
        ``update_weights`` has to give new ones. Weights that are referenced elsewhere, as by
        ``llm.model``, stay in memory. Raises ``EngineError`` while a stream is open, and
        ``ArgumentError`` for another level.
        """
        self._check_no_request()
        with interrupts_deferred():
            self._engine.sleep(level)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Take the device's memory again: ``tags`` of "weights" and "kv_cache", by default both.

        With tags, new weights can be given before there is memory for the KV cache. Raises
        ``EngineError`` if the device has no memory for it, and ``ArgumentError`` for another tag.
        """
        with interrupts_deferred():
            self._engine.wake_up(tags)

    def is_sleeping(self) -> bool:
        """True until weights and KV cache are both on the device."""
        return bool(self._engine.asleep)

    def start_profile(self, folder: str | Path, num_steps: int = NUM_STEPS) -> None:
        """Trace the next steps, at most ``num_steps``, into a new folder in ``folder``; see
        ``engine.loop.profiler``. Raises ``ArgumentError`` if it cannot be written.
        """
        self._engine.profiler.start(Path(folder), num_steps)

    def stop_profile(self) -> Path:
        """End the trace; returns the profile's folder, which XProf and Perfetto read."""
        return self._engine.profiler.stop()

    def _check_no_request(self) -> None:
        if self._engine.has_work:
            raise EngineError(
                "requests are open; finish or close the stream before the weights or the memory "
                "of the engine change"
            )

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        if self._engine.tokenizer is None:
            raise EngineError("this engine was built without a tokenizer (skip_tokenizer_init)")
        return self._engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """The values of requests without ``SamplingParams``: vLLM's, overridden by the model's
        generation_config, or of a GGUF file by its own keys and llama.cpp's defaults. The fields of
        ``SamplingParams`` themselves have vLLM's defaults with every model.
        """
        return self._engine.facts.default_sampling

    def stats(self) -> EngineStats:
        """Counters since the engine was built."""
        return self._engine.stats()

    def generate(
        self,
        prompts: Any,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Continue one or several prompts; outputs are in the order of the prompts.

        A prompt is a string, a list of token ids, ``{"prompt": str}`` or
        ``{"prompt_token_ids": [int]}``. If one is invalid, ``RequestError`` names it and no prompt
        is started. ``priority`` has one number for each prompt: lower runs first.
        """
        _refuse_lora(lora_request)
        parsed = parse_prompts(prompts, self._engine.tokenizer)
        return self._run(parsed, sampling_params, use_tqdm, priority)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer one or several conversations: lists of ``{"role": ..., "content": ...}``.

        ``tools`` and ``chat_template_kwargs`` are passed to the chat template; tools that it does
        not write are in the system message. Calls are not told from the text of an answer.
        """
        _refuse_lora(lora_request)
        variables = {**(chat_template_kwargs or {})}
        if tools is not None:
            variables["tools"] = tools
        several = bool(messages) and isinstance(messages[0], Sequence)
        conversations: Any = messages if several else [messages]
        tokenizer = self.get_tokenizer()
        source = tokenizer.get_chat_template(chat_template, variables.get("tools"))
        # a template's own form of tools is kept, also if it is not one that a server could read
        generic = "tools" not in source
        found = answer_format(source, tokenizer.response_template, with_tools=generic)
        parsed: list[Prompt] = []
        for conversation in conversations:
            text = tokenizer.render_chat(
                conversation,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                template_kwargs=variables,
                chat_template=chat_template,
                calls=None if found is None else found.calls,
            )
            parsed.append(Prompt(text, encode(text, tokenizer, add_special_tokens=False)))
        return self._run(parsed, sampling_params, use_tqdm)

    def stream(self, specs: Sequence[RequestSpec]) -> Generator[tuple[int, Delta]]:
        """Yield (number of the request, delta) after each step. Closing it aborts open requests."""
        if self._answering:
            raise EngineError("this LLM is already answering; use AsyncLLM for concurrent calls")
        self._answering = True
        numbers: dict[str, int] = {}
        try:
            with gc_paused():  # the device is idle until the first launch
                self._add(self._validated(specs), numbers)
                deltas = self._step()
            while deltas or self._engine.has_work:
                for delta in deltas:
                    yield numbers[delta.request_id], delta
                deltas = self._step()
        finally:
            self._abort(numbers)

    def check(self, spec: RequestSpec) -> None:
        """Raise ``RequestError`` if the engine can never answer this request."""
        self._engine.check(spec)

    def _validated(self, specs: Sequence[RequestSpec]) -> list[ValidatedRequest]:
        """Validate all requests; raises ``RequestError`` for the first invalid one."""
        check, requests = self._engine.check, list[ValidatedRequest]()
        submit = self._engine.constraints.submit  # several are compiled at the same time
        given = [spec.sampling for spec in specs]
        constraints = [submit(one) if one.is_constrained else None for one in given]
        try:
            for spec, constraint in zip(specs, constraints, strict=True):
                requests.append(check(spec, constraint))
        except TaskError:
            raise
        except RequestError as error:
            raise RequestError(f"prompt {len(requests)}: {error}") from None
        finally:
            for constraint in constraints:
                if constraint is not None:  # a request before it is invalid
                    constraint.cancel()
        return requests

    def _add(self, requests: Sequence[ValidatedRequest], numbers: dict[str, int]) -> None:
        """Add the requests to the engine; ``numbers`` receives prompt numbers by request id."""
        for some in batched(enumerate(requests), ADDED_AT_ONCE):
            with interrupts_deferred():
                for number, request in some:
                    request_id = f"llm-{next(self._numbers)}"
                    self._engine.add_validated(request_id, request)
                    numbers[request_id] = number

    def _run(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        priorities: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        params = self._params_for(prompts, sampling_params)
        if priorities is None:
            priorities = [0] * len(prompts)
        priorities = _one_each("priorities", priorities, len(prompts))
        specs = _specs(prompts, params, priorities)
        # made after the first step: until a batch's first launch the device is idle
        collectors: dict[int, Collector] = {}
        progress = self._progress if use_tqdm else NO_PROGRESS
        with progress.task("generate", len(prompts)) as advance, full_collections_deferred():
            for number, delta in self.stream(specs):
                if number not in collectors:
                    given = (prompts[number], params[number], self._engine.limits.points)
                    collectors[number] = Collector(str(number), *given)
                collectors[number].add(delta)
                if delta.error:
                    raise delta.failure(f"prompt {number}: ")
                if collectors[number].output.finished:
                    advance(1)
        return [collectors[number].output for number in range(len(prompts))]

    def _params_for(
        self, prompts: list[Prompt], given: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if given is None:
            given = self.get_default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * len(prompts)
        several = _one_each("SamplingParams", given, len(prompts))
        for one in several:
            if not isinstance(one, SamplingParams):
                raise RequestError(f"sampling_params must be SamplingParams, got {one!r}")
        return several

    def _abort(self, request_ids: Mapping[str, int]) -> None:
        """Abort unfinished requests after an error or a closed stream, to free their pages."""
        with interrupts_deferred():
            self._answering = False  # first: a step may raise, and the next call must report it
            for request_id in request_ids:
                self._engine.abort(request_id)
            while self._engine.has_work:
                self._engine.step()

    def _step(self) -> tuple[Delta, ...]:
        if not self._engine.has_work:
            return ()
        with interrupts_deferred():
            return self._engine.step().deltas


def _refuse_lora(lora_request: object) -> None:
    if lora_request is not None:
        raise RequestError("lora_request is not supported; leave it out")


def _specs(
    prompts: Sequence[Prompt], params: Sequence[SamplingParams], priorities: Sequence[int]
) -> list[RequestSpec]:
    """The requests of the prompts; raises ``RequestError`` for the first invalid one."""
    specs: list[RequestSpec] = []
    try:
        for prompt, sampling, priority in zip(prompts, params, priorities, strict=True):
            specs.append(RequestSpec(prompt.token_ids, sampling, priority))
    except RequestError as error:
        raise RequestError(f"prompt {len(specs)}: {error}") from None
    return specs


def _one_each(name: str, given: Any, prompts: int) -> list[Any]:
    """The items of an argument that has one item for each prompt; raises ``RequestError``."""
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise RequestError(f"{name} must be a list, one for each prompt, got {given!r}")
    items = list(cast("Iterable[Any]", given))
    if len(items) != prompts:
        raise RequestError(f"{prompts} prompts came with {len(items)} {name}")
    return items


@contextmanager
def interrupts_deferred() -> Generator[None]:
    """Defer SIGINT to the end of the block, where its usual handler runs.

    Python raises KeyboardInterrupt between any two instructions. Inside an iteration of the engine
    this could lose a step whose tokens the scheduler waits for. Signals are handled on the main
    thread only, so on other threads this does nothing.
    """
    handler = signal.getsignal(signal.SIGINT)
    if not callable(handler) or threading.current_thread() is not threading.main_thread():
        yield
        return
    deferred: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: deferred.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if deferred:
            handler(*deferred[0])
