"""Makes what llama.cpp says for each GGUF file of ``kit.gguf_rope`` or another such module.

A tool, run by hand in an environment of its own with llama-cpp-python (0.3.36 made the files that
are committed); tests read only its output. The GGUF files come from the project's environment:

    PYTHONPATH=.:tests python -m kit.gguf_rope FOLDER
    python make_gguf.py FOLDER gguf_rope

data/NAME.safetensors holds the logits [V] after the last token of ``token_ids.npy``, for each case.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from llama_cpp import Llama
from safetensors.numpy import save_file

DATA = Path(__file__).parent / "data"
F32 = 0  # ggml's number of the type; the cache is float16 by default


def main(folder: Path, name: str) -> None:
    """Run every file of the folder."""
    token_ids = np.load(folder / "token_ids.npy").tolist()
    logits: dict[str, np.ndarray] = {}
    for path in sorted(folder.glob("*.gguf")):
        model = Llama(str(path), n_ctx=256, n_batch=256, type_k=F32, type_v=F32, logits_all=True)
        model.eval(token_ids)
        logits[path.stem.replace("-", "/")] = np.array(model.scores[len(token_ids) - 1], np.float32)
    save_file(logits, DATA / f"{name}.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
