"""The version of the native library: a hash of its sources, which ``setup.py`` builds into it.

``setup.py`` executes this file by its path, so it imports only the standard library.
"""

import hashlib
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
_SUFFIXES = (".cc", ".h", ".inc")


def version(folder: Path = SOURCES) -> str:
    """A hash of the names and contents of all sources in the folder."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in _SUFFIXES):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]
