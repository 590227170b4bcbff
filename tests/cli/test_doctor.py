"""``jaxinfer doctor``: a healthy machine passes, each broken part is named and fails."""

import dataclasses
import json
from pathlib import Path

import jax
import pytest
from click.testing import CliRunner, Result

from jaxinfer.cli import doctor
from jaxinfer.cli.main import cli
from pallas_kernels.harness import registry
from pallas_kernels.harness.registry import Impl
from pallas_kernels.native import library


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("JAXINFER_CACHE_DIR", str(folder))
    return folder


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "all_ops", tuple)


def run() -> tuple[Result, dict[str, dict[str, str]]]:
    result = CliRunner().invoke(cli, ["doctor", "--json"])
    report = json.loads(result.stdout)
    assert report["ok"] == (result.exit_code == 0)
    return result, {finding["name"]: finding for finding in report["findings"]}


def test_healthy(cache: Path) -> None:
    result, findings = run()
    assert result.exit_code == 0
    assert findings["python"]["section"] == "interpreter"
    assert findings["jax"]["detail"] == jax.__version__
    assert findings["cpu:0"]["section"] == "devices"
    for op in registry.all_ops():
        assert findings[f"{op.name}/xla"]["status"] == "ok"
        native = findings.get(f"{op.name}/native")
        if native is not None and library.variants():
            assert native["status"] == "ok", native
    assert findings[str(cache)]["detail"] == "not there yet; writable"


def test_the_native_library(monkeypatch: pytest.MonkeyPatch, without_kernels: None) -> None:
    if found := library.variants():
        _, findings = run()
        assert findings["native library"]["detail"] == f"uses {found[0]}"
    monkeypatch.setattr(library, "variants", lambda: ())
    result, findings = run()
    assert result.exit_code == 0
    assert findings["native library"]["status"] == "absent"
    assert "is not built" in findings["native library"]["detail"]


