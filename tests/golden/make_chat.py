"""Makes data/chat.json.gz: what transformers renders and says of chats and special tokens.

A tool, run by hand in an environment of its own with transformers (5.24 made the file that is
committed); tests read only its output.

    python make_chat.py

``histories`` are lists of messages as OpenAI's clients send them.
``expected[template][history]`` is the prompt, or null where the template refuses the history.
Before transformers renders a history, this tool adapts it by hand to what each template is written
for (``CONVENTIONS``).
"""

from __future__ import annotations

import copy
import gzip
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

DATA = Path(__file__).parent / "data"
TEST_DATA = Path(__file__).parents[1] / "data"
SPECIAL = {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}
EVERY_ROLE = ("system", "user", "assistant", "tool")


class Convention(NamedTuple):
    """The features that a template supports, read from its source."""

    joins_arguments: bool = False  # the arguments of a call are text; else an object
    null_beside_calls: bool = False  # a message with calls and no text has null; else ""
    null_alone: bool = False  # so does one without calls
    roles_in_parts: tuple[str, ...] = ()  # whose content may be a list


CONVENTIONS = {
    "qwen2.5": Convention(),
    "qwen3": Convention(),
    "qwen3-coder": Convention(),
    "qwen3.5": Convention(roles_in_parts=EVERY_ROLE),
    "smollm2": Convention(),
    "smollm3": Convention(),
    "mistral-nemo": Convention(),
    "deepseek-r1": Convention(joins_arguments=True, null_beside_calls=True),
    "deepseek-r1-distill": Convention(True, True, True),
    "deepseek-r1-distill-llama.cpp": Convention(null_beside_calls=True, null_alone=True),
    "deepseek-r1-0528": Convention(joins_arguments=True),
    "deepseek-v3.1": Convention(joins_arguments=True, null_beside_calls=True),
    "own-key-tests": Convention(),
    "own-parts": Convention(roles_in_parts=("user", "assistant")),
    "own-defined": Convention(null_beside_calls=True, null_alone=True),
    "own-printed": Convention(joins_arguments=True),
}

USER = {"role": "user", "content": "What is the weather in Paris?"}
ANSWER = {"role": "assistant", "content": "It is 12 degrees."}
THANKS = {"role": "user", "content": "Thanks"}
RESULT = {"role": "tool", "tool_call_id": "abcdefghi", "content": "12 degrees"}
ARGUMENTS = '{"city": "Par\\u00eds", "days": 3, "deep": {"x": [1, null, true, 0.5]}}'
# what model_dump of the openai client adds to an answer
NULLS = ("refusal", "annotations", "audio", "function_call")
OTHERS = (*NULLS, "name", "reasoning_content", "tool_call_id")


def call(name: str = "get_weather", arguments: str | None = ARGUMENTS, **more: Any) -> dict:
    function = {"name": name, "arguments": arguments}
    return {"id": "abcdefghi", "type": "function", "function": function, **more}


def after_calls(*calls: dict, results: int = 1, **fields: Any) -> list[dict]:
    message = {"role": "assistant", **fields, "tool_calls": list(calls)}
    return [USER, message, *[RESULT] * results, ANSWER, THANKS]


def parts(*texts: str) -> list[dict]:
    return [{"type": "text", "text": text} for text in texts]


