"""A developer's messages are in every prompt: as the system's, if the template lacks the role."""

from __future__ import annotations

from typing import Any

import pytest

from kit.scripted import scripted_engine
from kit.server import serving

USER = {"role": "user", "content": "hi"}
DEVELOPER = {"role": "developer", "content": "PIRATE"}
TEMPLATES = ("qwen2.5", "qwen3", "qwen3.5", "deepseek-v3.1", "smollm3", "smollm2", "gpt-oss")


@pytest.mark.parametrize("template", TEMPLATES)
def test_developers_are_heard(template: str) -> None:
    engine, _ = scripted_engine(template)

    def prompt(**fields: Any) -> str:
        response = server.post("/tokenize", return_token_strs=True, **fields)
        return "".join(response.json()["token_strs"])

    with serving(engine) as server:
        as_developer = prompt(messages=[DEVELOPER, USER])
        assert as_developer.count("PIRATE") == 1
        if template != "gpt-oss":  # it has the role
            assert as_developer == prompt(messages=[{**DEVELOPER, "role": "system"}, USER])
            system = {"role": "system", "content": "ARR"}
            joined = {"role": "system", "content": "ARR\n\nPIRATE"}
            both = prompt(messages=[system, DEVELOPER, USER])
            assert both == prompt(messages=[joined, USER])


@pytest.mark.parametrize("template", TEMPLATES)
def test_instructions_and_a_developer_of_responses(template: str) -> None:
    engine, device = scripted_engine(template)
    device.speak("yes")
    with serving(engine) as server:
        system = {"role": "system", "content": "ARR"}
        chat = server.post("/tokenize", messages=[system, DEVELOPER, USER]).json()
        for stored in ({}, {"instructions": "ARR"}):
            items = [DEVELOPER, USER] if stored else [system, DEVELOPER, USER]
            answer = server.post("/v1/responses", input=items, max_output_tokens=16, **stored)
            assert answer.json()["usage"]["input_tokens"] == chat["count"], answer.text
