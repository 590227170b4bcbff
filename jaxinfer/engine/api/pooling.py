"""``LLM``'s methods for vectors and scores, under vLLM's names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from msgspec.structs import replace

from jaxinfer.core.errors import RequestError
from jaxinfer.core.pooling import PoolingParams, check_dimensions
from jaxinfer.core.progress import NO_PROGRESS, Progress
from jaxinfer.core.request import RequestSpec
from jaxinfer.engine.requests.pooled import (
    NO_SAMPLING,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
    embedding,
    truncated,
)
from jaxinfer.engine.requests.prompts import Prompt, parse_prompts
from jaxinfer.engine.requests.scoring import (
    check_scores,
    paired,
    probability,
    score_prompt,
    score_sampling,
)
from jaxinfer.engine.requests.validate import check_task

if TYPE_CHECKING:
    from jaxinfer.core.request import SamplingParams
    from jaxinfer.engine.loop.engine import Engine
    from jaxinfer.engine.requests.outputs import Delta
    from jaxinfer.text.tokenizer import Tokenizer

_NO_PARAMS = PoolingParams()


class PoolingMethods(ABC):
    """``encode``, ``embed`` and ``score``."""

    _engine: Engine
    _progress: Progress

    @abstractmethod
    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""

    @abstractmethod
    def stream(self, specs: Sequence[RequestSpec]) -> Generator[tuple[int, Delta]]:
        """The deltas of all requests, with their numbers."""

    def encode(
        self,
        prompts: Any,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        lora_request: None = None,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The vector of each prompt as an array; prompts are those of ``generate``.

        ``pooling_task`` may name "embed", the only one. Raises ``TaskError`` for a model that
        generates text, and ``RequestError`` naming the invalid prompt or field.
        """
        _refuse_others(lora_request, pooling_task)
        engine = self._engine
        check_task(engine.limits, pools=True)
        parsed = parse_prompts(prompts, engine.tokenizer)
        params = _params_for(pooling_params, len(parsed))
        if truncate_prompt_tokens is not None:
            params = [replace(one, truncate_prompt_tokens=truncate_prompt_tokens) for one in params]
        short = pooled_prompts(engine, parsed, params)
        deltas = self._last_deltas(short, NO_SAMPLING, use_tqdm, pools=True)
        return [
            pooling_output(engine, str(number), *one)
            for number, one in enumerate(zip(short, params, deltas, strict=True))
        ]

    def embed(
        self,
        prompts: Any,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        lora_request: None = None,
    ) -> list[EmbeddingRequestOutput]:
        """``encode``, with each vector as a list of numbers."""
        return [
            EmbeddingRequestOutput(
                one.request_id,
                EmbeddingOutput(one.outputs.data.tolist()),
                one.prompt_token_ids,
                one.num_cached_tokens,
            )
            for one in self.encode(
                prompts,
                pooling_params,
                truncate_prompt_tokens=truncate_prompt_tokens,
                use_tqdm=use_tqdm,
                lora_request=lora_request,
            )
        ]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        truncate_prompt_tokens: int | None = None,
        use_tqdm: bool = True,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: None = None,
    ) -> list[ScoringRequestOutput]:
        """The score of each document in ``data_2`` for the query in ``data_1``, or for its own.

        With task "score" it is the probability of the first of ``score_tokens``, by a chat template
        with the roles ``query`` and ``document`` (``engine.requests.scoring``); with task "embed"
        the cosine of the two embeddings. Raises ``TaskError`` for other models.
        """
        _refuse_others(lora_request)
        facts = self._engine.facts
        check_scores(facts)
        pairs = paired(_texts("data_1", data_1), _texts("data_2", data_2))
        keep = PoolingParams(truncate_prompt_tokens=truncate_prompt_tokens).truncate_prompt_tokens
        if facts.pooling is not None:
            texts = [text for pair in pairs for text in pair]
            unit = PoolingParams(normalize=True, truncate_prompt_tokens=keep)
            found = self.encode(texts, unit, use_tqdm=use_tqdm)
            return [
                ScoringRequestOutput(
                    str(number),
                    ScoringOutput(float(np.dot(one.outputs.data, other.outputs.data))),
                    one.prompt_token_ids + other.prompt_token_ids,
                    one.num_cached_tokens + other.num_cached_tokens,
                )
                for number, (one, other) in enumerate(zip(found[::2], found[1::2], strict=True))
            ]
        if keep == -1:
            keep = self._engine.limits.max_model_len - 1
        prompts = [
            score_prompt(
                self.get_tokenizer(),
                query,
                document,
                template=chat_template,
                variables=chat_template_kwargs or {},
                keep=keep,
            )
            for query, document in pairs
        ]
        deltas = self._last_deltas(prompts, score_sampling(facts), use_tqdm, pools=False)
        return [
            ScoringRequestOutput(
                str(number),
                ScoringOutput(probability(delta.logprobs[0], facts)),
                list(prompt.token_ids),
                delta.num_cached_tokens,
            )
            for number, (prompt, delta) in enumerate(zip(prompts, deltas, strict=True))
        ]

    def _last_deltas(
        self, prompts: list[Prompt], sampling: SamplingParams, use_tqdm: bool, *, pools: bool
    ) -> list[Delta]:
        """The one delta of each prompt, for requests that draw at most one token."""
        found: dict[int, Delta] = {}
        progress = self._progress if use_tqdm else NO_PROGRESS
        specs = [RequestSpec(prompt.token_ids, sampling, pools=pools) for prompt in prompts]
        with progress.task("embed" if pools else "score", len(prompts)) as advance:
            for number, delta in self.stream(specs):
                if delta.error:
                    raise delta.failure(f"prompt {number}: ")
                found[number] = delta
                advance(1)
        return [found[number] for number in range(len(prompts))]


