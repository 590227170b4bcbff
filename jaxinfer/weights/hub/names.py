"""Names of models on the hub: ``ORG/NAME``, ``ORG/NAME@REVISION``, ``ORG/NAME:QUANT`` or both."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jaxinfer.core.errors import ConfigError

HUB_FORM = "ORG/NAME[@REVISION][:QUANT]"
_PART = r"[A-Za-z0-9_](?:[\w.-]*\w)?"  # neither begins nor ends with "." or "-", as the hub demands
_NAME = re.compile(
    rf"(?P<repo>{_PART}/{_PART})(?:@(?P<revision>\w[\w./+-]*))?(?::(?P<quant>\w[\w.-]*))?", re.ASCII
)
_FILES = (".gguf", ".json", ".safetensors")  # ends of paths
_MAX_LENGTH = 96  # of ORG/NAME


@dataclass(frozen=True)
class HubName:
    """A repository of the hub, a revision (None: its main branch), and a GGUF file's quantisation
    (None: a Hugging Face folder).
    """

    repo: str
    revision: str | None = None
    quant: str | None = None

    def __str__(self) -> str:
        revision = "" if self.revision is None else f"@{self.revision}"
        return f"{self.repo}{revision}{'' if self.quant is None else f':{self.quant}'}"


def parse_name(reference: str, revision: str | None = None) -> HubName | None:
    """The name that a reference is, which may be a path's as well; None if it has another form.

    ``revision`` is that of the setting with this name. Raises ``ConfigError`` if the reference has
    another one.
    """
    match = _NAME.fullmatch(reference)
    if match is None or _is_wrong(match["repo"]):
        return None
    given = match["revision"]
    if given and revision and given != revision:
        raise ConfigError(
            f"model {reference} names revision {given}, and the setting revision is {revision!r}; "
            "leave one of them out"
        )
    return HubName(match["repo"], given or revision or None, match["quant"])


def _is_wrong(repo: str) -> bool:
    is_file = repo.endswith((".git", *_FILES))
    return len(repo) > _MAX_LENGTH or "--" in repo or ".." in repo or is_file


def is_meant(reference: str) -> bool:
    """True if a reference that is no name was meant as one: an address, or one slash within."""
    if "://" in reference:
        return True
    is_path = reference.startswith(("/", ".", "~")) or reference.endswith(_FILES)
    return not is_path and reference.partition("@")[0].rstrip("/").count("/") == 1
