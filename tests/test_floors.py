"""The rules of the source tree, read from the syntax alone: floors, layers, purity, size.

``docs/architecture.md`` explains the rules; each one is a function below and is itself tested on a
synthetic module that breaks it.
"""

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FLOORS = (  # lowest first; "jaxinfer" is the package's own __init__, the public face of the engine
    {"pallas_kernels"},
    {"jaxinfer.core"},
    {"jaxinfer.text", "jaxinfer.sched", "jaxinfer.nn"},
    {"jaxinfer.models"},
    {"jaxinfer.weights", "jaxinfer.exec"},
    {"jaxinfer.engine"},
    {"jaxinfer.server", "jaxinfer.rl", "jaxinfer"},
    {"jaxinfer.bench"},
    {"jaxinfer.cli"},
    {"jaxinfer.__main__", "jaxinfer.ray"},
)
LAYERS = {  # of a folder that has folders itself, lowest first; "" holds the folder's own files
    "jaxinfer.exec": ({""}, {"step"}, {"calls"}, {"compile"}, {"run"}),
    "jaxinfer.engine": (
        {""},
        {"requests"},
        {"record", "events"},
        {"loop"},
        {"start"},
        {"link"},
        {"api"},
    ),
    "jaxinfer.server": (
        {""},
        {"metrics", "http"},
        {"api"},
        {"openai"},
        {"anthropic", "ollama", "responses"},
        {"service"},
        {"document"},
        {"routes"},
    ),
}
FLOOR_OF = {folder: floor for floor, folders in enumerate(FLOORS) for folder in folders}
LAYER_OF = {
    f"{folder}.{name}".rstrip("."): layer
    for folder, order in LAYERS.items()
    for layer, names in enumerate(order)
    for name in names
}
TRITON = ("triton", "jax_triton")  # optional packages
MAX_NOTE_WORDS, MAX_NOTES_WORDS = 400, 9000  # of one file in docs/notes, and of all
MAY_ASK_FOR_DEVICES = ("jaxinfer.nn.placement", "jaxinfer.cli.doctor")  # doctor reports them
MUTABLE_CALLS = {"list", "dict", "set", "bytearray", "defaultdict", "deque", "Counter"}
MUTABLE_DISPLAYS = (ast.List, ast.Dict, ast.Set, ast.ListComp, ast.DictComp, ast.SetComp)


class Module(NamedTuple):
    """One parsed file."""

    name: str
    path: Path
    text: str
    tree: ast.Module

    @property
    def folder(self) -> str:
        """The unit that stands on a floor: ``pallas_kernels`` or ``jaxinfer.<folder>``."""
        return self.name if self.name == "jaxinfer" else folder_of(self.name)

    @property
    def package(self) -> str:
        """The folder that holds the file, however deep."""
        return self.name if self.path.stem == "__init__" else self.name.rpartition(".")[0]


def folder_of(name: str) -> str:
    parts = name.split(".")
    return parts[0] if parts[0] == "pallas_kernels" else ".".join(parts[:2])


def load(root: Path) -> dict[str, Module]:
    modules = {}
    for path in sorted(
        p for top in ("jaxinfer", "pallas_kernels") for p in root.glob(f"{top}/**/*.py")
    ):
        parts = path.relative_to(root).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        modules[name] = Module(name, path, path.read_text(), ast.parse(path.read_text()))
    return modules


@cache  # every rule looks at all of them: to walk each tree anew took 20 s
def nodes_of(tree: ast.Module) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree))


@cache
def imports_of(module: Module) -> tuple[ast.Import | ast.ImportFrom, ...]:
    nodes = nodes_of(module.tree)
    return tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom))


def imports(module: Module, modules: dict[str, Module]) -> Iterator[tuple[int, str]]:
    """(line, imported module) of every import, also inside functions and ``if TYPE_CHECKING``."""
    for node in imports_of(module):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        else:
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield node.lineno, full if full in modules or not node.module else base


def dotted(node: ast.Attribute) -> str:
    """``a.b`` of an attribute of a plain name, and "" of others."""
    return f"{node.value.id}.{node.attr}" if isinstance(node.value, ast.Name) else ""