def only_native(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Leave the native kernels alone; their names in the report."""
    ops = [
        dataclasses.replace(op, impls=impls)
        for op in registry.all_ops()
        if (impls := tuple(impl for impl in op.impls if impl.name == "native"))
    ]
    monkeypatch.setattr(registry, "all_ops", lambda: tuple(ops))
    return [f"{op.name}/native" for op in ops]


def test_without_the_native_library_that_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "library", lambda: None)
    names = only_native(monkeypatch)
    _, findings = run()
    assert {"quantised_gemm/native", "experts/native", "residual_norm/native"} <= {*names}
    assert {findings[name]["detail"] for name in names} == {library.MISSING}


def test_a_broken_native_library_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise library.BrokenLibrary("the native library is cut off")

    monkeypatch.setattr(library, "library", refuse)
    whole = [op for op in registry.all_ops() if op.name in ("quantised_gemm", "residual_norm")]
    monkeypatch.setattr(registry, "all_ops", lambda: tuple(whole))
    result, findings = run()
    assert result.exit_code == 1
    broken = [name for name, one in findings.items() if one["status"] == "broken"]
    assert broken == ["native library"]
    assert findings["native library"]["detail"] == "the native library is cut off"
    for op in whole:
        assert findings[f"{op.name}/native"]["detail"] == "the native library is broken"
        assert findings[f"{op.name}/xla"]["status"] == "ok"
    assert findings["quantised_gemm/tiled"]["detail"] == "it runs on gpu, not on cpu"


def test_text(without_kernels: None) -> None:
    result = CliRunner().invoke(cli, ["doctor"])
    assert result.exit_code == 0
    verdict, empty, *lines = result.stdout.splitlines()
    assert verdict == "nothing broken: jaxinfer runs here on cpu:0" and not empty
    assert lines[0] == "interpreter" and lines[1].startswith("  ok      python ")


def test_the_verdict_names_what_is_broken_and_absent_kernels_take_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    op = registry.all_ops()[0]
    impls = (*(Impl(name, op.impls[-1].fn, platforms=("mars",)) for name in "ab"), op.impls[-1])
    monkeypatch.setattr(registry, "all_ops", lambda: (dataclasses.replace(op, impls=impls),))
    monkeypatch.setattr(doctor, "_version", lambda package: None if package == "flax" else "1.0")
    result = CliRunner().invoke(cli, ["doctor"])
    assert result.exit_code == 1
    assert result.stdout.startswith("1 broken: flax\n\ninterpreter\n")
    assert f"  absent  for other devices: {op.name}/a, {op.name}/b\n" in result.stdout
    assert "mars" not in result.stdout


def test_cache_sizes(cache: Path, without_kernels: None) -> None:
    (cache / "models" / "a").mkdir(parents=True)
    (cache / "models" / "a" / "weights").write_bytes(bytes(1500))
    _, findings = run()
    assert findings[str(cache)]["detail"] == "1.5 kB; writable"
    assert findings[str(cache / "models")]["detail"] == "1.5 kB"


def test_a_cache_that_others_may_write(cache: Path, without_kernels: None) -> None:
    (cache / "models").mkdir(parents=True)
    (cache / "models").chmod(0o777)
    result, findings = run()
    assert result.exit_code == 1
    assert findings[str(cache)]["status"] == "broken"
    assert "models may be written by other users (mode 777)" in findings[str(cache)]["detail"]


def test_unwritable_cache(cache: Path, without_kernels: None) -> None:
    cache.write_text("a file where the folder should be")
    result, findings = run()
    assert result.exit_code == 1
    assert findings[str(cache)]["status"] == "broken"
    assert "set JAXINFER_CACHE_DIR" in findings[str(cache)]["detail"]


def test_unusable_cache_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, without_kernels: None
) -> None:
    folder = tmp_path / ("c" * 300)
    monkeypatch.setenv("JAXINFER_CACHE_DIR", str(folder))
    result, findings = run()
    assert result.exit_code == 1
    assert findings[str(folder)]["status"] == "broken"
    assert "File name too long" in findings[str(folder)]["detail"]


def test_cache_in_the_home_of_an_unknown_user(
    monkeypatch: pytest.MonkeyPatch, without_kernels: None
) -> None:
    monkeypatch.setenv("JAXINFER_CACHE_DIR", "~nobody-of-that-name/cache")
    result, findings = run()
    assert result.exit_code == 1
    assert "cannot be found; set JAXINFER_CACHE_DIR" in findings["folder"]["detail"]


def test_missing_package(monkeypatch: pytest.MonkeyPatch, without_kernels: None) -> None:
    monkeypatch.setattr(doctor, "_version", lambda package: None if package == "flax" else "1.0")
    result, findings = run()
    assert result.exit_code == 1
    assert findings["flax"]["status"] == "broken"


def test_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("Unable to initialize backend 'cuda'")

    monkeypatch.setattr(jax, "devices", fail)
    result, findings = run()
    assert result.exit_code == 1
    assert findings["jax"]["status"] == "broken"
    assert "cuda" in findings["jax"]["detail"]


def test_kernel_that_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    op = registry.all_ops()[0]
    right = op.impls[-1]

    def doubled(*args: jax.Array, **static: object) -> object:
        return jax.tree.map(lambda x: 2 * x, right.fn(*args, **static))

    elsewhere = Impl("elsewhere", right.fn, platforms=("mars",))
    impls = (Impl("doubled", doubled), elsewhere)
    monkeypatch.setattr(registry, "all_ops", lambda: (dataclasses.replace(op, impls=impls),))
    result, findings = run()
    assert result.exit_code == 1
    assert findings[f"{op.name}/doubled"]["status"] == "broken"
    assert findings[f"{op.name}/elsewhere"]["detail"] == "it runs on mars, not on cpu"


def test_op_without_any_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    op = registry.all_ops()[0]
    impls = (Impl("elsewhere", op.impls[-1].fn, platforms=("mars",)),)
    monkeypatch.setattr(registry, "all_ops", lambda: (dataclasses.replace(op, impls=impls),))
    result, findings = run()
    assert result.exit_code == 1
    assert findings[op.name]["status"] == "broken"
