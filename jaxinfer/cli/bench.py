"""``jaxinfer bench``: measurements, whose flags are those of ``vllm bench``."""

from __future__ import annotations

import os
from typing import Any

import click

from jaxinfer.cli.command import SettingsCommand
from jaxinfer.cli.options import MEASURED_MODEL, MEMORY
from jaxinfer.cli.serve_options import EVERY


@click.command(
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
    }
)
@click.argument("command", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def bench(ctx: click.Context, command: str | None, arguments: tuple[str, ...]) -> None:
    """Measure servers and engines; every run is a folder that can be verified.

    `jaxinfer bench COMMAND --help` shows the flags of a command, which are vLLM's where it has
    them.

    \b
    serve       latency and throughput of a running server
    throughput  tokens a second of many prompts at once, without a server
    latency     milliseconds of one batch, without a server
    offload     first tokens of prompts in host memory and computed
    startup     time to the first token: cold, warm, with a bundle
    compare     the same requests to several engines, in alternating rounds
    sweep       the most requests a second within limits
    replay      the requests and times of a trace
    plan        memory, context, TTFT and TPOT of a config.json on a device
    simulate    a trace on engines that need not exist
    plot        one figure of several runs against another, as SVG
    verify      compute a run's figures and verdicts again from its records

    A workload of configs/bench is a command with its flags: `jaxinfer bench openinfer-qps`.
    """
    from jaxinfer.bench.main import run

    if command is None:
        raise click.UsageError("give a command; `jaxinfer bench --help` lists them")
    ctx.exit(run([command, *arguments], engine_settings, _api_key()))


def _api_key() -> str:
    """The key for a server that runs already: as of `jaxinfer chat`, or as of `vllm bench`."""
    return os.environ.get("JAXINFER_API_KEY") or os.environ.get("OPENAI_API_KEY") or ""


def engine_settings(arguments: list[str]) -> dict[str, Any]:
    """The settings of an engine from flags, variables and a file, as of ``jaxinfer generate``."""
    command = SettingsCommand("bench", groups=(MEASURED_MODEL, MEMORY))
    with command.make_context("jaxinfer bench", arguments) as context:
        resolved = command.resolved(context.params, EVERY)
    return {name: value.value for name, value in resolved.items()}
