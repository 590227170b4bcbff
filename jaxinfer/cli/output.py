"""Output of the commands: answers on stdout in the prompts' order, failures on stderr.

Owns: the JSON record of an answer, the time at which each answer is printed, and formats of
numbers.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from jaxinfer.core.request import SamplingParams
    from jaxinfer.engine.outputs import Collector, CompletionOutput, Delta, RequestOutput
    from jaxinfer.engine.prompts import Prompt


class OutputPrinter:
    """Collects the deltas of each prompt and prints them at once, or each whole answer in order."""

    def __init__(self, *, as_json: bool, stream: bool) -> None:
        self.any_failed = False
        self._as_json = as_json
        self._stream = stream
        self._collectors: dict[int, Collector] = {}
        self._ready: dict[int, str | None] = {}
        self._next = 0

    def expect(self, number: int, prompt: Prompt, sampling: SamplingParams) -> None:
        """Register a prompt whose answer will follow."""
        from jaxinfer.engine.outputs import Collector

        self._collectors[number] = Collector(str(number), prompt, sampling)

    def add(self, number: int, delta: Delta) -> None:
        """Add a delta of a prompt's answer."""
        collector = self._collectors[number]
        collector.add(delta)
        if delta.error:
            self.fail(number, delta.error)
            return
        if self._stream:
            click.echo(delta.text, nl=collector.output.finished)
        elif collector.output.finished:
            answer = collector.output
            text = json.dumps(record(answer)) if self._as_json else answer.outputs[0].text
            self._print_in_order(number, text)

    def fail(self, number: int, error: str) -> None:
        """Report a prompt without an answer; in JSON an object with the error takes its place."""
        self.any_failed = True
        click.echo(f"jaxinfer: error: {error}", err=True)
        self._print_in_order(number, json.dumps({"error": error}) if self._as_json else None)

    def _print_in_order(self, number: int, text: str | None) -> None:
        self._ready[number] = text
        while self._next in self._ready:
            line = self._ready.pop(self._next)
            if line is not None:
                click.echo(line)
            self._next += 1


def record(answer: RequestOutput) -> dict[str, Any]:
    """The JSON object of an answer; ``usage`` has OpenAI's names and the prefix cache's hits."""
    completion = answer.outputs[0]
    prompt_tokens, completion_tokens = len(answer.prompt_token_ids), len(completion.token_ids)
    fields: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "prompt_token_ids": answer.prompt_token_ids,
        "finish_reason": completion.finish_reason,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "num_cached_tokens": answer.num_cached_tokens,
        },
    }
    if completion.logprobs is not None:
        fields["logprobs"] = _logprobs(completion)
    return fields


def _logprobs(completion: CompletionOutput) -> list[list[dict[str, Any]]]:
    """For each token, the chosen one first and then the likeliest."""
    return [
        [
            {
                "token_id": token_id,
                "token": entry.decoded_token,
                "logprob": entry.logprob,
                "rank": entry.rank,
            }
            for token_id, entry in position.items()
        ]
        for position in completion.logprobs or ()
    ]


def format_bytes(count: float) -> str:
    """Decimal units with three digits: ``98.1 MB``."""
    return format_count(count, ("B", "kB", "MB", "GB", "TB"))


def format_count(count: float, units: tuple[str, ...] = ("", "K", "M", "B", "T")) -> str:
    """A large number with three digits: ``135 M``."""
    step = 0
    while count >= 999.5 and step < len(units) - 1:
        count /= 1000
        step += 1
    return f"{count:.3g} {units[step]}".rstrip()
