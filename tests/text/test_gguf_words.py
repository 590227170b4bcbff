"""The pre-tokenizers of GGUF files cut texts into words as the models' own do."""

from __future__ import annotations

import gzip
import json
import unicodedata
from typing import Any

import pytest
import regex
import tokenizers

from jaxinfer.text.gguf_words import WORD_RULES
from jaxinfer.text.tokenizer import load_tokenizer
from kit.tokenizers import (
    DATA,
    GOLDEN,
    TINY_BOS_ID,
    gguf_spec_of,
    kitoken_inputs,
    tiny_gguf_spec,
    tiny_tokenizer_json,
    tiny_tokenizer_spec,
)

PUBLISHED = json.loads((DATA / "pre_tokenizers.json").read_text("utf-8"))
BY_NAME = {name: entry for entry in PUBLISHED for name in entry["names"]}

TEXTS = [
    "don't DON'T I'll we'VE'd 's'S it\u2019s it'\u017f a'lL",
    "1 12 123 1234 12345 3.14e-10 $100,000.00 ½² ١٢٣٤ ①②Ⅷ x1y22z333",
    "\n \n\n \n\n\n \t \t\t\r\n\r  \n   x  \n",
    "trailing spaces   ",
    "   leading, a  b   c    d\u00a0e\u3000f\u2028g\u2029\ua3e4\u0085h",
    "\tdef f(x):\n\t\treturn x**2  # {x}[0] //\n\n",
    "https://a.b/c?d=e&f#g //\n/* x */ <a href='b'>&amp;</a> ~`^|",
    "中文字abc中文，。！？「引号」 汉字123汉字 一二三",
    "日本語カタカナひらがなABCです 한국어test가나 々〇〆ヶㇰ㍻",
    "㐀𠀀豈⺀⼀〡龥龦 \u0800\ud7ff\ua000",
    "e\u0301 E\u0301A a\u0300\u0302\u0303 क्षि กำ กាន់តែ ﷺ x\u20e3 \u0301a",
    "👩\u200d👩\u200d👧\u200d👦🇩🇪❤\ufe0f\u200d🔥☺ 🚀x 👍🏽!\n",
    "HTTPServerError fooBarBAZ \u01c4ungla \u01c5x ʰʱ ªº ΑΒγδ Привет",
    "\u2126 \u212a \u00c5 ß\u1e9e ﬁ",
    "﹏︰…“”‘’—–-=_+!!!??? ------======= ''''''```\"\"\"",
    "\x00\x01\x7f\ufeff\u200b\ue000\u0378",
    "Ⱥⱥ ꭰꮿ 𐐀𐐨 𞤀 ᏸ ა Ა",
    # every character below U+3400 that Python's version of Unicode has; the engines' are newer
    "".join(f" é{chr(n)}" for n in range(0x21, 0x3400) if unicodedata.category(chr(n)) != "Cn"),
    *kitoken_inputs("small", "mixed"),
]


def words(tokenizer: tokenizers.Tokenizer, text: str) -> list[str]:
    """The words of a text, after the tokenizer's normalisation."""
    if tokenizer.normalizer is not None:
        text = tokenizer.normalizer.normalize_str(text)
    assert tokenizer.pre_tokenizer is not None
    return [text[start:end] for _, (start, end) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]


def tiny(pre: str, **more: Any) -> tokenizers.Tokenizer:
    spec = gguf_spec_of(tiny_tokenizer_spec(), pre, **{"add_bos_token": False, **more})
    return load_tokenizer(spec)._tokenizer


@pytest.mark.parametrize("pre", BY_NAME)
def test_words_are_those_of_the_published_tokenizer(pre: str) -> None:
    published = BY_NAME[pre]
    ours = tiny(pre)
    parts = {key: published[key] for key in ("normalizer", "pre_tokenizer")}
    theirs = tokenizers.Tokenizer.from_str(json.dumps(json.loads(tiny_tokenizer_json()) | parts))
    for text in TEXTS:
        assert words(ours, text) == words(theirs, text)


def test_words_of_kimi_k2_in_another_engine() -> None:
    """Kimi-K2's own program is tiktoken, whose regular expressions are not Oniguruma's."""
    pattern = BY_NAME["kimi-k2"]["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"]
    compiled = regex.compile(pattern, regex.V1)
    ours = tiny("kimi-k2")
    for text in TEXTS:
        assert words(ours, text) == compiled.findall(text)


