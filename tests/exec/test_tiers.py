"""The connectors of the tiers: what they keep, replace, lose and refuse."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from jaxinfer.core.connector import Connector, Forms, Polled, Unit, UnitForm
from jaxinfer.core.errors import ConfigError
from jaxinfer.core.tiers import SNAPSHOTS, key_in
from jaxinfer.exec.tiers import disk as disk_module
from jaxinfer.exec.tiers import page_file
from jaxinfer.exec.tiers.chain import Chain
from jaxinfer.exec.tiers.disk import MAX_WRITES, UNITS, DiskTier
from jaxinfer.exec.tiers.disk_folder import opened
from jaxinfer.exec.tiers.host import HostTier, Slabs

PAGE = UnitForm((((4, 2), np.dtype(np.float32)), ((4,), np.dtype(np.int8))))
STATE = UnitForm((((40,), np.dtype(np.float16)),))
FORMS: Forms = {0: PAGE, 1: PAGE, SNAPSHOTS: STATE}
IDENTITY = {"model": "tiny", "dtype": "float32"}
SECONDS = 20.0


def key_of(number: int, group: int = 0) -> bytes:
    return key_in(group, number.to_bytes(16))


def unit_of(number: int, group: int = 0) -> Unit:
    """A unit whose content is a function of its number."""
    draw = np.random.default_rng(number)
    content = FORMS[group].new()
    content[:] = draw.integers(0, 100, content.size)
    return Unit(group, key_of(number, group), content)


def save(tier: Connector, number: int, group: int = 0) -> bool:
    """Save a unit as the engine does; False if the tier has no space for it."""
    unit = unit_of(number, group)
    if (memory := tier.reserve(group, unit.key)) is None:
        return False
    memory[:] = unit.content
    return tier.save(unit._replace(content=memory))


def load(tier: Connector, ticket: int, *numbers: int, group: int = 0) -> list[bool]:
    """Load units and compare them with what was saved; which of them the tier has."""
    tier.load(ticket, [key_of(number, group) for number in numbers])
    units = wait(tier, lambda polled: ticket in polled.loaded).loaded[ticket]
    for number, unit in zip(numbers, units, strict=True):
        if unit is not None:
            assert (unit.group, unit.key) == (group, key_of(number, group))
            np.testing.assert_array_equal(unit.content, unit_of(number, group).content)
    tier.finished(ticket)
    return [unit is not None for unit in units]


def wait(tier: Connector, until: object) -> Polled:
    """All changes until one of them is there."""
    whole, end = Polled(), time.monotonic() + SECONDS
    while True:
        polled = tier.poll(0.1)
        whole.added += polled.added
        whole.removed += polled.removed
        whole.saved += polled.saved
        whole.loaded |= polled.loaded
        if until(whole):  # type: ignore[operator]
            return whole
        assert time.monotonic() < end, "nothing happens"


def written(tier: DiskTier, count: int) -> None:
    """Wait until so many units have been written."""
    wait(tier, lambda polled: len(polled.added) >= count)


def disk(folder: Path, size: int = 1 << 20) -> DiskTier:
    return DiskTier(folder, size, FORMS, opened(folder, IDENTITY))


def files(folder: Path) -> list[Path]:
    return sorted((folder / UNITS).glob("??/*"))


def test_slabs_are_of_another_size_once_they_are_empty() -> None:
    slabs, draw = Slabs(100), random.Random(1)
    slabs.add(np.empty(1000, np.uint8))
    used: dict[int, int] = {}
    for _ in range(2000):
        size = draw.choice((100, 33, 20))
        offset = slabs.take(size)
        if offset is None:
            for old in draw.sample([*used], len(used) // 2):
                slabs.give_back(old, used.pop(old))
            continue
        used[offset] = size
        ends = sorted((start, start + length) for start, length in used.items())
        assert all(a[1] <= b[0] for a, b in zip(ends, ends[1:], strict=False)), "they overlap"
        assert ends[-1][1] <= 1000
    for offset, size in used.items():
        slabs.give_back(offset, size)
    assert len([slabs.take(100) for _ in range(10)]) == 10 and slabs.take(20) is None


def test_the_host_tier_replaces_what_was_used_longest_ago() -> None:
    tier = HostTier(3 * STATE.num_bytes, FORMS)
    assert [save(tier, number) for number in (1, 2, 3)] == [True] * 3
    assert not save(tier, 1), "it is there already"
    assert load(tier, 1, 2, 3) == [True, True]
    tier.load(2, [key_of(1)])
    assert save(tier, 4, SNAPSHOTS) and save(tier, 5, SNAPSHOTS)
    polled = tier.poll()
    assert polled.loaded[2][0] is not None and key_of(1) not in polled.removed
    assert {key_of(2), key_of(3)} & {*polled.removed}
    assert tier.used_bytes == sum(FORMS[255 if len(k) > 16 else 0].num_bytes for k in tier.keys)
    tier.finished(2)
    assert tier.num_pinned == 0


def test_a_host_tier_full_of_units_that_are_read_takes_no_more() -> None:
    tier = HostTier(2 * STATE.num_bytes, {SNAPSHOTS: STATE})
    assert save(tier, 1, SNAPSHOTS) and save(tier, 2, SNAPSHOTS)
    tier.load(7, [key_of(1, SNAPSHOTS), key_of(2, SNAPSHOTS)])
    assert not save(tier, 3, SNAPSHOTS)
    tier.clear(b"")
    (one, _) = tier.poll().loaded[7]
    assert one is not None and one.content.tolist() == unit_of(1, SNAPSHOTS).content.tolist()
    tier.finished(7)
    assert tier.used_bytes == 0 and save(tier, 3, SNAPSHOTS)


def test_a_disk_tier_is_read_again_by_a_later_engine(tmp_path: Path) -> None:
    first = disk(tmp_path / "tier")
    assert all(save(first, number, group) for number in (1, 2) for group in FORMS)
    written(first, 6)
    assert load(first, 1, 2, 3) == [True, False]
    first.close()
    second = disk(tmp_path / "tier")
    assert len(second.poll().added) == 6 and second.used_bytes == first.used_bytes
    for group in FORMS:
        assert load(second, group, 1, 2, 3, group=group) == [True, True, False]
    second.close()


def test_a_disk_tier_replaces_what_was_used_longest_ago(tmp_path: Path) -> None:
    size = page_file.file_size(PAGE)
    tier = disk(tmp_path, 3 * size)
    for number in (1, 2, 3):
        save(tier, number)
        written(tier, 1)
    assert load(tier, 1, 1) == [True]
    save(tier, 4)
    assert wait(tier, lambda polled: polled.added).removed == [key_of(2)]
    assert tier.used_bytes == 3 * size == sum(path.stat().st_size for path in files(tmp_path))
    tier.close()


def test_a_smaller_disk_tier_keeps_the_newest_units(tmp_path: Path) -> None:
    size = page_file.file_size(PAGE)
    tier = disk(tmp_path)
    for number in (1, 2, 3, 4):
        save(tier, number)
        written(tier, 1)
    tier.close()
    for number in (1, 2, 3, 4):
        os.utime(page_file.path_of(tmp_path / UNITS, key_of(number), b""), (number, number))
    foreign = tmp_path / UNITS / "ab" / "folder"
    foreign.mkdir(parents=True)
    tier = disk(tmp_path, 2 * size)
    polled = tier.poll()
    assert (polled.added, polled.removed) == ([key_of(3), key_of(4)], [])
    assert tier.used_bytes == 2 * size
    tier.close()
    assert sum(path.stat().st_size for path in files(tmp_path) if path.is_file()) == 2 * size
    assert foreign.is_dir()


@pytest.mark.parametrize("at", [0, 9, 13, 22, 30, 60, 90])
def test_a_flipped_byte_is_found(tmp_path: Path, at: int) -> None:
    tier = disk(tmp_path)
    save(tier, 1)
    save(tier, 2)
    written(tier, 2)
    path = page_file.path_of(tmp_path / UNITS, key_of(1), b"")
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    path.write_bytes(content)
    assert load(tier, 1, 1, 2) == [False, True]
    assert tier.match([key_of(1), key_of(2)]) == [key_of(2)] and not path.exists()
    tier.close()


def test_half_a_file_and_one_of_other_weights_are_removed(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    save(tier, 1)
    written(tier, 1)
    tier.clear(b"v" * 16)
    save(tier, 2)
    save(tier, 3)
    written(tier, 2)
    assert load(tier, 1, 1, 2, 3) == [False, True, True]
    tier.clear(b"")
    save(tier, 4)
    save(tier, 5)
    written(tier, 2)
    tier.close()
    path = page_file.path_of(tmp_path / UNITS, key_of(4), b"")
    path.write_bytes(path.read_bytes()[:-1])
    path.with_suffix(".partial").write_bytes(b"x")
    unit = unit_of(6)
    other = page_file.path_of(tmp_path / UNITS, unit.key, b"w" * 16)
    page_file.write_unit(other, unit, b"w" * 16).rename(other)
    tier = disk(tmp_path)
    assert tier.poll().added == [key_of(5)] and len(files(tmp_path)) == 1
    tier.close()


def test_a_unit_under_another_name_is_not_taken_for_it(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    save(tier, 1)
    written(tier, 1)
    tier.close()
    (path,) = files(tmp_path)
    path.rename(page_file.path_of(tmp_path / UNITS, key_of(2), b""))
    tier = disk(tmp_path)
    assert load(tier, 1, 2) == [False]
    tier.close()


def test_a_full_disk_stops_saving_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier, write = disk(tmp_path), page_file.write_unit

    def full(path: Path, unit: Unit, version: bytes) -> Path:
        if unit.key == key_of(1):
            return write(path, unit, version)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk_module, "write_unit", full)
    with tier._lock:  # pyright: ignore[reportPrivateUsage]  # so that none is written in between
        assert all([save(tier, number) for number in (1, 2, 3)])
    wait(tier, lambda polled: len(polled.saved) == 3)
    assert not save(tier, 4)
    assert load(tier, 1, 1, 2) == [True, False]
    tier.close()
    (record,) = caplog.records
    assert "saves no more pages" in record.getMessage()


def test_units_that_wait_to_be_written_are_bounded(tmp_path: Path) -> None:
    tier = disk(tmp_path)
    with tier._lock:  # pyright: ignore[reportPrivateUsage]
        found = [save(tier, number) for number in range(MAX_WRITES + 3)]
    assert sum(found) in (MAX_WRITES, MAX_WRITES + 1) and not found[-1]
    tier.close()


@pytest.mark.parametrize("name", IDENTITY)
def test_another_model_is_refused_with_the_field(tmp_path: Path, name: str) -> None:
    opened(tmp_path, IDENTITY).close()
    with pytest.raises(ConfigError, match=f"pages of {name} '{IDENTITY[name]}'.*'other'"):
        opened(tmp_path, {**IDENTITY, name: "other"})
    opened(tmp_path, IDENTITY).close()


def test_folders_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is no folder"):
        opened(tmp_path / "file", IDENTITY)
    with pytest.raises(ConfigError, match="is no folder"):
        opened(tmp_path / "file" / "below", IDENTITY)
    with opened(tmp_path / "one", IDENTITY), pytest.raises(ConfigError, match="another engine"):
        opened(tmp_path / "one", IDENTITY)
    (tmp_path / "one" / "tier.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        opened(tmp_path / "one", IDENTITY)
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(ConfigError, match="written by other users"):
        opened(tmp_path / "open", IDENTITY)


WRITER = """
import itertools, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from exec.test_tiers import disk, key_of, save
tier = disk(Path(sys.argv[1]))
for number in itertools.count():
    while not save(tier, number) and not tier.match([key_of(number)]):
        tier.poll(0.01)
    print(number, flush=True)
