"""The fingerprint of executables: the fields on which they depend, to check if a bundle fits."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from importlib.util import resolve_name
from pathlib import Path

import jax
import msgspec

from jaxinfer.core.config import compiler_environment
from jaxinfer.core.limits import Limits
from jaxinfer.exec.compile.program import Program
from jaxinfer.exec.step.drafts import Drafter
from jaxinfer.models.base import Model, ModelFamily
from jaxinfer.nn.decoder_config import LayerSpec
from jaxinfer.nn.placement import Placement
from pallas_kernels.harness.pins import Pins
from pallas_kernels.native.library import variants

# Folders of jaxinfer that every step is traced from. Of ``models``, a step is traced from the
# modules of its own family: see ``family_digest``.
TRACED_FOLDERS = ("core", "exec", "nn")
MODELS = "jaxinfer.models"
# the fields of Limits on which shapes depend; only the scheduler uses the others
SHAPING_LIMITS = ("page_size", "max_num_seqs", "max_model_len")
KERNEL_COMPILERS = ("triton", "jax-triton")  # packages that compile kernels for GPUs
LONGEST_SHOWN = 60  # characters of a value in a message
ABSENT = "not set"


class Fingerprint(msgspec.Struct, frozen=True):
    """Everything on which executables depend, as text by field. Equal ones can share a bundle."""

    machine: dict[str, str]
    model: dict[str, str]
    limits: dict[str, str]
    kernels: dict[str, str]

    @classmethod
    def of(cls, program: Program) -> Fingerprint:
        """The fingerprint of a program's executables on this machine."""
        return cls(
            of_machine(program.placement),
            of_model(program.model) | of_drafter(program.drafter),
            of_limits(program.limits),
            of_pins(program.pins),
        )

    def without_buckets(self) -> Fingerprint:
        """The facts that engines share if they differ only in their buckets."""
        limits = {name: value for name, value in self.limits.items() if name != "buckets"}
        return msgspec.structs.replace(self, limits=limits)

    def digest(self) -> str:
        """A hash of all fields, which names the folder of the executables."""
        text = json.dumps(msgspec.to_builtins(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]


def differences(
    bundle: Mapping[str, str],
    here: Mapping[str, str],
    places: tuple[str, str] = ("in the bundle", "here"),
) -> dict[str, str]:
    """A sentence for each field that differs, by its name, in the order of ``here``.

    ``places``: the words for where each of the two is.
    """
    found: dict[str, str] = {}
    for name in dict.fromkeys((*here, *bundle)):
        made, own = bundle.get(name, ABSENT), here.get(name, ABSENT)
        if made != own:
            found[name] = f"{name} is {_short(made)} {places[0]} and {_short(own)} {places[1]}"
    return found


def of_machine(placement: Placement) -> dict[str, str]:
    """The fields of this installation and the devices of an engine."""
    device = placement.device
    compilers = {name: _version(name) for name in KERNEL_COMPILERS}
    native = " ".join(variants()[:1]) or ABSENT
    host = {"host CPU": _host_cpu(), "native library": native}
    backend = host if device.platform == "cpu" else compilers
    return {
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "flax": version("flax"),
        "platform": device.client.platform_version,  # on a GPU: the CUDA plugin and driver
        "device": f"{device.platform} {device.device_kind}{_numbers(placement)}",
        **backend,
        "enable_x64": str(jax.config.jax_enable_x64),  # type: ignore[attr-defined]
        "matmul_precision": str(jax.config.jax_default_matmul_precision),  # type: ignore[attr-defined]
        **compiler_environment(),
        "sources": source_digest(),
    }


def _numbers(placement: Placement) -> str:
    """The number of devices, if several, and their ids, if they are not the first of the process:
    a saved executable names its devices.
    """
    ids = [device.id for device in placement.devices]
    count = f" x{len(ids)}" if len(ids) > 1 else ""
    if placement.num_hosts > 1:
        count += f" of {placement.num_hosts} hosts"
    return count if ids == [*range(len(ids))] else f"{count} with id {' '.join(map(str, ids))}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ABSENT


def of_model(model: Model) -> dict[str, str]:
    """The family, its sources and calls, every field of the config, forms of quantised weights."""
    config = model.config
    values = {field.name: str(getattr(config, field.name)) for field in fields(config)}
    values |= _of_layers(config.layers)
    forms: dict[str, list[str]] = {}
    for name, form in model.forms:
        forms.setdefault(f"{form} of {form.scale_dtype}", []).append(name)
    weights = {f"weights {form}": " ".join(names) for form, names in forms.items()}
    sources = family_digest(family_module(model.family))
    calls = {f"call {c.name}": family_digest(c.function.__module__) for c in model.family.calls}
    return {"family": model.family.name, "family sources": sources, **values, **weights, **calls}


def _of_layers(layers: Sequence[LayerSpec]) -> dict[str, str]:
    """The kind of each layer, by number, and for each field its values in the kinds."""
    kinds = list(dict.fromkeys(layers))
    found: dict[str, list[str]] = {"norms": [kind.norms for kind in kinds]}
    for kind in kinds:
        for part, spec in (("mixer", kind.mixer), ("ffn", kind.ffn)):
            found.setdefault(part, []).append(type(spec).__name__)
            for name, value in vars(spec).items():
                found.setdefault(f"{part}.{name}", []).append(str(value))
    values = {
        name: each[0] if len(set(each)) == 1 else " ".join(each) for name, each in found.items()
    }
    return {"layers": " ".join(str(kinds.index(layer)) for layer in layers), **values}


def of_drafter(drafter: Drafter | None) -> dict[str, str]:
    """The name, sources and shapes of a drafter."""
    if drafter is None:
        return {}
    shapes = (f"{leaf.dtype}{list(leaf.shape)}" for leaf in drafter.weights())
    return {
        "drafter": f"{drafter.name} of {drafter.count} tokens",
        "drafter sources": family_digest(drafter.propose.__module__),
        "drafter arrays": " ".join((*shapes, str(drafter.state))),
    }


def of_limits(limits: Limits) -> dict[str, str]:
    """The sizes on which shapes depend, and what the steps make of hidden states."""
    values = {"num_pages": " ".join(map(str, limits.num_pages))}  # of each pool
    values |= {name: str(getattr(limits, name)) for name in SHAPING_LIMITS}
    if limits.num_snapshots:
        values["num_snapshots"] = str(limits.num_snapshots)
    if limits.points:
        values["tap_points"] = " ".join(point.name for point in limits.points)
    if limits.pooling:
        values["pooling"] = limits.pooling
    return values | {"buckets": " ".join(bucket.name for bucket in limits.buckets)}


def of_pins(pins: Pins) -> dict[str, str]:
    """The kernels whose implementation is pinned, and whether modules keep a token's bits."""
    invariant = {"batch_invariant": "on"} if pins.invariant else {}
    return {f"kernel {op}": impl for op, impl in pins.pairs} | invariant


def _short(value: str) -> str:
    return value if len(value) <= LONGEST_SHOWN else f"{value[:LONGEST_SHOWN]}..."


def _host_cpu() -> str:
    """The inputs of XLA's CPU code generation: architecture, features and number of threads."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        features = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        features = platform.processor()
    digest = hashlib.sha256(features.encode()).hexdigest()[:12]
    return f"{platform.machine()} {digest} x{os.cpu_count()}"


@cache  # a start needs it twice, the second time while weights are loaded: 0.7 s for 250 files then
def source_digest() -> str:
    """A digest of the source files that the steps of every family are traced from."""
    digest, package = hashlib.sha256(), Path(str(files("jaxinfer")))
    folders = (Path(str(files("pallas_kernels"))), *(package / name for name in TRACED_FOLDERS))
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".json"):
                name = f"{folder.name}/{path.relative_to(folder)}"
                digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def family_module(family: ModelFamily) -> str:
    """The name of the module that defines a family, which may be outside jaxinfer."""
    reader = family.config_from_hf
    while isinstance(reader, partial):
        reader = reader.func
    return reader.__module__


@cache  # as ``source_digest``
def family_digest(module: str) -> str:
    """A digest of the modules of ``models`` that the steps of a family are traced from."""
    digest = hashlib.sha256()
    for name, source in sorted(family_sources(module).items()):
        digest.update(name.encode() + b"\0" + source)
    return digest.hexdigest()


def family_sources(module: str) -> dict[str, bytes]:
    """The sources of a family's module and of the modules of ``models`` that it imports, by name.

    Imports of imports count, and so do those of ``models.base``, which runs every family. The
    package itself does not, nor the registry unless it is imported: they name all families.
    """
    sources: dict[str, bytes] = {}
    pending = [module, ModelFamily.__module__]
    while pending:
        name = pending.pop()
        if name not in sources and (path := _source_path(name)) is not None:
            sources[name] = path.read_bytes()
            package = name.rpartition(".")[0]
            pending += [package] if package.startswith(f"{MODELS}.") else []
            own = name if path.name == "__init__.py" else package
            pending += imported_models(sources[name], own)
    return sources


def _source_path(module: str) -> Path | None:
    """The file of a module of ``models``, or of a family's own module elsewhere."""
    if not module.startswith(f"{MODELS}."):
        file = getattr(sys.modules.get(module), "__file__", None) or ""
        return Path(file) if file.endswith(".py") else None
    stem = Path(str(files("jaxinfer"))).joinpath(*module.split(".")[1:])
    candidates = (stem.with_suffix(".py"), stem / "__init__.py")
    return next((path for path in candidates if path.is_file()), None)


def imported_models(source: bytes, package: str) -> Iterator[str]:
    """The modules of ``models`` that a source in ``package`` imports, and names from them."""
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            origin = resolve_name("." * node.level + (node.module or ""), package)
            names = [origin, *(f"{origin}.{alias.name}" for alias in node.names)]
        yield from (name for name in names if name.startswith(f"{MODELS}."))
