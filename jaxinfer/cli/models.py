"""``jaxinfer pull``, ``list`` and ``rm``: the models in the caches."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import click

from jaxinfer.cli.command import SettingsCommand
from jaxinfer.cli.options import MEMORY, MODEL, MODEL_FORMS
from jaxinfer.cli.output import format_bytes
from jaxinfer.cli.serve_options import EVERY
from jaxinfer.cli.settings import Group
from jaxinfer.engine.start.progress import progress_on

if TYPE_CHECKING:
    from jaxinfer.weights.inventory import Stored
    from jaxinfer.weights.locate import Places

CACHES = Group(
    "Caches",
    tuple(
        one
        for one in (*MODEL.settings, *MEMORY.settings)
        if one.name in ("revision", "cache_dir", "download_dir")
    ),
)


@click.command(
    cls=SettingsCommand,
    groups=(CACHES,),
    help=f"Download MODEL, or a newer commit of one of the hub. MODEL: {MODEL_FORMS}.",
)
@click.argument("model")
@click.pass_context
def pull(ctx: click.Context, model: str, **flags: Any) -> None:
    """Download what is missing; a transfer that broke off goes on."""
    from jaxinfer.weights.locate import locate
    from jaxinfer.weights.uses import folder_bytes

    start = time.perf_counter()
    path = locate(model, _places(ctx, flags), progress_on(sys.stderr), refresh=True).path
    size = folder_bytes(path) if path.is_dir() else path.stat().st_size
    seconds = time.perf_counter() - start
    click.echo(f"{model} is here: {path}, {format_bytes(size)}, after {seconds:.1f} s")


@click.command(
    "list",
    cls=SettingsCommand,
    groups=(CACHES.without("revision"),),
    help="List the models that are in the caches, and those with a short name.",
)
@click.pass_context
def list_(ctx: click.Context, **flags: Any) -> None:
    """Two tables: models that are here, and models to pull."""
    from jaxinfer.weights.catalog import find_model, known_models
    from jaxinfer.weights.inventory import stored_models

    stored = stored_models(_places(ctx, flags))
    if stored:
        click.echo("Here: model, size, and what was made for it")
        _table([_row(one) for one in stored])
    here = {short for one in stored if one.held.is_complete for short in one.short_names}
    entries = {short: find_model(short) for short in known_models() if short not in here}
    if entries:
        click.echo("To pull, by a short name: size, and what the model is good at")
        _table(
            [
                (short, format_bytes(entry.size), f"{entry.about} ({entry.source})")
                for short, entry in entries.items()
                if entry is not None
            ]
        )


@click.command(
    cls=SettingsCommand,
    groups=(CACHES,),
    help="Remove MODEL from its cache, and the converted weights and executables made for it "
    "alone. MODEL: a name that `jaxinfer list` shows.",
)
@click.argument("model")
@click.pass_context
def rm(ctx: click.Context, model: str, **flags: Any) -> None:
    """Remove the files at once; a running engine keeps what it has loaded."""
    from jaxinfer.weights.inventory import remove

    held, made = remove(model, _places(ctx, flags))
    more = f", and {format_bytes(made)} that was made for it" if made else ""
    click.echo(f"removed {held.name}, {format_bytes(held.size)}{more}")


def _places(ctx: click.Context, flags: Mapping[str, Any]) -> Places:
    from jaxinfer.core.config import cache_root
    from jaxinfer.weights.locate import Places

    assert isinstance(ctx.command, SettingsCommand)
    given = {name: one.value for name, one in ctx.command.resolved(flags, EVERY).items()}
    return Places(
        cache_root(given.get("cache_dir")), given.get("download_dir"), given.get("revision")
    )


def _row(stored: Stored) -> tuple[str, str, str]:
    made = {"converted weights": stored.converted_bytes, "executables": stored.executable_bytes}
    words = [f"{kind} {format_bytes(size)}" for kind, size in made.items() if size]
    if not stored.held.is_complete:
        words.insert(0, "incomplete: pull it again")
    names = "".join(f" = {short}" for short in stored.short_names)
    return stored.held.name + names, format_bytes(stored.held.size), ", ".join(words)


def _table(rows: list[tuple[str, str, str]]) -> None:
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for name, size, words in rows:
        click.echo(f"  {name:{widths[0]}}  {size:>{widths[1]}}  {words}".rstrip())
