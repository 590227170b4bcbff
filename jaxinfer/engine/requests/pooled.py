"""Requests for vectors: their prompts, and their outputs under vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxinfer.core.pooling import Pooling, PoolingParams
from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.requests.prompts import Prompt

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer

NO_SAMPLING = SamplingParams(max_tokens=1, detokenize=False)  # of requests that draw no token


@dataclass(slots=True)
class PoolingOutput:
    """One vector."""

    data: np.ndarray  # float32[N]


@dataclass(slots=True)
class EmbeddingOutput:
    """One vector as a list."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The number of dimensions."""
        return len(self.embedding)


@dataclass(slots=True)
class ScoringOutput:
    """How well a document answers a query, from 0 to 1; of two embeddings the cosine, from -1."""

    score: float


@dataclass(slots=True)
class PoolingRequestOutput[T]:
    """A prompt and what was made of it. Of a score by embeddings the tokens of both texts."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


class EmbeddingRequestOutput(PoolingRequestOutput[EmbeddingOutput]):
    """A prompt and its embedding."""


class ScoringRequestOutput(PoolingRequestOutput[ScoringOutput]):
    """A query with a document, and the score."""


def truncated(
    prompt: Prompt, keep: int | None, context: int, tokenizer: Tokenizer | None
) -> Prompt:
    """The first ``keep`` tokens of a prompt; -1: as many as the ``context`` has. Those of a text
    end with the special tokens that the tokenizer adds.
    """
    if keep is None:
        return prompt
    keep = context if keep < 0 else keep
    if len(prompt.token_ids) <= keep:
        return prompt
    if prompt.text is None or tokenizer is None:
        return Prompt(prompt.text, prompt.token_ids[:keep])
    return Prompt(
        prompt.text, tuple(tokenizer.encode(prompt.text, truncation=True, max_length=keep))
    )


def embedding(pooled: bytes, pooling: Pooling, params: PoolingParams) -> np.ndarray:  # float32[N]
    """The vector that a request asks for, of the pooled hidden states float32[D]."""
    vector = np.frombuffer(pooled, np.float32)[: params.dimensions]
    normalize = pooling.normalize if params.normalize is None else params.normalize
    # as torch's normalize: a vector of zeros stays one
    return vector / max(float(np.linalg.norm(vector)), 1e-12) if normalize else vector
