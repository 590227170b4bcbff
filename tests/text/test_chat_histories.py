"""Histories as OpenAI's clients send them render as transformers renders the template's own form.

tests/golden/make_chat.py made the expected prompts; it describes how each template is written.
"""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from jaxinfer.core.errors import RequestError, TokenizerError
from jaxinfer.text.tokenizer import Tokenizer, load_tokenizer
from jaxinfer.text.tokenizer_config import TokenizerSpec
from kit.tokenizers import GOLDEN_CHAT, real_spec, tiny_tokenizer_json

TEMPLATES = Path(__file__).parents[1] / "data" / "chat_templates"
GOLDEN: dict[str, Any] = json.loads(gzip.decompress(GOLDEN_CHAT.read_bytes()))
USER = {"role": "user", "content": "hi"}
# what these templates drop or refuse here gets messages of its own: see test_template_chats
SPLIT = {
    ("deepseek-r1-distill", "calls, text"),  # the call is dropped
    ("own-key-tests", "calls, text"),  # the text is dropped
    ("own-key-tests", "two calls"),  # refused
}


@cache
def tokenizer_with(template: str) -> Tokenizer:
    spec = TokenizerSpec(
        tokenizer_json=tiny_tokenizer_json(),
        tokenizer_config=GOLDEN["special_tokens"],
        chat_template=template,
    )
    return load_tokenizer(spec)


def published(name: str) -> Tokenizer:
    return tokenizer_with((TEMPLATES / f"{name}.jinja").read_text("utf-8"))


@pytest.mark.parametrize("history", GOLDEN["histories"])
@pytest.mark.parametrize("template", GOLDEN["expected"])
def test_equals_transformers(template: str, history: str) -> None:
    messages, expected = GOLDEN["histories"][history], GOLDEN["expected"][template][history]
    if (template, history) in SPLIT:
        assert published(template).render_chat(messages) != expected
    elif expected is None:
        with pytest.raises(TokenizerError, match="chat template failed"):
            published(template).render_chat(messages)
    else:
        assert published(template).render_chat(messages) == expected


@pytest.mark.parametrize("source", GOLDEN["snippets"])
def test_environment_is_that_of_transformers(source: str) -> None:
    messages, expected = GOLDEN["histories"]["plain"], GOLDEN["snippets"][source]
    if expected is None:
        with pytest.raises(TokenizerError, match="chat template failed"):
            tokenizer_with(source).render_chat(messages)
    else:
        assert tokenizer_with(source).render_chat(messages) == expected


def history_with(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "abcdefghi", "type": "function", "function": function}
    return [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]


@pytest.mark.parametrize("template", ["qwen2.5", "qwen3", "qwen3.5", "mistral-nemo", "smollm2"])
@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        pytest.param("[1]", "another JSON value", id="a list"),
        pytest.param('"text"', "another JSON value", id="a string"),
        pytest.param("[" * 100_000, "nested too deeply", id="too deep"),
        pytest.param(3, "must be a JSON object", id="a number"),
    ],
)
def test_arguments_that_are_no_object_name_the_message(
    template: str, arguments: Any, reason: str
) -> None:
    where = r"messages\[1\].tool_calls\[0\].function.arguments"
    with pytest.raises(RequestError, match=f"{where}.*{reason}"):
        published(template).render_chat(history_with(arguments))


@pytest.mark.parametrize("template", ["qwen2.5", "qwen3", "qwen3.5", "mistral-nemo", "smollm2"])
@pytest.mark.parametrize(
    ("arguments", "those_before"),
    [
        pytest.param('{"city": "Rome", "day": Monday, "n": 1}', {"city": "Rome"}, id="no JSON"),
        pytest.param('{"city": "Rome",}', {"city": "Rome"}, id="a comma"),
        pytest.param('{"a": "Rome", "b": "He said "hi" then"}', {"a": "Rome"}, id="quotes"),
        pytest.param(
            '{"city": "Rome\nand", "n": 1}', {"city": "Rome\nand", "n": 1}, id="a newline"
        ),
        pytest.param('{"city": "Rome", "text": "cut', {"city": "Rome"}, id="cut"),
        pytest.param('{"x": NaN}', {}, id="NaN"),
        pytest.param("null", {}, id="null"),
    ],
)
def test_arguments_that_a_model_has_not_written_as_json_are_those_before_the_mistake(
    template: str, arguments: str, those_before: dict[str, Any]
) -> None:
    found = published(template).render_chat(history_with(arguments))
    assert found == published(template).render_chat(history_with(those_before))