HISTORIES: dict[str, list[dict]] = {
    "plain": [USER, ANSWER, THANKS],
    "calls, no content": after_calls(call()),
    "calls, null": after_calls(call(), content=None),
    "calls, empty": after_calls(call(), content=""),
    "calls, no parts": after_calls(call(), content=[]),
    "calls, text": after_calls(call(), content="Let me look."),
    "calls, model_dump": after_calls(call(index=None), content=None, **dict.fromkeys(NULLS)),
    "two calls": after_calls(call(), call("now", "{}"), results=2, content=None),
    "call without arguments": after_calls(call("now", None), content=None),
    "call with empty arguments": after_calls(call("now", ""), content=None),
    "compact arguments": after_calls(call(arguments='{"city":"Paris","b":[]}'), content=None),
    "calls null": [USER, {**ANSWER, "tool_calls": None}, THANKS],
    "calls empty": [USER, {**ANSWER, "tool_calls": []}, THANKS],
    "all null": [USER, {**ANSWER, **dict.fromkeys(OTHERS), "tool_calls": None}, THANKS],
    "all empty": [USER, {**ANSWER, **dict.fromkeys(OTHERS, ""), "tool_calls": []}, THANKS],
    "user's fields null": [{**USER, **dict.fromkeys(OTHERS), "tool_calls": None}, ANSWER, THANKS],
    "answer null": [USER, {"role": "assistant", "content": None}, THANKS],
    "answer absent": [USER, {"role": "assistant"}, THANKS],
    "answer empty": [USER, {"role": "assistant", "content": ""}, THANKS],
    "result null": [USER, after_calls(call())[1], {**RESULT, "content": None}, ANSWER, THANKS],
    "parts": [{"role": "user", "content": parts("one", "two ")}],
    "system parts": [{"role": "system", "content": parts("one", "two")}, USER],
    "answer parts": [USER, {"role": "assistant", "content": parts("one", "two")}, THANKS],
    "result parts": after_calls(call())[:2] + [{**RESULT, "content": parts("one", "two")}],
    "reasoning_content": [USER, {**ANSWER, "reasoning_content": "Hm."}],
    "reasoning": [USER, {**ANSWER, "reasoning": "Hm.", "reasoning_content": None}],
    "names": [{**USER, "name": "Ann"}, ANSWER, {**THANKS, "name": ""}],
}

# small templates for what the environment supplies
SNIPPETS = [
    "{{ messages[0].content | tojson }}{{ {'b': '<é>', 'a': [1]} | tojson(indent=1) }}",
    "{{ {'b': 'é', 'a': 1} | tojson(ensure_ascii=True, sort_keys=True, separators=(',', ':')) }}",
    "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}",
    "{% generation %}{% set x = 'in' %}{{ x }}{% endgeneration %}-{{ x }}",
    "{%- generation -%}  a  {%- endgeneration -%} b",
    "{% set s = namespace(n=0) %}{% for c in 'ab' %}{% set s.n = s.n + 1 %}{% endfor %}{{ s.n }}",
    "{% for k, v in messages[0] | items %}{{ k }}={{ v }};{% endfor %}{{ dict(a=1) }}",
    "a\n  {% if true %}\n  b\n  {% endif %}\nc\n",
    "{{ tools is none }}{{ documents is none }}{{ missing }}{{ add_generation_prompt }}",
    "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(bos_token) ~ f(eos_token) }}",
    "{{ messages[0]['content'][::-1] | upper }}{{ messages | map(attribute='role') | join(',') }}",
    "{% if strftime_now is defined %}{{ strftime_now('%Y') | length }}{% endif %}",
    "{{ raise_exception('no') }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].pop('role') }}",
]

TOKEN = {"content": "<|bos|>", "lstrip": False, "normalized": False, "rstrip": False}
MAP = {"bos_token": "<|bos|>", "eos_token": {**TOKEN, "content": "<|eos|>"}}
DECODER = {"256": {**TOKEN, "single_word": False, "special": True}}
# files of a folder, and what transformers' special_tokens_map says of it
FOLDERS: dict[str, dict[str, Any]] = {
    "map alone": {"special_tokens_map.json": MAP},
    "map beside a config": {"special_tokens_map.json": MAP, "tokenizer_config.json": {}},
    "null in the config": {
        "special_tokens_map.json": MAP,
        "tokenizer_config.json": {"bos_token": None, "eos_token": None},
    },
    "map wins": {
        "special_tokens_map.json": {"eos_token": "<|user|>"},
        "tokenizer_config.json": {"bos_token": "<|bos|>", "eos_token": "<|eos|>"},
    },
    "null in the map": {
        "special_tokens_map.json": {"eos_token": None, "pad_token": "<|eos|>"},
        "tokenizer_config.json": {"bos_token": {"__type": "AddedToken", **TOKEN}},
    },
    "config with its own tokens": {
        "special_tokens_map.json": MAP,
        "tokenizer_config.json": {"eos_token": "<|user|>", "added_tokens_decoder": DECODER},
    },
    "additional tokens": {
        "special_tokens_map.json": {
            **MAP,
            "additional_special_tokens": ["<|user|>", {**TOKEN, "content": "<|system|>"}],
        },
        "tokenizer_config.json": {"additional_special_tokens": ["<|assistant|>"]},
    },
}


