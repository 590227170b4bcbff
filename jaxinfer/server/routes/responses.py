"""Handlers of ``/v1/responses``."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from uuid import uuid4

import msgspec
from starlette.responses import Response
from starlette.types import ASGIApp

from jaxinfer.core.errors import ContextLengthError
from jaxinfer.core.sampling_checks import INT32_MAX
from jaxinfer.engine.requests.prompts import Prompt
from jaxinfer.server.api.fields import field_error
from jaxinfer.server.api.parse import MAX_DIGITS
from jaxinfer.server.http.errors import ApiError
from jaxinfer.server.http.sse import EventStream, frame
from jaxinfer.server.openai.schema import ChatCompletionRequest
from jaxinfer.server.responses.background import BackgroundRun
from jaxinfer.server.responses.listing import MAX_LISTED, page, with_ids
from jaxinfer.server.responses.objects import (
    EVENTS,
    DeletedResponse,
    InputItemList,
    ResponseObject,
    Status,
)
from jaxinfer.server.responses.schema import ResponsesRequest, renamed
from jaxinfer.server.responses.store import StoredResponse, Turn
from jaxinfer.server.responses.writer import ResponseWriter
from jaxinfer.server.routes.generation import chat_reading, open_answer
from jaxinfer.server.routes.tokens import chat_prompt
from jaxinfer.server.service.endpoint import MEDIA_TYPE, Call, Route, json_response
from jaxinfer.server.service.service import Service, run_off_loop
from jaxinfer.text.chat_forms import GUIDANCE


async def create(call: Call) -> ASGIApp:
    """Answer items with items."""
    request = await call.parse(ResponsesRequest)
    call.refuse_hosted(request.hosted)
    call.prompt_field, call.renamed = "input", renamed
    service = call.service
    before = _turn_before(call, request.previous_response_id)
    if request.background and not service.config.max_stored_responses:
        raise field_error(
            "background",
            "background responses are stored, and this server stores none; start it with "
            "--max-stored-responses, or leave background out",
        )
    if request.background and len(service.background) >= service.config.max_stored_responses:
        raise ApiError(
            429,
            f"{len(service.background)} background responses are not done, and as many are stored "
            "(--max-stored-responses); try again later",
            param="background",
            code="queue_full",
            headers={"Retry-After": "5"},
        )
    chat = await run_off_loop(
        lambda: request.chat(before.conversation() if before is not None else ()),
        call.is_small and before is None,
    )
    if request.truncation == "auto":
        chat, prompt = await _fitting(call, chat)
    else:
        prompt = await chat_prompt(call, chat, chat.messages, chat.add_special_tokens)
    response = _begun(service, request)
    asked = None
    if request.store:
        asked = Turn(before, with_ids(request.items, response.id.partition("_")[2]))
    make_writer = partial(
        ResponseWriter,
        response=response,
        summarises=request.summarises,
        origins=request.origins,
        on_end=partial(_keep, call, request, asked),
    )
    reading = chat_reading(service, chat, prompt)
    answer, writer = open_answer(call, chat, [prompt], make_writer, reading)
    if request.background:
        assert asked is not None, "it is stored"
        run = BackgroundRun(writer, answer, asked, call.explain, partial(service.close, answer))
        service.background[writer.response.id] = run
        return _events(call, run, 0) if request.stream else json_response(writer.response)
    if request.stream:
        return call.stream(answer, writer)
    await call.read_all(answer, writer.add)
    writer.end(answer)
    return json_response(writer.response)


async def stored(call: Call) -> ASGIApp:
    """GET returns a stored response, or its events; DELETE forgets it."""
    found = _found(call)
    if call.method == "DELETE":
        if isinstance(found, BackgroundRun):
            await found.cancel()
        call.service.responses.remove(_id(call))
        return json_response(DeletedResponse(id=_id(call)))
    if call.query.get("stream", "false").lower() in ("true", "1"):
        return _events(call, found, _first_event(call))
    return _whole(found)


async def cancel(call: Call) -> ASGIApp:
    """End a background response early; one that has ended stays as it is."""
    found = _found(call)
    if isinstance(found, BackgroundRun):
        await found.cancel()
    elif not found.is_background:
        raise field_error(
            "response_id", "only a response created with background=true can be cancelled"
        )
    return _whole(found)


async def input_items(call: Call) -> ASGIApp:
    """A page of the items that a stored response answers, those of earlier turns too."""
    asked = _found(call).asked
    items = await run_off_loop(asked.conversation, False)
    return json_response(page(items, call.query))


def _id(call: Call) -> str:
    return call.path_parameters["response_id"]


def _found(call: Call) -> BackgroundRun | StoredResponse:
    """The response that the path names; raises ``ApiError`` 404."""
    service, response_id = call.service, _id(call)
    _ = service.loaded  # 503 before the model is loaded
    found = _own(call, response_id)
    if found is None:
        raise ApiError(
            404,
            f"the response {response_id[:100]!r} is not stored; the oldest are forgotten first",
            param="response_id",
            code="response_not_found",
        )
    return found


def _own(call: Call, response_id: str) -> BackgroundRun | StoredResponse | None:
    """The response with this id, if it is there and was made with the same API key."""
    service = call.service
    found = service.background.get(response_id) or service.responses.get(response_id)
    return found if found is not None and found.owner == call.caller.key_salt else None


# requests


def _turn_before(call: Call, response_id: str | None) -> Turn | None:
    """The turn that a request continues; raises ``ApiError``."""
    if response_id is None:
        return None
    found = _own(call, response_id)
    if isinstance(found, StoredResponse):
        return found.turn
    known = "is not stored" if found is None else "is still running"
    most = call.service.config.max_stored_responses
    raise ApiError(
        400,
        f"previous_response_id {response_id!r} {known}; this server keeps the last {most} "
        "responses (--max-stored-responses); send their items as input instead",
        param="previous_response_id",
        code="previous_response_not_found",
    )


async def _fitting(call: Call, chat: ChatCompletionRequest) -> tuple[ChatCompletionRequest, Prompt]:
    """The chat without as many of its first turns as exceed the context, and its prompt.

    Instructions stay, and the first turn that is kept begins with a user's message. A last turn
    that is too long gets the error of other long prompts.
    """
    longest = call.service.client.limits.max_model_len - (chat.max_completion_tokens or 1)
    roles = [message["role"] for message in chat.messages]
    first = next((n for n, role in enumerate(roles) if role not in GUIDANCE), 0)
    begins = [first, *(n for n, role in enumerate(roles) if n > first and role == "user")]

    async def rendered(number: int) -> tuple[ChatCompletionRequest, Prompt]:
        messages = (*chat.messages[:first], *chat.messages[begins[number] :])
        prompt = await chat_prompt(call, chat, messages, chat.add_special_tokens)
        return msgspec.structs.replace(chat, messages=messages), prompt

    async def fits(number: int) -> bool:
        try:
            return len((await rendered(number))[1].token_ids) <= longest
        except ContextLengthError:  # it has too many characters
            return False

    low, high = 0, len(begins) - 1
    number = 0  # most chats fit whole
    while low < high:
        low, high = (low, number) if await fits(number) else (number + 1, high)
        number = (low + high) // 2
    return await rendered(low)


def _begun(service: Service, request: ResponsesRequest) -> ResponseObject:
    """The response before its first token."""
    defaults = service.loaded.defaults
    text = {} if request.text.format is None else _without_null(request.text.format)
    return ResponseObject(
        id=f"resp_{uuid4().hex}",
        created_at=int(time.time()),
        status=Status.QUEUED if request.background else Status.IN_PROGRESS,
        background=request.background,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata,
        model=service.model_names[0],
        parallel_tool_calls=request.parallel_tool_calls,
        previous_response_id=request.previous_response_id,
        reasoning={"effort": request.reasoning.effort, "summary": request.reasoning.summary},
        store=request.store,
        temperature=_or_default(request.temperature, defaults.temperature),
        text={"format": text or {"type": "text"}},
        tool_choice=request.tool_choice or "auto",
        tools=list(request.tools or ()),
        top_logprobs=request.top_logprobs or 0,
        top_p=_or_default(request.top_p, defaults.top_p),
        truncation=request.truncation,
    )


def _or_default(given: float | None, default: float) -> float:
    return default if given is None else given


def _without_null(struct: msgspec.Struct) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.structs.asdict(struct)
    return {name: value for name, value in fields.items() if value is not None}


def _keep(
    call: Call, request: ResponsesRequest, asked: Turn | None, writer: ResponseWriter
) -> None:
    """Store a response that has ended with its request, unless the client forbids it."""
    service, response = call.service, writer.response
    service.background.pop(response.id, None)
    if asked is not None:
        turn = Turn(asked, response.output)
        frames = tuple(writer.frames) if request.background and request.stream else None
        owner = call.caller.key_salt
        service.responses.add(StoredResponse.of(response, turn, frames, owner))


# responses


def _whole(found: BackgroundRun | StoredResponse) -> ASGIApp:
    """The response as it is now."""
    if isinstance(found, BackgroundRun):
        return json_response(found.writer.response)
    return Response(found.body, media_type=MEDIA_TYPE)


def _events(call: Call, found: BackgroundRun | StoredResponse, first: int) -> ASGIApp:
    """The events of a background response, beginning with event number ``first``."""
    if isinstance(found, BackgroundRun):
        read = found.reader(first) if found.writer.is_streamed else None
    else:
        read = None if found.frames is None else _once(b"".join(found.frames[first:]))
    if read is None:
        raise field_error(
            "stream",
            "only the events of a response created with background=true and stream=true are kept",
        )
    return EventStream(read, lambda: None, call.explain, lambda error: frame(error.body), b"")


def _once(data: bytes) -> Callable[[], Awaitable[bytes]]:
    """A function that returns the data at its first call, and then nothing."""
    unread = [data]

    async def read() -> bytes:
        return unread.pop() if unread else b""

    return read


def _first_event(call: Call) -> int:
    """The number of the first event that the client has not seen; raises ``ApiError``."""
    given = call.query.get("starting_after", "-1")
    if not given.removeprefix("-").isdecimal() or len(given) > MAX_DIGITS:
        raise field_error("starting_after", "starting_after must be the number of an event")
    return max(int(given), -1) + 1


ROUTES = (
    Route(
        "POST",
        "/v1/responses",
        create,
        "createResponse",
        "Answer input items with output items, in the form of OpenAI's Responses API.",
        ResponseObject,
        ResponsesRequest,
        EVENTS,
        named_events=True,
    ),
    Route(
        "GET",
        "/v1/responses/{response_id}",
        stored,
        "getResponse",
        "A stored response, or its events if it was created in the background.",
        ResponseObject,
        query={
            "stream": {"type": "boolean"},
            "starting_after": {"type": "integer", "minimum": 0, "maximum": INT32_MAX},
        },
        errors=(400,),
    ),
    Route(
        "DELETE",
        "/v1/responses/{response_id}",
        stored,
        "deleteResponse",
        "Forget a stored response.",
        DeletedResponse,
    ),
    Route(
        "POST",
        "/v1/responses/{response_id}/cancel",
        cancel,
        "cancelResponse",
        "End a background response early.",
        ResponseObject,
        errors=(400,),
    ),
    Route(
        "GET",
        "/v1/responses/{response_id}/input_items",
        input_items,
        "listInputItems",
        "The items that a stored response answers, those of earlier turns too.",
        InputItemList,
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": MAX_LISTED},
            "order": {"enum": ["asc", "desc"]},
            "after": {"type": "string"},
            "include": {"type": "array", "items": {"type": "string"}},
        },
        errors=(400,),
    ),
)
