"""The console at ``/``: the files of ``server/ui`` as routes.

They need no API key, because they contain no secret: the page's script prompts for the key and
sends it with its requests. A content security policy keeps the page from loading or sending
anything elsewhere, and from reading text as HTML.
"""

from __future__ import annotations

import hashlib
import html
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import NamedTuple

from starlette.responses import Response
from starlette.types import ASGIApp

from jaxinfer.server.http.errors import ApiError
from jaxinfer.server.service.endpoint import Call, Handler

INDEX = "index.html"
PAGE_PATHS = ("/", "/ui/{name}")
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
        "Cache-Control": "no-cache",  # browsers keep the file, and compare its ETag before each use
        "Content-Security-Policy": POLICY,
        "Cross-Origin-Resource-Policy": "same-origin",
        "Referrer-Policy": "no-referrer",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "DENY",
    }
)


class File(NamedTuple):
    """A file of the page as it is sent."""

    body: bytes
    media_type: str
    tag: str  # its ETag


def page_files(root_path: str) -> Mapping[str, File]:
    """The files by path: the document at ``/``, the others below ``/ui``."""
    files: dict[str, File] = {}
    for source in (resources.files("jaxinfer.server") / "ui").iterdir():
        body, path = source.read_bytes(), f"/ui/{source.name}"
        if source.name == INDEX:
            path = "/"
            if root_path:  # absolute links: the path in the browser may lack its last slash
                body = body.replace(b'="ui/', f'="{html.escape(root_path)}/ui/'.encode())
        media_type = MEDIA_TYPES[source.name.rpartition(".")[2]]
        files[path] = File(body, media_type, f'"{hashlib.sha256(body).hexdigest()[:32]}"')
    return files


def page_handler(files: Mapping[str, File]) -> Handler:
    """The handler of ``PAGE_PATHS``: sends a file, or 304 if the client has it already."""

    async def send_file(call: Call) -> ASGIApp:
        file = files.get(call.route)
        if file is None:
            raise ApiError(404, f"the page has no file {call.route[:200]}", code="not_found")
        headers = {**HEADERS, "ETag": file.tag}
        known = [one.strip() for one in call.headers.get("if-none-match", "").split(",")]
        if file.tag in known or f"W/{file.tag}" in known:  # proxies that compress make tags weak
            return Response(status_code=304, headers=headers)
        return Response(file.body, headers={**headers, "Content-Type": file.media_type})

    return send_file
