r"""GGUF files of a vocabulary alone, one for each pre-tokenizer, in which a token is a whole word.

    PYTHONPATH=.:tests python -m kit.gguf_words FOLDER

writes them, and ``texts.json``; ``tests/golden/make_gguf_words.py`` writes llama.cpp's words. The
merges join every word that any of the rules makes of the texts, and every text, into one token,
so that a limit between words is a limit between tokens.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import gguf

from jaxinfer.text.gguf_words import WORD_RULES
from jaxinfer.text.pieces import byte_to_char
from kit.tokenizers import TINY_BOS_ID, TINY_SPECIAL_TOKENS

# A token that no merges produce.
UNMERGED = "Zqj"
TEXTS = (
    "Hello world",
    " Hello  world   again    and     again",
    "don't DON'T I'll we'VE'd 's'S it's they'RE",
    "it\u2019s they\u2019re \u2018quoted\u2019 \u201ctext\u201d",
    "1 12 123 1234 12345 123456 1234567 12345678",
    "x1y22z333w4444",
    "3.14e-10 $100,000.00 1,234,567.89 50% 1/2",
    "2024-01-31T12:34:56.789Z",
    " 7 42 007 1000000",
    "a1 1a 12ab34",
    "\u00bd \u00b2 \u0661\u0662\u0663\u0664 \u2460\u2461 \u2167 \uff11\uff12\uff13\uff14",
    "\n",
    "\n\n",
    "\n \n\n \n\n\n \t \t\t\r\n\r  \n   x  \n",
    "a\nb\n\nc\n\n\nd\r\ne\r\n\r\nf",
    "trailing spaces   ",
    "trailing newline\n",
    "trailing tab\t",
    "   leading, a  b   c    d",
    "a" + 5 * " " + "b" + 9 * " " + "c" + 17 * " " + "d" + 700 * " " + "e",
    "\tdef f(x):\n\t\treturn x**2  # {x}[0] //\n\n",
    "    if (a != b && c <= d) { return -1; }\n",
    "https://a.b/c?d=e&f#g //\n/* x */ <a href='b'>&amp;</a>",
    "user@example.com, C:\\Windows\\System32, ~/.bashrc",
    "--option=value -v | grep -E '^[a-z]+$' > /dev/null 2>&1",
    "~`^|\\ @#$%^&*()_+{}[];:'\",.<>/?",
    "...!!!??? ---- ==== ''' \"\"\" ```",
    "!important #hashtag @mention $var %s &ref *ptr .dot /path :colon ;semi =eq",
    "Hello,world!How are you?I'm fine;thanks:bye.",
    "camelCase PascalCase HTTPServerError fooBarBAZ snake_case SCREAMING_CASE",
    "iPhone McDonald eBay XMLHttpRequest",
    "na\u00efve caf\u00e9 \u00dcber stra\u00dfe \u00c9t\u00e9 \u0141\u00f3d\u017a",
    "Привет мир! Ελληνικά",
    "中文字abc中文，。！？「引号」 汉字123汉字",
    "\u65e5\u672c\u8a9e\u30ab\u30bf\u30ab\u30ca\u3072\u3089\u304c\u306aABC\u3067\u3059",
    "\ud55c\uad6d\uc5b4 test\uc785\ub2c8\ub2e4 123\uac1c",
    "\u3400\U00020000\uf900 \u9fa5\u9fa6",
    "مرحبا بالعالم، ؟۔ שלום",
    "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 \u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0926\u0941\u0928\u093f\u092f\u093e \u0964",
    "\u1780\u17b6\u1793\u17cb\u178f\u17c2 \u0e81\u0eb3",
    "e\u0301 a\u0300\u0302 x\u20e3 \u0301a",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \U0001f44d\U0001f3fd!\n",
    "\U0001f680x \u2764\ufe0f\u200d\U0001f525 \u263a:)",
    "\u00a0nbsp\u00a0 \u3000wide\u3000 \u2028line",
    "\u2126 \u212a \ufb01 \u01c5x \u02b0\u02b1 \u00aa\u00ba",
    "\ufe4f\ufe30\u2026\u2014\u2013",
    "a\u200bb\ufeffc \ue000",
    "f(x)=x^2+2x+1; \u2211\u222b\u221a \u2260 \u00b1\u00d7\u00f7",
    "| a | b |\n|---|---|\n| 1 | 2 |\n",
    "# Title\n\n- item 1\n- item 2\n\n1. one\n2. two\n",
    "Mr. O'Neill's 'tis rock'n'roll",
)


def merges_of(words: Iterable[str]) -> list[tuple[str, str]]:
    """Merges, in their order, by which each word (its bytes as characters) becomes one token."""
    ranks: dict[tuple[str, str], int] = {}
    for word in words:
        parts = [*word]
        while len(parts) > 1:
            known = [(ranks[pair], at) for at, pair in enumerate(pairwise(parts)) if pair in ranks]
            at = min(known)[1] if known else 0
            ranks.setdefault((parts[at], parts[at + 1]), len(ranks))
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [*ranks]


def write(folder: Path) -> None:
    """Write NAME.gguf of each name, and the texts."""
    char = byte_to_char()
    words = {
        word
        for rules in {id(rules): rules for rules in WORD_RULES.values()}.values()
        for text in TEXTS
        for word, _ in rules.pre_tokenizer().pre_tokenize_str(text)
    }
    texts = ["".join(char[byte] for byte in text.encode()) for text in TEXTS]
    merges = merges_of([*sorted(words, key=lambda word: (len(word), word)), *texts])
    tokens = [char[byte] for byte in range(256)] + [*TINY_SPECIAL_TOKENS, UNMERGED]
    tokens += [token for token in dict.fromkeys(a + b for a, b in merges) if token not in tokens]
    types = [1] * len(tokens)
    types[256 : 256 + len(TINY_SPECIAL_TOKENS)] = [3] * len(TINY_SPECIAL_TOKENS)
    for name in WORD_RULES:
        writer = gguf.GGUFWriter(folder / f"{name}.gguf", "llama")
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(name)
        writer.add_token_list(tokens)
        writer.add_token_types(types)
        writer.add_token_merges([f"{a} {b}" for a, b in merges])
        writer.add_bos_token_id(TINY_BOS_ID)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
    (folder / "texts.json").write_text(json.dumps({"texts": TEXTS, "unmerged": UNMERGED}))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
