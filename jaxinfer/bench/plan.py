"""``jaxinfer bench plan``: what a model needs and could reach on a device, from config.json alone.

Memory, pages and context are the engine's own plan for that device. TTFT and TPOT are the shortest
times that its bytes and operations allow (``floor``); an engine reaches a share of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax

from jaxinfer.bench.arguments import Parser, count
from jaxinfer.bench.floor import CEILINGS, Ceiling, Floor
from jaxinfer.bench.report import number, table
from jaxinfer.core.config import DEFAULT_GPU_MEMORY_UTILIZATION, EngineConfig
from jaxinfer.core.errors import BenchError
from jaxinfer.engine.start.build import plan_elsewhere
from jaxinfer.exec.compile.memory_plan import DeviceMemory, shown
from jaxinfer.models.costs import costs_of
from jaxinfer.models.quantised import sizes_by_form
from jaxinfer.nn.placement import Placement, default_placement

if TYPE_CHECKING:
    from jaxinfer.engine.start.plan import EnginePlan

GB, TERA = 1e9, 1e12
BANDWIDTH_SHARE, FLOPS_SHARE = 0.9, 0.8  # of a data sheet's, as measured on an H100 and an H200
# of the floor, Qwen3-4B on an H200 (bench/results/h200/step.json): TPOT at 1 to 256 rows, and TTFT
# of 1,024 tokens
REACHED_TPOT, REACHED_TTFT = 0.82, 0.72
BATCHES = (1, 8, 32, 128)
PROMPTS = (512, 1024, 8192)


@dataclass(frozen=True)
class Device:
    """A kind of device: what CUDA reports of its memory, and its rates."""

    name: str
    memory: int  # bytes
    ceiling: Ceiling


def _of_data_sheet(name: str, memory_gib: float, tb_per_s: float, tflops: float) -> Device:
    """Rates below a data sheet's, by the shares that were measured on other devices."""
    rates = Ceiling(BANDWIDTH_SHARE * tb_per_s * TERA, FLOPS_SHARE * tflops * TERA)
    return Device(name, int(memory_gib * 2**30), rates)


DEVICES: Mapping[str, Device] = MappingProxyType(
    {
        "h100": Device(
            "NVIDIA H100 80GB HBM3", int(79.1 * 2**30), CEILINGS["NVIDIA H100 80GB HBM3"]
        ),
        "h200": Device("NVIDIA H200", int(139.8 * 2**30), CEILINGS["NVIDIA H200"]),
        "a100": _of_data_sheet("NVIDIA A100-SXM4-80GB", 79.2, 2.039, 312),
        "l40s": _of_data_sheet("NVIDIA L40S", 44.4, 0.864, 362),
        "rtx4090": _of_data_sheet("NVIDIA GeForce RTX 4090", 23.6, 1.008, 165),
    }
)


@dataclass(frozen=True)
class ElsewherePlacement(Placement):
    """Devices of another machine, for a plan: so many GPUs in place of this one's devices."""

    count: int = 1

    @property
    def platform(self) -> str:
        """The platform that is planned for."""
        return "gpu"

    @property
    def num_devices(self) -> int:
        """The number that is planned for."""
        return self.count


def plan_on(config: EngineConfig, device: Device) -> EnginePlan:
    """The engine's plan on GPUs of this kind; raises a ``JaxinferError`` if it does not fit."""
    share = config.gpu_memory_utilization or DEFAULT_GPU_MEMORY_UTILIZATION
    memory = DeviceMemory(device.memory, int(device.memory * share))
    placement = ElsewherePlacement(default_placement().mesh, config.tensor_parallel_size or 1)
    return plan_elsewhere(config, placement, memory)


