"""First tokens of prefixes on the device, in host memory, or computed: ``python -m bench.offload``.

Each length has prompts of its own. One is sent cold, again (its pages are on the device), and once
more after others have evicted it (its pages are in the host tier). The pool holds one prompt
of the longest length and a little more. Prints a line for each length, and writes a JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from jaxinfer.bench.circumstances import host_circumstances, write_report

if TYPE_CHECKING:
    from jaxinfer import LLM

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16384)
PAGE = 16


def arguments() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--offload-gib", type=float, default=16.0)
    parser.add_argument("--engine", nargs="*", default=[], metavar="NAME=JSON")
    parser.add_argument("--output", type=Path)
    return parser


def main() -> None:
    """Measure every length."""
    from jaxinfer import LLM

    options = arguments().parse_args()
    longest = max(options.lengths)
    more = {
        name: json.loads(value) for name, _, value in (e.partition("=") for e in options.engine)
    }
    settings: dict[str, Any] = {
        "load_format": options.load_format,
        "skip_tokenizer_init": options.load_format == "dummy",
        "max_model_len": longest + 64,
        "max_num_seqs": 8,
        "num_pages": longest // PAGE + 8,
        "kv_offloading_size": options.offload_gib,
    }
    llm = LLM(options.model, **settings | more)
    unmeasured(llm, longest)
    rows = [measured(llm, length, longest, options.repeats) for length in options.lengths]
    tiers = llm.stats().tiers
    report = {
        **host_circumstances("jaxinfer", "bench"),
        "model": options.model,
        "settings": settings | more,
        "lengths": rows,
        "fitted_restore_bytes_per_s": tiers.bytes_per_second,
        "save_bytes_per_s": tiers.saved_bytes / max(tiers.save_seconds, 1e-9),
        "num_failed": tiers.num_failed,
    }
    print(json.dumps(report, indent=1))
    if options.output:
        write_report(options.output, report)


def unmeasured(llm: LLM, longest: int) -> None:
    """Run each kind of step, and fill the pool."""
    for seed in range(2):
        first_token(llm, prompt(seed, longest))


def measured(llm: LLM, length: int, longest: int, repeats: int) -> dict[str, Any]:
    """Milliseconds to the first token of each kind, and bytes per second of the restores."""
    times: dict[str, list[float]] = {"cold": [], "device": [], "host": []}
    rates: list[float] = []
    for repeat in range(repeats):
        own = prompt(1000 * length + repeat, length)
        for kind in times:
            if kind == "host":
                for other in range(2):  # the first one evicts what was there before
                    first_token(llm, prompt(10**9 + 1000 * length + 2 * repeat + other, longest))
            before = llm.stats().tiers
            milliseconds, reused = first_token(llm, own)
            after = llm.stats().tiers
            restored = after.restored_bytes - before.restored_bytes
            expected = 0 if kind == "cold" else length // 2
            if reused < expected or (kind == "host") != bool(restored):
                raise SystemExit(
                    f"{kind} at {length}: {reused} tokens reused, {restored} bytes restored"
                )
            times[kind].append(milliseconds)
            if kind == "host":
                rates.append(restored / (after.restore_seconds - before.restore_seconds))
    row: dict[str, Any] = {"length": length, "restore_bytes_per_s": median(rates)}
    for kind, values in times.items():
        row |= {f"{kind}_ms": median(values), f"{kind}_all_ms": values}
    row["cold_over_host"] = row["cold_ms"] / row["host_ms"]
    row["cold_over_device"] = row["cold_ms"] / row["device_ms"]
    shown = ", ".join(f"{kind} {row[f'{kind}_ms']:.1f} ms" for kind in times)
    print(f"{length:6} {shown}, {row['restore_bytes_per_s'] / 1e9:.1f} GB/s", flush=True)
    return row


def first_token(llm: LLM, token_ids: list[int]) -> tuple[float, int]:
    """Milliseconds to the first token, and the tokens that were reused."""
    from jaxinfer import SamplingParams

    start = time.perf_counter()
    (output,) = llm.generate(
        {"prompt_token_ids": token_ids},
        SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True),
        use_tqdm=False,
    )
    return 1e3 * (time.perf_counter() - start), output.num_cached_tokens


def prompt(seed: int, length: int) -> list[int]:
    """Token ids that no other seed has."""
    draw = random.Random(seed)
    return [draw.randrange(10, 1000) for _ in range(length)]


if __name__ == "__main__":
    main()
