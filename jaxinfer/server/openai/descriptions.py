"""Descriptions of the fields of requests and responses, for ``/openapi.json``.

A response's field has one meaning in all responses. A request's field whose meaning differs in a
struct is listed as ``Struct.field``.
"""

from collections.abc import Mapping
from types import MappingProxyType

from jaxinfer.core.request import MAX_STOP_CHARACTERS
from jaxinfer.server.openai.fields import DEFAULT_MAX_TOKENS, MAX_STOP_STRINGS
from jaxinfer.server.openai.schema import MAX_PROMPTS

REQUEST_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "add_generation_prompt": "Open the assistant's turn.",
        "add_special_tokens": "Add the tokenizer's special tokens to a text prompt.",
        "allowed_token_ids": "Only these tokens may be drawn.",
        "bad_words": "Texts that the output must not contain, as tokens.",
        "best_of": "1 or the same as n: every completion is sent.",
        "cache_salt": "Share cached prefixes only with equal salts.",
        "chat_template": "A template, or the name of one of the model's, to use instead.",
        "chat_template_kwargs": "Further names for the chat template.",
        "continue_final_message": "Go on with the last message; needs add_generation_prompt=false.",
        "echo": "Put the prompt before the text; logprobs cover it too.",
        "frequency_penalty": "As presence_penalty, for each occurrence.",
        "guided_choice": "As structured_outputs.choice.",
        "guided_grammar": "As structured_outputs.grammar.",
        "guided_json": "As structured_outputs.json.",
        "guided_regex": "As structured_outputs.regex.",
        "guided_whitespace_pattern": "As structured_outputs.whitespace_pattern.",
        "ignore_eos": "Go on after the model's end of sequence.",
        "include_stop_str_in_output": "Keep the stop string at the end of the text.",
        "logit_bias": "Token id to what is added to its logit.",
        "logprobs": "Likeliest tokens to list at each position.",
        "max_completion_tokens": "Most tokens to generate; wins over max_tokens.",
        "max_tokens": "Most tokens to generate.",
        "messages": "Objects of role and content (text, or a list of text parts), and of an "
        "answer tool_calls, whose arguments are a JSON object as text; fields that are null or "
        "empty count as absent, other keys reach the chat template.",
        "min_p": "Least probability, relative to the likeliest token's.",
        "min_tokens": "Tokens to generate before a stop id can end the output.",
        "model": "A name that /v1/models lists; absent: the served model.",
        "n": "Completions of each prompt.",
        "presence_penalty": "Taken from the logits of tokens in the output.",
        "priority": "Lower is served first.",
        "prompt": "Text, or token ids.",
        "prompt_logprobs": "Likeliest tokens to list at each position of the prompt.",
        "repetition_penalty": "Divides the logits of tokens seen so far.",
        "request_id": "The id in the answer and the log; printable ASCII.",
        "response_format": "The form of the answer: any JSON object, or one with a schema.",
        "return_token_ids": "List the token ids of the prompt and of each output.",
        "return_token_strs": "List each token's text too.",
        "return_tokens_as_token_ids": 'Spell tokens in logprobs as "token_id:<id>".',
        "seed": "The same seed gives the same output.",
        "skip_special_tokens": "Leave special tokens out of the text.",
        "stop": f"A string, or up to {MAX_STOP_STRINGS} of them with {MAX_STOP_CHARACTERS} "
        "characters in all, that end the output.",
        "stop_token_ids": "Token ids that end the output.",
        "stream": "Answer with server-sent events.",
        "stream_options": "Options of a stream; needs stream=true.",
        "structured_outputs": "The form of the answer: exactly one of json (a schema), regex, "
        "choice, grammar (Lark or GBNF), json_object and structural_tag.",
        "temperature": "0 takes the most likely token.",
        "timeout": "Seconds after which to give up with 408.",
        "tokens": "The token ids.",
        "top_k": "Sample from the k likeliest tokens; 0 or -1: all.",
        "top_logprobs": "Likeliest tokens to list at each position; needs logprobs=true.",
        "top_p": "Sample from the smallest set of this probability.",
        "truncate_prompt_tokens": "Keep only this many of the prompt's last tokens; "
        "-1: as many as the context has. 0 is refused.",
        "ChatCompletionRequest.add_special_tokens": "Add the tokenizer's special tokens to what "
        "the template writes.",
        "ChatCompletionRequest.echo": "Put the last message before the text if its role is the "
        "answer's.",
        "ChatCompletionRequest.logprobs": "List the logprob of each token.",
        "CompletionRequest.max_tokens": f"Most tokens to generate, absent {DEFAULT_MAX_TOKENS}; 0, "
        "which needs echo, only scores the prompt.",
        "CompletionRequest.prompt": f"Text, token ids, or a list of up to {MAX_PROMPTS} of either.",
        "GenerateRequest.max_tokens": f"Most tokens to generate, absent {DEFAULT_MAX_TOKENS}.",
        "JsonSchemaFormat.description": "For the reader of the request; without effect.",
        "JsonSchemaFormat.name": "For the reader of the request; without effect.",
        "JsonSchemaFormat.schema": "The JSON schema; absent: any object.",
        "JsonSchemaFormat.strict": "Without effect: answers always follow the schema.",
        "ResponseFormat.format": "Of a structural_tag: its format.",
        "ResponseFormat.json_schema": "The schema, if the type is json_schema.",
        "ResponseFormat.structures": "Of a structural_tag: tags of begin, schema and end.",
        "ResponseFormat.triggers": "Of a structural_tag: texts that begin its tags.",
        "ResponseFormat.type": "text, json_object, json_schema or structural_tag.",
        "StreamOptions.continuous_usage_stats": "Send the usage so far in every chunk.",
        "StreamOptions.include_usage": "Send the usage in a last chunk without choices.",
        "TokenizeRequest.add_special_tokens": "Absent: true for a prompt, false for messages.",
        "TokenizeRequest.prompt": "The text; either this or messages.",
    }
)
RESPONSE_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        "bytes": "UTF-8 bytes of the token, which may be only a part of a character.",
        "cached_tokens": "Tokens of the prompt that came from the prefix cache.",
        "choices": "All completions of the first prompt, then those of the next.",
        "code": "The kind of error, in one word for programs; null if there is no word for it.",
        "completion_tokens": "Tokens that were generated.",
        "content": "The text, in a stream its new part; in logprobs one entry for each token.",
        "count": "The number of tokens.",
        "created": "Start of the answer, or of the server, in seconds since 1970.",
        "data": "One entry for each name.",
        "decoded_token": "The token's text.",
        "delta": "The new part of the message.",
        "error": "The error.",
        "finish_reason": "Why the output ended; null while it goes on.",
        "id": "The id of the request, or the name of the model.",
        "index": "The index of the choice.",
        "latency_ms": "Milliseconds from the request's arrival to its last token.",
        "logprob": "Natural logarithm of the probability, before temperature and penalties.",
        "logprobs": "The requested logprobs, else null.",
        "max_model_len": "Most tokens of a prompt and its output together.",
        "message": "The model's message, or the error and its remedy.",
        "model": "The name of the model that answered.",
        "object": "The kind of object.",
        "outputs": "One entry for each completion.",
        "owned_by": "The software that serves the model.",
        "param": "The path of the invalid field, such as messages[0].content.",
        "parent": "Always null: there are no adapters.",
        "prompt": "The text of the tokens.",
        "prompt_logprobs": "Token ids to logprobs at each position; null for the first.",
        "prompt_token_ids": "Token ids of the prompt, once, when return_token_ids is true.",
        "prompt_tokens": "Tokens of all prompts.",
        "prompt_tokens_details": "The prompt's tokens by source.",
        "rank": "1 for the likeliest token.",
        "refusal": "Always null.",
        "role": "The author of the message.",
        "root": "The model behind the name.",
        "stop_reason": "The stop string, or the request's stop id, that ended the output.",
        "system_fingerprint": "The software that answered, with its version.",
        "text": "The text, in a stream its new part.",
        "text_offset": "The offset of each token in the text, in characters.",
        "token": "The token's text, or token_id:<id>.",
        "token_ids": "Token ids of the text, when return_token_ids is true.",
        "token_logprobs": "The logprob of each token; null for the first of an echoed prompt.",
        "token_strs": "The text of each token, when return_token_strs is true.",
        "tokens": "The tokens, in order.",
        "top_logprobs": "The likeliest tokens at each position.",
        "total_tokens": "prompt_tokens and completion_tokens together.",
        "type": "The class of the error.",
        "usage": "Tokens of the request; in a stream null until the end.",
        "version": "The version of jaxinfer.",
    }
)
