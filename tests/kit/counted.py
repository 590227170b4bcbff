"""Executables that count their calls."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from jaxinfer.exec.compile.build import Executables


class Counted:
    """The given executables, with counts of their calls by name."""

    def __init__(self, executables: Executables) -> None:
        self.calls: Counter[str] = Counter()
        by_name = {
            name: self._counted(name, executables.by_name[name]) for name in executables.by_name
        }
        self.executables = replace(executables, by_name=by_name)

    def _counted(self, name: str, step: Any) -> Any:
        def call(*args: Any) -> Any:
            self.calls[name] += 1
            return step(*args)

        return call
