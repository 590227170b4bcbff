"""Routes that change the engine: they need ``--admin-api-key``, and exist only with one."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response
from starlette.types import ASGIApp

from jaxinfer.core.errors import ArgumentError, EngineError, JaxinferError, RequestError
from jaxinfer.engine.link.wire import Action, EngineState, Mode
from jaxinfer.engine.loop.profiler import NUM_STEPS
from jaxinfer.server.api.fields import field_error
from jaxinfer.server.http.errors import ApiError
from jaxinfer.server.http.guard import Keys, wrong_key
from jaxinfer.server.openai.schema import (
    ChangeRequest,
    SteeringRequest,
    UpdateWeightsRequest,
    change_mode,
)
from jaxinfer.server.service.endpoint import Call, Route, json_response

MAX_STEPS = 1000  # of a profile: a decode step of a GPU has some 300 kernels, of 100 bytes each


async def pause(call: Call) -> ASGIApp:
    """Complete or abort the open requests, then hold later ones."""
    _check_key(call)
    await call.service.client.control("pause", mode=await _mode(call))
    return json_response({"status": "paused"})


async def resume(call: Call) -> ASGIApp:
    """Start the requests that ``pause`` has held."""
    _check_key(call)
    await call.service.client.control("resume")
    return json_response({"status": "resumed"})


async def reset_prefix_cache(call: Call) -> ASGIApp:
    """Forget all prefixes once no request is open."""
    _check_key(call)
    await call.service.client.control("reset_prefix_cache", mode=await _mode(call))
    return json_response({"status": "reset"})


async def update_weights(call: Call) -> ASGIApp:
    """Serve the weights of a folder; the old ones stay if they do not fit."""
    _check_key(call)
    request = await call.parse(UpdateWeightsRequest)
    mode = change_mode(call.query.get("mode", request.mode))
    try:
        await call.service.client.control("update_weights", mode=mode, path=request.path)
    except EngineError:
        raise
    except JaxinferError as error:  # the weights do not fit
        raise field_error("path", str(error)) from None
    return json_response({"status": "updated"})


async def sleep(call: Call) -> ASGIApp:
    """Give the device's memory back; ``?level=`` and, by default abort, ``?mode=`` as in vLLM."""
    _check_key(call)
    level, mode = call.query.get("level", "1"), change_mode(call.query.get("mode", "abort"))
    if level not in ("1", "2"):
        raise field_error("level", f"level must be 1 or 2, got {level[:40]!r}")
    await call.service.client.control("sleep", mode=mode, level=int(level))
    return Response(status_code=200)


async def wake_up(call: Call) -> ASGIApp:
    """Take the device's memory again: ``?tags=weights``, ``?tags=kv_cache``, by default both."""
    _check_key(call)
    tags = tuple(call.query.getlist("tags")) or None
    try:
        await call.service.client.control("wake_up", tags=tags)
    except ArgumentError as error:
        raise field_error("tags", str(error)) from None
    return Response(status_code=200)


async def set_steering(call: Call) -> ASGIApp:
    """Keep a steering vector by name, or remove it."""
    _check_key(call)
    request = await call.parse(SteeringRequest)
    try:
        await call.service.client.set_steering(request.name, request.vector)
    except RequestError as error:
        raise field_error("vector", str(error)) from None
    return json_response({"status": "removed" if request.vector is None else "set"})


async def start_profile(call: Call) -> ASGIApp:
    """Trace the next steps into a new folder in ``--profiler-dir``; ``?num_steps=``: at most."""
    _check_key(call)
    steps = call.query.get("num_steps", str(NUM_STEPS))
    if not steps.isdecimal() or not 0 < int(steps) <= MAX_STEPS:
        raise field_error("num_steps", f"num_steps must be 1 to {MAX_STEPS}, got {steps[:40]!r}")
    folder = call.service.config.profiler_dir or ""
    await _profiled(call, "start_profile", path=folder, num_steps=int(steps))
    return json_response({"profiler_dir": folder})


async def stop_profile(call: Call) -> ASGIApp:
    """End the trace and write the profile."""
    _check_key(call)
    await _profiled(call, "stop_profile")
    return json_response({"profiler_dir": call.service.config.profiler_dir or ""})


async def _profiled(call: Call, action: Action, **arguments: Any) -> None:
    """Start or stop; 409 if that cannot be done now, as another profile is being taken or none."""
    try:
        await call.service.client.control(action, **arguments)
    except (ArgumentError, EngineError) as error:
        if not call.service.client.alive:
            raise
        raise ApiError(409, str(error)) from None


async def is_paused(call: Call) -> ASGIApp:
    """Answer True if ``/pause`` holds requests."""
    return json_response({"is_paused": (await _state(call)).paused})


async def is_sleeping(call: Call) -> ASGIApp:
    """Answer True if weights or KV cache are not on the device."""
    return json_response({"is_sleeping": bool((await _state(call)).asleep)})


async def weight_info(call: Call) -> ASGIApp:
    """The version of the weights: the number of updates."""
    return json_response({"weight_version": (await _state(call)).weight_version})


async def _state(call: Call) -> EngineState:
    _check_key(call)
    return await call.service.client.control("report")


def _check_key(call: Call) -> None:
    """Raise ``ApiError`` 401 without the admin key; here, as paths have several spellings."""
    if not Keys(call.service.config.admin_api_key).accept(call.headers):
        raise wrong_key("admin")


async def _mode(call: Call) -> Mode:
    """The treatment of open requests: ``?mode=``, or the body's field."""
    if (mode := call.query.get("mode")) is not None:
        return change_mode(mode)
    return change_mode((await call.parse(ChangeRequest)).mode) if call.has_body else "wait"


# They exist only with --profiler-dir
PROFILE_ROUTES = (
    Route("POST", "/start_profile", start_profile, is_admin=True),
    Route("POST", "/stop_profile", stop_profile, is_admin=True),
)
# vLLM has all but /set_steering
ROUTES = (
    *(
        Route("POST", path, handler, is_admin=True, reads_body=True)
        for path, handler in (
            ("/pause", pause),
            ("/reset_prefix_cache", reset_prefix_cache),
            ("/update_weights", update_weights),
            ("/set_steering", set_steering),
        )
    ),
    *(
        Route(method, path, handler, is_admin=True)
        for method, path, handler in (
            ("POST", "/resume", resume),
            ("POST", "/sleep", sleep),
            ("POST", "/wake_up", wake_up),
            ("GET", "/is_paused", is_paused),
            ("GET", "/is_sleeping", is_sleeping),
            ("GET", "/weight_info", weight_info),
        )
    ),
)
