"""Makes data/config_keys.json.gz: which changes of a config.json change what transformers computes.

A tool, run by hand in an environment of its own with torch and transformers 5.24; tests read only
its output.

    python make_config_keys.py [CASE ...]

Without names all cases are made. Each is the model of a file of make_golden.py, whose config is
changed one key at a time (``kit/config_changes.py``). "changed" has the changes after which the
same random numbers give other logits or parameters of other shapes, "refused" those with which
transformers raises an error, or which would take too much memory; all others change nothing.
"""

from __future__ import annotations

import gzip
import json
import sys
from pathlib import Path
from typing import Any

import torch
from make_golden import FLAT_WITH_IMAGES, randomise
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, logging
from transformers.models.auto import CONFIG_MAPPING

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from kit.config_changes import changes  # noqa: E402

FILE, LENGTH, MAX_SIZE = HERE / "data" / "config_keys.json.gz", 24, 2**31


def config_of(case: str) -> dict[str, Any]:
    """The config of a golden file."""
    with safe_open(HERE / "data" / f"{case}.safetensors", "pt") as file:
        return json.loads(file.metadata()["config"])


def cases() -> list[str]:
    """A case of each model type of text: the one with most keys."""
    found: dict[tuple[str, bool], tuple[int, str]] = {}
    for path in sorted((HERE / "data").glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
        config = json.loads(metadata.get("config", "{}"))
        if "model_type" not in config or "text_config" in config or path.stem in NO_CASES:
            continue
        kind = config["model_type"], bool(config.get("enable_moe_block"))
        found[kind] = max(found.get(kind, (0, "")), (len(config), path.stem))
    return sorted(case for _, case in found.values())


NO_CASES = (
    *("embeddings", "reranker", "gguf_rope", "gguf_experts", "gguf_hybrid", "gguf_families"),
    "qwen3_5_long",
    "chameleon_swin",
    *("internlm2", "mimo", "minicpm", "orion", "nemotron_nas"),  # not in transformers
)


@torch.inference_mode()
def computed(config: dict[str, Any]) -> tuple[dict[str, Any], torch.Tensor]:
    """The shapes of parameters, and logits of random ones."""
    own = {key: value for key, value in config.items() if key != "architectures"}
    made = CONFIG_MAPPING[config["model_type"]].from_dict(own)
    torch.manual_seed(0)
    is_text = made.model_type not in FLAT_WITH_IMAGES
    auto = AutoModelForCausalLM if is_text else AutoModelForImageTextToText
    model = auto.from_config(made, attn_implementation="eager").float().eval()
    with torch.no_grad():
        randomise(model, torch.Generator().manual_seed(0))
    rows = model.get_input_embeddings().weight.shape[0]
    ids = torch.randint(0, min(rows, 48), (1, LENGTH), generator=torch.Generator().manual_seed(5))
    return {key: tuple(t.shape) for key, t in model.state_dict().items()}, model(ids).logits


def is_large(config: Any) -> bool:
    """True if some number is larger than any size may be."""
    if isinstance(config, dict):
        return any(map(is_large, config.values()))
    return isinstance(config, int) and abs(config) >= MAX_SIZE


def effects(config: dict[str, Any]) -> dict[str, list[str]]:
    """The names of changes that change something, and of those that cannot be made."""
    shapes, logits = computed(config)
    found: dict[str, list[str]] = {"changed": [], "refused": []}
    for name, changed in changes(config):
        try:
            if is_large(changed):
                raise ValueError("too large")
            own_shapes, own = computed(changed)
        except Exception:  # whatever transformers raises
            found["refused"].append(name)
            continue
        if own_shapes != shapes or not torch.equal(own, logits):
            found["changed"].append(name)
    return found


def main() -> None:
    logging.set_verbosity_error()
    torch.set_num_threads(1)  # the models are tiny
    names = sys.argv[1:] or cases()
    made = json.loads(gzip.decompress(FILE.read_bytes())) if FILE.exists() else {}
    for case in names:
        made[case] = effects(config_of(case))
        print(case, {kind: len(own) for kind, own in made[case].items()}, flush=True)
        text = json.dumps(made, sort_keys=True, separators=(",", ":"))
        FILE.write_bytes(gzip.compress(text.encode(), 9, mtime=0))


if __name__ == "__main__":
    main()