def floors(module: Module, modules: dict[str, Module]) -> Iterator[tuple[int, str]]:
    if module.folder not in FLOOR_OF:
        yield 1, f"{module.folder} stands on no floor"
        return
    for line, target in imports(module, modules):
        if target.startswith("."):
            yield line, "relative import"
        elif target.split(".")[0] in ("jaxinfer", "pallas_kernels"):
            folder = target if target == "jaxinfer" else folder_of(target)
            if target not in modules:
                yield line, f"imports {target}, which does not exist"
            elif folder != module.folder and FLOOR_OF[folder] >= FLOOR_OF[module.folder]:
                yield line, f"imports {target}, which is not on a lower floor"


def layers(module: Module, modules: dict[str, Module]) -> Iterator[tuple[int, str]]:
    """The floors within a folder of ``LAYERS``."""
    if module.folder not in LAYERS:
        return
    if module.package not in LAYER_OF:
        yield 1, f"{module.package} is no layer of {module.folder}"
        return
    for line, target in imports(module, modules):
        package = modules[target].package if target in modules else ""
        inside = folder_of(package) == module.folder and package in LAYER_OF
        if inside and package != module.package and LAYER_OF[package] >= LAYER_OF[module.package]:
            yield line, f"imports {target}, which is not on a lower layer"


