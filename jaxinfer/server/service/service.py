"""The state that all handlers share: the engine's client, the settings, the open answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import msgspec
from regex import Pattern

from jaxinfer.core.errors import (
    ConfigError,
    ContextLengthError,
    EngineError,
    JaxinferError,
    QueueFullError,
)
from jaxinfer.core.request import RequestSpec, SamplingParams
from jaxinfer.core.server_config import OUTPUT_LIMIT, ServerConfig
from jaxinfer.engine.link.beam_stream import BeamStream
from jaxinfer.engine.link.client import EngineClient, Stream
from jaxinfer.engine.requests.prompts import Prompt
from jaxinfer.server.api.answer import UNKNOWN, Answer, Caller
from jaxinfer.server.api.fields import GenerationFields
from jaxinfer.server.api.tools import hidden_pattern
from jaxinfer.server.http.errors import ApiError, api_error, queue_full
from jaxinfer.server.http.keys import api_keys
from jaxinfer.server.http.log import EventLog
from jaxinfer.server.http.run import FLUSH_SECONDS
from jaxinfer.server.metrics.registry import Metrics
from jaxinfer.server.metrics.tally import Rejection
from jaxinfer.server.openai.pooling import PoolingFields
from jaxinfer.server.responses.background import BackgroundRun
from jaxinfer.server.responses.store import ResponseStore
from jaxinfer.server.service.limits import check_prompts, check_taps, deadline
from jaxinfer.server.service.names import check_name
from jaxinfer.server.service.rendering import Renderer
from jaxinfer.server.service.streams import open_stream
from jaxinfer.server.service.traces import Traces, otlp_exporter
from jaxinfer.text.answers.formats import AnswerFormat, answer_format
from jaxinfer.text.chat import MAX_COMPILED_TEMPLATES
from jaxinfer.text.render_process import RenderRequest
from jaxinfer.text.tokenizer import Tokenizer

# a longer text is tokenized in a thread: 2,000 characters take about 0.5 ms
INLINE_CHARACTERS = 2000
RENDERED_CONTEXTS = 4  # a rendered chat is at most so many times as long as the longest prompt


class LoadedModel(NamedTuple):
    """The parts that exist once the model is loaded."""

    client: EngineClient
    metrics: Metrics
    defaults: SamplingParams
    max_new_tokens: int | None  # most tokens that an answer may have


class Service:
    """One server's state, from before the model is loaded. Used in one event loop only."""

    def __init__(
        self, config: ServerConfig, log: EventLog, renderer: Renderer | None = None
    ) -> None:
        self.config = config
        self.log = log
        self.created = int(time.time())
        self.draining = False
        self.responses = ResponseStore(
            config.max_stored_responses, config.max_stored_response_bytes
        )
        self.background: dict[str, BackgroundRun] = {}  # by the id of the response
        self._loaded: LoadedModel | None = None
        self._answers: set[Answer] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self.renderer = renderer or Renderer()
        self.keys = api_keys(config)
        self.traces: Traces | None = None
        if config.otlp_traces_endpoint is not None:
            exporter = otlp_exporter(config.otlp_traces_endpoint, config.otlp_traces_protocol)
            self.traces = Traces(exporter)
        self._format = lru_cache(maxsize=MAX_COMPILED_TEMPLATES)(self._format_of)
        names = ("tool_call_parser", "reasoning_parser")
        self._parsers: dict[str, Any] = {name: getattr(config, name) for name in names}
        answer_format("", **self._parsers)  # a wrong name is an error before the model is loaded

    def attach(self, client: EngineClient, metrics: Metrics) -> None:
        """Register the loaded model; from now on requests are accepted.

        Raises ``RequestError`` if ``override_generation_config`` has an invalid value.
        """
        overrides = dict(self.config.override_generation_config)
        max_new_tokens = overrides.pop(OUTPUT_LIMIT, client.facts.max_new_tokens)
        defaults = msgspec.structs.replace(client.facts.default_sampling, **overrides)
        self._loaded = LoadedModel(client, metrics, defaults, max_new_tokens)

    def reload_keys(self) -> None:
        """Read the key file again; if it is unusable, the old keys stay and the log says why."""
        assert self.keys is not None
        try:
            self.keys.reload()
        except ConfigError as error:
            self.log.error("keys_not_reloaded", reason=str(error))
        else:
            self.log.info("keys_reloaded", num_keys=len(self.keys))

    @property
    def loaded(self) -> LoadedModel:
        """The loaded model; raises ``ApiError`` 503 before it is loaded."""
        if self._loaded is None:
            raise ApiError(
                503,
                "the model is still being loaded; try again once /ready answers 200",
                code="loading",
                headers={"Retry-After": "5"},
            )
        return self._loaded

    @property
    def client(self) -> EngineClient:
        """The engine's client; 503 while loading."""
        return self.loaded.client

    @property
    def ready(self) -> bool:
        """True if new requests are accepted."""
        return self._loaded is not None and self.client.alive and not self.draining

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises ``ApiError`` if the server has none."""
        tokenizer = self.client.tokenizer
        if tokenizer is None:
            raise ApiError(400, "this server has no tokenizer; send token ids as the prompt")
        return tokenizer

    @property
    def has_chats(self) -> bool:
        """True if there is a chat template."""
        tokenizer = self.client.tokenizer
        return tokenizer is not None and bool(
            self.config.chat_template or tokenizer.has_chat_template
        )

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names under which the model is served; responses carry the first one."""
        return self.config.served_model_name or (self.client.facts.name,)

    def check_model(self, name: str | None) -> None:
        """Raise ``ApiError`` 404 for a model that is not served here."""
        check_name(name, self.model_names, self.config.unlisted_model_name)

    # texts

    @property
    def form_of_calls(self) -> str | None:
        """The name of the form of tool calls; None: the model cannot be given tools."""
        found = self.answer_format(self.config.chat_template, ("any",)) if self.has_chats else None
        return found.name if found is not None and found.has_calls else None

    def answer_format(self, chat_template: str | None, tools: Sequence[Any]) -> AnswerFormat | None:
        """The format of answers to a chat with this template (None: the model's own) and tools."""
        template = self.tokenizer.get_chat_template(chat_template, tools or None)
        return self._format(template, bool(tools))

    def _format_of(self, chat_template: str, with_tools: bool) -> AnswerFormat | None:
        return answer_format(
            chat_template,
            self.tokenizer.response_template,
            with_tools=with_tools,
            special_tokens=self.tokenizer.all_special_tokens,
            **self._parsers,
        )

    @cached_property
    def hidden(self) -> Pattern[str] | None:
        """The special tokens, which are not part of an answer's text."""
        return hidden_pattern(self.tokenizer.all_special_tokens)

    @property
    def max_characters(self) -> int:
        """Characters of the longest prompt that may fit the context."""
        return self.client.limits.max_model_len * self.tokenizer.max_token_characters

    async def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, with_offsets: bool = False
    ) -> list[Prompt]:
        """Texts as prompts. ``with_offsets`` adds the offset of each token in its text.

        Raises ``ContextLengthError`` before tokenizing if a text has more characters than the
        longest prompt that fits.
        """
        tokenizer, special, longest = self.tokenizer, add_special_tokens, self.max_characters
        for number, text in enumerate(texts):
            if len(text) > longest:
                name = "prompt" if len(texts) == 1 else f"prompt[{number}]"
                raise self._too_long(name, str(len(text)))

        def encoded(text: str) -> Prompt:
            offsets: Sequence[int] = ()
            if with_offsets:
                ids, offsets = tokenizer.encode_with_offsets(text, add_special_tokens=special)
            else:
                ids = tokenizer.encode(text, add_special_tokens=special)
            return Prompt(text, tuple(ids), tuple(offsets))

        is_short = sum(map(len, texts)) <= INLINE_CHARACTERS
        return await run_off_loop(lambda: [encoded(text) for text in texts], is_short)

    def _too_long(self, name: str, size: str) -> ContextLengthError:
        """The error for a prompt of so many characters, before it is tokenized."""
        where = "the prompt" if name == "prompt" else name
        return ContextLengthError(
            f"This model's maximum context length is {self.client.limits.max_model_len} tokens. "
            f"However, {where} has {size} characters, and {self.max_characters} are the most that "
            "can be so many tokens; shorten it",
            name,
        )

    async def render(
        self,
        messages: Sequence[Any],
        variables: Mapping[str, Any],
        chat_template: str | None,
        *,
        is_own: bool = True,
        client: str = "",
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
    ) -> str:
        """A chat as text; see ``Renderer``."""
        tokenizer, most = self.tokenizer, RENDERED_CONTEXTS * self.max_characters
        source = tokenizer.get_chat_template(chat_template, variables.get("tools"))
        found = self._format(source, True)
        if found is not None and found.calls is not None and found.calls.is_generic:
            source = tokenizer.get_chat_template(chat_template)  # a tool_use template needs tools
        request = RenderRequest(
            source,
            tuple(messages),
            max_characters=most,
            special_tokens=tokenizer.special_tokens_map,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            variables=dict(variables),
            calls=None if found is None else found.calls,
            max_seconds=self.config.max_template_seconds,
        )
        try:
            return await self.renderer.render(request, is_own=is_own, client=client)
        except ContextLengthError:
            raise self._too_long("prompt", f"more than {most}") from None

    # admission

    def open(
        self,
        request_id: str,
        route: str,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        request: GenerationFields | PoolingFields,
        caller: Caller = UNKNOWN,
        *,
        pools: bool = False,
    ) -> Answer:
        """Submit the prompts of one request, all or none; raises ``ApiError`` or ``RequestError``.

        Of ``request`` the tokens that must fit the context after each prompt, the priority, the
        salt and the timeout are used; the server's own timeout applies as well. ``pools``: it asks
        for vectors.
        """
        client = self.client
        # a key's salt is before the request's own; all that are not empty have the same length
        salt = caller.key_salt if self.config.prefix_caching_by_key else ""
        salt += request.cache_salt or ""
        given: Any = (sampling, request.priority, salt, pools)
        specs = [RequestSpec(prompt.token_ids, *given) for prompt in prompts]
        specs = check_prompts(client, specs, request.requested_tokens())
        check_taps(prompts, sampling, client.limits, self.config.max_tap_bytes)
        self._check_queue(prompts)
        wake = asyncio.Event()
        streams: list[Stream | BeamStream] = []
        try:
            for spec in specs:
                streams.append(open_stream(client, spec, request, wake, caller.client, request_id))
        except JaxinferError:
            for stream in streams:
                stream.close()
            raise
        metrics = self.loaded.metrics
        answer = Answer(
            request_id,
            route,
            streams,
            wake,
            metrics,
            sampling=sampling,
            caller=caller,
            shows_cached=self.config.enable_prompt_tokens_details,
        )
        if expiry := deadline(request.timeout, self.config.request_timeout):
            answer.expire_after(*expiry)
        self._answers.add(answer)
        self._empty.clear()
        self.log.request_received(
            request_id=request_id,
            route=route,
            num_prompt_tokens=answer.num_prompt_tokens,
            sampling=sampling,
            prompts=prompts,
        )
        return answer

    def close(self, answer: Answer) -> None:
        """End an answer, finished or not; its handler calls it when it returns. Idempotent."""
        answer.close()
        if answer not in self._answers:
            return
        self._answers.remove(answer)
        if not self._answers:
            self._empty.set()
        first, reasons = answer.first_token, answer.finish_reasons
        self.log.request_finished(
            request_id=answer.request_id,
            route=answer.route,
            finish_reason=",".join(reason or "none" for reason in reasons),
            num_output_tokens=answer.num_tokens,
            ttft=None if first is None else first - answer.received,
            e2e=time.monotonic() - answer.received,
        )
        if self.traces is not None:
            self.traces.record(answer, self.model_names[0])

    def note_response(self, path: str | None, method: str, status: int, seconds: float) -> None:
        """Count a response; ``path`` is its route's, None for an unknown route."""
        if self._loaded is not None:
            self._loaded.metrics.http_response(path, method, status, seconds)

    def error(self, error: JaxinferError) -> ApiError:
        """The ``ApiError`` for an error of the lower floors."""
        if isinstance(error, QueueFullError):
            self.loaded.metrics.request_rejected(Rejection.FORMS)
        return api_error(error, alive=self._loaded is None or self.client.alive)

    def _check_queue(self, prompts: Sequence[Prompt]) -> None:
        client, config = self.client, self.config
        if self.draining:
            raise ApiError(
                503,
                "the server is shutting down; ask another one",
                code="draining",
                headers={"Retry-After": "5", "Connection": "close"},
            )
        if not client.alive:
            raise self.error(EngineError("the engine has stopped; restart the server"))
        if not client.num_open:
            # an idle server refuses no request: a batch beyond the limits would never be accepted
            return
        if not (num_queued := client.num_queued(len(prompts))):
            return
        num_tokens = client.num_waiting_tokens + sum(len(one.token_ids) for one in prompts)
        limits = (
            (Rejection.REQUESTS, num_queued, config.max_num_queued_reqs, "requests"),
            (Rejection.TOKENS, num_tokens, config.max_num_queued_tokens, "prompt tokens"),
        )
        for reason, count, limit, unit in limits:
            if limit is not None and count > limit:
                self.loaded.metrics.request_rejected(reason)
                raise queue_full(
                    f"the queue is full: it would hold {count} {unit}, and {limit} are allowed; "
                    "try again later"
                )

    # shutdown

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and end those that are still open after ``seconds``."""
        self.draining = True
        try:
            await asyncio.wait_for(self._empty.wait(), seconds)
        except TimeoutError:
            self.stop_all()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._empty.wait(), FLUSH_SECONDS)

    def stop_all(self) -> None:
        """End every open request with finish reason ``abort``."""
        for answer in self._answers:
            answer.stop()


async def run_off_loop[T](work: Callable[[], T], is_short: bool) -> T:
    """The result of ``work``; long work is done in a thread, so that other responses continue."""
    return work() if is_short else await asyncio.to_thread(work)
