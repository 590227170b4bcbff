"""A completions server on a real socket that sends words, or misbehaves if a request asks for it.

It writes HTTP by hand, so that a test controls every byte. The field ``stub`` of a request names a
behaviour of ``StubServer``.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

GAP = 0.01  # seconds between two words
LISTINGS: dict[str, Any] = {
    "/v1/models": {"data": [{"id": "stub"}]},
    "/version": {"version": "0"},
    "/server_info": {"version": "0.5"},  # SGLang's
}


class StubServer:
    """Serves until the context ends; counts its requests and connections."""

    def __init__(self, port: int = 0) -> None:
        self._port = port
        self.connections = 0
        self.open_requests = self.most_open_requests = 0
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []  # of the requests with a body

    async def __aenter__(self) -> StubServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await self._one_request(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _one_request(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        if method == "GET":
            listing = LISTINGS.get(path, {})
            writer.write(plain("200 OK", json.dumps(listing)))
            return True
        lines = head.lower().splitlines()
        length = next(int(line[16:]) for line in lines if line.startswith("content-length: "))
        body = json.loads(await reader.readexactly(length))
        self.bodies.append(body)
        self.heads.append(head)
        self.open_requests += 1
        self.most_open_requests = max(self.most_open_requests, self.open_requests)
        try:
            return await getattr(self, f"_{body.get('stub', 'words')}")(body, writer)
        finally:
            self.open_requests -= 1

    async def _words(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        writer.write(EVENT_STREAM)
        for index in range(body["max_tokens"]):
            writer.write(chunk(event({"choices": [{"index": 0, "text": f"w{index} "}]})))
            await asyncio.sleep(GAP)
        prompt = body.get("prompt") or body["messages"]
        usage = {"prompt_tokens": len(prompt), "completion_tokens": body["max_tokens"]}
        writer.write(chunk(event({"choices": [], "usage": usage})) + chunk(b"data: [DONE]\n\n"))
        writer.write(chunk(b""))
        return True

    async def _bytewise(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        text = {"choices": [{"delta": {"content": "é\r\n\n"}}]}
        usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 1}}
        stream = event(text) + event(usage) + b": a comment\n\ndata: [DONE]\n\n"
        # chunks that end anywhere within an event
        parts = [stream[start : start + 7] for start in range(0, len(stream), 7)]
        answer = EVENT_STREAM + b"".join(chunk(part) for part in parts) + chunk(b"")
        for value in answer:
            writer.write(bytes([value]))
            await asyncio.sleep(0)
        return True

    async def _verbatim(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        """Send the field ``sends`` as the events of a stream."""
        writer.write(EVENT_STREAM + chunk(body["sends"].encode()) + chunk(b""))
        return True

    async def _page(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        page = "<title>Sign in</title>"
        writer.write(plain("200 OK", page).replace(b"application/json", b"text/html"))
        return True

    async def _nothing(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        writer.write(EVENT_STREAM + chunk(b"data: [DONE]\n\n") + chunk(b""))
        return True

    async def _uncounted(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        writer.write(EVENT_STREAM)
        for _ in range(body["max_tokens"]):
            writer.write(chunk(event({"choices": [{"index": 0, "text": "w"}]})))
        writer.write(chunk(b"data: [DONE]\n\n") + chunk(b""))
        return True

    async def _silent(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        await asyncio.sleep(60)
        return False

    async def _refused(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        writer.write(plain("400 Bad Request", '{"error": {"message": "no such field"}}'))
        return True

    async def _fails_midway(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        writer.write(EVENT_STREAM + chunk(event({"choices": [{"text": "w"}]})))
        writer.write(chunk(event({"error": {"message": "engine died"}})) + chunk(b""))
        return True

    async def _not_done(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        writer.write(EVENT_STREAM + chunk(event({"choices": [{"text": "w"}]})) + chunk(b""))
        return True

    async def _cut(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        writer.write(EVENT_STREAM + chunk(event({"choices": [{"text": "w"}]})))
        return False

    async def _then_closes(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        await self._words(body, writer)
        return False  # without announcing it in the head

    async def _not_http(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        writer.write(b"what?\r\n\r\n")
        return True


EVENT_STREAM = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def plain(status: str, body: str) -> bytes:
    """A sized JSON response."""
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    return f"{head}\r\n\r\n{body}".encode()


def event(data: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n".encode()


def chunk(data: bytes) -> bytes:
    """A chunk of a chunked body; the empty one ends it."""
    return b"%x\r\n%s\r\n" % (len(data), data)
