"""llguidance, an optional package."""

from __future__ import annotations

from types import ModuleType

from jaxinfer.core.errors import RequestError
from jaxinfer.core.structured import FIELD


def load_llguidance() -> ModuleType:
    """The library, imported when the first form needs it; ``RequestError`` if it is missing."""
    try:
        import llguidance
    except ImportError:
        raise RequestError(
            f"{FIELD} needs the package llguidance, which is not installed on this machine; "
            "install it with pip install 'llguidance>=1.9,<2'"
        ) from None
    return llguidance
