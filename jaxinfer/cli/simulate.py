"""``jaxinfer simulate``: a trace on engines that need not exist."""

from __future__ import annotations

import click

from jaxinfer.cli.bench import engine_settings


@click.command(
    context_settings={
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
        "help_option_names": ["-h", "--help"],
    }
)
@click.argument("config")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def simulate(ctx: click.Context, config: str, arguments: tuple[str, ...]) -> None:
    """Answer a trace on simulated engines: hit rate, TTFT, TPOT, goodput.

    The scheduler and the router are those that serve; a step takes what was measured or what the
    device allows. CONFIG is a config.json, its folder, or any form of MODEL.
    `jaxinfer bench simulate --help` shows the flags.
    """
    from jaxinfer.bench.main import run

    ctx.exit(run(["simulate", config, *arguments], engine_settings))
