"""Chats as clients send them, in every template of tests/data: whole, or refused in a sentence.

``python -m kit.chat_histories FOLDER`` says the same of other templates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.text.chat import ChatTemplate
from kit.chat_histories import (
    CHATS,
    OTHER_ID,
    answer,
    call,
    calling,
    compiled,
    outcome,
    result,
    user,
)
from kit.scripted import TEMPLATES

LATER = ("developer in the middle", "system in the middle", "system at the end")
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
    "mistral-nemo": ("two users", "answer first", *LATER),
    "own-parts": ("two users", "answer first", *LATER),
}


def template(name: str) -> ChatTemplate:
    return compiled(TEMPLATES / f"{name}.jinja")


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.jinja")), ids=lambda path: path.stem)
def test_chats(path: Path) -> None:
    made = compiled(path)
    kinds = {"dropped": DROPPED.get(path.stem, ()), "refused": REFUSED.get(path.stem, ())}
    wrong: list[str] = []
    for name, chat in CHATS.items():
        has_calls = any("tool_calls" in message for message in chat.messages)
        if chat.tools and not made.renders.tools or has_calls and not made.renders.calls:
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
    ],
)
def test_equals_a_chat_in_the_templates_form(name: str, chat: Any, same: Any) -> None:
    assert template(name).render(chat) == template(name).render(same)
