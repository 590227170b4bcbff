"""The cache of converted weights: entries are atomic and are read instead of the checkpoint."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType

from jaxinfer.core import stamps
from jaxinfer.core.errors import CacheError
from jaxinfer.core.progress import NoProgress
from jaxinfer.core.staging import build_once
from jaxinfer.models.base import Params
from jaxinfer.models.params import by_path
from jaxinfer.models.registry import build_model
from jaxinfer.nn.placement import default_placement
from jaxinfer.weights import converted
from jaxinfer.weights.gguf.checkpoint import GGUFCheckpoint
from jaxinfer.weights.load import load_params
from jaxinfer.weights.plan import plan_params
from jaxinfer.weights.sources import ModelSource, resolve_source
from kit.checkpoints import random_hf_tensors, tiny_llama_config, write_gguf
from kit.owners import check_that_others_are_refused

CONFIG = tiny_llama_config(num_hidden_layers=4)


@pytest.fixture
def source(tmp_path: Path) -> ModelSource:
    tensors = random_hf_tensors(build_model(CONFIG, "float32"))
    kind = GGMLQuantizationType.Q8_0
    path = write_gguf(tmp_path / "m.gguf", CONFIG, tensors, kind=kind)
    return resolve_source(str(path), cache_dir=tmp_path, progress=NoProgress())


def load(source: ModelSource, cache: Path, dtype: str = "float32") -> Params:
    model = build_model(source.hf_config, dtype)
    return load_params(
        model, source, placement=default_placement(), cache_dir=cache, seed=0, progress=NoProgress()
    )


def entries(cache: Path) -> list[Path]:
    return [path for path in (cache / "converted").iterdir() if path.is_dir()]


def assert_equal(left: Params, right: Params) -> None:
    a, b = by_path(left), by_path(right)
    assert a.keys() == b.keys()
    for path in a:
        np.testing.assert_array_equal(np.asarray(a[path]), np.asarray(b[path]))


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the groups so small that a tiny model has several."""
    monkeypatch.setattr(converted, "_GROUP_BYTES", 40_000)


