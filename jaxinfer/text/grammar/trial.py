"""Compiles a grammar in a process of its own first, which is killed if it takes too long.

Some grammars take llguidance minutes or hours: many patterns that must hold at once, products of
multipleOf, overlapping patternProperties. A thread in its code cannot be stopped. The process takes
0.1 s, so schemas without such keywords skip it. ``python -m jaxinfer.text.grammar.trial`` reads the
grammar from stdin and prints the reason why it is refused, if it is. It has no vocabulary but the
256 bytes, which does not change the time.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import Any

from jaxinfer.core.errors import RequestError
from jaxinfer.core.structured import FIELD, StructuredOutputsParams

SECONDS = 1.0  # of CPU time in a trial, so that a busy machine refuses nothing else
MAX_WALL_SECONDS = 30.0  # for a trial that makes no progress at all
_SLOW_KEYWORDS = ('"allOf"', '"multipleOf"', '"patternProperties"')


def may_be_slow(params: StructuredOutputsParams) -> bool:
    """True unless the time to compile is known to be proportional to the size."""
    if params.json is not None:
        joined = '"pattern"' in params.json and '"$ref"' in params.json  # a pattern beside another
        return joined or any(name in params.json for name in _SLOW_KEYWORDS)
    return params.grammar is not None or params.structural_tag is not None


def try_to_compile(source: str, kind: str) -> str:
    """The reason why llguidance refuses a grammar, or none; raises ``RequestError`` if it takes
    longer than ``SECONDS``.
    """
    try:
        done = subprocess.run(
            (sys.executable, "-m", "jaxinfer.text.grammar.trial"),
            input=source.encode(),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=MAX_WALL_SECONDS,
            check=False,
        )
        code = done.returncode
    except subprocess.TimeoutExpired:
        code = -signal.SIGPROF
    if code == -signal.SIGPROF:
        raise RequestError(
            f"{FIELD}.{kind} takes more than {SECONDS:g} s to compile; use fewer patterns, "
            "multipleOf and patternProperties that hold at once"
        )
    if code:
        return f"compiling it ended the process with code {code}"
    return done.stdout.decode(errors="replace")


class _Bytes:
    """The vocabulary of a trial: every byte, and a token that ends the text."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([value]) for value in range(256)), b"<end>")

    def __call__(self, text: str | bytes) -> list[int]:
        return list(text if isinstance(text, bytes) else text.encode())


def main() -> None:
    """Compile the grammar on stdin."""
    import llguidance

    signal.setitimer(signal.ITIMER_PROF, SECONDS)  # its signal ends the process
    source = sys.stdin.buffer.read().decode()
    failed, messages = llguidance.LLMatcher.validate_grammar_with_warnings(source, None)
    if failed:
        sys.stdout.write(messages[0])
        return
    # an unknown special token, which only the real vocabulary has, is no reason
    vocabulary: Any = _Bytes()
    llguidance.LLMatcher(llguidance.LLTokenizer(vocabulary), source, log_level=0)


if __name__ == "__main__":
    main()
