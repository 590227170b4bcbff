"""Hugging Face folders of the tiny models in golden/data/embeddings and golden/data/reranker.

Owns: ``Embedder`` and ``Reranker``: the golden data, and ``write``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

DATA = Path(__file__).parents[1] / "golden" / "data"
POOLING_FLAGS = {"last": "lasttoken", "mean": "mean_tokens", "cls": "cls_token"}
# settings of small engines: prompts of several chunks
SMALL: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "kv_cache_memory_bytes": 1 << 22,
}


@dataclass(frozen=True)
class Golden:
    """A checkpoint and what transformers makes of some texts."""

    tensors: dict[str, np.ndarray]
    metadata: dict[str, str]

    def fact(self, name: str) -> Any:
        """A value of the metadata."""
        return json.loads(self.metadata[name])

    def vectors(self, kind: str, *, normalize: bool = True) -> np.ndarray:
        """float32[texts, D]."""
        found = self.tensors[kind]
        return found / np.linalg.norm(found, axis=1, keepdims=True) if normalize else found

    def write(self, folder: Path, **config: Any) -> Path:
        """The folder of the model, with changes of its config."""
        folder.mkdir(parents=True, exist_ok=True)
        start = "weights/"
        weights = {k[len(start) :]: t for k, t in self.tensors.items() if k.startswith(start)}
        save_file(weights, folder / "model.safetensors", {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.fact("config") | config))
        if "tokenizer" in self.metadata:
            (folder / "tokenizer.json").write_text(self.metadata["tokenizer"])
        (folder / "tokenizer_config.json").write_text('{"eos_token": "<|endoftext|>"}')
        return folder


@cache
def golden(name: str) -> Golden:
    """``embeddings``, ``reranker``, or the checkpoint of a family (without a tokenizer)."""
    with safe_open(DATA / f"{name}.safetensors", "np") as file:
        return Golden({key: file.get_tensor(key) for key in file.keys()}, file.metadata())  # noqa: SIM118


def write_modules(
    folder: Path,
    kind: str,
    modules: tuple[str, ...] = ("Transformer", "Pooling", "Normalize"),
    **config: Any,
) -> None:
    """The files of sentence-transformers; ``config`` replaces that of the pooling."""
    listed = [
        {"idx": n, "name": str(n), "path": f"{n}_{name}" if n else "", "type": f"st.models.{name}"}
        for n, name in enumerate(modules)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    flags = {f"pooling_mode_{flag}": own == kind for own, flag in POOLING_FLAGS.items()}
    (folder / "1_Pooling").mkdir(exist_ok=True)
    pooling = config or {"word_embedding_dimension": 32, **flags, "include_prompt": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