def pooled_prompts(
    engine: Engine, prompts: Sequence[Prompt], params: Sequence[PoolingParams]
) -> list[Prompt]:
    """The prompts as the parameters cut them; raises ``RequestError`` for other dimensions than the
    model's vectors can have.
    """
    check_task(engine.limits, pools=True)
    assert engine.facts.pooling is not None, "an engine that pools"
    for one in params:
        check_dimensions(one.dimensions, engine.facts.pooling)
    context, tokenizer = engine.limits.max_model_len, engine.tokenizer
    return [
        truncated(prompt, one.truncate_prompt_tokens, context, tokenizer)
        for prompt, one in zip(prompts, params, strict=True)
    ]


def pooling_output(
    engine: Engine, request_id: str, prompt: Prompt, params: PoolingParams, delta: Delta
) -> PoolingRequestOutput[PoolingOutput]:
    """The output of a prompt, of its one delta."""
    assert engine.facts.pooling is not None, "an engine that pools"
    return PoolingRequestOutput(
        request_id,
        PoolingOutput(embedding(delta.pooled, engine.facts.pooling, params)),
        list(prompt.token_ids),
        delta.num_cached_tokens,
    )


def _params_for(given: Any, count: int) -> list[PoolingParams]:
    if given is None or isinstance(given, PoolingParams):
        return [given or _NO_PARAMS] * count
    several = list(cast("Iterable[Any]", given)) if isinstance(given, Iterable) else []
    if len(several) != count or not all(isinstance(one, PoolingParams) for one in several):
        raise RequestError(f"pooling_params must be PoolingParams, or {count} of them")
    return several


def _texts(name: str, given: Any) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if isinstance(texts, Mapping) or not isinstance(texts, Iterable):
        raise RequestError(f"{name} must be a text or a list of texts, got {given!r}")
    found = list(cast("Iterable[Any]", texts))
    if not found or not all(isinstance(text, str) for text in found):
        raise RequestError(f"{name} must hold texts, at least one")
    return found


def _refuse_others(lora_request: object, pooling_task: str | None = None) -> None:
    if lora_request is not None:
        raise RequestError("lora_request is not supported; leave it out")
    if pooling_task not in (None, "embed"):
        raise RequestError(f"pooling_task must be 'embed', got {pooling_task!r}")
