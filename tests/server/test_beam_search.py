"""``use_beam_search`` in requests: the n best beams as the n answers."""

from __future__ import annotations

from typing import Any

import pytest

from jaxinfer import LLM, BeamSearchParams
from jaxinfer.core.config import EngineConfig
from jaxinfer.core.progress import NO_PROGRESS
from jaxinfer.server.api.beams import WITHOUT
from kit.engines import tiny_engine
from kit.server import Serving

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
WRONG: dict[str, Any] = {
    "stream": True,
    "stop": "a",
    "stop_token_ids": [1],
    "min_tokens": 1,
    "logit_bias": {"1": 1},
    "presence_penalty": 1,
    "frequency_penalty": 1,
    "repetition_penalty": 2,
    "allowed_token_ids": [1],
    "bad_words": ["a"],
    "logprob_token_ids": [1],
    "prompt_logprobs": 1,
    "taps": ["layers.0.resid_post"],
    "steer": [{"point": "layers.0.resid_post", "name": "a"}],
}


def beams(server: Serving, path: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    """The answer to a search."""
    response = server.post(path, use_beam_search=True, **{"n": 3, "max_tokens": 4, **fields})
    assert response.status_code == 200, response.text
    return response.json()


def test_answers_are_the_beams(server: Serving) -> None:
    prompts = ["ab", "once upon"]
    shown = {"return_token_ids": True, "return_tokens_as_token_ids": True, "logprobs": 2}
    answer = beams(server, prompt=prompts, **shown)
    llm = LLM.of_engine(tiny_engine(), EngineConfig(), NO_PROGRESS)
    outputs = llm.beam_search(prompts, BeamSearchParams(3, 4))
    expected = [
        (beam, beam.tokens[len(prompt) :])
        for prompt, output in zip(prompts, outputs, strict=True)
        for beam in output.sequences
    ]
    for number, (choice, (beam, token_ids)) in enumerate(
        zip(answer["choices"], expected, strict=True)
    ):
        assert (choice["index"], choice["finish_reason"]) == (number, "length")
        assert choice["token_ids"] == token_ids
        assert choice["text"] == llm.get_tokenizer().decode(token_ids)
        assert sum(choice["logprobs"]["token_logprobs"]) == pytest.approx(beam.cum_logprob, 1e-4)
        assert all(2 <= len(one) <= 3 for one in choice["logprobs"]["top_logprobs"])
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (11, 24)
    server.wait_until_idle()


def test_a_chat_has_beams(server: Serving) -> None:
    answer = beams(server, CHATS, logprobs=True, top_logprobs=1, length_penalty=0, **CHAT)
    texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert len(set(texts)) == 3
    totals = [sum(one["logprob"] for one in c["logprobs"]["content"]) for c in answer["choices"]]
    assert totals == sorted(totals, reverse=True)
    first = beams(server, CHATS, n=1, early_stopping=True, **CHAT)["choices"][0]
    greedy = server.post(CHATS, max_tokens=4, temperature=0, **CHAT).json()["choices"][0]
    assert first["message"] == greedy["message"]


def test_echo_and_neutral_fields(server: Serving) -> None:
    plain = beams(server, prompt="ab")["choices"]
    neutral = {"temperature": 0.7, "top_p": 0.5, "seed": 3, "stop": [], "early_stopping": "never"}
    assert beams(server, prompt="ab", **neutral)["choices"] == plain
    echoed = beams(server, prompt="ab", echo=True)["choices"]
    assert [one["text"] for one in echoed] == ["ab" + one["text"] for one in plain]


def test_every_field_that_a_search_cannot_follow_is_named(server: Serving) -> None:
    missing = WRONG.keys() ^ WITHOUT.keys()
    assert not missing, f"WRONG here needs a value that is refused for each of WITHOUT: {missing}"
    wrong = [(name, name, {name: value}) for name, value in WRONG.items()]
    wrong += [
        ("n", "n", {"n": 11}),
        ("length_penalty", "length_penalty", {"length_penalty": 1e3}),
        ("early_stopping", "early_stopping", {"early_stopping": "soon"}),
        ("response_format", "response_format", {"response_format": {"type": "json_object"}}),
        ("echo", "echo", {"echo": True, "logprobs": 1}),
        ("echo", "echo", {"echo": True, "max_tokens": 0}),
    ]
    for name, param, fields in wrong:
        response = server.post(COMPLETIONS, **{"prompt": "a", "use_beam_search": True, **fields})
        assert response.status_code == 400, name
        assert response.json()["error"]["param"] == param


def test_timeout_ends_a_search(server: Serving) -> None:
    response = server.post(
        COMPLETIONS, prompt="a", n=10, max_tokens=120, use_beam_search=True, timeout=0.01
    )
    assert response.status_code == 408
    server.wait_until_idle()
