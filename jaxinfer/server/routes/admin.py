"""Routes that change the engine: they need ``--admin-api-key``, and exist only with one."""

from __future__ import annotations

from starlette.types import ASGIApp

from jaxinfer.core.errors import EngineError, JaxinferError, RequestError
from jaxinfer.engine.link.wire import Mode
from jaxinfer.server.http.guard import Keys, wrong_key
from jaxinfer.server.openai.fields import field_error
from jaxinfer.server.openai.schema import (
    ChangeRequest,
    SteeringRequest,
    UpdateWeightsRequest,
    change_mode,
)
from jaxinfer.server.routes.endpoint import Call, json_response


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


async def set_steering(call: Call) -> ASGIApp:
    """Keep a steering vector by name, or remove it."""
    _check_key(call)
    request = await call.parse(SteeringRequest)
    try:
        await call.service.client.set_steering(request.name, request.vector)
    except RequestError as error:
        raise field_error("vector", str(error)) from None
    return json_response({"status": "removed" if request.vector is None else "set"})


def _check_key(call: Call) -> None:
    """Raise ``ApiError`` 401 without the admin key; here, as paths have several spellings."""
    if not Keys(call.service.config.admin_api_key).accept(call.headers):
        raise wrong_key("admin")


async def _mode(call: Call) -> Mode:
    """What becomes of open requests: ``?mode=``, or the body's field."""
    if (mode := call.query.get("mode")) is not None:
        return change_mode(mode)
    return change_mode((await call.parse(ChangeRequest)).mode) if call.has_body else "wait"
