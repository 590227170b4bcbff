"""A chat template runs within budgets of steps and sizes, in any process that renders it."""

from __future__ import annotations

import pytest

from jaxinfer.core.errors import ContextLengthError, TokenizerError
from jaxinfer.text import jinja
from jaxinfer.text.chat import ChatTemplate

USER = {"role": "user", "content": "hi"}
TEXTS = {
    "loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "a recursive loop": "{% for a in range(99) recursive %}{{ loop(range(99)) }}{% endfor %}",
    "a macro": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(90) }}",
}
SIZES = {
    "a text": "{{ 'x' * 10 ** 10 }}",
    "a text, reversed": "{{ 10 ** 10 * 'x' }}",
    "a list": "{{ ([1] * 10 ** 10)|length }}",
    "a power": "{{ 10 ** (10 ** 8) }}",
    "variables": "{% set n = 10 ** 10 %}{{ 'x' * n }}",
}
INVALID = {
    "loops in each other": "{% for a in [1] %}" * 21 + "{% endfor %}" * 21,
    "parentheses": "{{ " + "(" * 20_000 + "1" + ")" * 20_000 + " }}",
    "ifs": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "nots": "{{ " + "not " * 20_000 + "1 }}",
}


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja, "MAX_STEPS", 2000)


@pytest.mark.parametrize("case", TEXTS)
@pytest.mark.usefixtures("few_steps")
def test_steps_are_limited(case: str) -> None:
    with pytest.raises(TokenizerError, match="more than 2000 steps|recursion"):
        ChatTemplate(TEXTS[case]).render([USER])


@pytest.mark.usefixtures("few_steps")
def test_each_rendering_has_its_own_steps() -> None:
    template = ChatTemplate("{% for a in range(1500) %}{% endfor %}{{ messages[0].content }}")
    assert [template.render([USER]) for _ in range(3)] == ["hi"] * 3


@pytest.mark.parametrize("case", SIZES)
def test_products_and_powers_are_limited(case: str) -> None:
    with pytest.raises(TokenizerError, match="a product or power has a size of"):
        ChatTemplate(SIZES[case]).render([USER])


def test_usual_products_and_powers() -> None:
    source = "{{ 2 ** 10 }} {{ 2 ** -1 }} {{ 2.5 * 2 }} {{ '-' * 3 }} {{ 'x' * -1 }} {{ [1] * 2 }}"
    assert ChatTemplate(source).render([USER]) == "1024 0.5 5.0 ---  [1, 1]"


def test_the_output_is_limited() -> None:
    template = ChatTemplate("{% for a in range(9) %}{{ messages[0].content }}{% endfor %}")
    assert template.render([USER], max_characters=18) == "hi" * 9
    with pytest.raises(ContextLengthError, match="more than 17 characters as a prompt"):
        template.render([USER], max_characters=17)


@pytest.mark.parametrize("case", INVALID)
def test_sources_that_no_compiler_takes(case: str) -> None:
    with pytest.raises(TokenizerError, match="The chat template is not valid Jinja: .+"):
        ChatTemplate(INVALID[case])
