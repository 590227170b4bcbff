"""The garbage collector's settings; memory returned to the system, measured in a child process."""

import gc
import mmap
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.core import host_memory
from jaxinfer.core.host_memory import (
    NEVER,
    full_collections_deferred,
    gc_paused,
    release_library_pages,
    release_zeros,
)
from kit.residency import resident_pages


@pytest.mark.parametrize("enabled", [True, False])
def test_gc_is_paused_and_its_state_restored(enabled: bool) -> None:
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        with pytest.raises(KeyError), gc_paused():
            assert not gc.isenabled()
            raise KeyError
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_overlapping_deferrals_of_full_collections_restore_the_threshold() -> None:
    before = gc.get_threshold()
    first, second = full_collections_deferred(), full_collections_deferred()
    with pytest.raises(KeyError), first:
        second.__enter__()
        assert gc.get_threshold() == (*before[:2], NEVER)
        raise KeyError
    second.__exit__(None, None, None)  # it began later and ends later
    assert gc.get_threshold() == before


# objects of 100 bytes come from Python's own pools, of 4,000 from the C heap; the last one stays in
# use, so that glibc cannot shrink the heap by itself
HEAP_PROGRAM = """
from pathlib import Path
from jaxinfer.core.host_memory import release_free_heap

def test_objects_of_the_start_are_not_scanned_and_new_ones_seldom() -> None:
    before, made = gc.get_threshold(), [[number] for number in range(1000)]
    count = gc.get_freeze_count()
    try:
        collect_seldom()
        assert gc.get_freeze_count() >= count + len(made)
        assert gc.get_threshold() == (YOUNG_OBJECTS, *before[1:]) and before[0] < YOUNG_OBJECTS
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

objects = [bytes([index % 256]) * 4000 for index in range(10_000)]
last = objects.pop()
before = resident()
del objects
freed = resident()
release_free_heap()
print(before - freed, freed - resident(), len(last))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_free_heap_is_returned_to_the_system() -> None:
    output = subprocess.check_output([sys.executable, "-c", HEAP_PROGRAM], text=True)
    by_itself, released, _ = map(int, output.split())
    assert by_itself < 4_000_000  # of 40 MB: glibc keeps free memory below a block in use
    assert released > 30_000_000


@pytest.mark.skipif(sys.platform != "linux", reason="pages come back zeroed on Linux")
def test_zeros_are_released_without_their_neighbours() -> None:
    pages = 16
    memory = np.full(pages * mmap.PAGESIZE, 7, np.uint8)
    start, size = 3, memory.size - 8  # neither begins nor ends with an OS page
    memory[start : start + size] = 0
    release_zeros(memory.ctypes.data + start, size)
    assert resident_pages(memory.ctypes.data, memory.size) <= 3
    assert not memory[start : start + size].any()
    assert (memory[:start] == 7).all()
    assert (memory[start + size :] == 7).all()


def test_less_than_an_os_page_is_kept() -> None:
    memory = np.zeros(100, np.uint8)
    release_zeros(memory.ctypes.data, memory.size)
    assert not memory.any()


LIBRARY_PROGRAM = """
from pathlib import Path
import numpy as np
from jaxinfer.core.host_memory import release_library_pages

def resident_of_files():
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[2]) * 4096

np.linalg.inv(np.eye(3))
before = resident_of_files()
reported = release_library_pages()
after = resident_of_files()
print(before - after, reported, np.linalg.inv(2 * np.eye(3))[0, 0], resident_of_files() - after)
"""
SMAPS = (
    "7f00{0}000-7f00{0}000 {1} 00000000 00:1f 77 {2}\nSize: 4 kB\nRss: 4 kB\nAnonymous: {3} kB\n"
)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_library_pages_are_released_and_read_again() -> None:
    output = subprocess.check_output([sys.executable, "-c", LIBRARY_PROGRAM], text=True)
    released, reported, result, read_again = map(float, output.split())
    assert released > 5_000_000  # of NumPy's and Python's libraries
    assert reported >= released  # measuring has read some pages again
    assert result == 0.5  # released code still runs
    assert 0 < read_again < released


@pytest.mark.parametrize(
    ("access", "path", "anonymous", "released"),
    [
        ("r-xp", "/usr/lib/libone.so.2", 0, True),
        ("r--p", "/usr/lib/_two.cpython-312.so", 0, True),
        ("r--p", "/usr/lib/libone.so.2", 4, False),  # was written to while it was writable
        ("rw-p", "/usr/lib/libone.so.2", 0, False),
        ("r--s", "/usr/lib/libone.so.2", 0, False),
        ("r--p", "/data/model.safetensors", 0, False),  # may have been unmapped
        ("r--p", "/data/of.solar/model.safetensors", 0, False),
        ("rw-p", "[heap]", 4, False),
        ("r-xp", "", 4, False),  # machine code that a compiler wrote into memory
    ],
)
def test_only_clean_pages_of_libraries_are_released(
    access: str,
    path: str,
    anonymous: int,
    released: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    smaps = tmp_path / "smaps"  # its mappings are empty, so that madvise has no effect
    smaps.write_text(
        SMAPS.format(1, "r-xp", "[vdso]", 0) + SMAPS.format(3, access, path, anonymous)
    )
    monkeypatch.setattr(host_memory, "MAPPINGS", smaps)
    assert release_library_pages() == (4096 if released else 0)


def test_without_smaps_nothing_is_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "MAPPINGS", tmp_path / "none")
    assert release_library_pages() == 0