EXAMPLE = "don't abc123456 Été e\u0301a \n\nHTTPServer/\n 中文字か?!x"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", "don|'t| abc|123456| Été| e|\u0301|a| \n|\n|HTTPServer|/|\n| 中文字か|?!|x"),
        (
            "smollm",
            "don|'t| abc|1|2|3|4|5|6| Été| e|\u0301|a| \n|\n|HTTPServer|/|\n| 中文字か|?!|x",
        ),
        ("llama-bpe", "don|'t| abc|123|456| Été| e|\u0301a| \n\n|HTTPServer|/\n| 中文字か|?!|x"),
        ("dbrx", "don|'t| abc|123|456| Été| e|\u0301a| \n\n|HTTPServer|/\n| 中文字か|?!|x"),
        ("qwen2", "don|'t| abc|1|2|3|4|5|6| Été| éa| \n\n|HTTPServer|/\n| 中文字か|?!|x"),
        ("qwen35", "don|'t| abc|1|2|3|4|5|6| Été| éa| \n\n|HTTPServer|/\n| 中文字か|?!|x"),
        (  # its punctuation, ":-~", includes ASCII letters: words with others fall apart
            "deepseek-llm",
            "don|'|t| abc|1|2|3|4|5|6| É|t|é| e|\u0301|a| |\n|\n|HTTPServer|/|\n| |中文字か|?!|x",
        ),
        (
            "deepseek-coder",
            "don|'|t| abc|1|2|3|4|5|6| Été| e|\u0301|a| |\n|\n|HTTPServer|/|\n| |中文字か|?!|x",
        ),
        ("deepseek-v3", "don|'t| abc|123|456| Été| e\u0301a| \n\n|HTTPServer|/\n| |中文字か|?!|x"),
        ("kimi-k2", "don't| abc|123|456| Été| e\u0301a| \n\n|HTTPServer|/\n| |中文字|か|?!|x"),
        ("gpt-4o", "don't| abc|123|456| Été| e\u0301a| \n\n|HTTPServer|/\n| 中文字か|?!|x"),
        (
            "youtu",
            "don't| abc|1|2|3|4|5|6| Été| e\u0301a| \n\n|HTTPServer|/\n| |中文字か|?!|x",
        ),
        (
            "tiny_aya",
            "don't| abc|123|456| Été| e\u0301a| \n\n|HTTPServer|/\n| 中文字か|?!|x",
        ),
        (
            "afmoe",
            "don|'t| abc|123|456| Été| e\u0301a| \n\n|HTTPServer|/\n| |中文字か|?!|x",
        ),
        ("tekken", "don|'t| abc|1|2|3|4|5|6| Été| e\u0301a| \n\n|HTTPServer|/\n| 中文字か|?!|x"),
    ],
)
def test_words_of_an_example(pre: str, expected: str) -> None:
    assert "|".join(words(tiny(pre), EXAMPLE)) == expected


# What tests/golden/make_gguf_words.py has written, and the texts in which llama.cpp approximates.
LLAMA_CPP = json.loads(gzip.decompress((GOLDEN / "gguf_words.json.gz").read_bytes()))
_MARKS, _CAPITALS = r"\p{M}", "[a-z][A-Z]"
APPROXIMATED = {
    "gpt-4o": _MARKS,
    "llama4": _MARKS,
    "kanana2": _MARKS,
    "talkie": _MARKS,
    "minimax-m2": _MARKS,
    "tekken": _MARKS,
    "pixtral": "",
    "kimi-k2": f"{_MARKS}|{_CAPITALS}",
    "tiny_aya": _CAPITALS,
    "cohere2moe": _CAPITALS,
    "youtu": _CAPITALS,
    "deepseek-llm": "\\p{N}{2}|\u3000",
    "deepseek-coder": "\u3000",
    "superbpe": "[\u0660-\u0669]",
}


@pytest.mark.parametrize("pre", WORD_RULES)
def test_words_are_those_of_llama_cpp(pre: str) -> None:
    """But where llama.cpp approximates the model's rules, or the model's text is normalised."""
    tokenizer, exceptions = tiny(pre), APPROXIMATED.get(pre)
    differ: set[bool] = set()
    expected = LLAMA_CPP["words"][LLAMA_CPP["rules"][pre]["words"]]
    for text, lengths in zip(LLAMA_CPP["texts"], expected, strict=True):
        found = [len(word.encode()) for word in words(tokenizer, text)]
        if exceptions is not None and regex.search(exceptions, text):
            differ.add(found != lengths)
        elif not (WORD_RULES[pre].nfc and not unicodedata.is_normalized("NFC", text)):
            assert found == lengths, text
    assert exceptions is None or True in differ


@pytest.mark.parametrize("pre", WORD_RULES)
def test_whole_words(pre: str) -> None:
    """A word of the vocabulary is one token if the model, or else llama.cpp, ignores merges."""
    whole = BY_NAME.get(pre, {}).get("ignore_merges", LLAMA_CPP["rules"][pre]["whole_words"])
    whole |= pre == "llama4"  # converted from tiktoken's form, by transformers' TikTokenConverter
    ids = load_tokenizer(tiny_gguf_spec(pre, "abc")).encode("abc")
    assert ids == ([261] if whole else [97, 98, 99])


@pytest.mark.parametrize("pre", WORD_RULES)
def test_bos_is_added_as_by_llama_cpp(pre: str) -> None:
    """llama-vocab.cpp sets ``add_bos`` for Llama 3 and tekken; metadata wins."""
    by_default = LLAMA_CPP["rules"][pre]["add_bos"]
    for said, is_added in ((None, by_default), (True, True), (False, False)):
        more = {} if said is None else {"add_bos_token": said}
        spec = gguf_spec_of(tiny_tokenizer_spec(), pre, bos_token_id=TINY_BOS_ID, **more)
        assert load_tokenizer(spec).encode("a") == [*[TINY_BOS_ID] * is_added, 97]
