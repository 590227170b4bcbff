"""The engine's output for one prompt of a request: tokens that are drawn, or a beam search."""

from __future__ import annotations

import asyncio

from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.facts import resolved_max_tokens
from jaxinfer.engine.link.beam_stream import BeamStream
from jaxinfer.engine.link.client import EngineClient, Stream
from jaxinfer.server.openai.beams import BeamFields
from jaxinfer.server.openai.fields import GenerationFields
from jaxinfer.server.openai.pooling import PoolingFields


def open_stream(
    client: EngineClient,
    token_ids: tuple[int, ...],
    sampling: SamplingParams,
    request: GenerationFields | PoolingFields,
    wake: asyncio.Event,
    salt: str,
    *,
    pools: bool,
    sender: str,
) -> Stream | BeamStream:
    """Submit a prompt that has been checked; see ``Service.open``. ``salt``: before the request's
    own; all that are not empty have the same length.
    """
    priority, salt = request.priority, salt + (request.cache_salt or "")
    if isinstance(request, BeamFields) and request.use_beam_search:
        return BeamStream(
            client,
            token_ids,
            request.beam_search(resolved_max_tokens(len(token_ids), sampling, client.limits)),
            num_logprobs=sampling.logprobs or 0,
            skip_special_tokens=sampling.skip_special_tokens,
            priority=priority,
            cache_salt=salt,
            wake=wake,
        )
    return client.open(
        token_ids,
        sampling,
        priority=priority,
        cache_salt=salt,
        wake=wake,
        checked=True,
        pools=pools,
        client=sender,
    )
