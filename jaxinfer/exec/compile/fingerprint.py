"""The fingerprint of executables: the fields on which they depend, to check if a bundle fits."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from pathlib import Path

import jax
import msgspec

from jaxinfer.core.config import Limits, compiler_environment
from jaxinfer.exec.compile.program import Program
from jaxinfer.models.base import Model
from jaxinfer.nn.decoder_config import LayerSpec
from jaxinfer.nn.placement import Placement
from pallas_kernels.native.library import variants
from pallas_kernels.pins import Pins

TRACED_FOLDERS = ("core", "exec", "models", "nn")  # folders of jaxinfer that a step is traced from
# the fields of Limits on which shapes depend; only the scheduler uses the others
SHAPING_LIMITS = ("num_pages", "page_size", "max_num_seqs", "max_model_len")
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
            of_model(program.model),
            of_limits(program.limits),
            of_pins(program.pins),
        )

    def digest(self) -> str:
        """A hash of all fields, which names the folder of the executables."""
        text = json.dumps(msgspec.to_builtins(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:24]


def differences(bundle: Mapping[str, str], here: Mapping[str, str]) -> dict[str, str]:
    """A sentence for each field that differs, by its name, in the order of ``here``."""
    found: dict[str, str] = {}
    for name in dict.fromkeys((*here, *bundle)):
        made, own = bundle.get(name, ABSENT), here.get(name, ABSENT)
        if made != own:
            found[name] = f"{name} is {_short(made)} in the bundle and {_short(own)} here"
    return found


def of_machine(placement: Placement) -> dict[str, str]:
    """The fields of this installation and the devices of an engine."""
    device, count = placement.device, placement.num_devices
    compilers = {name: _version(name) for name in KERNEL_COMPILERS}
    native = " ".join(variants()[:1]) or ABSENT
    host = {"host CPU": _host_cpu(), "native library": native}
    backend = host if device.platform == "cpu" else compilers
    return {
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "flax": version("flax"),
        "platform": device.client.platform_version,  # on a GPU: the CUDA plugin and driver
        "device": f"{device.platform} {device.device_kind}" + (f" x{count}" if count > 1 else ""),
        **backend,
        "enable_x64": str(jax.config.jax_enable_x64),  # type: ignore[attr-defined]
        "matmul_precision": str(jax.config.jax_default_matmul_precision),  # type: ignore[attr-defined]
        **compiler_environment(),
        "sources": source_digest(),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ABSENT


def of_model(model: Model) -> dict[str, str]:
    """The family, every field of the config, and the forms of quantised weights."""
    config = model.config
    values = {field.name: str(getattr(config, field.name)) for field in fields(config)}
    values |= _of_layers(config.layers)
    forms: dict[str, list[str]] = {}
    for name, form in model.forms:
        forms.setdefault(str(form), []).append(name)
    weights = {f"weights {form}": " ".join(names) for form, names in forms.items()}
    return {"family": model.family.name, **values, **weights}


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


def of_limits(limits: Limits) -> dict[str, str]:
    """The sizes on which shapes depend."""
    values = {name: str(getattr(limits, name)) for name in SHAPING_LIMITS}
    if limits.num_snapshots:
        values["num_snapshots"] = str(limits.num_snapshots)
    return values | {"buckets": " ".join(bucket.name for bucket in limits.buckets)}


def of_pins(pins: Pins) -> dict[str, str]:
    """The kernels whose implementation is pinned."""
    return {f"kernel {op}": impl for op, impl in pins.pairs}


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
    """A digest of every source file that a compiled step is traced from."""
    digest, package = hashlib.sha256(), Path(str(files("jaxinfer")))
    folders = (Path(str(files("pallas_kernels"))), *(package / name for name in TRACED_FOLDERS))
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".json"):
                name = f"{folder.name}/{path.relative_to(folder)}"
                digest.update(name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
