"""Which pages of libraries go back to the system, seen in a process of its own."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxinfer.core import library_pages
from jaxinfer.core.library_pages import release_library_pages

PROGRAM = """
from pathlib import Path
import numpy as np
from jaxinfer.core.library_pages import release_library_pages

def of_files():
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[2]) * 4096

np.linalg.inv(np.eye(3))
before = of_files()
said = release_library_pages()
after = of_files()
print(before - after, said, np.linalg.inv(2 * np.eye(3))[0, 0], of_files() - after)
"""
HEAD = "7f00{0}000-7f00{0}000 {1} 00000000 00:1f 77 {2}\nSize: 4 kB\nRss: 4 kB\nAnonymous: {3} kB\n"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_pages_of_libraries_go_back_and_come_again() -> None:
    told = subprocess.check_output([sys.executable, "-c", PROGRAM], text=True).split()
    given_back, said, result, again = (float(each) for each in told)
    assert given_back > 5_000_000  # of NumPy's and Python's own
    assert said >= given_back  # some of what counts them here has come again by then
    assert result == 0.5  # what runs finds them again
    assert 0 < again < given_back


@pytest.mark.parametrize(
    ("access", "path", "own", "goes"),
    [
        ("r-xp", "/usr/lib/libone.so.2", 0, True),
        ("r--p", "/usr/lib/_two.cpython-312.so", 0, True),
        ("r--p", "/usr/lib/libone.so.2", 4, False),  # written to before it was closed for writing
        ("rw-p", "/usr/lib/libone.so.2", 0, False),
        ("r--s", "/usr/lib/libone.so.2", 0, False),
        ("r--p", "/data/model.safetensors", 0, False),  # may have gone from there by now
        ("r--p", "/data/of.solar/model.safetensors", 0, False),
        ("rw-p", "[heap]", 4, False),
        ("r-xp", "", 4, False),  # machine code that was made here
    ],
)
def test_only_what_is_a_library_s_own(
    access: str,
    path: str,
    own: int,
    goes: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    smaps = tmp_path / "smaps"
    smaps.write_text(HEAD.format(1, "r-xp", "[vdso]", 0) + HEAD.format(3, access, path, own))
    monkeypatch.setattr(library_pages, "MAPPINGS", smaps)
    assert release_library_pages() == (4096 if goes else 0)  # of no bytes, so that nothing happens


def test_another_system_has_nothing_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library_pages, "MAPPINGS", tmp_path / "none")
    assert release_library_pages() == 0
