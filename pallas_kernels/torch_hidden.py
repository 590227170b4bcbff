"""Triton as it is where PyTorch is not installed.

Triton knows PyTorch's tensors: the first time that it looks at a kernel's arguments it imports
PyTorch, if there is one. That takes seconds, for tensors that nobody hands it here.
Owns: ``torch_hidden``. Must not know: kernels.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from typing import Any

HIDDEN = "torch"
_CHANGING = threading.Lock()  # sys.meta_path


@contextmanager
def torch_hidden() -> Generator[None]:
    """Meanwhile this thread cannot import PyTorch, unless somebody has before; others can."""
    finder = _Hiding(threading.get_ident())
    with _CHANGING:
        # Another list, since somebody may be looking through this one.
        sys.meta_path = [finder, *sys.meta_path]
    try:
        yield
    finally:
        with _CHANGING:
            sys.meta_path = [other for other in sys.meta_path if other is not finder]


class _Hiding(MetaPathFinder):
    """Finds nothing; to one thread it says that PyTorch is not there."""

    def __init__(self, thread: int) -> None:
        self._thread = thread

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        """Raises ModuleNotFoundError."""
        del path, target
        if fullname == HIDDEN and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)
