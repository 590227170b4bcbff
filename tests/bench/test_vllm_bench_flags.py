"""Flags of ``vllm bench``: those that work, and the sentence of each that does not."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from jaxinfer.bench import compare, offline, serve, startup, sweep, vllm_flags
from jaxinfer.bench.workload import RandomLengths, random_queries, read_queries
from jaxinfer.cli.main import cli
from jaxinfer.core.errors import BenchError
from kit.tokenizers import write_tiny_tokenizer

from .stub_server import StubServer

CHAT = "/v1/chat/completions"
LOAD = ("--random-input-len=4", "--random-output-len=2", "--num-prompts=2")
# `vllm bench serve --help=all` of 0.32, without flags of its engine
SERVE = """
append-result asr-max-audio-len-sec asr-min-audio-len-sec backend base-url bfcl-categories
blazedit-max-distance blazedit-min-distance burstiness chat-template-kwargs
custom-ensure-client-side-data custom-output-len dataset-name dataset-path disable-shuffle
disable-tqdm enable-multimodal-chat endpoint extra-body frequency-penalty goodput header hf-name
hf-output-len hf-split hf-subset host ignore-eos input-len insecure label logprobs lora-assignment
lora-modules max-concurrency metadata metric-percentiles min-p model no-oversample no-reranker
no-stream num-prompts num-warmups output-len percentile-metrics plot-dataset-stats plot-timeline
port prefix-repetition-num-prefixes prefix-repetition-output-len prefix-repetition-prefix-len
prefix-repetition-suffix-len presence-penalty probe-request-rate profile ramp-up-end-rps
ramp-up-start-rps ramp-up-strategy random-batch-size random-input-len
random-mm-base-items-per-request random-mm-bucket-config random-mm-limit-mm-per-prompt
random-mm-num-mm-items-range-ratio random-output-len random-prefix-len random-range-ratio
ready-check-timeout-sec repetition-penalty request-id-prefix request-rate result-dir
result-filename save-detailed save-result seed self-timed served-model-name sharegpt-output-len
skip-chat-template skip-tokenizer-init spec-bench-category spec-bench-output-len
speed-bench-category speed-bench-dataset-subset speed-bench-output-len temperature
timed-trace-chunk-hash-size timed-trace-label-hash-ids timed-trace-label-input-length
timed-trace-label-output-length timed-trace-label-timestamp timed-trace-sec-multiplier
timeline-itl-thresholds tokenizer tokenizer-mode top-k top-p trust-remote-code use-beam-search
"""
OFFLINE = """
async-engine backend custom-output-len dataset-name dataset-path disable-detokenize
hf-max-batch-size hf-name hf-split hf-subset input-len lora-assignment lora-path n no-oversample
num-prompts num-warmups output-json output-len prefix-len prequeue-requests profile
random-input-len random-output-len random-prefix-len random-range-ratio
"""


def measured(tmp_path: Path, *words: str) -> tuple[int, StubServer]:
    """`serve` against a stub with these flags."""

    async def run() -> tuple[int, StubServer]:
        async with StubServer() as stub:
            given = [f"--base-url={stub.url}", f"--output={tmp_path / 'run'}", *LOAD, *words]
            return await asyncio.to_thread(serve.main, given), stub

    return asyncio.run(run())


def test_every_flag_of_vllms_client_is_known() -> None:
    known = {flag for action in serve.parser("serve")._actions for flag in action.option_strings}
    assert not {f"--{name}" for name in SERVE.split()} - known
    own = {flag for action in offline.parser()._actions for flag in action.option_strings}
    assert not {f"--{name}" for name in OFFLINE.split()} - own


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--trust-remote-code", "no code of a model is run"),
        ("--tokenizer-mode hf --skip-tokenizer-init", "--tokenizer-mode has no effect"),
        ("--plot-timeline --timeline-itl-thresholds 25,50", "plots in report.html"),
        ("--request-id-prefix a", "ids from the server"),
    ],
)
def test_flags_without_effect_say_so(
    tmp_path: Path, words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measured(tmp_path, "--vocab-size=50", *words.split())[0] == 0
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("serve --lora-modules a b", "--lora-modules is not supported: name one adapter"),
        ("serve --hf-split train", "save the rows as JSON lines"),
        ("serve --dataset-name hf", "hf is not a dataset here: save the rows as JSON lines"),
        ("serve --dataset-name random-mm", "models read text alone"),
        ("serve --dataset-name timed_trace", "mooncake or azure"),
        ("serve --timed-trace-chunk-hash-size 16", "hash ids of 512 tokens"),
        ("serve --backend vllm-pooling", "--backend vllm-pooling is not measured"),
        ('serve --random-range-ratio {"input":0.1}', "not one ratio of input and one of output"),
        ("serve --metadata a", "--metadata 'a' has no value"),
        ("serve --percentile-metrics speed", "not one of ttft, tpot, itl, e2el, client_queue_time"),
        ("sweep serve_workload --serve-cmd x", "sweep serve_workload is vLLM's"),
        ("throughput --dataset x.json", "give --dataset-name and --dataset-path"),
        ("throughput --n 2", "a request has one answer in a benchmark"),
        ("throughput --request-rate 4", "--request-rate is of requests to a server"),
        ("throughput --num-warmups 4", "--num-warmups is of requests to a server"),
        ("throughput --dataset-name sessions --dataset-path=x", "takes texts and token ids"),
        ("latency --use-beam-search", "a request has one answer in a benchmark"),
        ("startup --output-json x", "result.json in the folder of the run"),
    ],
)
def test_flags_that_are_refused(words: str, says: str) -> None:
    result = CliRunner().invoke(cli, ["bench", *words.split(" ", 3)])
    assert result.exit_code and says in result.stderr, result.stderr


def test_a_backend_of_chats_is_asked_for_chats(tmp_path: Path) -> None:
    """With random prompts as texts of the tokenizer: a chat takes no token ids."""
    write_tiny_tokenizer(tmp_path)
    code, stub = measured(tmp_path, "--backend=openai-chat", f"--tokenizer={tmp_path}")
    assert code == 0 and all(f"POST {CHAT} " in head for head in stub.heads)
    texts = [one["messages"][0]["content"] for one in stub.bodies]
    assert all(isinstance(one, str) and one for one in texts) and len({*texts}) == 3
    with pytest.raises(BenchError, match="a chat, llama.cpp's .* take no token ids"):
        measured(tmp_path / "b", "--backend=openai-chat", "--vocab-size=50")
    code, stub = measured(tmp_path / "c", "--backend=vllm", f"--model={tmp_path}")
    assert code == 0 and stub.bodies[0]["model"] == str(tmp_path)  # which is the tokenizer, too


def test_engines_are_compared_on_chats(tmp_path: Path) -> None:
    """The prompts are random, and all engines get them as the same texts."""
    write_tiny_tokenizer(tmp_path)

    async def run() -> tuple[int, StubServer]:
        async with StubServer() as stub:
            words = ["--backends=jaxinfer,vllm", f"--endpoint={CHAT}", f"--tokenizer={tmp_path}"]
            words += [f"--url-{name}={stub.url}" for name in ("jaxinfer", "vllm")]
            words += [*LOAD, "--rounds=1", f"--output={tmp_path / 'run'}"]
            words += ["--header", "Authorization=Bearer abc"]
            return await asyncio.to_thread(compare.main, words), stub

    code, stub = asyncio.run(run())
    assert code == 0 and all(f"POST {CHAT} " in head for head in stub.heads)
    assert all("Authorization: Bearer abc" in head for head in stub.heads)
    assert "abc" not in (tmp_path / "run" / "run.json").read_text()
    measured = [json.dumps(one["messages"]) for one in stub.bodies]
    assert len(measured) == 6 and measured[1:3] == measured[4:6]
    ratios = json.loads((tmp_path / "run" / "result.json").read_text())["ratios"]
    assert "p50_ttft_ms" in ratios["vllm"]["figures"]


def test_fields_of_requests(tmp_path: Path) -> None:
    words = ["--vocab-size=50", "--repetition-penalty=1.1", "--logprobs=2", "--model=folder"]
    words += ["--presence-penalty=0.5", "--frequency-penalty=0.2", "--served-model-name=named"]
    _, stub = measured(tmp_path, *words)
    body = stub.bodies[-1]
    assert (body["repetition_penalty"], body["presence_penalty"]) == (1.1, 0.5)
    assert (body["frequency_penalty"], body["logprobs"], body["model"]) == (0.2, 2, "named")


def test_a_key_of_the_environment_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[str]] = []
    with monkeypatch.context() as patch:
        patch.setattr(serve, "main", lambda arguments: given.append(arguments) or 0)
        for environment in ({"OPENAI_API_KEY": "abc"}, {"JAXINFER_API_KEY": "k"}, {}):
            environment = {"JAXINFER_API_KEY": "", "OPENAI_API_KEY": "", **environment}
            CliRunner().invoke(cli, ["bench", "serve"], env=environment)
    assert given == [["--api-key=abc"], ["--api-key=k"], []]
    _, stub = measured(tmp_path / "a", "--vocab-size=50", "--api-key=abc")
    assert "Authorization: Bearer abc" in stub.heads[-1]
    words = ["--vocab-size=50", "--api-key=abc", "--header", "authorization=Bearer other"]
    _, stub = measured(tmp_path / "b", *words)
    assert "abc" not in stub.heads[-1] and "Bearer other" in stub.heads[-1]
    assert not [path for path in tmp_path.rglob("run.json") if "abc" in path.read_text()]


def test_vllms_result_file(tmp_path: Path) -> None:
    words = ["--vocab-size=50", f"--result-dir={tmp_path}", "--result-filename=r.json"]
    words += ["--label=night", "--metadata", "tp=2", "--percentile-metrics=ttft,tpot"]
    for number in range(2):
        path = tmp_path / str(number)
        assert measured(path, *words, "--append-result", "--request-rate=100")[0] == 0
    rows = [json.loads(line) for line in (tmp_path / "r.json").read_text().splitlines()]
    assert len(rows) == 2
    names = "date backend label model_id tokenizer_id num_prompts request_rate burstiness "
    names += "max_concurrency duration completed total_input_tokens request_throughput mean_ttft_ms"
    assert {*names.split()} <= rows[0].keys() and "mean_itl_ms" not in rows[0]
    assert (rows[0]["label"], rows[0]["tp"], rows[0]["request_rate"]) == ("night", "2", 100)


def test_a_result_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    words = ["--vocab-size=50", f"--result-dir={tmp_path / 'file'}", "--result-filename=r.json"]
    for number, flag in enumerate(("--save-result", "--append-result")):
        with pytest.raises(BenchError, match="r.json cannot be written"):
            measured(tmp_path / str(number), *words, flag)
        assert (tmp_path / str(number) / "run" / "report.md").exists()


def test_levels_of_a_sweep_have_prompts_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or a prefix cache would answer every level but the first."""
    monkeypatch.setattr(serve, "level_size", lambda rate: 3)
    _, stub = measured(tmp_path, "--vocab-size=50", "--sweep=200,300,inf")
    prompts = [tuple(one["prompt"]) for one in stub.bodies]
    assert len(prompts) == 1 + 3 * 3 == len({*prompts})