def cycles(module: Module, modules: dict[str, Module]) -> Iterator[tuple[int, str]]:
    """A matter of the whole tree, so it is looked at once, with the first module."""
    if module.name != min(modules):
        return
    graph = {m.name: {t for _, t in imports(m, modules) if t in modules} for m in modules.values()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield 1, "import cycle " + " -> ".join(error.args[1])


def only_triton(module: Module, modules: dict[str, Module]) -> bool:
    """True if a file is imported, and only by files that import Triton themselves.

    Those are under the same rule, so a ``triton.py`` stands at the end; nothing else may be in the
    way of an installation without Triton.
    """
    targets = ({target for _, target in imports(other, modules)} for other in modules.values())
    users = [found for found in targets if module.name in found]
    return bool(users) and all(
        any(target.split(".")[0] in TRITON for target in found) for found in users
    )


def libraries(module: Module, modules: dict[str, Module]) -> Iterator[tuple[int, str]]:
    for line, target in imports(module, modules):
        top = target.split(".")[0]
        if "jax._src" in target or target.startswith("jaxlib"):
            yield line, f"imports {target}, which is private to JAX"
        if top in ("jax", "flax") and module.folder in ("jaxinfer.core", "jaxinfer.sched"):
            yield line, f"{module.folder} imports {target}"
        if top in TRITON and not (module.path.name == "triton.py" or only_triton(module, modules)):
            yield line, f"imports {target} outside a triton.py file and its parts"
        if top in ("torch", "transformers"):
            yield line, f"imports {target}"
    for node in nodes_of(module.tree):
        if isinstance(node, ast.Attribute) and dotted(node) == "jax._src":
            yield node.lineno, "reaches into jax._src"


def module_state(module: Module, modules: dict[str, Module]) -> Iterator[tuple[int, str]]:
    for node in module.tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if ast.unparse(target) == "__all__":  # read by tools only
                continue
            value = node.value
            called = ast.unparse(value.func).split(".")[-1] if isinstance(value, ast.Call) else ""
            if isinstance(value, MUTABLE_DISPLAYS) or called in MUTABLE_CALLS:
                yield (
                    node.lineno,
                    "mutable module state; use a tuple, frozenset or MappingProxyType",
                )
    for node in nodes_of(module.tree):
        if isinstance(node, ast.Global):
            yield node.lineno, "rebinds a global"


def environment(module: Module, modules: dict[str, Module]) -> Iterator[tuple[int, str]]:
    if module.folder == "jaxinfer.cli" or module.name == "jaxinfer.core.config":
        return
    for node in nodes_of(module.tree):
        if isinstance(node, ast.Attribute):
            used = {dotted(node)}
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            used = {f"os.{alias.name}" for alias in node.names}
        else:
            continue
        if used & {"os.environ", "os.getenv", "os.putenv"}:
            yield node.lineno, "reads the environment"


def devices(module: Module, modules: dict[str, Module]) -> Iterator[tuple[int, str]]:
    """An engine's devices are chosen in one place, and every array is put where that says."""
    if module.folder == "pallas_kernels" or module.name in MAY_ASK_FOR_DEVICES:
        return
    for node in nodes_of(module.tree):
        if isinstance(node, ast.ImportFrom) and node.module == "jax":
            used = {f"jax.{alias.name}" for alias in node.names}
        else:
            used = {dotted(node)} if isinstance(node, ast.Attribute) else set()
        if used & {"jax.devices", "jax.local_devices"}:
            yield node.lineno, "asks JAX for its devices; use the placement"
        puts = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("device_put")
        if puts and len(node.args) + len(node.keywords) < 2:
            yield node.lineno, "device_put without a device or sharding"


def spec_types(modules: dict[str, Module]) -> set[str]:
    """The names of the types of specs: the classes of ``nn`` that end so."""
    classes = (
        node.name
        for module in modules.values()
        if module.folder == "jaxinfer.nn"
        for node in module.tree.body
        if isinstance(node, ast.ClassDef)
    )
    return {name for name in classes if name.endswith(("Config", "Spec"))}


def names_in(nodes: list[ast.expr]) -> set[str]:
    parts = [part for node in nodes for part in ast.walk(node)]
    names = {part.id for part in parts if isinstance(part, ast.Name)}
    return names | {part.attr for part in parts if isinstance(part, ast.Attribute)}


def specs(module: Module, modules: dict[str, Module]) -> Iterator[tuple[int, str]]:
    """A spec says of its layer what others need; its type matters in ``nn`` and ``models`` only."""
    if module.folder in ("jaxinfer.nn", "jaxinfer.models"):
        return
    types = spec_types(modules)
    for node in nodes_of(module.tree):
        asked: set[str] = set()
        if isinstance(node, ast.Call) and names_in([node.func]) & {"isinstance", "issubclass"}:
            asked = names_in(node.args[1:])
        elif isinstance(node, ast.MatchClass):
            asked = names_in([node.cls])
        elif isinstance(node, ast.Compare):
            compared = names_in([node.left, *node.comparators])
            asked = compared if "type" in compared else set()
        if found := asked & types:
            yield node.lineno, f"asks for the type {min(found)}; use a member of the spec"


def size(module: Module, modules: dict[str, Module]) -> Iterator[tuple[int, str]]:
    cap = 600 if module.folder == "pallas_kernels" else 400
    lines = module.text.count("\n")
    if lines > cap:
        yield lines, f"{lines} lines; at most {cap}"
    if not ast.get_docstring(module.tree):
        yield 1, "no docstring"


RULES = (floors, layers, cycles, libraries, module_state, environment, devices, specs, size)


@cache
def tree() -> dict[str, Module]:
    """This repository."""
    return load(ROOT)


def broken(rule, modules: dict[str, Module]) -> list[str]:
    return [
        f"{module.name}:{line}: {text}"
        for module in modules.values()
        for line, text in rule(module, modules)
    ]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_tree_obeys(rule) -> None:
    assert broken(rule, tree()) == []


def test_notes_are_short() -> None:
    """Samples stay in bench/results, and the course of the work in git: see docs/style.md."""
    words = {path.name: len(path.read_text().split()) for path in ROOT.glob("docs/notes/*.md")}
    assert [name for name, count in words.items() if count > MAX_NOTE_WORDS] == []
    assert sum(words.values()) <= MAX_NOTES_WORDS


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (floors, "jaxinfer/sched/a.py", "import jaxinfer.exec.b"),
        (floors, "jaxinfer/sched/a.py", "from jaxinfer.nn import b"),
        (floors, "jaxinfer/weights/a.py", "from jaxinfer.exec.b import f"),
        (floors, "jaxinfer/core/a.py", "if TYPE_CHECKING:\n    from jaxinfer.nn.b import f"),
        (floors, "jaxinfer/engine/a.py", "def f():\n    from jaxinfer import LLM"),
        (floors, "pallas_kernels/a.py", "import jaxinfer.core.b"),
        (floors, "jaxinfer/core/a.py", "from . import b"),
        (floors, "jaxinfer/core/a.py", "import jaxinfer.core.missing"),
        (floors, "jaxinfer/extra/a.py", ""),
        (floors, "jaxinfer/cli/a.py", "import jaxinfer.__main__"),
        (layers, "jaxinfer/engine/loop/a.py", "from jaxinfer.engine.api.b import f"),
        (layers, "jaxinfer/engine/a.py", "def f():\n    from jaxinfer.engine.api import b"),
        (layers, "jaxinfer/engine/extra/a.py", ""),
        (layers, "jaxinfer/server/http/a.py", "import jaxinfer.server.metrics.b"),
        (cycles, "jaxinfer/core/b.py", "import jaxinfer.core.c"),
        (libraries, "jaxinfer/nn/a.py", "from jax._src import core"),
        (libraries, "jaxinfer/nn/a.py", "import jax\njax._src.core.f()"),
        (libraries, "jaxinfer/sched/a.py", "import jax.numpy as jnp"),
        (libraries, "pallas_kernels/a.py", "import triton.language as tl"),
        (libraries, "pallas_kernels/b.py", "from pallas_kernels.part import f"),
        (libraries, "jaxinfer/weights/a.py", "import torch"),
        (module_state, "jaxinfer/nn/a.py", "CACHE: dict[str, int] = {}"),
        (module_state, "jaxinfer/nn/a.py", "seen = collections.defaultdict(int)"),
        (module_state, "jaxinfer/nn/a.py", "def f():\n    global x"),
        (environment, "jaxinfer/core/a.py", "import os\nx = os.environ['HOME']"),
        (environment, "jaxinfer/nn/a.py", "from os import getenv"),
        (devices, "jaxinfer/weights/a.py", "import jax\nx = jax.devices()"),
        (devices, "jaxinfer/engine/start/a.py", "from jax import local_devices"),
        (devices, "jaxinfer/nn/a.py", "import jax\nx = jax.device_put(1)"),
        (specs, "jaxinfer/exec/a.py", "f = lambda x: isinstance(x, GqaSpec)"),
        (specs, "jaxinfer/exec/a.py", "f = lambda x: isinstance(x, (int, b.GqaSpec))"),
        (specs, "jaxinfer/cli/a.py", "f = lambda x: issubclass(x, int | GqaSpec)"),
        (specs, "jaxinfer/engine/start/a.py", "f = lambda x: type(x) is GqaSpec"),
        (specs, "jaxinfer/exec/a.py", "match f():\n    case GqaSpec():\n        pass"),
        (size, "jaxinfer/nn/a.py", "x = 1\n" * 400),
        (size, "pallas_kernels/a.py", "x = 1\n" * 600),
    ],
)
def test_rule_can_fail(rule, path: str, source: str, tmp_path: Path) -> None:
    texts = {
        "jaxinfer/__init__.py": "",
        "jaxinfer/core/b.py": "",
        "jaxinfer/core/c.py": "import jaxinfer.core.b",
        "jaxinfer/nn/b.py": "import jax\nfrom jaxinfer.core.b import f\nclass GqaSpec: ...",
        "jaxinfer/models/b.py": "f = lambda x: isinstance(x, GqaSpec)",
        "jaxinfer/exec/b.py": "from jaxinfer.nn import b\nf = lambda x: isinstance(x, (b.f, int))",
        "jaxinfer/engine/api/b.py": "from jaxinfer.engine.link.b import f",
        "jaxinfer/engine/link/b.py": "",
        "jaxinfer/server/metrics/b.py": "import jaxinfer.engine.api.b",
        "jaxinfer/__main__.py": "from jaxinfer.cli.b import f",
        "jaxinfer/cli/b.py": "",
        "pallas_kernels/part.py": "import triton",
        "pallas_kernels/triton.py": "import jax_triton\nfrom pallas_kernels.part import f",
    }
    for name, text in texts.items():
        write(tmp_path / name, text)
    assert [other.__name__ for other in RULES if broken(other, load(tmp_path))] == []
    write(tmp_path / path, source)
    assert [other for other in RULES if broken(other, load(tmp_path))] == [rule]


def write(path: Path, source: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'"""Docstring."""\n{source}\n')
