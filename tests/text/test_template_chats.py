"""Chats as clients send them, in every template of tests/data: whole, or refused in a sentence.

``python -m kit.chat_histories FOLDER`` says the same of other templates.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.core.errors import RequestError, TokenizerError
from jaxinfer.text.chat import ChatTemplate
from kit.chat_histories import (
    CHATS,
    OTHER_ID,
    answer,
    call,
    calling,
    compiled,
    function,
    has_calls,
    outcome,
    result,
    user,
)
from kit.scripted import TEMPLATES

# of a template, the chats that it does not render whole by its own design
DROPPED: Mapping[str, Sequence[str]] = {
    # text beside a call; gpt-oss writes it as thoughts, until the turn has its answer
    "mistral-nemo": ("call*text*", "two calls and text*"),
    "gpt-oss": (
        *("call and text", "call and text in parts", "call, text, thoughts", "two calls and text"),
        *("call and text, tools", "call and text in parts, tools", "call, text, thoughts, tools"),
        *("two calls and text, tools", "tool: nested"),
    ),
    # types of TypeScript or Python in place of schemas: without what these do not say
    "seed-oss": ("tool: nested",),
    "own-typed": ("tool: nested",),
}
REFUSED: Mapping[str, Sequence[str]] = {
    "mistral-nemo": ("answer first",),
    "own-parts": ("answer first",),
    "own-no-system": ("answer first", "*system*", "*developer*", "* in parts"),
}


def template(name: str) -> ChatTemplate:
    return compiled(TEMPLATES / f"{name}.jinja")


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.jinja")), ids=lambda path: path.stem)
def test_chats(path: Path) -> None:
    made = compiled(path)
    kinds = {"dropped": DROPPED.get(path.stem, ()), "refused": REFUSED.get(path.stem, ())}
    wrong: list[str] = []
    for name, chat in CHATS.items():
        if chat.tools and not made.renders.tools or has_calls(chat) and not made.renders.calls:
            continue
        found = outcome(made, chat)
        known = any(fnmatch(name, pattern) for pattern in kinds.get(found.kind, ()))
        if found.kind != "rendered" and not known:
            wrong.append(f"{found.kind}: {name}: {found.details}")
    assert not wrong


@pytest.mark.parametrize(
    ("name", "chat", "same"),
    [
        # its template writes either text or calls
        (
            "deepseek-r1-distill",
            [user(), calling(content="LOOKING"), result(), answer()],
            [user(), answer("LOOKING"), calling(), result(), answer()],
        ),
        ("own-key-tests", [user(), calling(content="A")], [user(), answer("A"), calling()]),
        # one call in a message
        (
            "own-key-tests",
            [user(), calling(call(), call("g", "{}", OTHER_ID)), result("1", OTHER_ID), result()],
            [
                user(),
                calling(),
                result(),
                calling(call("g", "{}", OTHER_ID)),
                result("1", OTHER_ID),
            ],
        ),
        (
            "gpt-oss",
            [user(), calling(call(), call("g", "{}", OTHER_ID), content="A"), result(), answer()],
            [user(), calling(content="A"), result(), calling(call("g", "{}", OTHER_ID)), answer()],
        ),
        # text and thoughts are one text
        (
            "gpt-oss",
            [user(), calling(content="LOOKING", reasoning_content="HMM"), result()],
            [user(), calling(content="HMM\n\nLOOKING"), result()],
        ),
        # results in the order of the calls
        (
            "qwen3",
            [user(), calling(call(), call("g", "{}", OTHER_ID)), result("1", OTHER_ID), result()],
            [user(), calling(call(), call("g", "{}", OTHER_ID)), result(), result("1", OTHER_ID)],
        ),
        # two systems are one, and later ones the user's
        (
            "smollm3",
            [{"role": "system", "content": "A"}, {"role": "developer", "content": "B"}, user()],
            [{"role": "system", "content": "A\n\nB"}, user()],
        ),
        (
            "smollm3",
            [user(), answer(), {"role": "system", "content": "A"}, user()],
            [user(), answer(), user("A"), user()],
        ),
        # roles that must alternate: as clients of agents send them (mistral-common's issue 169)
        ("mistral-nemo", [user("A"), user("B"), answer()], [user("A\n\nB"), answer()]),
        (
            "mistral-nemo",
            [user(), calling(), result("1"), user("A"), user("B")],
            [user(), calling(), result("1\n\nA\n\nB")],
        ),
        (
            "mistral-nemo",
            [user(), answer("A"), answer("B"), {"role": "system", "content": "C"}, user("D")],
            [user(), answer("A\n\nB"), user("C\n\nD")],
        ),
    ],
)
def test_equals_a_chat_in_the_templates_form(name: str, chat: Any, same: Any) -> None:
    assert template(name).render(chat) == template(name).render(same)


def test_ids_of_other_servers_where_a_template_demands_its_own() -> None:
    """Mistral's templates refuse ids of calls that are not nine letters and digits."""
    ids = ("call_8f1-a", OTHER_ID, "call_8f1-b")
    chat = [
        user(),
        calling(*(call(call_id=one) for one in ids)),
        *(result(one, one) for one in ids),
    ]
    prompt = template("mistral-nemo").render(chat)
    written = re.findall(r'"(?:call_)?id": "([^"]*)"', prompt)
    assert written[:3] == written[3:] and len(set(written)) == 3 and written[1] == OTHER_ID
    assert all(re.fullmatch("[0-9A-Za-z]{9}", one) for one in written)


