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
