"""Renders the table of docs/models.md from the registry and from what the tests hold.

Run from the repository root: ``python -m bench.models_page``; a test compares the table with the
page. A family is its architectures; llama.cpp's names of its GGUF files; the golden files of tests
that transformers or llama.cpp made; and the public shapes that an engine served on a GPU as the
dense form computes them (``bench.families``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from safetensors import safe_open

from bench.families import configs
from jaxinfer.models.registry import (
    decoder_config,
    family_for,
    known_architectures,
    text_config,
    wrapping_architectures,
)
from jaxinfer.weights.gguf.config import known_architectures as gguf_architectures

PAGE = Path("docs/models.md")
GOLDEN, RESULTS = Path("tests/golden/data"), Path("bench/results/h200")
BEGIN, END = "<!-- models_page: begin -->\n", "<!-- models_page: end -->\n"
# llama.cpp's names that are not those of a family
GGUF_FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "bailingmoe": "bailing",
        "bailingmoe2": "bailing",
        "nemotron_h_moe": "nemotron_h",
        "qwen3moe": "qwen3_moe",
        "gpt-oss": "gpt_oss",
        "qwen35": "qwen3_5",
        "qwen35moe": "qwen3_5_moe",
        "qwen3next": "qwen3_next",
        "deepseek2": "deepseek_v2",
        "kimi-linear": "kimi_linear",
        "starcoder": "gpt_bigcode",
        "command-r": "cohere",
        "muse-glimmer": "muse_glimmer",
        "deci": "nemotron_nas",
        "step35": "step3p5",
        "qwen2vl": "qwen2",
        "qwen3vl": "qwen3",
        "qwen3vlmoe": "qwen3_moe",
        "mistral3": "ministral",
        "exaone-moe": "exaone_moe",
        "cohere2moe": "cohere2_moe",
        "cohere2": "cohere",
        "phi2": "phi",
        "gptneox": "gpt_neox",
        "chatglm": "glm",
        "hunyuan-dense": "hunyuan",
        "hunyuan-moe": "hunyuan",
        "qwen2moe": "qwen2_moe",
        "granitemoe": "granite",
        "glm4moe": "glm4_moe",
        "ernie4_5-moe": "ernie4_5",
        "minimax-m2": "minimax_m2",
        "minimax-m3": "minimax_m3",
        "falcon-h1": "falcon_h1",
        "granitehybrid": "granite_hybrid",
        "lfm2moe": "lfm2",
        "mimo2": "mimo_v2_flash",
    }
)
WRAPPED = "Of these only the text decoder is read, which is of one of the families above:"
HEAD = ("family", "architectures", "GGUF", "golden files", "served on a GPU as the dense form")


def table() -> str:
    """The table in Markdown, a line for each family in the order of the registry."""
    families: dict[str, list[str]] = {}
    wrappers = wrapping_architectures()
    for architecture in (one for one in known_architectures() if one not in wrappers):
        name = family_for({"architectures": [architecture]}).name
        families.setdefault(name, []).append(architecture)
    of_gguf, golden, served = _gguf_names(), _golden(), _served()
    lines = [_line(HEAD), _line(("---",) * len(HEAD))]
    for name, architectures in families.items():
        cells = (
            f"`{name}`",
            ", ".join(architectures),
            ", ".join(f"`{one}`" for one in of_gguf.get(name, ())) or "-",
            str(golden.get(name, 0)),
            ", ".join(served.get(name, ())) or "-",
        )
        lines.append(_line(cells))
    names = "".join(f"- {one}\n" for one in wrappers)
    return f"{''.join(lines)}\n{WRAPPED}\n\n{names}"


def _line(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(cells)} |\n"


def _family(config: Mapping[str, Any]) -> str:
    return family_for(decoder_config(text_config(config))).name


def _gguf_names() -> dict[str, list[str]]:
    """llama.cpp's names of each family's files: most are those of the family."""
    found: dict[str, list[str]] = {}
    for name in gguf_architectures():
        found.setdefault(GGUF_FAMILIES.get(name, name), []).append(name)
    return found


def _golden() -> dict[str, int]:
    """The number of golden files with logits of each family."""
    found: dict[str, int] = {}
    for path in sorted(GOLDEN.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            config = (file.metadata() or {}).get("config")
        if config is not None and "architectures" in (read := json.loads(config)):
            found[name] = found.get(name := _family(read), 0) + 1
    return found


def _served() -> dict[str, list[str]]:
    """The shapes of each family in the committed results of ``bench.families``."""
    found: dict[str, list[str]] = {}
    known = configs()
    for name in _measured():
        own = found.setdefault(_family(known[name]), [])
        if name not in own:
            own.append(name)
    return found


def _measured() -> Iterator[str]:
    for path in sorted(RESULTS.glob("families*.json")):
        yield from json.loads(path.read_text())["differences"]


def rendered(page: str) -> str:
    """The page with the table between its marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text("utf-8")), "utf-8")