def test_rows_of_a_file_in_order_and_once(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": word}) + "\n" for word in "abcdef"))
    rows = read_queries(path, 9, None, None)
    assert "".join(str(one.prompt) for one in rows) == "abcdefabc"
    assert len(read_queries(path, 9, None, 0, repeats=False)) == 6
    words = ["--dataset-name=custom", f"--dataset-path={path}", "--output-len=2"]
    _, stub = measured(tmp_path, *words, "--disable-shuffle")
    assert [one["prompt"] for one in stub.bodies[1:]] == ["a", "b"]


def conversation(prompt: str, answer: str) -> dict[str, Any]:
    turns = [{"from": "human", "value": prompt}, {"from": "gpt", "value": answer}]
    return {"conversations": turns}


def test_a_recorded_answer_has_its_length(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([conversation("hi there", "hello you")]))
    assert read_queries(path, 1, None, 0, count_tokens=len)[0].max_tokens == 9
    assert read_queries(path, 1, 5, 0, count_tokens=len)[0].max_tokens == 5
    assert read_queries(path, 1, None, 0)[0].max_tokens == 256
    write_tiny_tokenizer(tmp_path)
    words = ["--dataset-name=sharegpt", f"--dataset-path={path}", "--custom-output-len=-1"]
    _, stub = measured(tmp_path, *words, f"--tokenizer={tmp_path}")
    assert stub.bodies[0]["max_tokens"] == 9  # of this tokenizer's tokens each is a byte


def test_conversations_that_vllm_leaves_out(tmp_path: Path) -> None:
    path = tmp_path / "sharegpt.json"
    long, longer = "x" * 1024, "x" * 1025
    rows = [("hi", "hello"), ("hello", "hi"), (longer, "hello"), (long, longer), (long, long)]
    path.write_text(json.dumps([conversation(*row) for row in rows]))
    kept = read_queries(path, 9, None, None, repeats=False, count_tokens=len)
    assert [(len(one.prompt), one.max_tokens) for one in kept] == [(1024, 1024)]
    kept = read_queries(path, 9, 2, None, repeats=False, count_tokens=len)
    assert [len(one.prompt) for one in kept] == [5, 1024, 1024]


def test_ratios_of_both_lengths() -> None:
    lengths = RandomLengths(input_len=100, output_len=100, range_ratio=0.0, output_ratio=0.5)
    found = random_queries(lengths, [5], 30, seed=0)
    assert {len(one.prompt) for one in found} == {100}
    assert min(one.max_tokens for one in found) < 80
    given = serve.parser("serve").parse_args(['--random-range-ratio={"input":0.1,"output":0.5}'])
    assert given.random_range_ratio == (0.1, 0.5)


class Engine:
    """An engine's stand-in, each of whose answers has the tokens that were asked for."""

    model = SimpleNamespace(config=SimpleNamespace(vocab_size=50))

    def generate(self, prompts: list[Any], sampling: list[Any], use_tqdm: bool) -> list[Any]:
        return [
            SimpleNamespace(
                prompt_token_ids=one["prompt_token_ids"],
                outputs=[SimpleNamespace(token_ids=[0] * params.max_tokens)],
            )
            for one, params in zip(prompts, sampling, strict=True)
        ]


def test_vllms_files_of_measurements_without_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "engine_of", lambda settings: Engine())
    monkeypatch.setattr(offline, "device_of", lambda llm: {"device": "cpu"})
    path = tmp_path / "made.json"
    words = [*LOAD, f"--output-json={path}", f"--output={tmp_path / 'a'}", "--backend=vllm"]
    assert offline.throughput(words, lambda more: {}) == 0
    found = json.loads(path.read_text())
    assert (found["num_requests"], found["total_num_tokens"]) == (2, 12)
    assert found["tokens_per_second"] == pytest.approx(12 / found["elapsed_time"])
    words = ["--num-iters=3", f"--output-json={path}", f"--output={tmp_path / 'b'}"]
    assert offline.latency(words, lambda more: {}) == 0
    found = json.loads(path.read_text())
    assert len(found["latencies"]) == 3 and {"10", "99"} <= found["percentiles"].keys()
    assert found["avg_latency"] == pytest.approx(sum(found["latencies"]) / 3)


def test_a_measured_start_ends_with_its_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    def wait4(pid: int, options: int) -> None:
        ended.append(pid)
        raise KeyboardInterrupt

    script = "import os, time; os.close(2); time.sleep(60)"
    monkeypatch.setattr(startup, "COMMAND", (sys.executable, "-c", script))
    monkeypatch.setattr(startup.os, "wait4", wait4)
    with pytest.raises(KeyboardInterrupt):
        startup.run_once("m", "cache")
    with pytest.raises(ProcessLookupError):
        os.kill(ended[0], 0)


def test_no_flag_has_two_answers() -> None:
    groups = [*vllm_flags.WITHOUT_EFFECT, *vllm_flags.REFUSED]
    flags = [flag for one in groups for flag in f"{one.flags} {one.switches}".split()]
    assert len(flags) == len({*flags})
    assert sweep.parser() and startup.MODEL
