"""Responses, read by the official client's own types, and the form of errors."""

import json

import msgspec
import openai.types as openai_types
import openai.types.chat as openai_chat
import pytest

from jaxinfer.core.errors import EngineError, RequestError, TokenizerError
from jaxinfer.core.request import FinishReason
from jaxinfer.engine.requests.outputs import Logprob
from jaxinfer.server.http.errors import api_error
from jaxinfer.server.openai import responses

# errors


@pytest.mark.parametrize(
    ("error", "alive", "status", "param"),
    [
        (RequestError("min_tokens 5 is larger than max_tokens 3"), True, 400, "min_tokens"),
        (RequestError("the prompt has 9 tokens"), True, 400, "prompt"),
        (RequestError("prompt[3]: the prompt is empty"), True, 400, "prompt[3]"),
        (RequestError("messages[0].content[1] must be"), True, 400, "messages[0].content[1]"),
        (RequestError("logit_bias[5] must be"), True, 400, "logit_bias[5]"),
        (RequestError("stop strings need a tokenizer"), True, 400, "stop"),
        (RequestError("something else is wrong"), True, 400, None),
        (TokenizerError("The chat template failed: no"), True, 400, None),
        (EngineError("the step failed"), True, 500, None),
        (EngineError("the engine has stopped"), False, 503, None),
    ],
)
def test_errors_of_the_lower_floors(error, alive, status, param):
    told = api_error(error, alive=alive)
    assert (told.status, told.param, told.message) == (status, param, str(error))
    body = json.loads(told.body)
    assert body["error"].keys() == {"message", "type", "param", "code"}
    assert body["error"]["type"] == ("invalid_request_error" if status == 400 else "server_error")


# answers, read by the official client's own types


USAGE = responses.Usage(
    prompt_tokens=3,
    completion_tokens=2,
    total_tokens=5,
    prompt_tokens_details=responses.PromptTokensDetails(cached_tokens=1),
)
HEAD = {"id": "x", "created": 1, "model": "m", "system_fingerprint": "f"}
CHAT_LOGPROBS = responses.ChatLogprobs(
    content=[
        responses.TokenLogprob(
            token="a",
            logprob=-1.0,
            bytes=[97],
            top_logprobs=[responses.TopLogprob(token="a", logprob=-1.0, bytes=[97])],
        )
    ]
)
LOGPROBS = responses.CompletionLogprobs(
    text_offset=[0], token_logprobs=[-1.0], tokens=["a"], top_logprobs=[{"a": -1.0}]
)
COMPLETION = responses.Completion(
    **HEAD,
    choices=[
        responses.CompletionChoice(
            index=0, text="a", finish_reason=FinishReason.STOP, logprobs=LOGPROBS, stop_reason=5
        )
    ],
    usage=USAGE,
)
ANSWERS = [
    (COMPLETION, openai_types.Completion),
    (
        responses.CompletionChunk(
            **HEAD,
            choices=[
                responses.CompletionChunkChoice(index=0, text="", finish_reason=FinishReason.LENGTH)
            ],
            usage=None,
        ),
        openai_types.Completion,
    ),
    (responses.CompletionChunk(**HEAD, choices=[], usage=USAGE), openai_types.Completion),
    (
        responses.ChatCompletion(
            **HEAD,
            choices=[
                responses.ChatChoice(
                    index=0,
                    message=responses.ChatMessage(role="assistant", content="a"),
                    finish_reason=FinishReason.STOP,
                    logprobs=CHAT_LOGPROBS,
                )
            ],
            usage=USAGE,
        ),
        openai_chat.ChatCompletion,
    ),
    (
        responses.ChatChunk(
            **HEAD,
            choices=[
                responses.ChatChunkChoice(
                    index=0, delta=responses.ChatDelta(role="assistant", content="")
                )
            ],
        ),
        openai_chat.ChatCompletionChunk,
    ),
    (
        responses.ChatChunk(
            **HEAD,
            choices=[
                responses.ChatChunkChoice(
                    index=0,
                    delta=responses.ChatDelta(),
                    finish_reason=FinishReason.STOP,
                    stop_reason="x",
                    logprobs=CHAT_LOGPROBS,
                )
            ],
            usage=None,
        ),
        openai_chat.ChatCompletionChunk,
    ),
    (
        responses.ModelCard(id="m", created=1, root="m", max_model_len=9),
        openai_types.Model,
    ),
]


@pytest.mark.parametrize(("answer", "kind"), ANSWERS, ids=lambda one: type(one).__name__)
def test_official_types_read_our_answers(answer, kind):
    sent = json.loads(responses.encode(answer))
    read_back = kind.model_validate(sent, strict=True)
    assert read_back.model_dump(exclude_unset=True) == sent


def test_left_out_and_null_fields():
    chunk = responses.CompletionChunk(**HEAD, choices=[])
    assert "usage" not in json.loads(responses.encode(chunk))
    waiting = msgspec.structs.replace(chunk, usage=None)
    assert json.loads(responses.encode(waiting))["usage"] is None
    delta = responses.ChatDelta(content="a")
    assert json.loads(responses.encode(delta)) == {"content": "a"}


def test_prompt_logprobs_are_keyed_by_id():
    choice = msgspec.structs.replace(
        COMPLETION.choices[0], prompt_logprobs=[None, {7: Logprob(-1.0, 2, "b")}]
    )
    assert json.loads(responses.encode(choice))["prompt_logprobs"] == [
        None,
        {"7": {"logprob": -1.0, "rank": 2, "decoded_token": "b"}},
    ]
