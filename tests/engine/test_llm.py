"""The Python API: vLLM's scripts run after changing the import; errors are one clear sentence."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxinfer import LLM, SamplingParams
from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import CacheError, ConfigError, EngineError, JaxinferError, RequestError
from jaxinfer.core.host_memory import NEVER
from jaxinfer.core.progress import NoProgress
from jaxinfer.core.request import RequestSpec
from jaxinfer.core.step import StepPlan
from jaxinfer.engine.api import llm as llm_module
from jaxinfer.engine.loop.engine import Engine
from jaxinfer.engine.requests.outputs import Collector
from jaxinfer.engine.requests.prompts import Prompt, parse_prompts
from jaxinfer.engine.start import loading, plan
from jaxinfer.engine.start.build import plan_engine
from jaxinfer.exec.run.executor import Executor
from jaxinfer.models.registry import build_model
from kit.checkpoints import random_hf_tensors, tiny_llama_config, write_gguf, write_hf_folder
from kit.tokenizers import TINY_VOCAB_SIZE, tiny_tokenizer_json

SMALL: dict[str, Any] = {
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 16,
    "block_size": 8,
}
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = tiny_llama_config(vocab_size=TINY_VOCAB_SIZE)
    write_hf_folder(folder, config, random_hf_tensors(build_model(config, "float32")))
    (folder / "tokenizer.json").write_text(tiny_tokenizer_json())
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 5}))
    return folder


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def llm(folder: Path, cache: str) -> LLM:
    return LLM(str(folder), cache_dir=cache, **SMALL)


def test_text_ids_and_dicts_are_equal_prompts(llm: LLM) -> None:
    ids = llm.get_tokenizer().encode("hello")
    forms = ["hello", ids, {"prompt": "hello"}, {"prompt_token_ids": ids}]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
    assert all(output.prompt_token_ids == ids and output.finished for output in outputs)
    assert outputs[0].prompt == "hello"
    assert outputs[0].outputs[0].text == llm.get_tokenizer().decode(outputs[0].outputs[0].token_ids)
    assert llm.generate("hello", GREEDY)[0].outputs[0].token_ids == outputs[0].outputs[0].token_ids


def test_sampling_params_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(temperature=0, max_tokens=n, ignore_eos=True) for n in (1, 4, 9)]
    outputs = llm.generate(["a", "b", "c"], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 4, 9]
    with pytest.raises(RequestError, match="3 prompts came with 2"):
        llm.generate(["a", "b", "c"], params[:2])


def test_each_completion_has_its_times(llm: LLM) -> None:
    before = time.monotonic()
    outputs = llm.generate(["one", "two"], SamplingParams(max_tokens=4, n=2, ignore_eos=True))
    after = time.monotonic()
    for completion in (one for output in outputs for one in output.outputs):
        times = completion.times
        assert times is not None
        order = [before, times.arrived, times.started, times.first_token, times.finished, after]
        assert order == sorted(order) and times.first_token < times.finished


def test_chat_renders_the_template(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "hi"}], GREEDY)
    assert output.prompt == "<user>hi<assistant>"
    several = llm.chat([[{"role": "user", "content": c}] for c in "ab"], GREEDY)
    assert [output.prompt for output in several] == ["<user>a<assistant>", "<user>b<assistant>"]


def test_sampling_defaults_are_those_of_the_model(llm: LLM) -> None:
    defaults = llm.get_default_sampling_params()
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.6, 5, 1.0)


def test_an_invalid_prompt_is_named_and_none_is_started(llm: LLM) -> None:
    before = llm.stats().num_requests
    with pytest.raises(RequestError, match="prompt 1: the prompt is empty"):
        llm.generate(["good", "", "good"], GREEDY)
    with pytest.raises(RequestError, match="prompt 0: This model's .* the prompt has 70 tokens"):
        llm.generate([[1] * 70], GREEDY)
    assert llm.stats().num_requests == before
    assert llm.generate("good", GREEDY)[0].finished


BAD_PROMPTS: dict[str, tuple[Any, str]] = {
    "digits as ids": ({"prompt_token_ids": "123"}, "a list of token ids, got '123'"),
    "fractions": ([1.9, 2], "prompt_token_ids holds 1.9; token ids are integers"),
    "bools": ([True], "prompt_token_ids holds True"),
    "bytes": (b"ab", "a list of token ids, got b'ab'"),
    "numbered": ([[1], [1, "2"]], "prompt 1: prompt_token_ids holds '2'"),
    "a number as text": ({"prompt": 5}, "a prompt must be text or token ids, got int"),
    "ids under the text's name": ({"prompt": [1]}, "a prompt must be text or token ids, got list"),
    "empty dict": ([{}], "prompt 0: a prompt needs text or token ids"),
    "an image": ({"prompt": "a", "multi_modal_data": {}}, "'multi_modal_data' in a prompt dict"),
}


@pytest.mark.parametrize("name", BAD_PROMPTS)
def test_invalid_prompts(name: str) -> None:
    prompts, message = BAD_PROMPTS[name]
    with pytest.raises(RequestError, match=message):
        parse_prompts(prompts, None)


def test_numpy_ids_are_a_prompt() -> None:
    ids = np.array([1, 2])
    for form in ({"prompt_token_ids": ids}, list(ids), [ids]):
        assert parse_prompts(form, None) == [Prompt(None, (1, 2))]


def test_apply_chat_template_gives_the_prompt_of_chat(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokenizer = llm.get_tokenizer()
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    ids = encoded["input_ids"]
    assert text == "<user>hi<assistant>" and tokenizer(text).input_ids == ids
    (output,) = llm.chat(messages, GREEDY)
    assert output.prompt_token_ids == ids
    for prompt in (text, {"prompt_token_ids": ids}):
        assert llm.generate(prompt, GREEDY)[0].outputs[0].token_ids == output.outputs[0].token_ids


def test_arguments_of_generate_and_chat(llm: LLM) -> None:
    first = llm.generate(["a", "b"], GREEDY, lora_request=None, priority=[1, 0])
    assert first == llm.generate(["a", "b"], GREEDY)
    refused: dict[str, dict[str, Any]] = {
        "2 prompts came with 1 priorities": {"priority": [1]},
        "priorities must be a list": {"priority": 1},
        "prompt 1: priority must be a whole number": {"priority": [0, 0.5]},
        "lora_request is not supported": {"lora_request": object()},
        "SamplingParams must be a list": {"sampling_params": {"n": 1}},
        "sampling_params must be SamplingParams, got 5": {"sampling_params": [GREEDY, 5]},
    }
    for message, arguments in refused.items():
        with pytest.raises(RequestError, match=message):
            llm.generate(["a", "b"], **arguments)
    template = "{{ tools | length if tools else 'none' }}"
    for tools, shown in ((None, "none"), ([{"type": "function"}], "1")):
        (output,) = llm.chat(
            [{"role": "user", "content": "a"}], GREEDY, chat_template=template, tools=tools
        )
        assert output.prompt == shown
    # the model's own template has no tools: they are in the prompt, too long for this model
    with pytest.raises(RequestError, match=r"the prompt has 2\d\d tokens"):
        llm.chat([{"role": "user", "content": "a"}], GREEDY, tools=[{"function": {"name": "f"}}])


def test_closing_a_stream_frees_the_engine(llm: LLM) -> None:
    prompts = parse_prompts(["one", "two"], llm.get_tokenizer())
    stream = llm.stream([RequestSpec(prompt.token_ids, GREEDY) for prompt in prompts])
    next(stream)
    with pytest.raises(EngineError, match="already answering"):
        llm.generate("three", GREEDY)
    stream.close()
    assert llm.generate("three", GREEDY)[0].finished


def test_second_start_compiles_nothing_and_answers_alike(
    llm: LLM, folder: Path, cache: str
) -> None:
    again = LLM(str(folder), cache_dir=cache, **SMALL)
    assert llm.stats().num_compiled == llm.stats().num_executables > 0
    assert again.stats().num_compiled == 0
    first, second = llm.generate("hello", GREEDY), again.generate("hello", GREEDY)
    assert first[0].outputs[0].token_ids == second[0].outputs[0].token_ids
    assert again.stats().num_late_compiles == llm.stats().num_late_compiles == 0


def test_without_a_tokenizer(folder: Path, cache: str) -> None:
    llm = LLM(str(folder), cache_dir=cache, skip_tokenizer_init=True, load_format="dummy", **SMALL)
    (output,) = llm.generate({"prompt_token_ids": [1, 2, 3]}, GREEDY)
    assert len(output.outputs[0].token_ids) == 6
    assert output.outputs[0].text == ""
    with pytest.raises(RequestError, match="give prompt_token_ids"):
        llm.generate("text", GREEDY)
    with pytest.raises(EngineError, match="skip_tokenizer_init"):
        llm.get_tokenizer()


def test_a_batch_is_prefilled_first_by_default(
    llm: LLM, folder: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mixing = LLM(str(folder), cache_dir=cache, prefill_first=False, **SMALL)
    plans: list[StepPlan] = []
    launch = Executor.launch
    monkeypatch.setattr(Executor, "launch", lambda self, p: plans.append(p) or launch(self, p))
    prompts = [[5 + i] * 12 for i in range(2)]  # 24 tokens: two chunks
    first = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert not any(plan.decodes and plan.prefills for plan in plans)

    mixed = mixing.generate(prompts, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in first] == [o.outputs[0].token_ids for o in mixed]
    assert any(plan.decodes and plan.prefills for plan in plans)
    assert mixing.stats().num_compiled == 0, "the executables are the same"


def test_outputs_are_created_after_the_first_launch(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then the device is idle."""
    order: list[str] = []

    def noted(name: str, function: Any) -> Any:
        def call(*arguments: Any) -> Any:
            order.append(name)
            return function(*arguments)

        return call

    monkeypatch.setattr(Executor, "launch", noted("launch", Executor.launch))
    monkeypatch.setattr(llm_module, "Collector", noted("output", Collector))
    outputs = llm.generate(["b", "a", "b"], GREEDY, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["b", "a", "b"]
    assert order[0] == "launch" and order.count("output") == len(outputs)


def test_gc_is_paused_until_the_first_launch(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    collects: list[bool] = []
    launch, check = Executor.launch, Engine.check

    def noted(function: Any) -> Any:
        return lambda *args, **named: collects.append(gc.isenabled()) or function(*args, **named)

    monkeypatch.setattr(Executor, "launch", noted(launch))
    monkeypatch.setattr(Engine, "check", noted(check))
    llm.generate("a", GREEDY, use_tqdm=False)
    assert collects[:2] == [False, False] and all(collects[2:]) and len(collects) > 2
    with pytest.raises(RequestError):
        llm.generate("", GREEDY, use_tqdm=False)
    assert gc.isenabled()


def test_full_collections_are_deferred_while_a_batch_is_answered(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, seen, step = gc.get_threshold(), set[int](), Engine.step

    def noted(engine: Engine) -> Any:
        seen.add(gc.get_threshold()[2])
        return step(engine)

    monkeypatch.setattr(Engine, "step", noted)
    llm.generate("a", GREEDY, use_tqdm=False)
    assert seen == {NEVER}
    with pytest.raises(RequestError):
        llm.generate("", GREEDY, use_tqdm=False)
    assert gc.get_threshold() == before


def test_no_prompts_take_no_iteration(llm: LLM) -> None:
    before = llm.stats().num_iterations
    assert llm.generate([], GREEDY, use_tqdm=False) == []
    assert llm.stats().num_iterations == before


def test_vllm_arguments_that_change_nothing_are_accepted(folder: Path, cache: str) -> None:
    LLM(
        model=str(folder),
        cache_dir=cache,
        tensor_parallel_size=1,
        trust_remote_code=True,
        enforce_eager=True,
        gpu_memory_utilization=0.5,
        cpu_offload_gb=4,
        max_logprobs=5,
        generation_config="auto",
        dtype="float",
        enable_prefix_caching=None,
        **SMALL,
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown setting": ({"max_modle_len": 5}, "unknown setting 'max_modle_len'"),
    "two devices": (
        {"tensor_parallel_size": 2},
        "tensor_parallel_size is 2, and JAX finds 1 device of the platform cpu; lower it",
    ),
    "unknown dtype": ({"dtype": "float63"}, "dtype 'float63' is unknown"),
    "context beyond the model": ({"max_model_len": 10**6}, "beyond the model's"),
    "too little memory": ({"kv_cache_memory_bytes": 1000}, "KV cache"),
    "zero sequences": ({"max_num_seqs": 0}, "max_num_seqs must be at least 1"),
    "logprobs": ({"max_logprobs": 21}, "max_logprobs=21 is not supported: 20 is the bound"),
    "generation config": ({"generation_config": "x"}, "generation_config 'x' is unknown"),
    "utilization": ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization must be a number in"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_settings(folder: Path, cache: str, name: str) -> None:
    settings, message = REFUSED[name]
    with pytest.raises(ConfigError, match=message):
        LLM(str(folder), cache_dir=cache, **{**SMALL, **settings})


def test_unwritable_cache(folder: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(JaxinferError, match="cannot write .*executables"):
        LLM(str(folder), cache_dir=str(blocked), **{**SMALL, "max_num_seqs": 1})


def test_progress_reports_the_plan_then_compile_load_and_generate(folder: Path, cache: str) -> None:
    class Recorder(NoProgress):
        def __init__(self) -> None:
            self.tasks: list[str] = []
            self.notes: list[tuple[str, int]] = []  # with the number of tasks that had begun

        def detail(self, text: str) -> None:
            self.notes.append((text, len(self.tasks)))

        def task(self, description: str, total: float | None, unit: str = ""):
            self.tasks.append(description)
            return super().task(description, total, unit)

    recorder = Recorder()
    llm = LLM(str(folder), cache_dir=cache, progress=recorder, **SMALL)
    llm.generate("a", GREEDY)
    count = llm.stats().num_executables
    assert sorted(recorder.tasks[:2]) == [f"load {count} executables", "load weights"]
    assert recorder.tasks[2:] == ["generate"]
    *described, (plan, begun), (measured, _) = recorder.notes
    assert described[0][0].startswith("model ") and described[0][1] == 0
    assert begun == 0 and plan.startswith("memory: weights ")
    assert measured.startswith("workspace: ") and measured.endswith(" planned")


TINY = {**SMALL, "max_num_seqs": 1, "max_num_batched_tokens": 8}


@pytest.fixture(scope="module")
def tiny_cache(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with the bundle of an engine, for tests that damage a copy."""
    cache = tmp_path_factory.mktemp("cache")
    llm = LLM(str(folder), cache_dir=str(cache), **TINY)
    assert llm.stats().num_compiled == llm.stats().num_executables > 0
    return cache


def bundle_copy(cache: Path, copy: Path) -> Path:
    """The only bundle of a copied cache."""
    shutil.copytree(cache, copy, dirs_exist_ok=True)
    (bundle,) = (path for path in (copy / "executables").iterdir() if path.is_dir())
    return bundle


@pytest.mark.parametrize("damage", ["cut", "missing", "manifest", "unloadable"])
def test_a_damaged_bundle_is_named(
    folder: Path, tiny_cache: Path, tmp_path: Path, damage: str
) -> None:
    bundle = bundle_copy(tiny_cache, tmp_path)
    executable, manifest = bundle / "d1.bin", bundle / "manifest.json"
    match damage:
        case "cut":
            executable.write_bytes(executable.read_bytes()[:1000])
        case "missing":
            executable.unlink()
        case "manifest":
            manifest.write_text("{")
        case _:  # the hash is right, but the content is not an executable
            payload = executable.read_bytes()
            digest, junk = hashlib.sha256(payload).hexdigest(), bytes(len(payload))
            executable.write_bytes(junk)
            now = hashlib.sha256(junk).hexdigest()
            manifest.write_text(manifest.read_text().replace(digest, now))
    with pytest.raises(CacheError, match=rf"{bundle} cannot be used .*; delete that folder"):
        LLM(str(folder), cache_dir=str(tmp_path), **TINY)


def test_weights_that_do_not_fit(
    folder: Path, tiny_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_params(*_: Any, **settings: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory")

    monkeypatch.setattr(plan, "load_params", load_params)
    with pytest.raises(EngineError, match=r"MB are planned and the device has not so much free"):
        LLM(str(folder), cache_dir=str(tiny_cache), **TINY)


def test_a_plan_that_does_not_fit_is_an_error_before_compiling(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def claim_memory(*_: Any) -> None:
        raise EngineError("9 GB are planned")

    monkeypatch.setattr(loading, "claim_memory", claim_memory)
    monkeypatch.setattr(loading, "build_executables", lambda *_, **__: pytest.fail("compiled"))
    with pytest.raises(EngineError, match="9 GB are planned"):
        LLM(str(folder), cache_dir=str(tmp_path), **TINY)


def test_a_cache_left_half_written_is_compiled_again(
    folder: Path, tiny_cache: Path, tmp_path: Path
) -> None:
    bundle = bundle_copy(tiny_cache, tmp_path)
    first = LLM(str(folder), cache_dir=str(tmp_path), **TINY)
    (bundle / "manifest.json").unlink()  # as after a process that was killed in its first writes
    again = LLM(str(folder), cache_dir=str(tmp_path), **TINY)
    assert again.stats().num_compiled == first.stats().num_executables
    assert LLM(str(folder), cache_dir=str(tmp_path), **TINY).stats().num_compiled == 0
    assert [path for path in bundle.parent.iterdir() if path.is_dir()] == [bundle]
    assert again.generate("a", GREEDY) == first.generate("a", GREEDY)


def test_a_wrong_checkpoint_is_an_error_before_compiling(folder: Path, tmp_path: Path) -> None:
    config = tiny_llama_config(vocab_size=TINY_VOCAB_SIZE)
    tensors = random_hf_tensors(build_model(config, "float32"))
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    write_hf_folder(tmp_path, config, tensors)
    (tmp_path / "tokenizer.json").write_text(tiny_tokenizer_json())
    with pytest.raises(
        JaxinferError, match="tensor model.norm.weight of model.safetensors has shape"
    ):
        LLM(str(tmp_path), cache_dir=str(tmp_path / "cache"), **SMALL)
    assert not (tmp_path / "cache").exists()


def test_sampling_defaults_of_vllm(folder: Path, cache: str) -> None:
    llm = LLM(str(folder), cache_dir=cache, generation_config="vllm", **SMALL)
    assert llm.get_default_sampling_params() == SamplingParams()


def test_ctrl_c_while_adding_leaves_a_usable_llm(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Engine.add_validated

    def interrupted(engine: Engine, *arguments: Any, **named: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        original(engine, *arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "add_validated", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b"], SamplingParams(n=3, seed=1), use_tqdm=False)
    assert llm.generate("a", GREEDY)[0].finished


@pytest.mark.parametrize(
    ("given", "expected"), [(3, (3,)), ([3, 5], (3, 5)), (None, (7,))], ids=str
)
def test_eos_comes_from_either_config(
    tmp_path: Path, given: Any, expected: tuple[int, ...]
) -> None:
    config = tiny_llama_config(vocab_size=TINY_VOCAB_SIZE, eos_token_id=7)
    write_hf_folder(tmp_path, config)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": given}))
    settings = EngineConfig(
        model=str(tmp_path), load_format="dummy", skip_tokenizer_init=True, max_model_len=64
    )
    assert plan_engine(settings).facts.eos_token_ids == expected


@pytest.mark.parametrize("skip_tokenizer_init", [False, True])
def test_all_end_tokens_of_a_gguf_file_are_eos(tmp_path: Path, skip_tokenizer_init: bool) -> None:
    config = tiny_llama_config(eos_token_id=7)
    special = {7: "<|im_end|>", 8: "<|endoftext|>", 9: "<|end|>", 10: "<|return|>", 11: "<|call|>"}
    tensors = random_hf_tensors(build_model(config, "float32"))
    path = write_gguf(tmp_path / "m.gguf", config, tensors, special=special)
    settings = EngineConfig(
        model=str(path), skip_tokenizer_init=skip_tokenizer_init, max_model_len=64
    )
    assert plan_engine(settings).facts.eos_token_ids == (7, 8, 10, 11)


def test_eos_of_the_wrong_type(tmp_path: Path) -> None:
    write_hf_folder(tmp_path, tiny_llama_config(eos_token_id="</s>"))
    settings = EngineConfig(model=str(tmp_path), load_format="dummy", skip_tokenizer_init=True)
    with pytest.raises(ConfigError, match="eos_token_id '</s>'"):
        plan_engine(settings)
