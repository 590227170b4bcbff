"""``jaxinfer``: the command group, its exit codes, and how errors reach the terminal.

Owns: 0 for success, 1 for a ``JaxinferError`` or a broken installation, 2 for wrong usage, 130 for
Ctrl-C. Must not know: what a command does.
"""

from __future__ import annotations

from typing import Any

import click

from jaxinfer import __version__
from jaxinfer.cli.doctor import doctor
from jaxinfer.cli.generate import generate
from jaxinfer.cli.inspect import inspect
from jaxinfer.core.errors import JaxinferError


class Commands(click.Group):
    """A group that turns the project's errors into one line on stderr."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except JaxinferError as error:
            click.echo(f"jaxinfer: error: {error}", err=True)
            ctx.exit(1)
        except KeyboardInterrupt:
            ctx.exit(130)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="jaxinfer %(version)s")
def main() -> None:
    """Large language models served by pure JAX."""


main.add_command(doctor)
main.add_command(generate)
main.add_command(inspect)
