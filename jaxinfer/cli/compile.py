"""``jaxinfer compile``: writes all executables of an engine to a folder, without weights."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from jaxinfer.cli.command import SettingsCommand, planned_config
from jaxinfer.cli.options import MODEL_FORMS, PLANNED_MEMORY, PLANNED_MODEL
from jaxinfer.cli.output import format_bytes
from jaxinfer.engine.start.progress import progress_on


@click.command(
    "compile",
    cls=SettingsCommand,
    groups=(PLANNED_MODEL, PLANNED_MEMORY),
    help=f"Compile MODEL's executables into a bundle, for --bundle. MODEL: {MODEL_FORMS}.",
)
@click.argument("reference", metavar="[MODEL]", required=False)
@click.option("-o", "--output", metavar="FOLDER", required=True, help="The bundle; must be new.")
@click.pass_context
def compile_(ctx: click.Context, reference: str | None, output: str, **flags: Any) -> None:
    """Write the bundle, whole or not at all; an equal bundle may already be in the folder."""
    start = time.perf_counter()
    config = planned_config(ctx, flags, reference)

    progress = progress_on(sys.stderr)
    with progress.phase("plan the engine"):
        from jaxinfer.engine.start.build import plan_engine, write_planned

        plan = plan_engine(config, progress)
    click.echo(plan.memory.described())
    folder = Path(output)
    manifest, made = write_planned(plan, folder, progress)
    for name, stored in manifest.executables.items():
        size, workspace = format_bytes(stored.size_bytes), format_bytes(stored.workspace_bytes)
        click.echo(f"{name:16} {size}, workspace {workspace}")
    click.echo(plan.memory.measured(manifest.workspace_bytes))
    count = len(manifest.executables)
    total = format_bytes(sum(stored.size_bytes for stored in manifest.executables.values()))
    verb = "holds" if made else "held already and is whole:"
    seconds = time.perf_counter() - start
    click.echo(f"{folder} {verb} {count} executables, {total}, in {seconds:.1f} s")
