"""Lark and GBNF are told apart, and GBNF's escapes and names are read as llama.cpp reads them."""

from __future__ import annotations

import pytest

from jaxinfer.core.errors import RequestError

pytest.importorskip("llguidance")
from kit.grammar_walks import Form

SQL = """
?start: select_statement
select_statement: "SELECT " column_list " FROM " identifier
column_list: identifier ("," identifier)*
identifier: /[a-z]+/
"""
# as in vLLM's and llama.cpp's examples
EBNF = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table
column ::= "col_1 " | "col_2 "
table ::= "table_1 "
    | "table_2 "
"""
JSON = r"""
# an object
root   ::= object
value  ::= object | string | ("true" | "false" | "null") ws
object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) # escapes "
  )* "\"" ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
GRAMMARS: dict[str, tuple[str, str, str]] = {
    # Lark
    "inlined start": ('?start: "a" | "b"', "b", "c"),
    "kept start": ('!start: "a"', "a", "b"),
    "sql": (SQL, "SELECT a,b FROM c", "SELECT"),
    "start with attributes": ("start[lazy]: /a*b/", "ab", "a"),
    "imports": ("%import common.DIGIT\nstart: DIGIT", "7", "a"),
    "a comment first": ('// root ::= "b"\nstart: "a"', "a", "b"),
    "the sign of GBNF in a text": ('start: foo\nfoo: "x ::= y"', "x ::= y", "x"),
    "a long escape of Lark": (r'start: "\U0001F600"', "😀", "a"),
    # GBNF
    "ebnf": (EBNF, "SELECT col_2  from table_2 ", "SELECT"),
    "json": (JSON, '{"a": {"b\\n": true}}', "[1]"),
    "a comment like Lark": ('# start: "b"\nroot ::= "a"', "a", "b"),
    "a rule named start": ('root ::= start "b"\nstart ::= "a"', "ab", "a"),
    "names that differ in case": (
        'root ::= fooBar foo-bar foo_bar\nfooBar ::= "x"\nfoo-bar ::= "y"\nfoo_bar ::= "z"',
        "xyz",
        "xxx",
    ),
    "escapes": (r'root ::= "\u00e9\U0001F600\x41\xe9\t\u0022\u005c\u0000"', 'é😀Aé\t"\\\0', "é"),
    "escapes in a class": (r"root ::= [\u00e0-\u00e9\]\[\t\x2d\u005e]{7}", "àé][\t-^", "zé][\t-^"),
    "needless escapes": (r'root ::= "\/\'" [a\-\^z]', "/'-", "/'b"),
    "marks within a class": (r'root ::= "#" [#"] [^\]]', '#"a', '#"]'),
}


@pytest.mark.parametrize("name", GRAMMARS)
def test_grammars(name: str) -> None:
    grammar, text, wrong = GRAMMARS[name]
    form = Form(grammar=grammar)
    assert form.accepts(text) and not form.accepts(wrong)


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        (r'root ::= "\ud83d"', "d83d is the number of no character"),
        (r'root ::= "\U00110000"', "110000 is the number of no character"),
        (r"root ::= [\d]", "Invalid escape sequence"),
        ('main ::= "a"', "No 'root' rule found"),
        ('main: "a"', "no start rule found"),
    ],
)
def test_wrong_grammars(grammar: str, words: str) -> None:
    with pytest.raises(RequestError, match=words):
        Form(grammar=grammar)


def test_characters_of_json_may_be_escaped() -> None:
    """A model whose habit is caf\\u00e9 must not be led to caf\\u000e9, which is another text."""
    text = Form(json={"type": "string", "maxLength": 5})
    assert text.accepts('"caf\\u00e9"') and text.accepts('"\\ud83c\\udf38"')
    assert not text.accepts('"\\ud83c"') and not text.accepts('"' + "\\u00e9" * 6 + '"')
    schema = {"type": "object", "properties": {"a": {"enum": ["é"]}, "b": {"pattern": "^[é]+$"}}}
    for value in ("a", "b"):  # those that the schema lists are written as they are
        assert Form(json=schema).accepts(f'{{"{value}": "é"}}')
    assert Form(json_object=True).accepts('{"\\u00e9": "\\u00e9"}')
    tag = {"format": {"type": "json_schema", "json_schema": {"type": "string"}}}
    assert Form(structural_tag=tag).accepts('"\\u00e9"')
