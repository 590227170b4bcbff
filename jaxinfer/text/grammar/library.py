"""llguidance, an optional package."""

from __future__ import annotations

from types import ModuleType

from jaxinfer.core.errors import RequestError
from jaxinfer.core.structured import FIELD


def load_llguidance() -> ModuleType:
    """The library, an optional extra; raises ``RequestError`` if it is not installed."""
    try:
        import llguidance
    except ImportError:
        raise RequestError(
            f"{FIELD} needs the package llguidance, which is not installed on this machine; "
            "install jaxinfer with the extra 'structured'"
        ) from None
    return llguidance
