"""Requests and responses of embeddings, scores and reranking: OpenAI's and vLLM's fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from msgspec import UNSET, Meta, UnsetType

from jaxinfer.core.pooling import PoolingParams
from jaxinfer.core.sampling_checks import INT32_MAX
from jaxinfer.server.api.fields import (
    AnyRequest,
    CacheSalt,
    Neutral,
    Priority,
    RequestId,
    TokenId,
    field_error,
)
from jaxinfer.server.openai.responses import AnswerStruct, Usage
from jaxinfer.server.openai.schema import MAX_PROMPTS, prompt_list

ENCODINGS = ("float", "base64")
POOLING_TASKS = ("embed",)
Input = str | Annotated[tuple[str | TokenId | tuple[TokenId, ...], ...], Meta(min_length=1)]
Count = Annotated[int, Meta(ge=1, le=INT32_MAX)]
Texts = str | Annotated[tuple[str, ...], Meta(min_length=1, max_length=MAX_PROMPTS)]

_UNSUPPORTED: Neutral = MappingProxyType(
    {
        "kv_transfer_params": (None,),
        "mm_processor_kwargs": (None, {}),
        "truncation_side": (None, "right"),
    }
)


class PoolingFields(AnyRequest, frozen=True, kw_only=True, dict=True):
    """Fields of all requests for vectors and scores."""

    unsupported: ClassVar[Neutral] = _UNSUPPORTED
    ignored: ClassVar[tuple[str, ...]] = ("user",)

    truncate_prompt_tokens: Annotated[int, Meta(ge=-1, le=INT32_MAX)] | None = None
    priority: Priority = 0
    cache_salt: CacheSalt | None = None
    request_id: RequestId | None = None
    timeout: Annotated[float, Meta(gt=0.0)] | None = None  # seconds

    def check(self) -> None:
        if self.truncate_prompt_tokens == 0:
            raise field_error(
                "truncate_prompt_tokens", "truncate_prompt_tokens must be -1 or at least 1, got 0"
            )

    def requested_tokens(self) -> None:
        """The number of tokens to generate: none."""


class EmbeddingRequest(PoolingFields, frozen=True, kw_only=True, dict=True):
    """``POST /v1/embeddings``."""

    unsupported: ClassVar[Neutral] = MappingProxyType(
        {
            **_UNSUPPORTED,
            "embed_dtype": (None, "float32"),
            "endianness": (None, "native", "little"),
            "messages": (None,),
        }
    )

    input: Input
    encoding_format: str = "float"
    dimensions: Count | None = None
    normalize: bool | None = None
    use_activation: bool | None = None
    add_special_tokens: bool = True

    @cached_property  # it checks every token id
    def inputs(self) -> list[str | tuple[int, ...]]:
        """Each input, text or token ids; a single one is a list of one."""
        return prompt_list(self.input, "input")

    @property
    def params(self) -> PoolingParams:
        """How each vector is made; newer clients of vLLM say ``use_activation``."""
        normalize = self.use_activation if self.normalize is None else self.normalize
        return PoolingParams(dimensions=self.dimensions, normalize=normalize)

    def check(self) -> None:
        super().check()
        if self.encoding_format not in ENCODINGS:
            got = self.encoding_format[:40]
            raise field_error(
                "encoding_format", f"encoding_format must be float or base64, got {got!r}"
            )
        _ = self.inputs


class PoolingRequest(EmbeddingRequest, frozen=True, kw_only=True, dict=True):
    """``POST /pooling``: as ``EmbeddingRequest``; ``task`` may be embed, the only one."""

    task: str = "embed"

    def check(self) -> None:
        super().check()
        if self.task not in POOLING_TASKS:
            raise field_error("task", f"task must be embed, got {self.task[:40]!r}")


class TemplateFields(PoolingFields, frozen=True, kw_only=True, dict=True):
    """Fields of requests for scores. The template of a request is a program, and not run."""

    unsupported: ClassVar[Neutral] = MappingProxyType(
        {
            **_UNSUPPORTED,
            "activation": (None,),
            "chat_template": (None,),
            "use_activation": (None, True),
        }
    )

    chat_template_kwargs: dict[str, Any] | None = None
    instruction: str | None = None

    @property
    def variables(self) -> Mapping[str, Any]:
        """The variables of the chat template."""
        own = {} if self.instruction is None else {"instruction": self.instruction}
        return {**(self.chat_template_kwargs or {}), **own}


class ScoreRequest(TemplateFields, frozen=True, kw_only=True, dict=True):
    """``POST /v1/score``: one query and documents, or as many queries as documents."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None

    @property
    def pair_fields(self) -> tuple[str, str]:
        """The names of the fields that hold the queries and the documents."""
        return ("text_1", "text_2") if self.queries is None else ("queries", "documents")

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Each query with its document; raises ``ApiError``."""
        names = self.pair_fields
        given = [getattr(self, name) for name in names]
        for name, value in zip(names, given, strict=True):
            if value is None:
                raise field_error(name, f"{name} is required")
        queries, documents = ([one] if isinstance(one, str) else list(one) for one in given)
        if len(queries) == 1:
            queries *= len(documents)
        if len(queries) != len(documents):
            raise field_error(
                names[1],
                f"{names[1]} holds {len(documents)} texts and {names[0]} {len(queries)}; send one "
                "query, or one for each document",
            )
        return list(zip(queries, documents, strict=True))

    def check(self) -> None:
        super().check()
        if (self.text_1 is not None or self.text_2 is not None) and (
            self.queries is not None or self.documents is not None
        ):
            raise field_error("queries", "queries and documents exclude text_1 and text_2")
        _ = self.pairs


Documents = Annotated[tuple[str | dict[str, Any], ...], Meta(min_length=1, max_length=MAX_PROMPTS)]


class RerankRequest(TemplateFields, frozen=True, kw_only=True, dict=True):
    """``POST /v1/rerank``, with the fields of Jina, Cohere and vLLM."""

    query: str
    documents: Documents
    top_n: Annotated[int, Meta(ge=0, le=INT32_MAX)] = 0  # 0: all
    return_documents: bool = True
    max_tokens_per_doc: Count | None = None

    @cached_property
    def texts(self) -> list[str]:
        """The text of each document; raises ``ApiError``."""
        found: list[str] = []
        for index, document in enumerate(self.documents):
            text = document if isinstance(document, str) else document.get("text")
            if not isinstance(text, str):
                name = f"documents[{index}].text"
                raise field_error(name, f"{name} must be a string")
            found.append(text)
        return found

    def check(self) -> None:
        super().check()
        _ = self.texts


class EmbeddingData(AnswerStruct, frozen=True, kw_only=True):
    """One vector; as bytes it is float32, little endian, which JSON has in base64."""

    index: int
    object: Literal["embedding"] = "embedding"
    embedding: list[float] | bytes


class EmbeddingList(AnswerStruct, frozen=True, kw_only=True):
    """The answer of ``/v1/embeddings``."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[EmbeddingData]
    usage: Usage


