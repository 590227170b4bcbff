"""``jaxinfer compile``: writes all executables of an engine to a folder, without weights."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from jaxinfer.cli.options import MODEL_FORMS, SHAPE_OPTIONS, SIZE_OPTIONS, given
from jaxinfer.cli.output import format_bytes
from jaxinfer.engine.start.progress import progress_on


@click.command(
    "compile",
    params=[*SIZE_OPTIONS, *SHAPE_OPTIONS],
    help=f"Compile MODEL's executables into a bundle, for --bundle. MODEL: {MODEL_FORMS}.",
)
@click.argument("model")
@click.option("-o", "--output", metavar="FOLDER", required=True, help="The bundle; must be new.")
def compile_(model: str, output: str, **fields: Any) -> None:
    """Write the bundle, whole or not at all; an equal bundle may already be in the folder."""
    from jaxinfer.core.config import EngineConfig
    from jaxinfer.engine.start.build import plan_engine, write_planned

    start = time.perf_counter()
    progress = progress_on(sys.stderr)
    settings = given((*SIZE_OPTIONS, *SHAPE_OPTIONS), fields)
    plan = plan_engine(EngineConfig(model=model, skip_tokenizer_init=True, **settings), progress)
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
