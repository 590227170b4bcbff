"""Streams of text equal the text decoded at once, and never show part of a character."""

from __future__ import annotations

import codecs
import re
import time
import unicodedata
from functools import cache
from itertools import combinations, groupby, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxinfer.core.errors import RequestError
from jaxinfer.text.detokenize import StopStrings
from jaxinfer.text.tokenizer import Tokenizer, load_tokenizer
from jaxinfer.text.tokenizer_config import TokenizerSpec
from kit.tokenizers import real_spec, stories_gguf_metadata, tiny_tokenizer_spec

NAMES = ["tiny", "gpt2", "smollm2", "qwen3", "stories", "stories_no_prefix"]


@cache
def tokenizer_of(name: str) -> Tokenizer:
    if name == "tiny":
        return load_tokenizer(tiny_tokenizer_spec())
    if name.startswith("stories"):
        metadata = stories_gguf_metadata(add_space_prefix=name == "stories")
        return load_tokenizer(TokenizerSpec(gguf_metadata=metadata))
    return load_tokenizer(real_spec(name))


def stream(tokenizer: Tokenizer, token_ids: list[int], skip: bool, cut: int = 1) -> str:
    detokenizer = tokenizer.detokenizer((), skip)
    cuts = range(0, len(token_ids), cut)
    return "".join(detokenizer.push(token_ids[at : at + cut]) for at in cuts) + detokenizer.flush()


