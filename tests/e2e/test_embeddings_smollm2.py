"""Embeddings of SmolLM2 by the official client."""

from __future__ import annotations

import numpy as np
from openai import OpenAI

from jaxinfer.bench.server_process import ServerProcess
from kit.openai_server import SECONDS

TEXTS = ["The river bends east.", "Le fleuve tourne vers l'est.", "a b c " * 40]


def test_embeddings_together_and_alone() -> None:
    with (
        ServerProcess("--task=embed", "--cpu-weights=float32", "--max-model-len=512") as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", timeout=SECONDS) as client,
    ):
        model = client.models.list().data[0].id
        together = client.embeddings.create(model=model, input=TEXTS)  # base64, which it decodes
        floats = client.embeddings.create(model=model, input=TEXTS, encoding_format="float")
        alone = [client.embeddings.create(model=model, input=text).data[0] for text in TEXTS]
    vectors = np.array([one.embedding for one in together.data])
    assert vectors.shape == (3, 576) and together.usage.prompt_tokens > 100
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    np.testing.assert_array_equal(vectors, [one.embedding for one in floats.data])
    np.testing.assert_allclose(vectors, [one.embedding for one in alone], atol=1e-5)