@pytest.mark.parametrize("template", ["deepseek-r1", "deepseek-v3.1", "own-printed"])
def test_text_that_a_template_joins_stays_as_it_is(template: str) -> None:
    text = '{"city":  "Par'  # a template that needs no object accepts text that is not JSON
    assert text in published(template).render_chat(history_with(text))
    given = published(template).render_chat(history_with({"é": 1}))
    assert '{"é": 1}' in given


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"tool_calls": "f"}, "tool_calls must be a list"),
        ({"tool_calls": {"name": "f"}}, "tool_calls must be a list"),
        ({"tool_calls": ["f"]}, r"tool_calls\[0\] must be an object"),
        ({"tool_calls": [{"function": "f"}]}, r"tool_calls\[0\].function must be an object"),
        ({"content": 3}, "content must be a string or a list"),
        ({"content": [{"type": "refusal"}]}, r"content\[0\] must be"),
    ],
)
def test_calls_of_another_form_name_the_message(message: dict[str, Any], reason: str) -> None:
    with pytest.raises(RequestError, match=rf"messages\[1\].{reason}"):
        published("qwen3").render_chat([USER, {"role": "assistant", **message}])


@pytest.mark.parametrize("role", ["user", "system", "developer"])
@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_other_messages_need_content(role: str, content: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"messages\[1\].content must be"):
        published("qwen3").render_chat([USER, {"role": role, **content}])


def test_calls_before_openais_form() -> None:
    older = [USER, {"role": "assistant", "tool_calls": [{"name": "f", "arguments": '{"a":1}'}]}]
    assert '{"name": "f", "arguments": {"a": 1}}' in published("qwen2.5").render_chat(older)


class Message:
    """A response message of the openai client."""

    def model_dump(self) -> dict[str, Any]:
        return {"role": "assistant", "content": "yes", "refusal": None, "tool_calls": None}


def test_objects_of_the_openai_client() -> None:
    text = published("qwen3").render_chat([USER, Message(), USER])
    assert "<|im_start|>assistant\nyes<|im_end|>" in text


def test_a_refusal_in_parts_is_text() -> None:
    content = [{"type": "refusal", "refusal": "no"}]
    text = published("qwen3").render_chat([USER, {"role": "assistant", "content": content}])
    assert "<|im_start|>assistant\n<think>\n\n</think>\n\nno<|im_end|>" in text


@pytest.mark.parametrize("content", ["a ", [{"type": "text", "text": "a "}], None, ""])
@pytest.mark.parametrize("template", ["own-parts", "own-key-tests", "smollm2", "qwen3.5"])
def test_continuing_any_content(template: str, content: Any) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    text = published(template).render_chat(
        messages, add_generation_prompt=False, continue_final_message=True
    )
    assert text.rstrip().endswith("a" if content else ("]", "assistant", "</think>", "hi<|eos|>"))


@pytest.mark.parametrize("name", GOLDEN["folders"])
def test_special_tokens_are_those_of_transformers(name: str) -> None:
    files, expected = GOLDEN["folders"][name]["files"], GOLDEN["folders"][name]["special_tokens"]
    spec = TokenizerSpec(
        tokenizer_json=tiny_tokenizer_json(),
        tokenizer_config=files.get("tokenizer_config.json", {}),
        special_tokens_map=files.get("special_tokens_map.json", {}),
        chat_template="{{ bos_token }}/{{ eos_token }}/{{ pad_token }}",
    )
    tokenizer = load_tokenizer(spec)
    assert tokenizer.special_tokens_map == expected
    assert (tokenizer.bos_token, tokenizer.eos_token) == (
        expected.get("bos_token"),
        expected.get("eos_token"),
    )
    names = [expected.get(f"{kind}_token", "") for kind in ("bos", "eos", "pad")]
    assert tokenizer.apply_chat_template([USER], tokenize=False) == "/".join(names)