def valid_byte_runs(tokenizer: Tokenizer, token_ids: list[int], skip: bool) -> bool:
    """True if the documented exception of IncrementalDetokenizer does not apply."""
    tokens = [tokenizer._tokenizer.id_to_token(token_id) or "" for token_id in token_ids]
    if skip:
        tokens = [
            token
            for token, token_id in zip(tokens, token_ids, strict=True)
            if token_id not in tokenizer.special_token_ids
        ]
    for is_byte, run in groupby(tokens, lambda token: bool(re.fullmatch("<0x..>", token))):
        if is_byte:
            try:
                bytes(int(token[3:5], 16) for token in run).decode()
            except UnicodeDecodeError:
                return False
    return True


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_stream_equals_decode(name: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(name)
    token_id = st.integers(0, 400) | st.integers(0, tokenizer.vocab_size + 5)
    texts = st.text(max_size=8).map(tokenizer.encode)
    token_ids = sum(data.draw(st.lists(texts | st.lists(token_id, max_size=4), max_size=4)), [])
    skip, cut = data.draw(st.booleans()), data.draw(st.integers(1, 3))
    text = stream(tokenizer, token_ids, skip, cut)
    expected = tokenizer.decode(token_ids, skip_special_tokens=skip)
    if not name.startswith("stories") or valid_byte_runs(tokenizer, token_ids, skip):
        assert text == expected
    else:
        assert "\ufffd" in text and "\ufffd" in expected


@pytest.mark.parametrize("name", NAMES)
@given(text=st.text(st.characters(max_codepoint=0x3FFFF, exclude_categories=["Cs"])))
def test_text_streams_without_replacement(name: str, text: str) -> None:
    tokenizer = tokenizer_of(name)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    shown = stream(tokenizer, token_ids, skip=True)
    assert shown == tokenizer.decode(token_ids)
    # SmolLM2 has no token for the first bytes of a character beyond U+3FFFF.
    assert shown.count("\ufffd") == text.count("\ufffd")


@pytest.mark.parametrize("name", ["tiny", "gpt2", "stories"])
def test_emoji_split_over_tokens_comes_whole(name: str) -> None:
    tokenizer = tokenizer_of(name)
    detokenizer = tokenizer.detokenizer()
    pushes = [detokenizer.push([i]) for i in tokenizer.encode("a🤗b", add_special_tokens=False)]
    assert [text for text in pushes if text] == ["a", "🤗", "b"]
    assert detokenizer.flush() == ""


def test_invalid_bytes_of_a_byte_level_vocabulary() -> None:
    detokenizer = tokenizer_of("tiny").detokenizer()
    assert detokenizer.push([0xF0, 0x9F]) == ""
    assert detokenizer.push([ord("x")]) == "\ufffdx"
    assert detokenizer.push([0xFF]) == "\ufffd"
    assert detokenizer.push([0xE2, 0x82]) == ""
    assert detokenizer.flush() == "\ufffd"


def test_invalid_bytes_of_a_byte_fallback_vocabulary() -> None:
    """Each stray byte is one U+FFFD, as in the library; whole characters stay, unlike there."""
    tokenizer = tokenizer_of("stories")
    byte = {value: tokenizer._tokenizer.token_to_id(f"<0x{value:02X}>") for value in range(256)}
    euro = [byte[value] for value in "€".encode()]
    assert stream(tokenizer, euro[:2], True) == tokenizer.decode(euro[:2]) == "\ufffd\ufffd"
    assert stream(tokenizer, [*euro, byte[0xFF]], True) == "€\ufffd"
    assert tokenizer.decode([*euro, byte[0xFF]]) == "\ufffd" * 4
    assert stream(tokenizer, [*euro[:2], 403, *euro], True) == "\ufffd\ufffd Once€"


def test_leading_space_belongs_to_the_start_of_the_text_only() -> None:
    tokenizer = tokenizer_of("stories")
    once = tokenizer.encode("Once", add_special_tokens=False)
    assert tokenizer.detokenizer().push(once) == "Once"
    # bos is skipped, so the text has not begun
    assert tokenizer.detokenizer([1]).push(once) == "Once"
    assert tokenizer.detokenizer(once).push(once) == " Once"


def characters(data: bytes, errors: str) -> list[int]:
    """Where each character of the decoded bytes begins, by byte."""
    decoder, starts, held = codecs.getincrementaldecoder("utf-8")(errors), list[int](), 0
    for at in range(len(data) + 1):
        is_end = at == len(data)
        decoded = decoder.decode(data[at : at + 1], is_end)
        begins = [held] * (len(decoded) > 0) + [at - n for n in range(len(decoded) - 1)][::-1]
        if errors == "surrogateescape" and len(decoded) > 1:  # one character for each byte
            begins = [at - is_end - n for n in range(len(decoded))][::-1]
        starts += begins
        if decoded:
            held = at + 1 - len(decoder.getstate()[0])
    return starts


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_offsets_are_those_of_the_text(name: str, data: st.DataObject) -> None:
    """A token's offset is the number of characters that have ended where its bytes begin."""
    tokenizer = tokenizer_of(name)
    texts = st.text("a \u00e9\u20ac\U0001f917", max_size=4).map(tokenizer.encode)
    token_id = st.integers(0, 300) | st.integers(0, tokenizer.vocab_size + 5)
    token_ids = sum(data.draw(st.lists(texts | st.lists(token_id, max_size=4), max_size=4)), [])
    skip, cut = data.draw(st.booleans()), data.draw(st.integers(1, 3))
    detokenizer, text, offsets = tokenizer.detokenizer((), skip), "", []
    for at in range(0, len(token_ids), cut):
        part, found = detokenizer.push_with_offsets(token_ids[at : at + cut])
        offsets += [len(text) + place for place in found]
        text += part
    text += detokenizer.flush()
    assert text == stream(tokenizer, token_ids, skip)
    shown = [
        b"" if skip and token_id in tokenizer.special_token_ids else tokenizer.token_bytes(token_id)
        for token_id in token_ids
    ]
    whole = b"".join(shown)
    starts = characters(whole, "surrogateescape" if name.startswith("stories") else "replace")
    dropped = len(starts) - len(text)  # spaces at the beginning, in sentencepiece vocabularies
    at, last = 0, -1
    for data_of_token, place in zip(shown, offsets, strict=True):
        if data_of_token:  # its first byte is in the last character that begins there or before
            expected = sum(start <= at for start in starts) - 1
            assert place == max(expected - dropped, 0)
        assert last <= place <= len(text)
        at, last = at + len(data_of_token), place


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "text",
    [
        "a\U0001f917b \u65e5\u672c c",
        "  two  spaces \n \n and lines",
        "e\u0301 and \ufb01 may be normalised",
        "<|endoftext|>x<s> <|eos|>y",
        " ",
    ],
)
@pytest.mark.parametrize("special", [False, True])
def test_an_encoded_text_has_the_offsets_of_its_tokens(name: str, text: str, special: bool) -> None:
    tokenizer = tokenizer_of(name)
    token_ids, offsets = tokenizer.encode_with_offsets(text, add_special_tokens=special)
    assert token_ids == tokenizer.encode(text, add_special_tokens=special)
    assert offsets == sorted(offsets) and len(offsets) == len(token_ids)
    bounds = [*offsets, len(text)]
    pieces = zip(token_ids, offsets, bounds[1:], strict=True)
    for token_id, start, end in pieces:
        piece = tokenizer.token_piece(token_id)
        if start < end and "\ufffd" not in piece and tokenizer.encode(piece) == [token_id]:
            assert unicodedata.normalize("NFC", text[start:end]) == piece


