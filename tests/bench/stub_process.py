"""A stub server in a process of its own, with a child, as engines have: a peer for comparisons.

    python stub_process.py PORT [dies_after=N] [more_tokens] [gap=SECONDS]

Its log has the process ids of both.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench import stub_server


class Peer(stub_server.StubServer):
    """Ends its process at a request, or sends a token more than asked."""

    dies_after = 10**9
    more_tokens = 0

    async def _words(self, body: dict[str, Any], writer: asyncio.StreamWriter) -> bool:
        if len(self.bodies) > self.dies_after:
            print("no more memory", flush=True)
            os._exit(3)
        return await super()._words(
            {**body, "max_tokens": body["max_tokens"] + self.more_tokens}, writer
        )


async def main(port: int, options: list[str]) -> None:
    """Serve until the process is ended."""
    peer = Peer(port)
    for name, _, value in (option.partition("=") for option in options):
        if name == "gap":
            stub_server.GAP = float(value)
        else:
            setattr(peer, name, int(value or 1))
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    print(f"pids {os.getpid()} {child.pid}", flush=True)
    async with peer:
        await asyncio.Event().wait()


asyncio.run(main(int(sys.argv[1]), sys.argv[2:]))
