"""The engine's output for one prompt of a request: tokens that are drawn, or a beam search."""

from __future__ import annotations

import asyncio

from jaxinfer.core.request import RequestSpec
from jaxinfer.engine.link.beam_stream import BeamStream
from jaxinfer.engine.link.client import EngineClient, Stream
from jaxinfer.engine.requests.validate import resolved_max_tokens
from jaxinfer.server.api.beams import BeamFields
from jaxinfer.server.api.fields import GenerationFields
from jaxinfer.server.openai.pooling import PoolingFields


def open_stream(
    client: EngineClient,
    spec: RequestSpec,
    request: GenerationFields | PoolingFields,
    wake: asyncio.Event,
    sender: str,
    name: str,
) -> Stream | BeamStream:
    """Submit a prompt of ``request`` that has been checked; see ``Service.open``."""
    if isinstance(request, BeamFields) and request.use_beam_search:
        num_tokens, sampling = len(spec.prompt_token_ids), spec.sampling
        most = resolved_max_tokens(num_tokens, sampling, client.limits)
        params, listed = request.beam_search(most), sampling.logprobs or 0
        return BeamStream(client, spec, params, num_logprobs=listed, wake=wake)
    is_whole = isinstance(request, GenerationFields) and not request.stream
    return client.open(spec, wake=wake, checked=True, client=sender, name=name, is_whole=is_whole)
