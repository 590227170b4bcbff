"""Taps and steering over HTTP: base64 with dtype and shape, their bound, and wrong requests."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxinfer import SamplingParams
from jaxinfer.exec.step.points import points_named
from kit.api_calls import CHAT, CHATS, COMPLETIONS, GENERATE, ask, refusal
from kit.engines import run, tiny_engine, tiny_limits
from kit.server import Serving, serving
from kit.tiny_models import tiny_model

POINTS = ("embed", "layers.0.resid_post", "layers.1.z", "layers.1.mlp_post", "final_norm")
POINT = POINTS[1]
LIMITS = tiny_limits(points=points_named(POINTS, tiny_model("llama")[0].config))
VECTOR = (np.arange(32, dtype=np.float32) - 15) / 2
STEER = [{"point": POINT, "vector": VECTOR.tolist(), "scale": 0.5}]
IDS: dict[str, Any] = {"prompt": list(range(5, 30)), "temperature": 0, "ignore_eos": True}
IDS |= {"max_tokens": 4, "return_token_ids": True}
TOKENS = "/inference/v1/generate"
KEY = {"Authorization": "Bearer secret"}


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    with serving(tiny_engine(LIMITS), admin_api_key=("secret",), max_tap_bytes=19_000) as running:
        yield running
        running.wait_until_idle()


def array(tap: Any) -> np.ndarray:
    assert tap["dtype"] == "float32"
    return np.frombuffer(base64.b64decode(tap["base64"]), "<f4").reshape(tap["shape"])


def test_taps_are_those_of_the_engine_on_every_route(server: Serving) -> None:
    names = [POINT, "blocks.1.attn.hook_z"]
    choice = ask(server, COMPLETIONS, **IDS, taps=names, steer=STEER)["choices"][0]
    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, taps=names, steer=STEER)
    (expected,) = run(tiny_engine(LIMITS), [IDS["prompt"]], params)
    answer = expected.outputs[0]
    assert choice["token_ids"] == answer.token_ids and answer.taps is not None
    assert list(choice["taps"]) == names
    for name in names:
        np.testing.assert_array_equal(array(choice["taps"][name]), answer.taps[name])
    assert choice["taps"][names[1]]["shape"] == [28, 4, 8]
    generated = ask(server, GENERATE, **IDS, taps=[POINT], steer=STEER)["outputs"][0]
    assert generated["taps"][POINT] == choice["taps"][POINT]
    params = {name: IDS[name] for name in ("temperature", "ignore_eos", "max_tokens")}
    params |= {"taps": [POINT], "steer": STEER}
    own = ask(server, TOKENS, token_ids=IDS["prompt"], sampling_params=params)["choices"][0]
    assert own["taps"][POINT] == choice["taps"][POINT]
    chat = ask(server, CHATS, **CHAT, max_tokens=2, taps=["embed"])["choices"][0]
    assert array(chat["taps"]["embed"]).shape[1:] == (32,)
    assert "taps" not in ask(server, COMPLETIONS, **IDS)["choices"][0]


def test_vectors_by_name_need_the_admin_key(server: Serving) -> None:
    named = [{"point": POINT, "name": "mine", "scale": 0.5}]
    assert "'mine', which is not set" in refusal(server, COMPLETIONS, **IDS, steer=named)["message"]
    body = {"name": "mine", "vector": VECTOR.tolist()}
    assert server.post("/set_steering", **body).status_code == 401
    with server.client(headers=KEY) as client:
        assert client.post("/set_steering", json=body).json() == {"status": "set"}
        wrong = client.post("/set_steering", json=body | {"vector": [1.0]})
        assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "vector"
        by_name = ask(server, COMPLETIONS, **IDS, steer=named)["choices"]
        assert by_name == ask(server, COMPLETIONS, **IDS, steer=STEER)["choices"]
        assert client.post("/set_steering", json={"name": "mine"}).json() == {"status": "removed"}
    refusal(server, COMPLETIONS, **IDS, steer=named)


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"taps": ["layers.0.resid"]}, "taps", "the nearest are layers.0.resid_post"),
        ({"taps": list(POINTS)}, "taps", "may have 19712 bytes, and 19000 are allowed"),
        ({"taps": [POINT], "n": 9}, "taps", "ask for fewer points, prompts or tokens"),
        ({"taps": [POINT], "stream": True}, "taps", "cannot be streamed"),
        ({"steer": [{"point": POINT, "vector": [1.0]}]}, "steer", "has 1 values, .* has 32"),
        ({"steer": [{"point": "emb", "vector": [1.0]}]}, "steer", "the nearest are embed"),
        ({"steer": [{"point": POINT, "vector": ["a"]}]}, "steer[0].vector[0]", "a number"),
    ],
)
def test_refused(server: Serving, fields: dict[str, Any], param: str, words: str) -> None:
    error = refusal(server, COMPLETIONS, **(IDS | fields))
    assert error["param"] == param
    for part in words.split(" .* "):
        assert part in error["message"]


def test_a_server_without_points_names_the_flag() -> None:
    with serving(tiny_engine()) as plain:
        for fields in ({"taps": [POINT]}, {"steer": STEER}):
            assert "(--tap-points)" in refusal(plain, COMPLETIONS, **IDS, **fields)["message"]