def described(plan: EnginePlan, device: Device, context: int) -> dict[str, Any]:
    """Sizes in bytes and tokens, of each device; floors in ms."""
    limits, memory, model = plan.program.limits, plan.memory, plan.program.model
    floor = Floor(costs_of(model), device.ceiling)
    tokens = (sum(limits.num_pages) - 1) * limits.page_size
    own = sizes_by_form(model.whole.param_specs, model.config.dtype)
    return {
        "model": plan.source.name,
        "architecture": model.architecture,
        "device": device.name,
        "devices": memory.num_devices,
        "parameters": sum(size.count for size in own.values()),
        "weight_bytes": memory.weight_bytes,
        "kv_bytes_per_token": model.state.bytes_per_token,
        "state_bytes_per_sequence": model.state.bytes_per_slot,
        "num_pages": sum(limits.num_pages),
        "page_size": limits.page_size,
        "kv_cache_bytes": memory.kv_bytes,
        "total_bytes": memory.total_bytes,
        "device_bytes": device.memory,
        "max_model_len": limits.max_model_len,
        "max_num_seqs": limits.max_num_seqs,
        "sequences_of_context": min(limits.max_num_seqs, tokens // context) if tokens else 0,
        "context": context,
        "tpot_ms": {batch: 1e3 * floor.decode(batch, context) for batch in BATCHES},
        "ttft_ms": {length: 1e3 * floor.prefill(1, length) for length in PROMPTS},
    }


def lines(found: Mapping[str, Any]) -> list[str]:
    """The plan as text."""
    each = f" on each of {found['devices']} devices" if found["devices"] > 1 else ""
    rows = [
        [f"TPOT of {batch} rows", number(ms), number(ms / REACHED_TPOT)]
        for batch, ms in found["tpot_ms"].items()
    ]
    rows += [
        [f"TTFT of {length} tokens", number(ms), number(ms / REACHED_TTFT)]
        for length, ms in found["ttft_ms"].items()
    ]
    return [
        f"model         {found['model']} ({found['architecture']})",
        f"device        {found['device']}, {shown(found['device_bytes'])}",
        f"parameters    {found['parameters']:,}",
        f"weights       {shown(found['weight_bytes'])}{each}",
        f"KV cache      {shown(found['kv_cache_bytes'])}{each}: {found['num_pages']:,} pages of "
        f"{found['page_size']} tokens, {found['kv_bytes_per_token']:,} bytes a token",
        f"memory        {shown(found['total_bytes'])}{each} in all",
        f"context       {found['max_model_len']:,} tokens at most",
        f"concurrency   {found['sequences_of_context']} sequences of {found['context']:,} tokens",
        "",
        *table(["ms", "floor", "usually"], rows),
        f"The floor is the larger of bytes and operations over the device's rates, at "
        f"{found['context']:,} tokens of context;",
        f"usually: a dense 4B model reached {REACHED_TPOT:.0%} of it in decode and "
        f"{REACHED_TTFT:.0%} in prefill on an H200, small models less.",
    ]


def main(arguments: list[str], read_settings: Callable[[list[str]], dict[str, Any]]) -> int:
    """Print the plan; the exit code. Flags of the engine are taken as well."""
    parser = Parser("plan", (__doc__ or "").splitlines()[0])
    parser.add_argument("config", help="a config.json, its folder, or any form of MODEL")
    parser.add_argument("--device", choices=list(DEVICES), required=True)
    parser.add_argument("--context", type=count, default=1024, help="tokens of each sequence")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    given, more = parser.parse_known_args(arguments)
    settings = read_settings(more)
    config = config_of(given.config, settings)
    device = DEVICES[given.device]
    jax.config.update("jax_platforms", "cpu")  # a plan takes no memory of a GPU
    found = described(plan_on(config, device), device, given.context)
    print(json.dumps(found) if given.json else "\n".join(lines(found)))
    return 0


def config_of(model: str, settings: Mapping[str, Any]) -> EngineConfig:
    """The settings of an engine that is planned; raises ``BenchError`` for a missing file."""
    path = Path(model)
    if path.suffix == ".json" and not path.is_file():
        raise BenchError(f"{path} does not exist; name a config.json")
    return EngineConfig(
        **{"load_format": "auto" if not _is_config(path) else "dummy", **settings},
        model=model,
        skip_tokenizer_init=True,
    )


def _is_config(path: Path) -> bool:
    """True for a config.json, or a folder that has one and no weights."""
    if path.is_dir():
        return not any(path.glob("*.safetensors")) and not any(path.glob("*.gguf"))
    return path.suffix == ".json"
