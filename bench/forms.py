"""Decode steps and prompts of one model by the form of its weights: none is slower than in bf16.

Run from the repository root; it fails where a form is slower than bf16 on this device:

    .venv/bin/python -m bench.forms --config bench/shapes/qwen2.5-1.5b/config.json --output FILE

Weights are random. q4_k_m is the mix of forms in llama.cpp's files of that name, for families that
``bench.synthetic_gguf`` writes; int4, int8 and fp8 are those of ``--quantization``; own is the form
that the config itself names, such as gpt-oss' mxfp4, whose bf16 is that of its config without it.
"""

from __future__ import annotations

import argparse
import gc
import json
import tempfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from bench.step.cases import GREEDY, Prompts, Repeats, middle, seconds_of, tpot_seconds
from bench.step.file import facts
from jaxinfer import LLM
from jaxinfer.bench.circumstances import write_report
from jaxinfer.core.config import DEFAULT_GPU_MEMORY_UTILIZATION, prepare_backend

SHAPES = Path(__file__).parent / "shapes"
BASE, MIXED, OWN = "bf16", "q4_k_m", "own"
FORMS = (BASE, "fp8", "int8", "int4", MIXED)
TOLERANCE = 1.02  # two runs of one engine differ by as much
TOKENS_IN = 500
REPEATS = Repeats(at_least=3, at_most=7, seconds=2.0)

type Row = dict[str, float]  # milliseconds by case


def settings_of(form: str, config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The arguments of ``LLM`` for a form; its files are written to ``folder``."""
    if form == MIXED:
        from bench.synthetic_gguf import write  # needs gguf

        path, size = folder / "q4_k_m.gguf", config["vocab_size"]
        words = {"vocab": {f"t{i}": i for i in range(size)}, "merges": []}
        added = [{"id": size - 1, "content": f"t{size - 1}"}]
        write(dict(config), {"model": words, "added_tokens": added}, path, data=False)
        return {"model": str(path)}
    kept = dict(config)
    if form != OWN:
        kept.pop("quantization_config", None)
    place = folder / form
    place.mkdir()
    (place / "config.json").write_text(json.dumps(kept))
    quantised = {} if form in (BASE, OWN) else {"quantization": form}
    return {"model": str(place), **quantised}


def measure(llm: LLM, vocab_size: int, batches: list[int], prompt: int, repeats: Repeats) -> Row:
    """The milliseconds of a step by its rows, and of the first token of a prompt."""
    prompts = Prompts(vocab_size, 0)
    found: Row = {}
    for batch in batches:
        run = partial(seconds_of, llm, prompts(batch, TOKENS_IN), GREEDY)
        found[f"b{batch}"] = middle(repeats.of(lambda run=run: 1e3 * tpot_seconds(run)))
    if prompt:
        one = prompts(1, prompt)
        samples = repeats.of(lambda: 1e3 * seconds_of(llm, one, GREEDY, 1))
        found[f"ttft{prompt}"] = middle(samples)
    return found


def slower(rows: Mapping[str, Row]) -> list[str]:
    """The cases that are slower than in bf16, a line each."""
    base = rows[BASE]
    return [
        f"{form} {case}: {ms:.3f} ms, {BASE} {base[case]:.3f}"
        for form, row in rows.items()
        for case, ms in row.items()
        if ms > TOLERANCE * base[case]
    ]


def shown(form: str, row: Row) -> str:
    """A line of the table."""
    return f"{form:8}" + "".join(f"  {case} {ms:8.3f}" for case, ms in row.items())


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.forms", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--config", type=Path, default=SHAPES / "qwen2.5-1.5b" / "config.json")
    parser.add_argument("--forms", default=",".join(FORMS), help="comma-separated; bf16 is added")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 64])
    parser.add_argument("--prompt", type=int, default=1024, help="tokens; 0: no prompt is timed")
    parser.add_argument("--commit", help="commit of the sources, if they are no checkout")
    parser.add_argument("--output", type=Path, default=Path("bench/results/local/forms.json"))
    return parser.parse_args(argv)


def main(argv: list[str] | None = None, repeats: Repeats = REPEATS, **more: Any) -> None:
    """Measure form after form; exits with an error if one is slower than bf16."""
    arguments = parse_arguments(argv)
    prepare_backend(DEFAULT_GPU_MEMORY_UTILIZATION)
    config, rows = json.loads(arguments.config.read_text()), dict[str, Row]()
    settings: dict[str, Any] = {
        **{"load_format": "dummy", "skip_tokenizer_init": True, "enable_prefix_caching": False},
        **{"max_num_seqs": max(arguments.batches), "max_model_len": 2048},
        **more,
    }
    for form in dict.fromkeys([BASE, *arguments.forms.split(",")]):
        with tempfile.TemporaryDirectory() as folder:
            llm = LLM(**settings | settings_of(form, config, Path(folder)))
            rows[form] = measure(
                llm, config["vocab_size"], arguments.batches, arguments.prompt, repeats
            )
        print(shown(form, rows[form]), flush=True)
        del llm
        gc.collect()
        about = {"model": arguments.config.parent.name, "unit": "ms", "forms": rows}
        write_report(arguments.output, {**facts(arguments.commit), **about})
    if found := slower(rows):
        raise SystemExit("slower than bf16:\n" + "\n".join(found))


if __name__ == "__main__":
    main()
