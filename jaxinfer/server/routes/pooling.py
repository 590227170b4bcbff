"""Handlers of the routes for embeddings, scores and reranking."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from starlette.types import ASGIApp

from jaxinfer.core.pooling import PoolingParams, check_dimensions
from jaxinfer.core.request import RequestSpec, SamplingParams
from jaxinfer.engine.requests.outputs import Delta
from jaxinfer.engine.requests.pooled import NO_SAMPLING, embedding, truncated
from jaxinfer.engine.requests.prompts import Prompt
from jaxinfer.engine.requests.scoring import (
    check_scores,
    first_tokens,
    fitted,
    probability,
    score_messages,
    score_sampling,
    score_template,
)
from jaxinfer.engine.requests.validate import check_task
from jaxinfer.server.api.answer import Answer
from jaxinfer.server.http.errors import ApiError
from jaxinfer.server.openai.pooling import (
    EmbeddingData,
    EmbeddingList,
    EmbeddingRequest,
    PoolingData,
    PoolingFields,
    PoolingList,
    PoolingRequest,
    Reranking,
    RerankRequest,
    ScoreData,
    ScoreList,
    ScoreRequest,
    TemplateFields,
    ranked,
)
from jaxinfer.server.openai.responses import Usage
from jaxinfer.server.openai.writer import prompt_details
from jaxinfer.server.service.endpoint import Call, Route, json_response
from jaxinfer.server.service.limits import check_prompts, too_large
from jaxinfer.server.service.service import INLINE_CHARACTERS, Service, run_off_loop

INLINE_NUMBERS = 4096  # of vectors that are written in the event loop: about 1 ms
FLOAT_BYTES, BASE64_BYTES = 21, 6  # of a number in the JSON of a vector
COSINE = PoolingParams(normalize=True)


async def embeddings(call: Call) -> ASGIApp:
    """The vector of each input."""
    request = await call.parse(EmbeddingRequest)
    return await _listed(
        call, request, EmbeddingList, lambda i, vector: EmbeddingData(index=i, embedding=vector)
    )


async def pooling(call: Call) -> ASGIApp:
    """``embeddings``, in the form of vLLM's route."""
    request = await call.parse(PoolingRequest)
    return await _listed(
        call, request, PoolingList, lambda i, vector: PoolingData(index=i, data=vector)
    )


async def score(call: Call) -> ASGIApp:
    """The score of each document for its query."""
    request = await call.parse(ScoreRequest)
    scores, usage = await _scores(call, request, request.pairs, request.pair_fields)
    data = [ScoreData(index=index, score=score) for index, score in enumerate(scores)]
    return json_response(ScoreList(data=data, usage=usage, **_identity(call, request)))


async def rerank(call: Call) -> ASGIApp:
    """The documents in the order of their scores for one query."""
    request = await call.parse(RerankRequest)
    pairs = [(request.query, text) for text in request.texts]
    fields = ("query", "documents")
    scores, usage = await _scores(call, request, pairs, fields, request.max_tokens_per_doc)
    identity = _identity(call, request)
    del identity["created"]
    results = ranked(scores, request.texts, request)
    return json_response(Reranking(results=results, usage=usage, **identity))


async def _listed[D](
    call: Call,
    request: EmbeddingRequest,
    answer: Callable[..., EmbeddingList | PoolingList],
    item: Callable[[int, list[float] | bytes], D],
) -> ASGIApp:
    """The answer with the vectors of all inputs."""
    found, usage = await vectors(call, request)

    def written() -> ASGIApp:
        data = [item(i, _written(vector, request)) for i, vector in enumerate(found)]
        return json_response(answer(data=data, usage=usage, **_identity(call, request)))

    return await run_off_loop(written, sum(map(len, found)) <= INLINE_NUMBERS)


async def vectors(call: Call, request: EmbeddingRequest) -> tuple[list[np.ndarray], Usage]:
    """The vector of each input, as the request asks for it."""
    call.prompt_field = "input"
    client = call.service.client
    check_task(client.limits, pools=True)
    own = client.facts.pooling
    assert own is not None, "an engine that pools"
    check_dimensions(request.dimensions, own)
    texts = [one for one in request.inputs if isinstance(one, str)]
    prompts = [Prompt(None, one) for one in request.inputs if not isinstance(one, str)]
    if texts:
        prompts = await _encoded(call, texts, request, request.add_special_tokens)
    number_bytes = FLOAT_BYTES if request.encoding_format == "float" else BASE64_BYTES
    size = len(prompts) * (request.dimensions or own.width) * number_bytes
    if size > (most := call.service.config.max_answer_bytes):
        raise too_large("input", size, most)
    prompts = [_short(call.service, prompt, request) for prompt in prompts]
    deltas, usage = await _answered(call, request, prompts, NO_SAMPLING, pools=True)
    params = request.params
    return [embedding(delta.pooled, own, params) for delta in deltas], usage


async def _scores(
    call: Call,
    request: TemplateFields,
    pairs: Sequence[tuple[str, str]],
    fields: tuple[str, str],
    document_tokens: int | None = None,
) -> tuple[list[float], Usage]:
    """The score of each pair of a query and a document; ``fields`` of the request hold them."""
    facts = call.service.client.facts
    check_scores(facts)
    if facts.pooling is None:
        call.prompt_field = fields[1]
        prompts = await _score_prompts(call, request, pairs, document_tokens)
        sampling = score_sampling(facts)
        deltas, usage = await _answered(call, request, prompts, sampling, pools=False)
        return [probability(delta.logprobs[0], facts) for delta in deltas], usage
    queries, texts = [query for query, _ in pairs], [text for _, text in pairs]
    if len(set(queries)) == 1:
        queries = queries[:1]
    prompts = await _checked(call, fields[0], queries, request)
    prompts += await _checked(call, fields[1], texts, request, document_tokens)
    deltas, usage = await _answered(call, request, prompts, NO_SAMPLING, pools=True)
    vectors = [embedding(delta.pooled, facts.pooling, COSINE) for delta in deltas]
    of_queries, of_texts = vectors[: len(queries)], vectors[len(queries) :]
    if len(of_queries) == 1:
        of_queries *= len(of_texts)
    return [float(np.dot(*pair)) for pair in zip(of_queries, of_texts, strict=True)], usage


