"""The names by which requests may call the model."""

from __future__ import annotations

from collections.abc import Sequence

from jaxinfer.server.http.errors import ApiError

LATEST = ":latest"  # ollama's clients add it to names without a tag


def check_name(name: str | None, served: Sequence[str], unlisted: str | None) -> None:
    """Raise ``ApiError`` 404 unless the name is among the served ones, or ``unlisted``; it may end
    with ollama's tag. None is the served model.
    """
    if name is None or {name, name.removesuffix(LATEST)} & {*served, unlisted}:
        return
    raise ApiError(
        404,
        f"the model {name[:200]!r} does not exist; this server has {', '.join(served)}",
        param="model",
        code="model_not_found",
    )
