"""What all handlers share: the engine's client, the settings, and the way into the queue.

Owns: ``Service``: texts to token ids, who may enter, which answers are open, and the end of all.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from jaxinfer.core.errors import (
    ContextLengthError,
    EngineError,
    JaxinferError,
    RequestError,
)
from jaxinfer.core.request import SamplingParams
from jaxinfer.core.server_config import ServerConfig
from jaxinfer.core.version import VERSION
from jaxinfer.engine.link.client import EngineClient, Stream
from jaxinfer.engine.prompts import Prompt
from jaxinfer.server.http.errors import ApiError, api_error
from jaxinfer.server.http.log import EventLog
from jaxinfer.server.metrics.registry import Metrics
from jaxinfer.server.metrics.tally import Rejection
from jaxinfer.server.openai.answer import Answer
from jaxinfer.server.openai.fields import Asked
from jaxinfer.text.tokenizer import Tokenizer

INLINE_CHARACTERS = 2000  # more text is tokenised off the loop: 2,000 take about 0.5 ms


class Loaded(NamedTuple):
    """What there is once the model is loaded."""

    client: EngineClient
    metrics: Metrics
    defaults: SamplingParams


class Service:
    """One server's state, from before the model is loaded. Used in one event loop only."""

    def __init__(self, config: ServerConfig, log: EventLog) -> None:
        self.config = config
        self.log = log
        self.created = int(time.time())
        self.draining = False
        self._loaded: Loaded | None = None
        self._answers: set[Answer] = set()
        self._empty = asyncio.Event()
        self._empty.set()

    def attach(self, client: EngineClient, metrics: Metrics) -> None:
        """The model is loaded: begin to answer.

        Raises ``RequestError`` when ``override_generation_config`` is not possible.
        """
        defaults = msgspec.structs.replace(
            client.facts.default_sampling, **self.config.override_generation_config
        )
        self._loaded = Loaded(client, metrics, defaults)

    @property
    def loaded(self) -> Loaded:
        """What there is once the model is loaded; raises ``ApiError`` 503 before that."""
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
    def metrics(self) -> Metrics:
        """The counters; 503 while loading."""
        return self.loaded.metrics

    @property
    def defaults(self) -> SamplingParams:
        """The model's sampling parameters, for what a request leaves open; 503 while loading."""
        return self.loaded.defaults

    @property
    def ready(self) -> bool:
        """Whether new requests are answered."""
        return self._loaded is not None and self.client.alive and not self.draining

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer; raises ``ApiError`` where there is none."""
        tokenizer = self.client.tokenizer
        if tokenizer is None:
            raise ApiError(400, "this server has no tokenizer; send token ids as the prompt")
        return tokenizer

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names under which the model is served; the first is the one that answers carry."""
        return self.config.served_model_name or (self.client.facts.name,)

    @property
    def fingerprint(self) -> str:
        """``system_fingerprint`` of the answers."""
        return f"jaxinfer-{VERSION}"

    def check_model(self, name: str | None) -> None:
        """Raise ``ApiError`` 404 for a model that is not served here."""
        if name is not None and name not in self.model_names:
            raise ApiError(
                404,
                f"the model {name[:200]!r} does not exist; this server has "
                f"{', '.join(self.model_names)}",
                param="model",
                code="model_not_found",
            )

    def note_unknown(self, names: Iterable[str]) -> None:
        """Log fields that nobody knows, each once by name."""
        for name in names:
            self.log.once("unknown_field", name, advice="--strict-fields refuses such requests")

    # texts

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> Prompt:
        """A text as a prompt; see ``encode_all``."""
        (prompt,) = await self.encode_all([text], add_special_tokens=add_special_tokens)
        return prompt

    async def encode_all(
        self, texts: Sequence[str], *, add_special_tokens: bool = True, located: bool = False
    ) -> list[Prompt]:
        """Texts as prompts, ``located`` with the places of their tokens; refused at once when one
        is longer than any that would fit.
        """
        tokenizer = self.tokenizer
        longest = self.client.limits.max_model_len * tokenizer.max_token_characters
        for number, text in enumerate(texts):
            if len(text) > longest:
                name = "prompt" if len(texts) == 1 else f"prompt[{number}]"
                where = "the prompt" if len(texts) == 1 else name
                raise ContextLengthError(
                    f"This model's maximum context length is {self.client.limits.max_model_len} "
                    f"tokens. However, {where} has {len(text)} characters, and {longest} are the "
                    "most that can be so many tokens; shorten it",
                    name,
                )

        def encode() -> list[Prompt]:
            special = add_special_tokens
            if located:
                found = (tokenizer.encode_located(one, add_special_tokens=special) for one in texts)
            else:
                found = ((tokenizer.encode(one, add_special_tokens=special), ()) for one in texts)
            return [
                Prompt(text, tuple(ids), tuple(places))
                for text, (ids, places) in zip(texts, found, strict=True)
            ]

        is_short = sum(map(len, texts)) <= INLINE_CHARACTERS
        return encode() if is_short else await asyncio.to_thread(encode)

    async def render(self, messages: Sequence[Any], **options: Any) -> str:
        """A chat as text; in a thread when it is long, since templates are programs."""
        tokenizer = self.tokenizer
        characters = sum(len(str(message)) for message in messages)
        if characters <= INLINE_CHARACTERS:
            return tokenizer.render_chat(messages, **options)
        return await asyncio.to_thread(tokenizer.render_chat, messages, **options)

    # the way in

    def open(
        self,
        request_id: str,
        route: str,
        prompts: Sequence[Prompt],
        sampling: SamplingParams,
        *,
        asked: Asked | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        timeout: float | None = None,
    ) -> Answer:
        """Submit the prompts of one request, all or none; raises ``ApiError`` or ``RequestError``.

        ``asked``: tokens that each answer must have room for. ``timeout`` in seconds; the server's
        own deadline holds too.
        """
        client = self.client
        self._check(prompts, sampling, asked)
        self._check_room(prompts)
        wake = asyncio.Event()
        streams: list[Stream] = []
        try:
            for prompt in prompts:
                streams.append(
                    client.open(
                        prompt.token_ids,
                        sampling,
                        priority=priority,
                        cache_salt=cache_salt,
                        wake=wake,
                        checked=True,
                    )
                )
        except JaxinferError:
            for stream in streams:
                stream.close()
            raise
        answer = Answer(
            request_id, route, streams, wake, self.metrics, max_tokens=sampling.max_tokens
        )
        if deadline := _deadline(timeout, self.config.request_timeout):
            answer.expire_after(*deadline)
        self._answers.add(answer)
        self._empty.clear()
        self.log.request_received(
            request_id,
            route=route,
            num_prompt_tokens=answer.num_prompt_tokens,
            sampling=sampling,
        )
        return answer

    def close(self, answer: Answer) -> None:
        """The handler of an answer has ended, in whatever way. Idempotent."""
        answer.close()
        if answer not in self._answers:
            return
        self._answers.remove(answer)
        if not self._answers:
            self._empty.set()
        first, reasons = answer.first_token, answer.finish_reasons
        self.log.request_finished(
            answer.request_id,
            route=answer.route,
            finish_reason=",".join(reason or "none" for reason in reasons),
            num_output_tokens=answer.num_tokens,
            ttft=None if first is None else first - answer.received,
            e2e=time.monotonic() - answer.received,
        )

    def note_response(self, path: str | None, method: str, status: int, seconds: float) -> None:
        """Count a response; ``path`` is its route's, None where there is none."""
        if self._loaded is not None:
            self._loaded.metrics.http_response(path, method, status, seconds)

    def error(self, error: JaxinferError) -> ApiError:
        """What a client is told about an error of the lower floors."""
        return api_error(error, alive=self._loaded is None or self.client.alive)

    def _check(
        self, prompts: Sequence[Prompt], sampling: SamplingParams, asked: Asked | None
    ) -> None:
        """Raise ``RequestError`` where one of the prompts can never be answered as asked."""
        for number, prompt in enumerate(prompts):
            try:
                self.client.check(prompt.token_ids, sampling)
                if asked is not None:
                    _check_fit(len(prompt.token_ids), asked, self.client.limits.max_model_len)
            except RequestError as error:
                if len(prompts) == 1:
                    raise
                name = f"prompt[{number}]"
                told = f"{name}: {error}"
                if not isinstance(error, ContextLengthError):
                    raise RequestError(told) from None
                field = name if error.field == "prompt" else error.field
                raise ContextLengthError(told, field) from None

    def _check_room(self, prompts: Sequence[Prompt]) -> None:
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
            return  # an idle server refuses nobody: a batch beyond the limits would never enter
        if not (num_queued := client.num_queued(len(prompts))):
            return
        num_tokens = client.num_waiting_tokens + sum(len(one.token_ids) for one in prompts)
        limits = (
            (Rejection.REQUESTS, num_queued, config.max_num_queued_reqs, "requests"),
            (Rejection.TOKENS, num_tokens, config.max_num_queued_tokens, "prompt tokens"),
        )
        for reason, count, limit, unit in limits:
            if limit is not None and count > limit:
                self.metrics.request_rejected(reason)
                raise ApiError(
                    429,
                    f"the queue is full: it would hold {count} {unit}, and {limit} are allowed; "
                    "try again later",
                    code="queue_full",
                    headers={"Retry-After": "1"},
                )

    # the way out

    def begin_drain(self) -> None:
        """Say that nothing new should come; open requests go on."""
        self.draining = True

    async def drained(self, seconds: float) -> bool:
        """Wait until no request is open; False when some still are after ``seconds``."""
        try:
            await asyncio.wait_for(self._empty.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def stop_all(self) -> None:
        """End every open request with finish reason ``abort``."""
        for answer in self._answers:
            answer.stop()


def _check_fit(num_tokens: int, asked: Asked, max_model_len: int) -> None:
    """Raise ``ContextLengthError`` where the context has no room for the tokens asked for."""
    total, room = num_tokens + asked.num_tokens, max_model_len - num_tokens
    if asked.num_tokens > room:
        raise ContextLengthError(
            f"This model's maximum context length is {max_model_len} tokens. However, you "
            f"requested {total} tokens: {num_tokens} in the prompt and {asked.num_tokens} by "
            f"{asked.field}; lower {asked.field} to at most {room}, or leave it out",
            asked.field,
        )


def _deadline(asked: float | None, allowed: float | None) -> tuple[float, ApiError] | None:
    """The shorter of the request's and the server's time, and what to say when it is over."""
    given = [seconds for seconds in (asked, allowed) if seconds is not None]
    if not given:
        return None
    seconds = min(given)
    return seconds, ApiError(
        408,
        f"the answer was not done within {seconds:g} s; ask for fewer tokens or a longer timeout",
        param="timeout" if asked == seconds else None,
        code="deadline_exceeded",
        # OpenAI's clients repeat what got a 408, twice: that makes a busy server busier
        headers={"X-Should-Retry": "false"},
    )