async def _checked(
    call: Call,
    field: str,
    texts: Sequence[str],
    request: PoolingFields,
    document_tokens: int | None = None,
) -> list[Prompt]:
    """The texts in a field as prompts; an error names that field."""
    call.prompt_field = field
    prompts = await _encoded(call, texts, request)
    prompts = [_short(call.service, prompt, request, document_tokens) for prompt in prompts]
    specs = [RequestSpec(prompt.token_ids, NO_SAMPLING, pools=True) for prompt in prompts]
    check_prompts(call.service.client, specs, None)
    return prompts


async def _score_prompts(
    call: Call,
    request: TemplateFields,
    pairs: Sequence[tuple[str, str]],
    document_tokens: int | None,
) -> list[Prompt]:
    """The prompts of pairs of a query and a document; one chat at a time waits for its turn."""
    service, tokenizer = call.service, call.service.tokenizer
    template = score_template(tokenizer, service.config.chat_template)
    keep = request.truncate_prompt_tokens
    keep = service.client.limits.max_model_len - 1 if keep == -1 else keep

    async def prompt(query: str, document: str) -> Prompt:
        if document_tokens is not None:
            first = partial(first_tokens, tokenizer, document, document_tokens)
            document = await run_off_loop(first, len(document) <= INLINE_CHARACTERS)
        found: Prompt | str = document
        while isinstance(found, str):
            chat = score_messages(query, found)
            client = call.caller.client
            text = await service.render(chat, request.variables, template, client=client)
            fit = partial(fitted, tokenizer, text, found, keep)
            found = await run_off_loop(fit, len(text) <= INLINE_CHARACTERS)
        return found

    async def prompts() -> list[Prompt]:
        return [await prompt(query, text) for query, text in pairs]

    return await call.unless_gone(prompts())


async def _encoded(
    call: Call, texts: Sequence[str], request: PoolingFields, add_special_tokens: bool = True
) -> list[Prompt]:
    """Texts as prompts; if they may be cut, only what can be in the context is read."""
    service = call.service
    if request.truncate_prompt_tokens is not None:
        most = service.client.limits.max_model_len * service.tokenizer.max_token_characters
        texts = [text[:most] for text in texts]
    return await service.encode_all(texts, add_special_tokens=add_special_tokens)


def _short(
    service: Service, prompt: Prompt, request: PoolingFields, document_tokens: int | None = None
) -> Prompt:
    keep, client = request.truncate_prompt_tokens, service.client
    keep = document_tokens if keep is None else keep
    return truncated(prompt, keep, client.limits.max_model_len, client.tokenizer)


async def _answered(
    call: Call,
    request: PoolingFields,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    *,
    pools: bool,
) -> tuple[list[Delta], Usage]:
    """The one delta of each prompt, and the usage."""
    given = (call.route, prompts, sampling, request, call.caller)
    answer = call.service.open(request.request_id or call.request_id, *given, pools=pools)
    deltas: dict[int, Delta] = {}
    for update in await call.updates(answer):
        if not (update.delta.pooled or update.delta.logprobs):
            raise ApiError(503, "the request was ended before its answer was done; send it again")
        deltas[update.prompt] = update.delta
    return [deltas[number] for number in range(len(prompts))], _usage(answer)


def _usage(answer: Answer) -> Usage:
    count = answer.num_prompt_tokens
    return Usage(
        prompt_tokens=count,
        completion_tokens=0,
        total_tokens=count,
        prompt_tokens_details=prompt_details(answer),
    )


def _written(vector: np.ndarray, request: EmbeddingRequest) -> list[float] | bytes:
    if request.encoding_format == "base64":
        return vector.astype("<f4").tobytes()
    return vector.tolist()  # type: ignore[no-any-return]


def _identity(call: Call, request: PoolingFields) -> dict[str, Any]:
    return {
        "id": request.request_id or call.request_id,
        "created": int(time.time()),
        "model": call.service.model_names[0],
    }


ROUTES = (
    Route(
        "POST",
        "/v1/embeddings",
        embeddings,
        "createEmbedding",
        "A vector of each text; needs a model for embeddings.",
        EmbeddingList,
        EmbeddingRequest,
        errors=(429,),
    ),
    Route(
        "POST",
        "/pooling",
        pooling,
        "createPooling",
        "As /v1/embeddings, in vLLM's form.",
        PoolingList,
        PoolingRequest,
        errors=(429,),
    ),
    Route(
        "POST",
        "/v1/score",
        score,
        "createScore",
        "How well documents answer queries; needs a reranker or a model for embeddings.",
        ScoreList,
        ScoreRequest,
        errors=(429,),
    ),
    Route(
        "POST",
        "/score",
        score,
        "score",
        "As /v1/score.",
        ScoreList,
        ScoreRequest,
        errors=(429,),
    ),
    *(
        Route("POST", path, rerank, name, summary, Reranking, RerankRequest, errors=(429,))
        for path, name, summary in (
            (
                "/v1/rerank",
                "createRerank",
                "Documents in the order in which they answer a query.",
            ),
            ("/v2/rerank", "createRerankV2", "As /v1/rerank, at Cohere's path."),
            ("/rerank", "rerank", "As /v1/rerank, at Jina's path."),
        )
    ),
)