class PoolingData(AnswerStruct, frozen=True, kw_only=True):
    """One vector of ``/pooling``."""

    index: int
    object: Literal["pooling"] = "pooling"
    data: list[float] | bytes


class PoolingList(AnswerStruct, frozen=True, kw_only=True):
    """The answer of ``/pooling``."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[PoolingData]
    usage: Usage


class ScoreData(AnswerStruct, frozen=True, kw_only=True):
    """The score of one document."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(AnswerStruct, frozen=True, kw_only=True):
    """The answer of ``/v1/score``."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[ScoreData]
    usage: Usage


class RerankedDocument(AnswerStruct, frozen=True, kw_only=True):
    """A document that was ranked."""

    text: str


class RerankResult(AnswerStruct, frozen=True, kw_only=True):
    """One document's place in the request, and its score."""

    index: int
    document: RerankedDocument | UnsetType = UNSET
    relevance_score: float


class Reranking(AnswerStruct, frozen=True, kw_only=True):
    """The answer of ``/v1/rerank``: the best document first."""

    id: str
    model: str
    usage: Usage
    results: list[RerankResult]


def ranked(
    scores: Sequence[float], texts: Sequence[str], request: RerankRequest
) -> list[RerankResult]:
    """The best documents, ``top_n`` of them, in order; equal scores are in the request's order."""
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    return [
        RerankResult(
            index=index,
            document=RerankedDocument(text=texts[index]) if request.return_documents else UNSET,
            relevance_score=scores[index],
        )
        for index in order[: request.top_n or None]
    ]
