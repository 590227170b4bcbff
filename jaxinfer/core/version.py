"""The version, for every floor. pyproject.toml has it too; a test holds them equal."""

from typing import Final

VERSION: Final = "0.1.0"
