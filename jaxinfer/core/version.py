"""The version. A test checks that pyproject.toml has the same one."""

from typing import Final

VERSION: Final = "0.1.0"
