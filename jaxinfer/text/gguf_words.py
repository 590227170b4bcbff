"""How byte-level BPE cuts a text into words: the pre-tokenizers that ``tokenizer.ggml.pre`` names.

The names are llama.cpp's (src/llama-vocab.cpp). The regular expressions are those of the models:
``pre_tokenizer`` in their tokenizer.json, and ``pat_str`` in Kimi-K2's tokenization_kimi.py; of the
others those that llama.cpp quotes. llama.cpp approximates some (combining marks in gpt-4o, tekken
and kimi-k2, capitals within a word in kimi-k2, tiny_aya and youtu, digits in deepseek-llm) and
normalises no text; a model was trained with its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from tokenizers import Regex
from tokenizers.pre_tokenizers import ByteLevel, Digits, Punctuation, Sequence, Split


class WordRules(NamedTuple):
    """The meaning of a ``tokenizer.ggml.pre`` value."""

    splits: tuple[str | Digits | Punctuation, ...] = ()  # each splits the pieces of the one before
    gpt2_split: bool = False  # split by GPT-2's pattern, last
    nfc: bool = False  # normalise to Unicode NFC (as the models' tokenizer.json does)
    whole_words: bool = False  # a word that is in the vocabulary is not merged from its parts
    add_bos: bool = False  # if the metadata does not say

    def pre_tokenizer(self) -> Sequence:
        """The steps of the splits, and the one that writes bytes as characters."""
        steps = [
            Split(Regex(split), "isolated") if isinstance(split, str) else split
            for split in self.splits
        ]
        return Sequence([*steps, ByteLevel(add_prefix_space=False, use_regex=self.gpt2_split)])


_EACH_DIGIT = Digits(individual_digits=True)

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_QWEN2 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _TAIL
)
_LLAMA3_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = _CONTRACTIONS + _LLAMA3_WORDS + _TAIL
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _TAIL
)
_YOUTU = (
    "[\uac00-\ud7a3\u3131-\u318e]+"
    "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    _O200K.replace(r"\p{N}{1,3}", r"\p{N}"),
)
# The digits of a number from its end in threes, as with commas.
_TINY_AYA = (r"\d{1,3}(?=(?:\d{3})*\b)", _O200K)
_NOT_HAN = r"&&[^\p{Han}]"
_KIMI_K2 = (
    r"[\p{Han}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_NOT_HAN}]*[{_LOWER}{_NOT_HAN}]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}{_NOT_HAN}]+[{_LOWER}{_NOT_HAN}]*{_CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*" + _TAIL
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _TAIL,
)

# Letters with an upper and a lower case, as of Unicode 11. Escapes, because an editor that
# normalises would replace some of them (U+2126, the Ohm sign) by others.
_CASED_LETTERS = (
    "A-Za-z"
    "\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3"
    "\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f"
    "\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
# U+0800 to U+9FA5, in which there are also symbols, and Hangul.
_ASIAN_SCRIPTS = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{_CASED_LETTERS}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    _ASIAN_SCRIPTS,
    _EACH_DIGIT,
)
_DEEPSEEK_CODER = (
    "[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    _ASIAN_SCRIPTS,
    _EACH_DIGIT,
)

# Letters of scripts without spaces between words: CJK, Thai, Lao, Khmer, Burmese, Hangul.
_AFMOE_SCRIPTS = (
    "[\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
    "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff"
    "\uac00-\ud7af\u1100-\u11ff]+"
)
_AFMOE = (r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))", _AFMOE_SCRIPTS, _DEEPSEEK_V3[-1])
_BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_SEED_CODER = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + _TAIL
_EXAONE_MOE = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_MINICPM5 = (r"\p{N}{1,3}", _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}+"))
# Runs of spaces fall apart into powers of two.
_JAIS2 = _CONTRACTIONS + _LLAMA3_WORDS + r"|\s*[\r\n]+"
_JAIS2 += "".join(rf"|\s{{{2**n}}}(?!\S)" for n in range(9, 1, -1)) + r"|\s{1,2}(?!\S)|\s{1}"
_SPARK = (
    *_DEEPSEEK_V3[:2],
    _DEEPSEEK_V3[-1].replace(r"[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+", r"[\p{P}\p{S}]+|[\r\n]"),
    r"\p{N}",
)
_FALCON = (Punctuation("contiguous"), _GPT2, "[0-9][0-9][0-9]")

_GPT2_RULES = WordRules(gpt2_split=True)
_DIGITS_RULES = WordRules((_EACH_DIGIT,), gpt2_split=True)
_LLAMA3_RULES = WordRules((_LLAMA3,), whole_words=True, add_bos=True)
_QWEN2_RULES = WordRules((_QWEN2,), nfc=True)
_TEKKEN_RULES = WordRules((_TEKKEN,), whole_words=True, add_bos=True)
_O200K_RULES = WordRules((_O200K,), whole_words=True)

# llama.cpp's converter finds the name by the ids of a test text, which begin with bos if the
# tokenizer adds it. So smaug-bpe, joyai-llm and pixtral also name the vocabularies of Llama 3,
# DeepSeek-V3 and Mistral-Nemo where it does not. llama.cpp takes no whole words with smaug-bpe,
# kimi-k2, gpt-4o and llama4, unlike the models' tokenizers: 588 words of Llama 3's have other ids.
_NAMES = (
    (_GPT2_RULES, "gpt-2 phi-2 jais trillion gigachat a.x-4.0 mellum exaone4 granite-docling"),
    (_GPT2_RULES._replace(nfc=True), "mpt olmo"),  # GPT-NeoX's, also Pythia's
    (
        _DIGITS_RULES,
        "smollm starcoder refact codeshell minerva-7b exaone mellum2",
    ),  # refact: Granite
    (_DIGITS_RULES._replace(nfc=True), "command-r"),
    (WordRules(_FALCON), "falcon"),
    (_LLAMA3_RULES, "llama-bpe llama3 llama-v3 falcon3 falcon-h1 midm-2.0 lfm2"),
    (_LLAMA3_RULES._replace(add_bos=False), "smaug-bpe glm4 glm5"),
    (WordRules((_LLAMA3,)), "dbrx chatglm-bpe"),  # dbrx: cl100k, which is OLMo 2's
    (WordRules((_JAIS2,)), "jais-2"),
    (WordRules(_MINICPM5, whole_words=True), "minicpm5"),
    (_QWEN2_RULES, "qwen2 deepseek-r1-qwen"),
    (WordRules((_QWEN2,)), "megrez kormo f2llmv2 stablelm2 hunyuan solar-open grok-2"),
    (WordRules((_QWEN2.removeprefix(_CONTRACTIONS + "|"),)), "ufakzeka"),
    (WordRules((r"[^\n]+|[\n]+", _QWEN2)), "laguna"),
    (WordRules((_QWEN35,), nfc=True), "qwen35"),
    (WordRules((_SEED_CODER,)), "seed-coder"),
    (WordRules((_BAILING,)), "bailingmoe bailingmoe2 llada-moe"),
    (WordRules((_EXAONE_MOE,)), "exaone-moe"),
    (WordRules(_DEEPSEEK_LLM), "deepseek-llm"),  # also V2, V2-Lite and Coder-V2
    (WordRules(_DEEPSEEK_CODER), "deepseek-coder"),
    (WordRules(_DEEPSEEK_V3), "deepseek-v3 joyai-llm hunyuan-dense hy_v4"),
    (WordRules(_SPARK), "spark2_5"),
    (WordRules(_YOUTU, whole_words=True), "youtu"),
    (WordRules(_AFMOE), "afmoe"),
    (WordRules((_KIMI_K2,), whole_words=True), "kimi-k2"),
    (_O200K_RULES, "gpt-4o llama4"),  # gpt-4o: also gpt-oss
    (_O200K_RULES._replace(whole_words=False), "kanana2 talkie minimax-m2"),
    (WordRules(_TINY_AYA), "tiny_aya cohere2moe"),
    (_TEKKEN_RULES, "tekken pixtral"),
    (WordRules((_BLOOM,)), "bloom poro-chat gpt3-finnish"),
    (WordRules((_BLOOM, r"\p{N}")), "viking"),
    (WordRules((r"\p{N}+", r"(?=(\d{3})+(?!\d))")), "superbpe"),
)
WORD_RULES: Mapping[str, WordRules] = MappingProxyType(
    {name: rules for rules, names in _NAMES for name in names.split()}
)