def test_output_completes_a_character_begun_in_the_prompt() -> None:
    token_ids = list("🤗".encode())
    assert tokenizer_of("tiny").detokenizer(token_ids[:3]).push(token_ids[3:]) == "🤗"


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_a_context_has_the_effect_of_pushing_it(name: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(name)
    token_ids = st.integers(0, 300) | st.integers(0, tokenizer.vocab_size + 5)
    texts = st.text("a \u00e9\u20ac\U0001f917", max_size=4).map(tokenizer.encode)
    parts = st.lists(texts | st.lists(token_ids, max_size=6), max_size=4)
    cut, skip = data.draw(st.integers(0, 3)), data.draw(st.booleans())
    prompt = sum(data.draw(parts), [])
    prompt = prompt[: len(prompt) - cut]
    output = sum(data.draw(parts), [])
    pushed = tokenizer.detokenizer((), skip)
    pushed.push(prompt)
    passed = tokenizer.detokenizer(prompt, skip)
    assert passed.push(output) + passed.flush() == pushed.push(output) + pushed.flush()


@pytest.mark.parametrize("name", ["tiny", "stories"])
def test_long_prompts_take_no_time(name: str) -> None:
    tokenizer = tokenizer_of(name)
    prompt = tokenizer.encode("hello there") * 100_000
    start = time.process_time()
    for _ in range(100):
        tokenizer.detokenizer(prompt)
    assert time.process_time() - start < 1


def test_many_tokens_take_linear_time() -> None:
    """Also of bytes that never become characters, for which a window of tokens would grow."""
    detokenizer = tokenizer_of("tiny").detokenizer()
    start = time.process_time()
    for _ in range(100_000):
        detokenizer.push([0x80])
    assert time.process_time() - start < 5


def find(stop: tuple[str, ...], include: bool, parts: list[str]) -> tuple[str, str | None]:
    stops, shown = StopStrings(stop, include), ""
    for part in parts:
        text, found = stops.push(part)
        shown += text
        if found is not None:
            return shown, found
    return shown + stops.flush(), None


def first_stop(stop: tuple[str, ...], include: bool, text: str) -> tuple[str, str | None]:
    """The definition: the earliest end, and there the longest stop string."""
    for end in range(len(text) + 1):
        ending = [string for string in stop if text[:end].endswith(string)]
        if ending:
            found = max(ending, key=len)
            return text[: end if include else end - len(found)], found
    return text, None


@given(
    stop=st.lists(st.text("ab🤗", min_size=1, max_size=5), max_size=5).map(tuple),
    parts=st.lists(st.text("ab🤗c", max_size=6), max_size=8),
    include=st.booleans(),
)
def test_stop_strings_equal_their_definition(
    stop: tuple[str, ...], parts: list[str], include: bool
) -> None:
    assert find(stop, include, parts) == first_stop(stop, include, "".join(parts))


@given(
    stop=st.lists(st.text("ab", min_size=1, max_size=4), max_size=4).map(tuple),
    parts=st.lists(st.text("abc", max_size=4), max_size=8),
    num_passed=st.integers(0, 8),
    include=st.booleans(),
)
def test_stop_strings_may_begin_where_none_may_end(
    stop: tuple[str, ...], parts: list[str], num_passed: int, include: bool
) -> None:
    text, least = "".join(parts), len("".join(parts[:num_passed]))
    expected, found = text, None
    for end in range(least + 1, len(text) + 1):
        if ending := [string for string in stop if text[:end].endswith(string)]:
            found = max(ending, key=len)
            expected = text[: end if include else end - len(found)]
            break
    stops, shown, matched, seen = StopStrings(stop, include), "", None, ""
    beginnings = {string[:size] for string in stop for size in range(1, len(string))} | {""}
    for number, part in enumerate(parts):
        new, matched = stops.push(part, may_end=number >= num_passed)
        shown, seen = shown + new, seen + part
        if matched is not None:
            break
        assert shown == seen[: next(n for n in range(len(seen) + 1) if seen[n:] in beginnings)]
    if matched is None:
        shown += stops.flush()
    assert (shown, matched) == (expected, found)


def words(alphabet: str, longest: int) -> list[str]:
    sizes = range(1, longest + 1)
    return ["".join(word) for size in sizes for word in product(alphabet, repeat=size)]


@pytest.mark.parametrize("include", [False, True])
def test_all_short_stop_strings(include: bool) -> None:
    """Every pair of stop strings on every text, one character a push.

    The result is as defined, and the held-back text is exactly its longest suffix that begins a
    stop string.
    """
    texts = words("abc", 5)[-(3**5) :]
    for stop in combinations(words("ab", 3), 2):
        beginnings = {string[:size] for string in stop for size in range(1, len(string))}
        for text in texts:
            stops, shown, found = StopStrings(stop, include), "", None
            for end, char in enumerate(text, start=1):
                part, found = stops.push(char)
                shown += part
                if found is not None:
                    break
                held = next(at for at in range(end + 1) if text[at:end] in beginnings | {""})
                assert shown == text[:held]
            assert (shown if found else text, found) == first_stop(stop, include, text)


def test_ten_thousand_stop_strings() -> None:
    start = time.process_time()
    stops = StopStrings(tuple(f"{'a' * 40}{n}" for n in range(10_000)), False)
    shown = "".join(stops.push("aaab")[0] for _ in range(10_000))
    assert shown == "aaab" * 10_000
    assert time.process_time() - start < 5


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="must not be empty"):
        StopStrings(("",), False)
