"""``jaxinfer simulate``: a trace on engines that need not exist."""

from __future__ import annotations

import click

from jaxinfer.cli.bench import engine_settings


@click.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def simulate(ctx: click.Context, arguments: tuple[str, ...]) -> None:
    """Answer a trace on simulated engines: hit rate, TTFT, TPOT, goodput.

    The scheduler and the router are those that serve; a step takes what was measured
    or what the device allows. `jaxinfer simulate --help` shows the flags.
    """
    from jaxinfer.bench.simulate import main

    ctx.exit(main(list(arguments), engine_settings))