@pytest.mark.usefixtures("small_groups")
def test_second_load_does_not_read_the_checkpoint(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    direct = load(replace(source, quantised=False), tmp_path / "unused")
    assert_equal(load(source, tmp_path), direct)
    (entry,) = entries(tmp_path)
    assert len(list(entry.glob("group_*"))) > 2
    monkeypatch.delattr(GGUFCheckpoint, "read")
    assert_equal(load(source, tmp_path), direct)


def test_host_arrays_are_saved(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Orbax copies a device's arrays back to the host, which has crashed on a GPU."""
    saved: list[type] = []
    save = converted._save

    def recording_save(orbax: object, folder: Path, group: dict[str, np.ndarray]) -> None:
        saved.extend(map(type, group.values()))
        save(orbax, folder, group)  # type: ignore[arg-type]

    monkeypatch.setattr(converted, "_save", recording_save)
    load(source, tmp_path)
    assert set(saved) == {np.ndarray}


def test_entries_differ_by_dtype_file_and_config(source: ModelSource, tmp_path: Path) -> None:
    load(source, tmp_path)
    load(source, tmp_path, "bfloat16")
    load(replace(source, fingerprint="another file"), tmp_path)
    longer = dict(source.hf_config) | {"max_position_embeddings": 512}
    load(replace(source, hf_config=longer), tmp_path)
    assert len(entries(tmp_path)) == 4


def test_changed_file_has_another_fingerprint(source: ModelSource, tmp_path: Path) -> None:
    path = Path(source.reference)
    before = source.fingerprint
    os.utime(path, ns=(1, 1))
    after = resolve_source(str(path), cache_dir=tmp_path, progress=NoProgress()).fingerprint
    assert before != after


def test_unwritable_cache(source: ModelSource, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot write .*converted.*JAXINFER_CACHE_DIR"):
        load(source, tmp_path / "file")


def test_failed_conversion_leaves_nothing(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise ValueError("RESOURCE_EXHAUSTED: no space left on device")

    monkeypatch.setattr(converted.ocp.Checkpointer, "save", full)
    with pytest.raises(CacheError, match="no space left on device.*make room"):
        load(source, tmp_path)
    assert list((tmp_path / "converted").iterdir()) == []


@pytest.mark.parametrize("victim", ["manifest.json", "group_0000", "group_0000/manifest.ocdbt"])
def test_damaged_entry_is_named(source: ModelSource, tmp_path: Path, victim: str) -> None:
    load(source, tmp_path)
    (entry,) = entries(tmp_path)
    path = entry / victim
    if path.is_dir():
        path.rename(path.with_name("elsewhere"))
    else:
        path.write_bytes(b"{")
    with pytest.raises(CacheError, match=rf"{entry} are damaged .*delete that folder and run"):
        load(source, tmp_path)


def test_cut_data_is_noticed(source: ModelSource, tmp_path: Path) -> None:
    load(source, tmp_path)
    (entry,) = entries(tmp_path)
    data = max((p for p in entry.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    data.write_bytes(data.read_bytes()[:-1])
    with pytest.raises(CacheError, match=f"are damaged .*{data.name} has "):
        load(source, tmp_path)


@pytest.mark.parametrize("count", [16, pytest.param(400, marks=pytest.mark.nightly)])
def test_flipped_bits_are_noticed(source: ModelSource, tmp_path: Path, count: int) -> None:
    """A flipped bit in any file is refused; one in a stamp of the manifest may change nothing."""
    whole = load(source, tmp_path)
    (entry,) = entries(tmp_path)
    files = sorted(path for path in entry.rglob("*") if path.is_file())
    for number in range(count):
        draw = random.Random(number)
        path = files[number % len(files)]
        content = path.read_bytes()
        damaged = bytearray(content)
        damaged[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        if path.name == "manifest.json":
            with suppress(CacheError):
                assert_equal(load(source, tmp_path), whole)
        else:
            words = rf"are damaged \({path.relative_to(entry)} has the SHA-256 .*delete that folder"
            with pytest.raises(CacheError, match=words):
                load(source, tmp_path)
        path.write_bytes(content)
    assert_equal(load(source, tmp_path), whole)


def test_damage_that_changes_no_stamp(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the disk itself: Orbax raises a plain ``Exception`` for data that it cannot unpack."""
    model, placement, progress = build_model(CONFIG, "float32"), default_placement(), NoProgress()
    assert source.checkpoint is not None
    plan = plan_params(model, source.checkpoint)[:1]  # Orbax leaves reads of others unawaited
    entry = tmp_path / "converted" / "entry"
    converted.convert(entry, plan, source.checkpoint, model, placement, progress)
    data = max((p for p in entry.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    zstandard = b"\x28\xb5\x2f\xfd"  # the beginning of a compressed array
    assert zstandard in data.read_bytes()
    data.write_bytes(data.read_bytes().replace(zstandard, b"none"))
    monkeypatch.setattr(converted, "is_unchanged", lambda *_: True)
    with pytest.raises(CacheError, match=rf"{entry} are damaged .*delete that folder") as caught:
        converted.restore(entry, plan, model, placement, progress)
    assert type(caught.value.__cause__) is Exception


def test_files_are_hashed_again_only_if_they_may_have_changed(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed: list[Path] = []
    monkeypatch.setattr(converted, "known", lambda path: hashed.append(path) or stamps.known(path))
    counts = []
    for settled in (10**18, 0, 0, 0):  # the files are too new for a stamp at first
        monkeypatch.setattr(stamps, "_SETTLED_NS", settled)
        load(source, tmp_path)
        counts.append(len(hashed))
    assert counts == [counts[0], *[2 * counts[0]] * 3]
    assert [path.name for path in (tmp_path / "converted").iterdir()] == [entries(tmp_path)[0].name]


def test_an_entry_that_others_may_change_is_refused(
    source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stamps, "_SETTLED_NS", 0)
    check_that_others_are_refused(lambda: load(source, tmp_path / "cache"), tmp_path / "cache")


def test_nothing_is_printed(source: ModelSource, tmp_path: Path) -> None:
    """Orbax's log lines are hidden from users. The test has its own process: logging is global."""
    code = """
import sys
from pathlib import Path
from jaxinfer.core.progress import NoProgress
from jaxinfer.models.registry import build_model
from jaxinfer.nn.placement import default_placement
from jaxinfer.weights.load import load_params
from jaxinfer.weights.plan import plan_params
from jaxinfer.weights.sources import resolve_source
cache = Path(sys.argv[2])
for _ in range(2):
    source = resolve_source(sys.argv[1], cache_dir=cache, progress=NoProgress())
    model = build_model(source.hf_config, "float32")
    where = default_placement()
    load_params(model, source, placement=where, cache_dir=cache, seed=0, progress=NoProgress())
"""
    command = [sys.executable, "-c", code, source.reference, str(tmp_path / "cache")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
    assert len(entries(tmp_path / "cache")) == 1


# Staging


def _fill(folder: Path) -> None:
    (folder / "data").write_text("whole")


def test_build_once(tmp_path: Path) -> None:
    entry = tmp_path / "a" / "entry"
    assert build_once(entry, _fill)
    assert not build_once(entry, _fill)
    assert (entry / "data").read_text() == "whole"


def test_leftover_of_a_killed_run_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "entry.partial").mkdir()
    (tmp_path / "entry.partial" / "junk").write_text("half")
    (tmp_path / "entry.lock").write_text("")
    assert build_once(tmp_path / "entry", _fill)
    assert {path.name for path in tmp_path.rglob("*")} == {"entry", "data"}


def test_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(folder: Path) -> None:
        _fill(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path / "entry", interrupted)
    assert list(tmp_path.iterdir()) == []


_BUILDER = """
import signal, sys
from pathlib import Path
from jaxinfer.core.staging import build_once

def fill(folder):
    if sys.argv[2] == "stuck":
        signal.pause()
    (folder / "data").write_text("whole")

assert build_once(Path(sys.argv[1]), fill)
"""


def test_second_process_waits_for_the_first(tmp_path: Path) -> None:
    """The first is killed while it builds; the second, which has waited, then builds the entry."""
    entry = tmp_path / "entry"
    with _builder(entry, "stuck") as first, _builder(entry, "quick") as second:
        with pytest.raises(subprocess.TimeoutExpired):
            second.wait(0.7)
        assert not entry.exists()
        first.kill()
        first.wait()
        assert second.wait(30) == 0
    assert (entry / "data").read_text() == "whole"
    assert {path.name for path in tmp_path.iterdir()} == {"entry"}


@contextmanager
def _builder(entry: Path, speed: str) -> Generator[subprocess.Popen[bytes]]:
    """A process that is building the entry, or waiting for another process that is."""
    process = subprocess.Popen([sys.executable, "-c", _BUILDER, str(entry), speed])
    try:
        while not entry.with_name("entry.partial").exists():
            assert process.poll() is None
            time.sleep(0.01)
        yield process
    finally:
        process.kill()
        process.wait()
