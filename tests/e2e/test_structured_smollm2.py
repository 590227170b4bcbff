"""Structured output of SmolLM2: the official client's ``parse`` with pydantic, and ``LLM``."""

from __future__ import annotations

import json
from typing import Any, Literal

import jsonschema_rs
import openai
import pytest
from langchain_openai import ChatOpenAI
from openai import OpenAI
from pydantic import BaseModel, Field

from jaxinfer import LLM, SamplingParams, StructuredOutputsParams
from kit.openai_server import CHAT, KEY


class Pet(BaseModel):
    """A schema with a reference, an enumeration and bounds."""

    name: str = Field(max_length=20)
    kind: Literal["cat", "dog"]


class Person(BaseModel):
    name: str = Field(max_length=30)
    age: int = Field(ge=0, le=120)
    pets: list[Pet] = Field(max_length=2)


MESSAGES = [{"role": "user", "content": "Describe a person with a dog as JSON."}]


def test_parse_with_pydantic(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model, messages=MESSAGES, response_format=Person, max_tokens=200, temperature=0
    )
    person = answer.choices[0].message.parsed
    assert answer.choices[0].finish_reason == "stop" and isinstance(person, Person)
    assert all(pet.kind in ("cat", "dog") for pet in person.pets)
    with client.chat.completions.stream(
        model=model, messages=MESSAGES, response_format=Person, max_tokens=200, temperature=0
    ) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.parsed == person


def test_structured_output_of_langchain(url: str, model: str) -> None:
    options: Any = {"api_key": KEY, "max_tokens": 200, "temperature": 0, "max_retries": 0}
    chat = ChatOpenAI(base_url=url, model=model, **options)
    person = chat.with_structured_output(Person).invoke(MESSAGES[0]["content"])
    assert isinstance(person, Person)


def test_a_choice_takes_the_likelier_text(client: OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=CHAT,
        temperature=0,
        extra_body={"structured_outputs": {"choice": ["London", "Paris", "Berlin"]}},
    )
    assert answer.choices[0].message.content == "Paris"
    with pytest.raises(openai.BadRequestError, match="unclosed group"):
        client.completions.create(model=model, prompt="a", extra_body={"guided_regex": "("})


def test_many_schemas_at_once(llm: LLM) -> None:
    ranges = [(low, low + 9) for low in range(0, 120, 10)]
    schemas = [{"type": "integer", "minimum": low, "maximum": high} for low, high in ranges]
    forms = [StructuredOutputsParams(json=schema) for schema in schemas]  # type: ignore[arg-type]
    params = [SamplingParams(temperature=1, seed=1, structured_outputs=form) for form in forms]
    outputs = llm.generate(["A number:"] * len(params), params, use_tqdm=False)
    for output, schema in zip(outputs, schemas, strict=True):
        assert output.outputs[0].finish_reason == "stop"
        jsonschema_rs.validate(schema, json.loads(output.outputs[0].text))
