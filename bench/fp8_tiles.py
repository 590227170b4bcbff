"""Times tile sizes of the fp8 GEMMs on a GPU, with scales of rows and of blocks.

Run on a Hopper GPU, from the repository root:
``python -m bench.fp8_tiles [--tokens N,...] [--gemm NAME,...] [--output FILE]``.
The tokens are quantised before; ``bench.kernels --op quantised_gemm --impl mosaic_fp8`` times calls
that quantise them. GEMMs are those of a layer of Qwen3-4B; calls are chained as in
``bench.kernels``.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from bench.kernels import seconds_in_a_chain
from bench.step.file import facts
from jaxinfer.bench.circumstances import write_report
from pallas_kernels.quantised_gemm.api import OP
from pallas_kernels.quantised_gemm.cases import CASES, QuantisedCase
from pallas_kernels.quantised_gemm.fp8 import launch
from pallas_kernels.quantised_gemm.fp8.launch import DecodeConfig, Fp8Sizes, PromptConfig
from pallas_kernels.quantised_gemm.fp8.tokens import quantised_tokens

TOKENS = (64, 1024, 8192)
GEMMS = ("qkv", "o", "gate_up", "down")
FORMS = ("fp8", "fp8_blocks")
STAGES = 8  # the most of a prompt's tiles; those that fit are used


def configs(sizes: Fp8Sizes) -> Iterator[DecodeConfig | PromptConfig]:
    """The heuristic's choice first, then other tiles of prompts that fit."""
    if launch.decodes(sizes):
        yield launch.decode_config(sizes, quantises=False)
        return
    yield (chosen := launch.prompt_config(sizes))
    for warpgroups, accs in launch.TILE_COSTS:
        made = (PromptConfig(warpgroups, accs, n) for n in range(STAGES, 1, -1))
        config = next((one for one in made if one.fits(sizes)), None)
        if config not in (None, chosen):
            yield config


def time_case(case: QuantisedCase) -> Iterator[dict[str, Any]]:
    """A row for each config."""
    from pallas_kernels.quantised_gemm.fp8 import decode, prompt  # Mosaic is slow to import

    inputs = OP.build(case, 0)
    (call,) = jax.tree.map(jnp.asarray, inputs.args)
    sizes = launch.sizes_of(call)
    args = (*jax.jit(quantised_tokens)(call.x), call.w.values, call.w.scales)
    for config in configs(sizes):
        module = decode if isinstance(config, DecodeConfig) else prompt
        run = jax.jit(partial(module.launch_with, config, sizes))  # lowered once for a chain
        seconds = seconds_in_a_chain(OP, run, args, OP.cost(case))
        yield {"case": case.name, "config": asdict(config), "us": round(seconds * 1e6, 1)}


def main(argv: list[str] | None = None) -> None:
    """Time, print, write: the file is complete after each row."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    several = partial(str.split, sep=",")
    parser.add_argument("--tokens", type=several, default=list(map(str, TOKENS)), metavar="N,...")
    parser.add_argument("--gemm", type=several, default=list(GEMMS), metavar="NAME,...")
    parser.add_argument("--commit", help="commit of the sources, if they are no checkout")
    parser.add_argument("--output", type=Path, default=Path("bench/results/local/fp8_tiles.json"))
    options = parser.parse_args(argv)
    cases = {case.name: case for case in CASES}
    wanted = [
        cases[f"qwen3_4b_{gemm}_{form}_t{tokens}"]
        for tokens in options.tokens
        for gemm in options.gemm
        for form in FORMS
    ]
    report = {**facts(options.commit), "rows": (rows := list[dict[str, Any]]())}
    for case in wanted:
        for row in time_case(case):
            rows.append(row)
            print(f"{row['case']:36}{row['us']:10.1f}  {row['config']}", flush=True)
            write_report(options.output, report)
    print(f"wrote {options.output}")


if __name__ == "__main__":
    main()
