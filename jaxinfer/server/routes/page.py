"""The console at ``/``: the files of ``server/ui`` as routes.

They need no API key, since they are the same for everyone: the page asks for the key and sends it
with its requests. A content security policy keeps the page from loading or sending anything
elsewhere, and from reading text as HTML.
"""

from __future__ import annotations

import hashlib
import html
from collections.abc import Mapping
from functools import partial
from importlib import resources
from types import MappingProxyType

from starlette.responses import Response
from starlette.types import ASGIApp

from jaxinfer.server.routes.endpoint import Call, Handler

INDEX = "index.html"
MEDIA_TYPES: Mapping[str, str] = MappingProxyType(
    {
        "html": "text/html; charset=utf-8",
        "css": "text/css; charset=utf-8",
        "js": "text/javascript; charset=utf-8",
        "svg": "image/svg+xml",
    }
)
POLICY = "; ".join(
    (
        "default-src 'none'",
        *(f"{kind}-src 'self'" for kind in ("script", "style", "img", "connect")),
        *(f"{what} 'none'" for what in ("base-uri", "form-action", "frame-ancestors")),
        # innerHTML and the like raise an error
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
HEADERS: Mapping[str, str] = MappingProxyType(
    {
        "Cache-Control": "no-cache",  # browsers keep the file, and ask whether it is still the same
        "Content-Security-Policy": POLICY,
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }
)


def page_routes(root_path: str) -> dict[tuple[str, str], Handler]:
    """The routes of the page: its document at ``/``, the other files below ``/ui``."""
    routes: dict[tuple[str, str], Handler] = {}
    for file in (resources.files("jaxinfer.server") / "ui").iterdir():
        body, path = file.read_bytes(), f"/ui/{file.name}"
        if file.name == INDEX:
            path = "/"
            if root_path:  # absolute links: a browser may show the path without its last slash
                body = body.replace(b'="ui/', f'="{html.escape(root_path)}/ui/'.encode())
        media_type = MEDIA_TYPES[file.name.rpartition(".")[2]]
        routes["GET", path] = partial(_file, body=body, media_type=media_type)
    return routes


async def _file(call: Call, *, body: bytes, media_type: str) -> ASGIApp:
    """The file, or 304 for a client that has it already."""
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {**HEADERS, "ETag": tag}
    known = [one.strip() for one in call.headers.get("if-none-match", "").split(",")]
    if tag in known or f"W/{tag}" in known:  # proxies that compress make tags weak
        return Response(status_code=304, headers=headers)
    return Response(body, headers={**headers, "Content-Type": media_type})
