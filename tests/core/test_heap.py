"""What the C heap gives back, seen in a process of its own."""

import subprocess
import sys

import pytest

# 100 bytes are Python's own small objects; 4,000 come from the C heap, and one keeps its top in use
PROGRAM = """
from pathlib import Path
from jaxinfer.core.heap import release_free_heap

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

taken = [bytes([index % 256]) * 4000 for index in range(10_000)]
last = taken.pop()
before = resident()
del taken
kept = resident()
release_free_heap()
print(before - kept, kept - resident(), len(last))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_free_memory_goes_back_to_the_system() -> None:
    told = subprocess.check_output([sys.executable, "-c", PROGRAM], text=True)
    by_itself, released, _ = map(int, told.split())
    assert by_itself < 4_000_000  # of 40 MB: glibc keeps what lies below a block in use
    assert released > 30_000_000