def adapted(history: list[dict], convention: Convention) -> list[dict]:
    """The history as a template of this convention expects it."""
    messages = []
    for given in copy.deepcopy(history):
        message = {key: value for key, value in given.items() if value or key == "content"}
        calls = message.get("tool_calls", [])
        if message["role"] == "assistant":
            if calls and not message.get("content"):
                message["content"] = None if convention.null_beside_calls else ""
            elif message.get("content") is None:
                message["content"] = None if convention.null_alone else ""
        if message["role"] == "tool" and message["content"] is None:
            message["content"] = ""
        content = message["content"]
        if isinstance(content, list) and message["role"] not in convention.roles_in_parts:
            message["content"] = "\n".join(part["text"] for part in content)
        for one in calls:
            text = one["function"]["arguments"] or "{}"
            one["function"]["arguments"] = text if convention.joins_arguments else json.loads(text)
        messages.append(message)
    return messages


def rendered(template: str, messages: list[dict]) -> str | None:
    try:
        texts, _ = render_jinja_template(
            conversations=[messages],
            chat_template=template,
            add_generation_prompt=True,
            **SPECIAL,
        )
    except Exception:  # a template is a program
        return None
    return texts[0]


def special_tokens(files: dict[str, Any]) -> dict[str, str]:
    vocabulary = {chr(33 + n): n for n in range(4)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    names = ("bos", "eos", "system", "user", "assistant")
    backend.add_special_tokens([f"<|{name}|>" for name in names])
    with tempfile.TemporaryDirectory() as folder:
        backend.save(f"{folder}/tokenizer.json")
        for name, content in files.items():
            Path(folder, name).write_text(json.dumps(content))
        return PreTrainedTokenizerFast.from_pretrained(folder).special_tokens_map


def called() -> dict[str, Any]:
    """SmolLM2's tokenizer, called in several ways."""
    source = TEST_DATA / "tokenizers" / "smollm2"
    with tempfile.TemporaryDirectory() as folder:
        packed = (source / "tokenizer.json.gz").read_bytes()
        Path(folder, "tokenizer.json").write_bytes(gzip.decompress(packed))
        config = (source / "tokenizer_config.json").read_text("utf-8")
        Path(folder, "tokenizer_config.json").write_text(config, "utf-8")
        tokenizer = AutoTokenizer.from_pretrained(folder)
    chat, both = HISTORIES["plain"], [HISTORIES["plain"], [USER]]
    apply = tokenizer.apply_chat_template
    return {
        "chat": dict(apply(chat)),
        "chat with a prompt": dict(apply(chat, add_generation_prompt=True)),
        "chat ids": apply(chat, return_dict=False),
        "chat text": apply(chat, tokenize=False, add_generation_prompt=True),
        "chats": dict(apply(both)),
        "chats ids": apply(both, return_dict=False),
        "chat cut": apply(chat, truncation=True, max_length=7, return_dict=False),
        "chat continued": apply(chat[:2], continue_final_message=True, tokenize=False),
        "text": dict(tokenizer("Hello <|im_end|>")),
        "texts": dict(tokenizer(["Hello", "a b c"])),
        "text cut": tokenizer("a b c d", truncation=True, max_length=2)["input_ids"],
        "tokens": tokenizer.tokenize("Hello there"),
        "ids": tokenizer.convert_tokens_to_ids(["Hello", "<|im_end|>"]),
        "special tokens": tokenizer.special_tokens_map,
        "length": len(tokenizer),
        "model_max_length": tokenizer.model_max_length,
    }


def main() -> None:
    expected: dict[str, dict[str, str | None]] = {}
    for name, convention in CONVENTIONS.items():
        template = (TEST_DATA / "chat_templates" / f"{name}.jinja").read_text("utf-8")
        expected[name] = {
            history: rendered(template, adapted(messages, convention))
            for history, messages in HISTORIES.items()
        }
        refused = sum(text is None for text in expected[name].values())
        print(f"{name}: {len(expected[name])} histories, {refused} refused")
    snippets = {source: rendered(source, HISTORIES["plain"]) for source in SNIPPETS}
    folders = {
        name: {"files": files, "special_tokens": special_tokens(files)}
        for name, files in FOLDERS.items()
    }
    golden = {
        "histories": HISTORIES,
        "special_tokens": SPECIAL,
        "expected": expected,
        "snippets": snippets,
        "folders": folders,
        "called": called(),
    }
    text = json.dumps(golden, ensure_ascii=False)
    (DATA / "chat.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
