"""Each field of ``SamplingParams`` is in every place of an option.

The places are in docs/adding-a-sampling-option.md.

A place that a contributor has not touched is named by a sentence.
"""

from __future__ import annotations

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.core.request import Request, SamplingParams
from jaxinfer.core.sampling_checks import (
    ABOVE_ZERO_BOUNDS,
    NEUTRAL,
    REAL_BOUNDS,
    WHOLE_BOUNDS,
)
from jaxinfer.exec.calls.admit import needs_admission
from jaxinfer.exec.step.sampling import any_extras
from jaxinfer.exec.step.slots import init_slots, settings_of
from jaxinfer.server.api.beams import WITHOUT
from jaxinfer.server.api.fields import GenerationFields, to_sampling
from jaxinfer.server.openai.schema import CompletionRequest

DEFAULTS = SamplingParams()
OPTIONS = sorted(set(SamplingParams.__struct_fields__) - set(NEUTRAL))
# options that requests have under other names, or not at all
OTHERWISE = {
    *("logprobs", "temperature_scaled_logprobs", "structured_outputs", "guided_decoding"),
    *("thinking", "detokenize"),
}
# options that choose among the tokens of a draw, or say what is returned: no effect on a search
FOLLOWED = {
    *("n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "ignore_eos"),
    *("include_stop_str_in_output", "skip_special_tokens"),
}
# options without a field of the page's own: its field "others" takes any JSON
OFF_THE_PAGE = {
    *("n", "min_tokens", "stop_token_ids", "include_stop_str_in_output", "skip_special_tokens"),
    *("prompt_logprobs", "taps", "steer", "allowed_token_ids", "bad_words", "logprob_token_ids"),
    *("ignore_eos", "logit_bias"),
}
NUMBERS = {**WHOLE_BOUNDS, **REAL_BOUNDS, **{k: (0.0, v) for k, v in ABOVE_ZERO_BOUNDS.items()}}


def other_value(name: str) -> float:
    """A value of a bounded option that is not its default."""
    low, high = NUMBERS[name]
    tried = [1, 2, high] if name in WHOLE_BOUNDS else [0.5, 2.0]
    return next(x for x in tried if low <= x <= high and x != getattr(DEFAULTS, name))


@pytest.mark.parametrize("name", sorted(set(OPTIONS) - OTHERWISE))
def test_an_option_is_a_field_of_requests(name: str) -> None:
    assert name in GenerationFields.__struct_fields__, (
        f"{name} is no field of requests; add it to GenerationFields of server/api/fields.py, "
        "or to OTHERWISE here"
    )
    assert (name in WITHOUT) != (name in FOLLOWED), (
        f"nothing says what a beam search does with {name}; add it to WITHOUT of "
        "server/api/beams.py with its neutral values, or to FOLLOWED here if it has no effect"
    )
    page = Path(__file__).parents[2] / "jaxinfer" / "server" / "ui" / "fields.js"
    fields = set(re.findall(r'(?:number|text|json|choice)\(\s*"(\w+)"', page.read_text()))
    assert (name in fields) != (name in OFF_THE_PAGE), (
        f"the page has no field {name}; add one to server/ui/fields.js, or to OFF_THE_PAGE here if "
        "it is for programs alone"
    )


@pytest.mark.parametrize("name", sorted({*NUMBERS} & {*GenerationFields.__struct_fields__}))
def test_an_option_of_a_request_reaches_the_engine(name: str) -> None:
    value = other_value(name)
    found = getattr(to_sampling(CompletionRequest(prompt="a", **{name: value}), DEFAULTS), name)
    assert found == value, f"{name} of a request is lost; add it to _SAME of server/api/fields.py"


@pytest.mark.parametrize("name", sorted(set(NUMBERS) - {"logprobs"}))
def test_an_extra_is_known_to_the_executables(name: str) -> None:
    """On a CPU a call computes extras only if ``any_extras`` finds one in the slots' settings."""
    sampling = SamplingParams(**{"max_tokens": None, name: other_value(name)})
    request = Request(request_id="a", prompt_token_ids=[1], sampling=sampling, max_tokens=9, seed=0)
    slots = init_slots(1, 8, jax.ShapeDtypeStruct((4,), jnp.float32))
    slots = slots._replace(settings=jnp.asarray(np.repeat(settings_of([request]), 2, 0)))
    found = bool(any_extras(slots, jnp.array([0]), jnp.array([1])))
    assert found == (sampling.needs_extras and sampling.logprobs is None), (
        f"{name} is an extra for only one of SamplingParams.needs_extras (core/request.py) and "
        "any_extras (exec/step/sampling.py); add it to the other"
    )
    assert not needs_admission(request) or found
