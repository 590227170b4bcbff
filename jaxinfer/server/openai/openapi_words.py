"""What the fields of answers mean, for ``/openapi.json``; a name means the same in every answer.

Owns: the words.
"""

from collections.abc import Mapping
from types import MappingProxyType

ANSWER_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "bytes": "UTF-8 bytes of the token, which may be only a part of a character.",
        "cached_tokens": "Tokens of the prompt that came from the prefix cache.",
        "choices": "All completions of the first prompt, then of the next.",
        "code": "What is wrong, in one word for programs; null where the message says all.",
        "completion_tokens": "Tokens that were generated.",
        "content": "The text, or what it gained; in logprobs one entry for each token.",
        "count": "How many tokens there are.",
        "created": "When the answer, or the server, began; seconds since 1970.",
        "data": "One entry for each name.",
        "decoded_token": "The token's text.",
        "delta": "What the message gained.",
        "error": "What is wrong.",
        "finish_reason": "Why the output ended; null while it goes on.",
        "id": "The id of the request, or the name of the model.",
        "index": "Which of the choices this is.",
        "latency_ms": "Milliseconds from the request's arrival to its last token.",
        "logprob": "Natural logarithm of the probability, before temperature and penalties.",
        "logprobs": "The logprobs that were asked for, else null.",
        "max_model_len": "Most tokens of a prompt and its output together.",
        "message": "What the model said, or what is wrong and what to do.",
        "model": "The name of the model that answered.",
        "object": "Which kind of answer this is.",
        "outputs": "One entry for each completion.",
        "owned_by": "Who serves the model.",
        "param": "The path of the field to blame, such as messages[0].content.",
        "parent": "Always null: there are no adapters.",
        "prompt": "The text of the tokens.",
        "prompt_logprobs": "Token ids to logprobs at each position; null for the first.",
        "prompt_token_ids": "Token ids of the prompt, once, when return_token_ids is true.",
        "prompt_tokens": "Tokens of all prompts.",
        "prompt_tokens_details": "Where the prompt's tokens came from.",
        "rank": "1 for the likeliest token.",
        "refusal": "Always null.",
        "role": "Who speaks.",
        "root": "The model behind the name.",
        "stop_reason": "The stop string, or the request's stop id, that ended the output.",
        "system_fingerprint": "Which software answered.",
        "text": "The text, or what it gained.",
        "text_offset": "Where each token begins in the text, in characters.",
        "token": "The token's text, or token_id:<id>.",
        "token_ids": "Token ids of the text, when return_token_ids is true.",
        "token_logprobs": "The logprob of each token; null for the first of an echoed prompt.",
        "token_strs": "The text of each token, when return_token_strs is true.",
        "tokens": "The tokens, in order.",
        "top_logprobs": "The likeliest tokens at each position.",
        "total_tokens": "prompt_tokens and completion_tokens together.",
        "type": "The class of what is wrong.",
        "usage": "Tokens of the request; in a stream null until the end.",
        "version": "The version of jaxinfer.",
    }
)