LOOPING = "{% macro f(x) %}{{ f(x) }}{% endmacro %}"
TOOLS = "{{ messages[0].content }}{% for tool in tools or [] %}{{ tool.function.name }}"


@pytest.mark.parametrize(
    ("source", "chat", "reason"),
    [
        (
            "{{ messages[0].content + city }}",
            [user()],
            "it reads the variable city, which is not set; pass it in chat_template_kwargs",
        ),
        (
            "{% for one in messages %}{{ one.content + one.weight }}{% endfor %}",
            [user()],
            "it reads the field weight, which is absent",  # of every chat
        ),
        (
            "{% for one in messages %}{{ 1 // one.content|length }}{{ one.content }}{% endfor %}",
            [user("A"), user("B"), user(""), user("C")],
            r"it cannot render messages\[2\] \(integer division or modulo by zero\); send it in a "
            "simpler form, or leave it out",
        ),
        (
            TOOLS + "{{ 1 + tool.function.parameters.size.high }}{% endfor %}",
            [user()],
            r"it cannot render tools\[1\] \(it reads the field high, which is absent\); describe",
        ),
        (
            LOOPING + TOOLS + "{% if tool.function.name == 'g' %}{{ f(1) }}{% endif %}{% endfor %}",
            [user()],
            r"it cannot render tools\[1\] \(it calls itself without an end\)",
        ),
        ("{{ raise_exception('I refuse') }}", [user()], "I refuse$"),
    ],
)
def test_errors_name_what_cannot_be_rendered(source: str, chat: Any, reason: str) -> None:
    tools = [function(parameters={"size": {"high": 1}}), function("g", parameters={"size": {}})]
    with pytest.raises(TokenizerError, match=f"The chat template failed: {reason}"):
        ChatTemplate(source).render(chat, variables={"tools": tools})


def test_a_template_that_iterates_over_tools_renders_chats_without() -> None:
    source = "{% for tool in tools %}{{ tool.function.name }}{% endfor %}{{ messages[0].content }}"
    assert ChatTemplate(source).render([user("hi")]) == "hi"


@pytest.mark.parametrize("role", ["observation", "ipython"])
def test_roles_that_a_template_names(role: str) -> None:
    source = "{% for one in messages %}{{ one.role == 'user' }}{{ one.content }}{% endfor %}"
    named, nameless = source.replace("user", role), source.replace("{{ one.role == 'user' }}", "")
    chat = [user("A"), {"role": role, "content": "B"}]
    assert "B" in ChatTemplate(named).render(chat)
    assert "B" in ChatTemplate(nameless).render(chat)
    with pytest.raises(RequestError, match=rf"messages\[1\].role '{role}' is not known"):
        ChatTemplate(source).render(chat)


def test_thoughts_beside_text_and_a_call_are_in_the_prompt() -> None:
    chat = [user(), calling(content="LOOKING", reasoning_content="HMM"), result()]
    for name in ("gpt-oss", "qwen3", "qwen3.5", "glm-4.6"):
        prompt = template(name).render(chat)
        assert prompt.count("HMM") == prompt.count("LOOKING") == 1, name


NAMED = (
    "{% for one in messages %}{% if one.role == 'tool' %}response:{{ NAME }}{{ '{' }}"
    "{{ one.content }}}{% else %}{{ one.content or '' }}{% for call in one.tool_calls or [] %}"
    "{{ call.function.name }}{{ call.function.arguments|tojson }}{% endfor %}{% endif %}"
    "{% endfor %}"
)


@pytest.mark.parametrize(
    ("name", "written"),
    [
        ("one.name", "g"),
        ("one['name']", "g"),
        ("one.get('name')", "g"),
        ("one.name | default('unknown')", "g"),
        ("one.name if one.name is defined else raise_exception('no name')", "g"),
        ("one.get('name') or 'tool'", "tool"),  # as Kimi-K2's, which means it
        ("'tool'", "tool"),
    ],
)
def test_results_have_names_where_a_template_needs_them(name: str, written: str) -> None:
    """Gemma's do, and OpenAI's clients send only the id of the call."""
    made = ChatTemplate(NAMED.replace("NAME", name))
    chat = [user(), calling(call("g", "{}", OTHER_ID), call()), result("7", OTHER_ID)]
    assert made.render(chat).endswith(f"response:{written}{{7}}")
    given = {**result("7", OTHER_ID), "name": "h"}
    assert made.render([*chat[:2], given]).endswith(f":{'tool' if name == "'tool'" else 'h'}{{7}}")
