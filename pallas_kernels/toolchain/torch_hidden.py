"""Keeps Triton from importing PyTorch.

Triton accepts PyTorch's tensors: the first time that it looks at a kernel's arguments it imports
PyTorch, if that is installed. That takes seconds, and no kernel here is given such a tensor.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from typing import Any

HIDDEN = "torch"
_CHANGING = threading.Lock()  # held while sys.meta_path is replaced


@contextmanager
def torch_hidden() -> Generator[None]:
    """Prevent imports of PyTorch in this thread for a scope, unless it is imported already."""
    finder = _Hiding(threading.get_ident())
    with _CHANGING:
        # A new list, since another thread may be iterating over this one.
        sys.meta_path = [finder, *sys.meta_path]
    try:
        yield
    finally:
        with _CHANGING:
            sys.meta_path = [other for other in sys.meta_path if other is not finder]


class _Hiding(MetaPathFinder):
    """Finds nothing; in one thread it makes an import of PyTorch fail."""

    def __init__(self, thread: int) -> None:
        self._thread = thread

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Raises ModuleNotFoundError."""
        del path, target
        if fullname == HIDDEN and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