def test_is_called_as_transformers_is() -> None:
    tokenizer, said = load_tokenizer(real_spec("smollm2")), GOLDEN["called"]
    chat = GOLDEN["histories"]["plain"]
    both = [chat, GOLDEN["histories"]["plain"][:1]]
    apply = tokenizer.apply_chat_template
    assert apply(chat) == said["chat"]
    assert apply(chat, add_generation_prompt=True) == said["chat with a prompt"]
    assert apply(chat, return_dict=False) == said["chat ids"]
    assert apply(chat, tokenize=False, add_generation_prompt=True) == said["chat text"]
    assert apply(both) == said["chats"]
    assert apply(both, return_dict=False) == said["chats ids"]
    assert apply(chat, truncation=True, max_length=7, return_dict=False) == said["chat cut"]
    continued = apply(chat[:2], continue_final_message=True, tokenize=False)
    assert continued == said["chat continued"]
    assert tokenizer("Hello <|im_end|>") == said["text"]
    assert tokenizer("Hello <|im_end|>").input_ids == said["text"]["input_ids"]
    assert tokenizer(["Hello", "a b c"]) == said["texts"]
    cut = tokenizer.encode("a b c d", truncation=True, max_length=2)
    assert cut == said["text cut"]
    assert tokenizer.tokenize("Hello there") == said["tokens"]
    assert tokenizer.convert_tokens_to_ids(["Hello", "<|im_end|>"]) == said["ids"]
    assert tokenizer.convert_ids_to_tokens(said["ids"]) == ["Hello", "<|im_end|>"]
    assert tokenizer.special_tokens_map == said["special tokens"]
    assert len(tokenizer) == said["length"] == len(tokenizer.get_vocab())
    assert tokenizer.model_max_length == said["model_max_length"]


def test_other_names_of_transformers() -> None:
    tokenizer = load_tokenizer(real_spec("smollm2"))
    assert tokenizer.decode(19556) == tokenizer.decode([19556, 2]) == "Hello"
    assert tokenizer.batch_decode([[19556, 2], [19556]], skip_special_tokens=False) == [
        "Hello<|im_end|>",
        "Hello",
    ]
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2
    assert {1, 2} <= set(tokenizer.all_special_ids)
    assert {"<|im_start|>", "<|im_end|>"} <= set(tokenizer.all_special_tokens)
    assert tokenizer.convert_tokens_to_ids("no such token") == tokenizer.unk_token_id
    assert tokenizer.chat_template == tokenizer.get_chat_template()
    assert isinstance(tokenizer.chat_template, str)
    with pytest.raises(AttributeError, match="no token_type_ids"):
        _ = tokenizer("a").token_type_ids


@pytest.mark.parametrize(
    "option",
    [{"return_tensors": "pt"}, {"padding": True}, {"return_assistant_tokens_mask": True}],
)
def test_options_that_are_not_supported_are_named(option: dict[str, Any]) -> None:
    tokenizer = load_tokenizer(real_spec("smollm2"))
    (name,) = option
    with pytest.raises(RequestError, match=f"does not support {name}"):
        tokenizer.apply_chat_template([USER], **option)
    with pytest.raises(RequestError, match=f"does not support {name}"):
        tokenizer("a", **option)


def test_files_of_templates_replace_the_config() -> None:
    entry = [{"name": "default", "template": "config"}, {"name": "tool_use", "template": "tools"}]
    spec = TokenizerSpec(
        tokenizer_json=tiny_tokenizer_json(), tokenizer_config={"chat_template": entry}
    )
    both = {"default": "config", "tool_use": "tools"}
    assert load_tokenizer(spec).chat_template == both

    def with_files(**files: Any) -> Tokenizer:
        parts = {"tokenizer_json": spec.tokenizer_json, "tokenizer_config": spec.tokenizer_config}
        return load_tokenizer(TokenizerSpec(**parts, **files))

    assert with_files(chat_template="file").chat_template == "file"
    assert (
        with_files(chat_template="file").render_chat([USER], template_kwargs={"tools": [{}]})
        == "file"
    )
    named = with_files(chat_template="file", additional_chat_templates={"rag": "documents"})
    assert named.chat_template == {"rag": "documents", "default": "file"}
    assert named.apply_chat_template([USER], chat_template="rag", tokenize=False) == "documents"
    assert named.get_chat_template("rag") == "documents"
