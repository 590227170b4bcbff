"""Requests get what their sampling parameters say: stops, n, seeds, logprobs; refusals."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.core.errors import RequestError
from jaxinfer.core.intlog import IntLog
from jaxinfer.core.request import Request, RequestSpec, SamplingParams
from jaxinfer.engine.loop import engine as engine_module
from jaxinfer.engine.loop import processor as processor_module
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.engine.requests.outputs import PositionLogprobs
from jaxinfer.exec.run.executor import Executor
from jaxinfer.models.base import forward
from jaxinfer.text.detokenize import StopStrings
from kit.engines import run, tiny_engine, tiny_limits, tokens
from kit.tiny_models import tiny_model

PROMPT = [72, 105, 33, 32, 87, 104, 97, 116]
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)


def greedy(**changes: object) -> SamplingParams:
    settings = {"temperature": 0.0, "max_tokens": 16, "ignore_eos": True, **changes}
    return SamplingParams(**settings)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine()


@pytest.fixture(scope="module")
def plain(engine: Engine) -> list[int]:
    """The greedy continuation with which the other tests compare."""
    return run(engine, [PROMPT], GREEDY)[0].outputs[0].token_ids


def test_greedy_is_the_argmax_of_forward(plain: list[int]) -> None:
    model, params = tiny_model("llama")
    logits = forward(model, params, jnp.asarray(PROMPT + plain, jnp.int32))
    np.testing.assert_array_equal(np.argmax(logits[len(PROMPT) - 1 : -1], -1), plain)


def test_nothing_is_detokenized_before_the_first_step_is_launched(
    monkeypatch: pytest.MonkeyPatch, plain: list[int]
) -> None:
    engine, order = tiny_engine(), list[str]()
    tokenizer, launch = engine.tokenizer, Executor.launch
    assert tokenizer is not None
    make = tokenizer.detokenizer
    monkeypatch.setattr(
        tokenizer, "detokenizer", lambda *a, **k: order.append("text") or make(*a, **k)
    )
    monkeypatch.setattr(
        processor_module, "StopStrings", lambda *a: order.append("stop") or StopStrings(*a)
    )
    monkeypatch.setattr(
        Executor, "launch", lambda self, plan: order.append("launch") or launch(self, plan)
    )
    assert tokens(run(engine, [PROMPT], greedy(stop="never"))) == [[plain]]
    assert order[0] == "launch" and order.count("text") == order.count("stop") == 1


def test_sampling_parameters_are_copied_only_to_score_the_prompt_once(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived: list[SamplingParams] = []
    processor = processor_module.SequenceProcessor

    def noted(request: Request, *arguments: Any) -> Any:
        arrived.append(request.sampling)
        return processor(request, *arguments)

    monkeypatch.setattr(engine_module, "SequenceProcessor", noted)
    several, scored = greedy(n=3, max_tokens=1), greedy(n=2, max_tokens=1, prompt_logprobs=1)
    run(engine, [PROMPT, PROMPT], [several, scored])
    assert all(sampling is several for sampling in arrived[:3])
    assert [sampling.prompt_logprobs for sampling in arrived[3:]] == [1, None]


def test_max_tokens(engine: Engine, plain: list[int]) -> None:
    output = run(engine, [PROMPT], greedy(max_tokens=5))[0].outputs[0]
    assert (output.token_ids, output.finish_reason) == (plain[:5], "length")


def test_context_end_is_a_length_finish(engine: Engine) -> None:
    output = run(engine, [PROMPT * 15], greedy(max_tokens=None))[0].outputs[0]
    assert len(output.token_ids) == 128 - 8 * 15
    assert output.finish_reason == "length"


def test_stop_token_id(engine: Engine, plain: list[int]) -> None:
    stop = next(token for token in plain[3:] if token not in plain[:3])
    end = plain.index(stop) + 1
    output = run(engine, [PROMPT], greedy(stop_token_ids=[stop]))[0].outputs[0]
    assert output.token_ids == plain[:end]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)


def test_eos_ends_and_ignore_eos_does_not(engine: Engine, plain: list[int]) -> None:
    bias = {319: 100.0}  # 319 is the model's eos
    ended = run(engine, [PROMPT], greedy(ignore_eos=False, logit_bias=bias))[0].outputs[0]
    assert (ended.token_ids, ended.finish_reason, ended.stop_reason) == ([319], "stop", None)
    kept = run(engine, [PROMPT], greedy(logit_bias=bias, max_tokens=3))[0].outputs[0]
    assert kept.token_ids == [319, 319, 319]


def test_min_tokens_masks_eos(engine: Engine) -> None:
    params = greedy(ignore_eos=False, logit_bias={319: 100.0}, min_tokens=4)
    output = run(engine, [PROMPT], params)[0].outputs[0]
    assert len(output.token_ids) == 5
    assert 319 not in output.token_ids[:4]


@pytest.mark.parametrize("include", [False, True])
def test_stop_string(engine: Engine, plain: list[int], include: bool) -> None:
    assert engine.tokenizer is not None
    text = engine.tokenizer.decode(plain)
    stop = text[4:7]
    params = greedy(stop=stop, include_stop_str_in_output=include)
    output = run(engine, [PROMPT], params)[0].outputs[0]
    end = text.index(stop) + (len(stop) if include else 0)
    assert output.text == text[:end]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert engine.limits.num_usable_pages == free_pages(engine)


def test_stop_strings_wait_for_min_tokens(engine: Engine, plain: list[int]) -> None:
    assert engine.tokenizer is not None
    stop = engine.tokenizer.decode(plain[:1])
    first_again = next((i for i, t in enumerate(plain) if i >= 3 and t == plain[0]), None)
    output = run(engine, [PROMPT], greedy(stop=stop, min_tokens=3))[0].outputs[0]
    assert len(output.token_ids) == (16 if first_again is None else first_again + 1)
    output = run(engine, [PROMPT], greedy(stop=stop))[0].outputs[0]
    assert len(output.token_ids) == 1


def ends_by_stop(engine: Engine, plain: list[int], stop: str, least: int) -> tuple[int, str, str]:
    """The number of tokens, the text and the finish reason if a stop string counts only when it
    ends after the first ``least`` tokens: the definition, token by token.
    """
    assert engine.tokenizer is not None
    detokenizer, text = engine.tokenizer.detokenizer(PROMPT), ""
    for number, token in enumerate(plain, start=1):
        seen = len(text)
        text += detokenizer.push([token])
        at = text.find(stop, max(seen + 1 - len(stop), 0))
        if number > least and at >= 0:
            return number, text[:at], "stop"
    return len(plain), text + detokenizer.flush(), "length"


@pytest.mark.parametrize("least", [0, 2, 3, 4, 5, 6, 7, 9])
@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_a_stop_string_may_begin_before_min_tokens(
    engine: Engine, plain: list[int], least: int, size: int
) -> None:
    assert engine.tokenizer is not None
    text = engine.tokenizer.decode(plain)
    stop = text[2 : 2 + size]
    output = run(engine, [PROMPT], greedy(stop=stop, min_tokens=least))[0].outputs[0]
    ended = (len(output.token_ids), output.text, output.finish_reason)
    assert ended == ends_by_stop(engine, plain, stop, least)


def test_min_tokens_beyond_the_context_does_not_affect_others(
    engine: Engine, plain: list[int]
) -> None:
    endless = greedy(max_tokens=None, min_tokens=2**31 - 1)
    outputs = run(engine, [PROMPT, PROMPT], [GREEDY, endless])
    assert outputs[0].outputs[0].token_ids == plain
    assert len(outputs[1].outputs[0].token_ids) == 120


def test_a_request_id_can_be_used_again_at_once(engine: Engine, plain: list[int]) -> None:
    """The abort for the stop string is still in flight when the id is used again."""
    assert engine.tokenizer is not None
    engine.add_request(
        "x", RequestSpec(PROMPT, greedy(stop=engine.tokenizer.decode(plain[:2])[-1:]))
    )
    while not any(delta.finish_reason for delta in engine.step().deltas):
        pass
    engine.add_request("x", RequestSpec(PROMPT, GREEDY))
    deltas = []
    while engine.has_work:
        deltas += engine.step().deltas
    assert [token for delta in deltas for token in delta.token_ids] == plain


def test_siblings_share_the_work_on_the_prompt() -> None:
    engine = tiny_engine()
    params = SamplingParams(n=3, temperature=1, prompt_logprobs=1, max_tokens=4, ignore_eos=True)
    (output,) = run(engine, [PROMPT * 2], params)
    assert len(output.prompt_logprobs or ()) == 16
    assert engine.stats().num_prompt_tokens == 48
    assert engine.stats().num_cached_tokens <= 32


def free_pages(engine: Engine) -> int:
    return engine._loop.state.num_free_pages  # pyright: ignore[reportPrivateUsage]


def test_n_gives_different_seeded_answers_that_repeat(engine: Engine) -> None:
    params = SamplingParams(n=3, temperature=1.5, seed=11, max_tokens=8, ignore_eos=True)
    first, second = run(engine, [PROMPT], params), run(engine, [PROMPT], params)
    assert tokens(first) == tokens(second)
    completions = tokens(first)[0]
    assert len({tuple(completion) for completion in completions}) == 3
    single = SamplingParams(temperature=1.5, seed=11, max_tokens=8, ignore_eos=True)
    assert tokens(run(engine, [PROMPT], single))[0][0] == completions[0]


def test_unseeded_requests_differ(engine: Engine) -> None:
    params = SamplingParams(temperature=1.5, max_tokens=8, ignore_eos=True)
    a, b = tokens(run(engine, [PROMPT, PROMPT], params))
    assert a != b


def close(position: PositionLogprobs, expected: np.ndarray, chosen: int, top: int) -> None:
    """Compare one position with a row of log-softmax."""
    assert next(iter(position)) == chosen
    assert len(position) in (top, top + 1)
    for token, logprob in position.items():
        assert logprob.logprob == pytest.approx(expected[token], abs=2e-4)
        assert logprob.rank == 1 + int((expected > expected[token]).sum())
        assert logprob.decoded_token is not None


def test_logprobs(engine: Engine, plain: list[int]) -> None:
    output = run(engine, [PROMPT], greedy(logprobs=3))[0].outputs[0]
    model, params = tiny_model("llama")
    logits = forward(model, params, jnp.asarray(PROMPT + plain, jnp.int32))
    expected = np.asarray(jax.nn.log_softmax(logits, -1))[len(PROMPT) - 1 : -1]
    assert output.logprobs is not None
    for position, row, chosen in zip(output.logprobs, expected, plain, strict=True):
        close(position, row, chosen, 3)
    total = sum(row[token] for row, token in zip(expected, plain, strict=True))
    assert output.cumulative_logprob == pytest.approx(total, abs=1e-3)


@pytest.mark.parametrize("length", [2, 8, 70])
def test_prompt_logprobs_over_chunks(length: int) -> None:
    prompt = np.random.default_rng(length).integers(0, 300, length).tolist()
    engine = tiny_engine()
    run(engine, [prompt], GREEDY)  # positions in cached pages are scored too
    output = run(engine, [prompt], greedy(prompt_logprobs=2, max_tokens=2))[0]
    model, params = tiny_model("llama")
    logits = forward(model, params, jnp.asarray(prompt, jnp.int32))
    expected = np.asarray(jax.nn.log_softmax(logits, -1))
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == length
    for index, position in enumerate(output.prompt_logprobs[1:]):
        assert position is not None
        close(position, expected[index], prompt[index + 1], 2)


def test_prompt_logprobs_survive_preemption() -> None:
    limits = tiny_limits(num_pages=12)
    prompts = [np.random.default_rng(i).integers(0, 300, 15).tolist() for i in range(4)]
    params = greedy(prompt_logprobs=0, max_tokens=20)
    outputs = run(tiny_engine(limits), prompts, params)
    assert [len(output.prompt_logprobs or ()) for output in outputs] == [15] * 4


def test_penalties_see_the_prompt_and_the_output(engine: Engine, plain: list[int]) -> None:
    strong = greedy(repetition_penalty=5.0, presence_penalty=2.0, frequency_penalty=2.0)
    output = run(engine, [PROMPT], strong)[0].outputs[0].token_ids
    assert output != plain
    assert len(set(output)) == len(output), "such penalties prevent every repetition"


REFUSED = {
    "empty prompt": ([], GREEDY, "prompt is empty"),
    "prompt beyond the context": (
        PROMPT * 16,
        GREEDY,
        "no room for an output within max_model_len 128",
    ),
    "token id out of range": ([1, 320], GREEDY, "320; the vocabulary ends at 319"),
    "token id beyond int64": ([2**70, 1], GREEDY, f"{2**70}; the vocabulary ends at 319"),
    "negative token id": ([-1], GREEDY, "-1"),
    "stop id out of range": (PROMPT, greedy(stop_token_ids=[999]), "stop_token_ids"),
    "bias id out of range": (PROMPT, greedy(logit_bias={320: 1.0}), "logit_bias"),
}


def test_a_validated_request_is_not_validated_again(
    engine: Engine, plain: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    validated = engine.check(RequestSpec(PROMPT, GREEDY))
    assert list(validated.spec.prompt_token_ids) == PROMPT
    assert engine.check(validated.spec) == validated
    monkeypatch.setattr(engine, "check", None)
    engine.add_validated("x", validated)
    deltas = []
    while engine.has_work:
        deltas += engine.step().deltas
    assert [token for delta in deltas for token in delta.token_ids] == plain


def test_an_intlog_is_validated_too(engine: Engine) -> None:
    with pytest.raises(RequestError, match="holds token id 320; the vocabulary ends at 319"):
        engine.add_request("x", RequestSpec(IntLog([1, 320]), GREEDY))
    with pytest.raises(RequestError, match="holds token id -1; the vocabulary ends at 319"):
        engine.add_request("x", RequestSpec(IntLog([1, -1, 320]), GREEDY))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_anything_begins(engine: Engine, plain: list[int], name: str) -> None:
    prompt, params, message = REFUSED[name]
    engine.add_request("good", RequestSpec(PROMPT, GREEDY))
    with pytest.raises(RequestError, match=message):
        engine.add_request("bad", RequestSpec(prompt, params))
    deltas = []
    while engine.has_work:
        deltas += engine.step().deltas
    assert {delta.request_id for delta in deltas} == {"good"}
    assert [token for delta in deltas for token in delta.token_ids] == plain


def test_request_that_can_never_fit_is_refused() -> None:
    engine = tiny_engine(tiny_limits(num_pages=6))
    with pytest.raises(RequestError, match=r"need 10 pages .* has 5"):
        engine.add_request("big", RequestSpec(PROMPT * 3, GREEDY))


def test_request_id_in_use(engine: Engine) -> None:
    engine.add_request("same", RequestSpec(PROMPT, GREEDY))
    with pytest.raises(RequestError, match="in use"):
        engine.add_request("same", RequestSpec(PROMPT, GREEDY))
    with pytest.raises(RequestError, match="in use"):
        engine.add_validated("same", engine.check(RequestSpec(PROMPT, GREEDY)))
    engine.abort("same")
    while engine.has_work:
        engine.step()


def test_abort_frees_pages_and_leaves_others_alone(engine: Engine, plain: list[int]) -> None:
    engine.add_request("gone", RequestSpec(PROMPT[:5], greedy(max_tokens=100)))
    engine.add_request("stays", RequestSpec(PROMPT, GREEDY))
    for _ in range(4):
        engine.step()
    engine.abort("gone")
    deltas = []
    while engine.has_work:
        deltas += engine.step().deltas
    assert free_pages(engine) == engine.limits.num_usable_pages
    reasons = {d.request_id: d.finish_reason for d in deltas if d.finish_reason}
    assert reasons == {"gone": "abort", "stays": "length"}


def test_no_late_compiles(engine: Engine) -> None:
    assert engine.stats().num_late_compiles == 0
