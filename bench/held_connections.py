"""The memory that clients hold who send their requests slowly, or never whole.

Run from the repository root:

    .venv/bin/python -m bench.held_connections [--connections 1000] [--output FILE] [-- FLAGS]

Starts `jaxinfer serve` for each case, without and with an API key, opens connections that each send
a request but its last byte, as far as the server reads it within some seconds, and prints JSON: by
case the growth of the server's own process while the connections are open, and after they have
closed, and what they could send. FLAGS go to `jaxinfer serve`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import NamedTuple

from jaxinfer.bench.circumstances import host_circumstances, write_report
from jaxinfer.bench.server_process import ServerProcess
from jaxinfer.core.config import DEFAULT_MODEL

MIB = 1 << 20
BODY = 8 * MIB  # the longest that a server accepts by default
SECONDS = 8.0  # in which the connections send
KEY = "secret"


class Case(NamedTuple):
    """Requests of one kind."""

    name: str
    head: str  # without its end
    body: bytes = b""  # repeated


PIECE = b"x" * 65536
CASES = (
    *(
        Case(
            f"{method} {path}, a body",
            f"{method} {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {BODY}",
            PIECE,
        )
        for method, path in (
            ("POST", "/ping"),
            ("GET", "/health"),
            ("GET", "/"),
            ("POST", "/v1/chat/completions"),
            ("POST", "/nowhere"),
        )
    ),
    Case(
        "POST /v1/chat/completions, chunks of 1 byte",
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked",
        b"1\r\nx\r\n" * 8192,
    ),
    Case("a head without an end", "GET / HTTP/1.1\r\nhost: localhost\r\nx-a: " + "x" * 65000),
    Case("many headers", "GET / HTTP/1.1\r\nhost: localhost" + "\r\na:b" * 12000),
    Case(
        "pipelined requests", "GET /nowhere HTTP/1.1\r\nhost: a\r\n\r\n" * 6000 + "GET / HTTP/1.1"
    ),
)


def resident_mib(pid: int) -> float:
    """The memory of a process that is its own."""
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    fields = dict(line.split(":") for line in text.splitlines()[1:])
    return sum(int(fields[name].split()[0]) for name in ("Private_Dirty", "Private_Clean")) / 1024


async def held(case: Case, port: int, stop: float) -> int:
    """One connection; returns the bytes that it could send."""
    sent = 0
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout_at(stop):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            with closing(writer):
                head = case.head.encode()
                if case.body:
                    head += b"\r\n\r\n"
                writer.write(head)
                await writer.drain()
                sent = len(head)
                while case.body and sent < BODY - len(case.body):
                    writer.write(case.body)
                    await writer.drain()
                    sent += len(case.body)
                await asyncio.sleep(3600)
    return sent


async def measured(case: Case, pid: int, port: int, count: int) -> dict[str, float]:
    """Memory of a server before, at most during, and after the connections."""
    before, peak = resident_mib(pid), 0.0
    loop = asyncio.get_running_loop()
    stop = loop.time() + SECONDS
    tasks = [asyncio.ensure_future(held(case, port, stop)) for _ in range(count)]
    while loop.time() < stop:
        await asyncio.sleep(0.1)
        peak = max(peak, resident_mib(pid))
    sent = sum(await asyncio.gather(*tasks))
    await asyncio.sleep(5.0)
    after = resident_mib(pid)
    return {
        "before_mib": round(before, 1),
        "growth_mib": round(peak - before, 1),
        "left_mib": round(after - before, 1),
        "sent_mib": round(sent / MIB, 1),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--connections", type=int, default=1000)
    parser.add_argument("--case", help="a part of the names of cases")
    parser.add_argument("--output", type=Path, default=Path("bench/results/local/held.json"))
    parser.add_argument("flags", nargs="*", help="after --: flags of jaxinfer serve")
    given = parser.parse_args(argv)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for access, flags in (("no key", ()), ("a key", ("--api-key", KEY))):
        for case in CASES:
            if given.case is None or given.case in case.name:
                with ServerProcess(given.model, *flags, *given.flags) as server:
                    port = int(server.url.rpartition(":")[2])
                    result = asyncio.run(measured(case, server.pid, port, given.connections))
                found.setdefault(access, {})[case.name] = result
    print(json.dumps(found, indent=2))
    report = {**host_circumstances(), "connections": given.connections, "results": found}
    write_report(given.output, report)


if __name__ == "__main__":
    main()
