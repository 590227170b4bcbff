"""Engines on one device where JAX sees several: ``python -m kit.several_devices FOLDER NUMBER``.

On a CPU the devices are fake ones; on GPUs NUMBER must be how many there are. FOLDER has a model,
its tokens of an engine that saw one device (``answers.json``), that engine's cache, and a bundle.
Others are made where several devices are seen, for ``check_one`` in a process that sees one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

PROMPTS = ([5, 9, 3, 80], [7] * 20)
SETTINGS: dict[str, Any] = {
    "max_num_seqs": 2,
    "max_model_len": 64,
    "max_num_batched_tokens": 32,
    "prefill_bucket_start": 32,
    "page_size": 8,
    "num_pages": 33,
}


def settings_of(folder: Path) -> dict[str, Any]:
    on_cpu = jax.default_backend() == "cpu"
    dtype = {"dtype": "float32"} if on_cpu else {}
    return {**SETTINGS, **dtype, "cache_dir": str(folder / "cache")}


def settings_of_many(folder: Path, number: int) -> dict[str, Any]:
    return {**settings_of(folder), "cache_dir": str(folder / f"cache_of_{number}")}


def flags(settings: dict[str, Any]) -> list[str]:
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


def answers(llm: Any) -> list[list[int]]:
    from jaxinfer import LLM, SamplingParams

    greedy = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True, logprobs=1)
    drawn = SamplingParams(max_tokens=8, temperature=1.0, seed=3, presence_penalty=0.5)
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    outputs = [*llm.generate(prompts, greedy), *llm.generate(prompts, drawn)]
    if isinstance(llm, LLM):
        assert llm.stats().num_late_compiles == 0
    return [list(output.outputs[0].token_ids) for output in outputs]


def devices_of(tree: Any) -> set[Any]:
    return {device for leaf in jax.tree.leaves(tree) for device in leaf.devices()}


def command(*arguments: str) -> str:
    """The output of a ``jaxinfer`` command in a process that sees as many devices."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    if jax.default_backend() == "cpu":
        environment |= {"JAX_NUM_CPU_DEVICES": str(len(jax.devices()))}
    program = (sys.executable, "-m", "jaxinfer", *arguments)
    done = subprocess.run(program, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def make(folder: Path) -> None:
    from jaxinfer import LLM, EngineConfig
    from jaxinfer.engine.start.build import plan_engine, write_planned

    settings, model = settings_of(folder), str(folder / "model")
    tokens = answers(LLM(model, **settings))
    (folder / "answers.json").write_text(json.dumps(tokens))
    config = replace(EngineConfig(model=model), **settings, prefill_first=True)
    write_planned(plan_engine(config), folder / "bundle")


def check(folder: Path, number: int) -> None:
    import jaxinfer
    from jaxinfer import LLM

    devices = jax.devices()
    assert len(devices) == number, devices
    expected = json.loads((folder / "answers.json").read_text())
    settings, model = settings_of(folder), str(folder / "model")

    llm = LLM(model, **settings)  # the cache of a process that saw one device
    assert llm.stats().num_compiled == 0
    assert answers(llm) == expected
    assert devices_of(llm.model.params) == {devices[0]}
    bundled = LLM(model, bundle=str(folder / "bundle"), **settings)
    assert bundled.stats().num_compiled == 0
    assert answers(bundled) == expected
    loaded = jaxinfer.load(model, **settings)
    assert devices_of(loaded.forward(PROMPTS[0])) == {devices[0]}
    assert answers(loaded) == expected

    many = settings_of_many(folder, number)
    options = ("--max-tokens=4", "--no-chat", "--json")
    assert json.loads(command("generate", "-m", model, *flags(many), *options, "a b"))
    many |= {"max_num_batched_tokens": 16, "prefill_bucket_start": 16}  # not all are in the cache
    command("compile", model, *flags(many), f"--output={folder / f'bundle_of_{number}'}")

    last = devices[-1]
    mesh = jax.make_mesh((1,), ("x",), devices=(last,))
    on_last = jaxinfer.load(model, mesh=mesh, **settings)
    assert devices_of(on_last.params) == {last}
    assert answers(on_last) == expected
    with jax.default_device(last):
        chosen = LLM(model, **settings)
        assert devices_of(chosen.model.params) == {last}
        assert answers(chosen) == expected
    assert chosen.stats().num_compiled == 0, "compiled for the loaded model before"


def check_one(folder: Path, number: int) -> None:
    """Check in a process with one device what others, with ``number`` devices, have compiled."""
    from jaxinfer import LLM

    assert len(jax.devices()) == 1
    expected = json.loads((folder / "answers.json").read_text())
    model, bundle = str(folder / "model"), folder / f"bundle_of_{number}"
    for settings in (settings_of_many(folder, number), {"bundle": str(bundle)}):
        llm = LLM(model, **settings)
        assert llm.stats().num_compiled == 0
        assert answers(llm) == expected


def main() -> None:
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    if "GPU" not in sys.argv and "ONE" not in sys.argv:
        jax.config.update("jax_num_cpu_devices", number)
    if "MAKE" in sys.argv:
        make(folder)
    elif "ONE" in sys.argv:
        check_one(folder, number)
    else:
        check(folder, number)
    print("checked")


if __name__ == "__main__":
    main()
