"""Chat templates render the same as in transformers; invalid messages and templates are refused."""

from __future__ import annotations

import dataclasses
import json
from datetime import datetime
from typing import Any

import pytest

from jaxinfer.core.errors import RequestError, TokenizerError
from jaxinfer.text.chat import ChatTemplate
from jaxinfer.text.tokenizer import Tokenizer, load_tokenizer
from jaxinfer.text.tokenizer_config import TokenizerSpec
from kit.tokenizers import DATA, tiny_tokenizer_json, tiny_tokenizer_spec

EXPECTED = json.loads((DATA / "chat_expected.json").read_text("utf-8"))
USER = {"role": "user", "content": "hi"}


@pytest.mark.parametrize(
    ("model", "case"),
    [
        pytest.param(model, case, id=f"{model}-{case['name']}")
        for model, entry in EXPECTED.items()
        for case in entry["cases"]
    ],
)
def test_equals_transformers(model: str, case: dict[str, Any]) -> None:
    text = ChatTemplate(EXPECTED[model]["template"]).render(
        case["messages"],
        add_generation_prompt=case["add_generation_prompt"],
        continue_final_message=case.get("continue_final_message", False),
        variables=case.get("kwargs"),
    )
    assert text == case["expected"]


@pytest.mark.parametrize("name", ["tools", "documents"])
def test_empty_tools_and_documents_count_as_absent(name: str) -> None:
    source = f"{{{{ {name} is none }}}} {{{{ {name} is not none and {name}|length }}}}"
    absent = ChatTemplate(source).render([USER])
    for empty in ([], (), None, {}):
        assert ChatTemplate(source).render([USER], variables={name: empty}) == absent
    assert ChatTemplate(source).render([USER], variables={name: [{}]}) == "False 1"


def render(source: str, messages: Any = (USER,), **options: Any) -> str:
    def clock() -> datetime:
        return datetime(2026, 2, 3)

    return ChatTemplate(source, clock).render(messages, **options)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        pytest.param("{{ strftime_now('%d %b %Y') }}", "03 Feb 2026", id="clock"),
        pytest.param("{{ '<é&>' | tojson }}", '"<é&>"', id="tojson does not escape"),
        pytest.param("a\n  {% if true %}\nb\n  {% endif %}\n", "a\nb\n", id="trimmed blocks"),
        pytest.param(
            "{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}",
            "1",
            id="loop controls",
        ),
        pytest.param(
            "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}",
            "hi",
            id="generation tag",
        ),
        pytest.param("{{ tools is none }}{{ missing }}", "True", id="no tools"),
    ],
)
def test_environment(source: str, text: str) -> None:
    assert render(source) == text


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts}
    assert render("{{ messages[0].content }}", [message]) == "a\nb"
    assert message["content"] is parts


def test_tool_calls_may_stand_without_content() -> None:
    message = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}
    assert render("{{ messages[0].tool_calls[0].function.name }}", [message]) == "f"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        pytest.param([], "at least one", id="empty"),
        pytest.param("hi", "must be a list", id="a string"),
        pytest.param(["hi"], r"messages\[0\] must be an object", id="not an object"),
        pytest.param([USER, {"content": "x"}], r"messages\[1\].role", id="no role"),
        pytest.param([{"role": "user"}], r"messages\[0\].content", id="no content"),
        pytest.param([{"role": "user", "content": 3}], "string or a list", id="number"),
        pytest.param(
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            r"content\[0\].*not supported",
            id="image",
        ),
    ],
)
def test_invalid_messages(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        render("{{ messages }}", messages)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        pytest.param("{% if %}", "not valid Jinja", id="syntax"),
        pytest.param(
            "{{ raise_exception('roles must alternate') }}", "roles must alt", id="raises"
        ),
        pytest.param("{{ 1 // 0 }}", "failed: .*zero", id="python error"),
        pytest.param("{{ messages.append(1) }}", "unsafe", id="changes its input"),
        pytest.param("{{ ''.__class__.__mro__ }}", "unsafe", id="leaves the sandbox"),
        pytest.param("{% for i in range(10**9) %}{% endfor %}", "too big", id="endless range"),
    ],
)
def test_invalid_templates(source: str, message: str) -> None:
    with pytest.raises(TokenizerError, match=message):
        render(source)


def test_continuing_needs_the_final_message() -> None:
    options = {"add_generation_prompt": False, "continue_final_message": True}
    with pytest.raises(TokenizerError, match="leaves out the final message"):
        render("x", **options)
    with pytest.raises(RequestError, match="exclude each other"):
        render("x", continue_final_message=True)
    stripped = "[{{ messages[-1].content | trim }}]"
    assert render(stripped, [{"role": "assistant", "content": "a "}], **options) == "[a"


def named(templates: Any, **more: Any) -> Tokenizer:
    return load_tokenizer(
        TokenizerSpec(
            tokenizer_json=tiny_tokenizer_json(),
            tokenizer_config={"chat_template": templates},
            **more,
        )
    )


def test_named_templates() -> None:
    tokenizer = named(
        [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    )
    assert tokenizer.render_chat([USER]) == "plain"
    assert tokenizer.render_chat([USER], template_kwargs={"tools": [{}]}) == "tools"
    assert tokenizer.render_chat([USER], chat_template="tool_use") == "tools"
    assert tokenizer.render_chat([USER], template_kwargs={"tools": []}) == "plain"
    assert tokenizer.render_chat([USER], chat_template="{{ messages[0].role }}") == "user"


def test_template_file_wins_over_the_config() -> None:
    assert named("config", chat_template="file").render_chat([USER]) == "file"


def test_without_a_template() -> None:
    tokenizer = load_tokenizer(dataclasses.replace(tiny_tokenizer_spec(), chat_template=None))
    assert not tokenizer.has_chat_template
    with pytest.raises(TokenizerError, match="has no chat template; pass"):
        tokenizer.render_chat([USER])
    with pytest.raises(TokenizerError, match="named default .it has rag."):
        named([{"name": "rag", "template": ""}]).render_chat([USER])


def test_the_effort_none_is_a_templates_own_word() -> None:
    messages = [{"role": "user", "content": "a"}]
    variables = {"reasoning_effort": "none"}
    own = "{{ reasoning_effort if reasoning_effort in ['no_think', 'high'] else 1 / 0 }}"
    assert ChatTemplate(own).render(messages, variables=variables) == "no_think"
    assert ChatTemplate("{{ reasoning_effort }}").render(messages, variables=variables) == "none"
