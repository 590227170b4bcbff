"""A peer without a model: each answer repeats the prompt's first token. Run as a child process."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "bench" / "peers"))

from line_server import Generate, serve


def load() -> tuple[Generate, dict[str, Any]]:
    """Fail in the way that the first argument names."""
    how = sys.argv[1] if len(sys.argv) > 1 else "well"
    if how == "missing":
        raise ImportError("No module named 'fake'")
    if how == "broken":
        raise ValueError("the file is broken")
    if how == "dead":
        sys.exit("no more memory")

    def generate(prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        print("a library that chats on stdout")
        if max_tokens > 100:
            raise ValueError("too long")
        return [prompt[:1] * max_tokens for prompt in prompts]

    return generate, {"versions": {"fake": "1.0"}, "facts": {}}


serve(load)
