"""The metrics of all replicas as one text for Prometheus."""

from __future__ import annotations

import re
from collections.abc import Mapping

# name, labels with braces or nothing, value (and a time or an exemplar)
_SAMPLE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{(.*)\})?( \S.*)")
_HEAD = re.compile(r"# (?:HELP|TYPE) (\S+)")


def merged_metrics(texts: Mapping[str, str]) -> str:
    """Texts in Prometheus's format, by replica, as one; each sample gets the label ``replica``.

    A family's samples stand together, under the comments of the first replica that has it.
    """
    heads: dict[str, dict[str, None]] = {}  # lines of each family, in order
    samples: dict[str, list[str]] = {}
    for replica, text in texts.items():
        family = ""
        for line in text.splitlines():
            if head := _HEAD.match(line):
                family = head[1]
                heads.setdefault(family, {})
                if not samples.get(family):
                    heads[family][line] = None
            elif sample := _SAMPLE.fullmatch(line):
                name, labels, value = sample.groups()
                own = f'replica="{replica}"'
                labels = f"{own},{labels}" if labels else own
                samples.setdefault(family, []).append(f"{name}{{{labels}}}{value}")
    lines = [line for name, head in heads.items() for line in (*head, *samples.get(name, ()))]
    return "".join(f"{line}\n" for line in lines)
