"""The digest of the lowered form of every executable of a model, to compare two commits.

Run from the repository root:

    .venv/bin/python -m bench.executables [--quantization int4] [--names d8,p512x32] \\
        [--output FILE] FOLDER...

FOLDER contains a config.json; no weights are read, and no step is compiled (all of a model take
10 s on a CPU, minutes on a GPU, whose Triton kernels are compiled). Prints JSON: for each folder
and executable, the SHA-256 of its StableHLO on this machine's device, with its number of
characters. Two commits whose digests are equal run the same steps. Kernels of a GPU contain the
paths of their sources: compare two commits in the same folder.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import msgspec

from bench.circumstances import circumstances
from jaxinfer.bench.circumstances import write_report
from jaxinfer.core.config import EngineConfig, cache_root
from jaxinfer.core.progress import NO_PROGRESS
from jaxinfer.engine.start.model import model_of
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.compile.sizes import limits_of, with_device_defaults
from jaxinfer.weights.sources import resolve_source

NUM_PAGES = 1024
MAX_MODEL_LEN = 4096


def digests(folder: Path, quantization: str | None, names: Sequence[str]) -> dict[str, str]:
    """SHA-256 and length by the name of an executable; without ``names``, of all."""
    jax.clear_caches()  # a jitted function that another program traced would keep its name
    program = program_of(folder, quantization)
    found: dict[str, str] = {}
    for name in names or program.names():
        text = program.trace(name).lower().as_text()
        found[name] = f"{hashlib.sha256(text.encode()).hexdigest()} {len(text)}"
    return found


def program_of(folder: Path, quantization: str | None = None) -> Program:
    """The program of a model for this machine's device, with sizes that depend on nothing else."""
    config = EngineConfig(model=str(folder), load_format="dummy", quantization=quantization)
    config = replace(config, max_model_len=MAX_MODEL_LEN)
    config = with_device_defaults(config, jax.default_backend())
    source = resolve_source(
        config.model, load_format="dummy", cache_dir=cache_root(), progress=NO_PROGRESS
    )
    _, model = model_of(source, config, jax.default_backend())
    state = model.state
    kept = {"has_slot_state": state.bytes_per_slot > 0, "align": state.align}
    platform = jax.default_backend()
    limits = limits_of(config, MAX_MODEL_LEN, state.groups, platform=platform, **kept)
    return Program(
        model, msgspec.structs.replace(limits, num_pages=(NUM_PAGES,) * len(limits.num_pages))
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the digests of the folders, and write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--quantization")
    parser.add_argument("--names", default="", help="comma-separated; default: all")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    names = [name for name in options.names.split(",") if name]
    report = {
        folder.name: digests(folder, options.quantization, names) for folder in options.folders
    }
    whole = {**circumstances(), "executables": report}
    print(json.dumps(whole, indent=1))
    if options.output is not None:
        write_report(options.output, whole)


if __name__ == "__main__":
    main()
