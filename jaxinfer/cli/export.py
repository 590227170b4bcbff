"""``jaxinfer export``: writes a model's tokenizer, and its weights, as a Hugging Face folder."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click

from jaxinfer.cli.options import MODEL_FORMS
from jaxinfer.engine.start.progress import progress_on


@click.command(
    help="Write MODEL as a new Hugging Face FOLDER: config.json, tokenizer.json and chat template, "
    f"for clients that read a tokenizer from a folder. MODEL: {MODEL_FORMS}."
)
@click.argument("model")
@click.argument("folder")
@click.option("--weights", is_flag=True, help="Also weights, dequantised.  [default: none]")
@click.option(
    "--dtype", metavar="NAME", help="Of the weights.  [default: float32; on a GPU bfloat16]"
)
@click.option("--tokenizer", metavar="PATH", help="A tokenizer in place of the model's.")
@click.option("--revision", metavar="NAME", help="Of a model of the hub.  [default: main]")
@click.option("--cache-dir", metavar="FOLDER", help="Where wheels and conversions go.")
@click.option("--download-dir", metavar="FOLDER", help="Where models of the hub go.")
def export(model: str, folder: str, weights: bool, **settings: Any) -> None:
    """Write the folder, whole or not at all."""
    from jaxinfer.engine.api.save import export as write

    if settings["dtype"] and not weights:
        raise click.UsageError("--dtype is that of the weights, which only --weights writes")
    start = time.perf_counter()
    given = {name: value for name, value in settings.items() if value is not None}
    write(model, folder, weights=weights, progress=progress_on(sys.stderr), **given)
    names = ", ".join(sorted(path.name for path in Path(folder).iterdir()))
    click.echo(f"{folder} holds {names}, made in {time.perf_counter() - start:.1f} s")
