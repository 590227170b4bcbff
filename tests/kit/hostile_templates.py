"""Chat templates that would take hours or all memory, each by another means of Jinja."""

from __future__ import annotations

NESTED = (  # a value of 2^40 items, made of 40 lists
    "{% set ns = namespace(x=[1, 2]) %}"
    "{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
)


def _doubled(first: str, step: str) -> str:
    return (
        f"{{% set ns = namespace(x={first}) %}}{{% for i in range(60) %}}"
        f"{{% set ns.x = {step} %}}{{% endfor %}}"
    )


# Ended by the system: one operation takes the time, so that no budget of steps notices it.
SLOW = {
    "squares": _doubled("10", "ns.x * ns.x"),
    "tojson of a shared list": NESTED + "{{ ns.x | tojson }}",
}
MANY_SLOW = {
    **SLOW,
    "a shared list as text": NESTED + "{{ ns.x }}",
    "pprint": NESTED + "{{ ns.x | pprint }}",
    "comparing shared lists": NESTED + NESTED.replace("ns", "nt") + "{{ ns.x == nt.x }}",
    "hashing tuples": _doubled("(1, 2)", "(ns.x, ns.x)") + "{{ {ns.x: 1} }}",
    "%": "{{ '%0999999999d' % 1 }}",
    "format": "{{ '%0999999999d' | format(1) }}",
    "sort": "{{ (range(99999) | list * 150) | sort | length }}",
    "unique": "{{ (range(99999) | list * 150) | unique | list | length }}",
    "groupby": "{{ (range(99999) | list * 150) | groupby('x') | length }}",
    "round": "{{ 1.5 | round(10 ** 9, 'floor') }}",
    "lipsum": "{{ lipsum(n=10 ** 7) | length }}",
    "slice": "{{ range(5) | slice(10 ** 9, 'x') | list | length }}",
    "wordwrap": "{{ ('a' * 10 ** 7) | wordwrap(1) | length }}",
    "a long source": "{{ x }}" * 37_000,
    "many loops": "{% for i in [1] %}{% endfor %}" * 8000,
    "many macros": "".join(f"{{% macro m{i}() %}}{{% endmacro %}}" for i in range(6500)),
}
LARGE = {
    "center": "{{ 'x' | center(10 ** 10) }}",
    "join": "{{ range(99999) | join('x' * 10 ** 6) }}",
}
MANY_LARGE = {
    **LARGE,
    "ljust": "{{ 'x'.ljust(10 ** 10) }}",
    "zfill": "{{ 'x'.zfill(10 ** 10) }}",
    "str.format": "{{ '{:>9999999999}'.format(1) }}",
    "indent": "{{ ('a\n' * 10 ** 6) | indent(10 ** 6) }}",
    "replace": "{{ ('x' * 10 ** 6) | replace('x', 'y' * 10 ** 6) }}",
    "translate": "{{ ('a' * 10 ** 7).translate({97: 'b' * 10 ** 6}) }}",
    "batch": "{{ range(5) | batch(10 ** 10, 'x') | list | length }}",
    "tojson(indent)": "{{ [[[1]]] | tojson(indent=10 ** 9) }}",
    "doubling a text": _doubled("'xxxxxxxx'", "ns.x ~ ns.x"),
    "doubling a list": _doubled("[1]", "ns.x + ns.x"),
    "centred items": "{{ range(99999) | map('string') | map('center', 99999) | join | length }}",
}