"""


@pytest.mark.parametrize("num_kills", [1, 8])
def test_a_kill_during_a_write_leaves_whole_units(tmp_path: Path, num_kills: int) -> None:
    draw, tests = random.Random(num_kills), str(Path(__file__).parents[1])
    found = 0
    for run in range(num_kills):
        command = [sys.executable, "-c", WRITER, str(tmp_path), tests]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(200 * run + MAX_WRITES + 20):  # at least 20 are written by the last
                process.stdout.readline()
            time.sleep(draw.uniform(0, 0.02))
            os.kill(process.pid, signal.SIGKILL)
        tier = disk(tmp_path)
        keys = tier.poll().added
        numbers = [int.from_bytes(key) for key in keys]
        assert all(load(tier, run, *numbers)) and len(numbers) >= found
        found = len(numbers)
        tier.close()
    assert found


def test_a_chain_saves_in_both_and_loads_from_both(tmp_path: Path) -> None:
    upper = HostTier(2 * STATE.num_bytes, FORMS)
    chain = Chain(upper, lower := disk(tmp_path))
    for number in range(12):
        assert save(chain, number)
        wait(chain, lambda _, n=number: lower.match([key_of(n)]))
    chain.poll()
    assert 0 < len(upper.keys) < 12 and upper.num_pinned == 0
    assert chain.match([key_of(n) for n in range(13)]) == [key_of(n) for n in range(12)]
    assert load(chain, 5, *range(13)) == [True] * 12 + [False]
    assert upper.num_pinned == 0
    chain.clear(b"")
    assert not chain.match([key_of(n) for n in range(12)])
    chain.close()
