"""``jaxinfer convert``: writes a quantised copy of a model folder."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from jaxinfer.engine.start.progress import progress_on


@click.command(
    help="Quantise MODEL, a Hugging Face folder or ORG/NAME of the hub, into a new folder of "
    "compressed-tensors."
)
@click.argument("model")
@click.option("--quantization", metavar="NAME", required=True, help="fp8, int8 or int4.")
@click.option("-o", "--output", metavar="FOLDER", required=True, help="Must be new.")
@click.option(
    "--ignore", multiple=True, metavar="LAYER", help='A name or "re:PATTERN"; may be repeated.'
)
def convert(model: str, quantization: str, output: str, ignore: tuple[str, ...]) -> None:
    """Write the folder, whole or not at all."""
    from jaxinfer.weights.quantised.convert import convert_folder

    start = time.perf_counter()
    folder = Path(output)
    progress = progress_on(sys.stderr)
    count = convert_folder(model, folder, quantization, ignore=ignore, progress=progress)
    seconds = time.perf_counter() - start
    click.echo(f"{folder} holds {count} matrices in {quantization}, made in {seconds:.1f} s")
