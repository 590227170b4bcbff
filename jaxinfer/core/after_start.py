"""What a process needed to start, given back to the system when it has.

Owns: ``release_memory_of_start``.
"""

from __future__ import annotations

from jaxinfer.core.heap import release_free_heap
from jaxinfer.core.library_pages import release_library_pages


def release_memory_of_start() -> None:
    """Give back free heap, as reading a tokenizer takes three times what it keeps, and pages of
    libraries that nothing has written to.
    """
    release_free_heap()
    release_library_pages()
