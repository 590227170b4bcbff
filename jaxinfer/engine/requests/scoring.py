"""Scores of a document for a query, by a causal model that answers yes or no (Qwen3-Reranker).

The score is the probability of the answer for, among the two answers (``score_tokens``), at the
first token after a prompt that a chat template makes of messages with the roles ``query`` and
``document``, as in vLLM. Source of the prompt and of the score: the model card of Qwen3-Reranker.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jaxinfer.core.errors import RequestError, TaskError
from jaxinfer.core.request import SamplingParams
from jaxinfer.engine.requests.facts import ModelFacts
from jaxinfer.engine.requests.outputs import PositionLogprobs
from jaxinfer.engine.requests.prompts import Prompt

if TYPE_CHECKING:
    from jaxinfer.text.tokenizer import Tokenizer

TEMPLATE = """\
{%- set ns = namespace(query="", document="") -%}
{%- for message in messages -%}
{%- if message.role == "query" -%}{%- set ns.query = message.content -%}{%- endif -%}
{%- if message.role == "document" -%}{%- set ns.document = message.content -%}{%- endif -%}
{%- endfor -%}
<|im_start|>system
Judge whether the Document meets the requirements based on the Query and the Instruct provided. \
Note that the answer can only be "yes" or "no".<|im_end|>
<|im_start|>user
<Instruct>: {{ instruction | default("Given a web search query, retrieve relevant passages that \
answer the query") }}
<Query>: {{ ns.query }}
<Document>: {{ ns.document }}<|im_end|>
<|im_start|>assistant
<think>

</think>{{ "\n\n" }}"""
_DOCUMENT_ROLE = re.compile(r"""["']document["']""")  # in a template that is made for scores
NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})


def check_scores(facts: ModelFacts) -> None:
    """Raise ``TaskError`` unless the model scores documents, or makes embeddings to compare."""
    if not facts.score_token_ids and facts.pooling is None:
        raise TaskError(
            "this model gives no scores here; start it with task 'score' (--task score) if it is a "
            "reranker, or with task 'embed'"
        )


def score_sampling(facts: ModelFacts) -> SamplingParams:
    """How to draw the one token whose logprobs make a score."""
    return SamplingParams(
        max_tokens=1,
        temperature=0,
        detokenize=False,
        logprobs=0,
        logprob_token_ids=facts.score_token_ids,
    )


def probability(position: PositionLogprobs, facts: ModelFacts) -> float:
    """The probability of the answer for, among the two answers."""
    yes, no = (position[token_id].logprob for token_id in facts.score_token_ids)
    return 1 / (1 + math.exp(min(no - yes, 700.0)))


def score_prompt(
    tokenizer: Tokenizer,
    query: str,
    document: str,
    *,
    template: str | None = None,
    variables: Mapping[str, Any] = NO_VARIABLES,
    keep: int | None = None,
) -> Prompt:
    """The prompt for one document, rendered in this process. ``template``: see ``score_template``;
    ``keep``: see ``fitted``.
    """
    template = score_template(tokenizer, template)
    found: Prompt | str = document
    while isinstance(found, str):
        chat = score_messages(query, found)
        text = tokenizer.render_chat(chat, template_kwargs=variables, chat_template=template)
        found = fitted(tokenizer, text, found, keep)
    return found


def score_template(tokenizer: Tokenizer, given: str | None) -> str:
    """The chat template of scores: the given one, else the model's own if it has the role
    ``document``, else Qwen3-Reranker's.
    """
    if given is not None:
        return given
    own = tokenizer.get_chat_template() if tokenizer.has_chat_template else ""
    return own if _DOCUMENT_ROLE.search(own) else TEMPLATE


def score_messages(query: str, document: str) -> list[dict[str, str]]:
    """The chat whose rendered text is the prompt for a document."""
    return [{"role": "query", "content": query}, {"role": "document", "content": document}]


def fitted(tokenizer: Tokenizer, text: str, document: str, keep: int | None) -> Prompt | str:
    """A rendered text as a prompt, or if it has more than ``keep`` tokens, the document without so
    many of its last tokens, to be rendered again.

    Raises ``RequestError`` if ``keep`` is too small for the rest of the prompt.
    """
    ids = tokenizer.encode(text, add_special_tokens=False)
    if keep is None or (excess := len(ids) - keep) <= 0:
        return Prompt(text, tuple(ids))
    left = len(tokenizer.encode(document, add_special_tokens=False)) - excess
    if left < 1:
        raise RequestError(
            f"truncate_prompt_tokens is {keep}, and the prompt has more tokens without the "
            "document; allow more"
        )
    return first_tokens(tokenizer, document, left)


def first_tokens(tokenizer: Tokenizer, text: str, count: int) -> str:
    """The first ``count`` tokens of a text, as text; a character that they cut is left out."""
    ids = tokenizer.encode(text, add_special_tokens=False)
    return text if len(ids) <= count else tokenizer.decode(ids[:count]).rstrip("\ufffd")


def paired[A, B](one: list[A], other: list[B]) -> list[tuple[A, B]]:
    """One query with each document, or each query with its own; raises ``RequestError``."""
    if len(one) == 1:
        return [(one[0], document) for document in other]
    if len(one) != len(other):
        raise RequestError(
            f"{len(one)} queries came with {len(other)} documents; send one query, or one for each "
            "document"
        )
    return list(zip(one, other, strict=True))
