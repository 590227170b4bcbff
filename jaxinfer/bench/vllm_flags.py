"""Flags and datasets of ``vllm bench`` that jaxinfer does not have, with the sentence that their
users get.

The names are those of ``vllm bench serve``, ``throughput``, ``latency`` and ``startup`` of 0.32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
# the route of each --backend of `vllm bench serve` that generates text
ROUTES: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("vllm", "openai", "openai-comp", "sglang-oai", "lmdeploy"), COMPLETIONS),
        **dict.fromkeys(("openai-chat", "vllm-chat", "sglang-oai-chat", "lmdeploy-chat"), CHAT),
    }
)


class Group(NamedTuple):
    """Flags with one answer: ``switches`` have no value, ``flags`` one or more."""

    advice: str
    flags: str  # with spaces between them
    switches: str = ""


WITHOUT_EFFECT = (
    Group("no code of a model is run", "", "--trust-remote-code"),
    Group(
        "a tokenizer is read as by jaxinfer serve, if prompts need one",
        "--tokenizer-mode",
        "--skip-tokenizer-init",
    ),
    Group(
        "prompts of a file are sent as they are, and the server applies its template to chats",
        "",
        "--skip-chat-template",
    ),
    Group(
        "every run has its plots in report.html",
        "--timeline-itl-thresholds",
        "--plot-timeline --plot-dataset-stats",
    ),
    Group("a file is read whole", "", "--no-stream"),
    Group("requests get their ids from the server", "--request-id-prefix"),
)
REFUSED = (
    Group("name one adapter with --model", "--lora-modules --lora-assignment --lora-path"),
    Group(
        "save the rows as JSON lines with 'prompt' and give --dataset-name custom --dataset-path",
        """--hf-name --hf-split --hf-subset --spec-bench-category --spec-bench-output-len
        --speed-bench-category --speed-bench-output-len --speed-bench-dataset-subset
        --blazedit-max-distance --blazedit-min-distance --bfcl-categories""",
    ),
    Group(
        "models read text alone",
        """--random-mm-base-items-per-request --random-mm-bucket-config
        --random-mm-limit-mm-per-prompt --random-mm-num-mm-items-range-ratio
        --asr-max-audio-len-sec --asr-min-audio-len-sec --enable-multimodal-chat
        --custom-ensure-client-side-data""",
    ),
    Group("embeddings and scores are not measured", "--random-batch-size --no-reranker"),
    Group(
        "a trace is --dataset-name mooncake or azure, or `jaxinfer bench replay`: times in ms, "
        "hash ids of 512 tokens, --time-scale",
        """--timed-trace-chunk-hash-size --timed-trace-label-hash-ids
        --timed-trace-label-input-length --timed-trace-label-output-length
        --timed-trace-label-timestamp --timed-trace-sec-multiplier --self-timed --no-self-timed""",
    ),
    Group("a request has one answer in a benchmark", "--use-beam-search --n"),
    Group(
        "run a second `jaxinfer bench serve` of short requests at the same time",
        "--probe-request-rate",
    ),
    Group(
        "give --extra-body '{\"chat_template_kwargs\": {...}}', for the server's template",
        "--chat-template-kwargs",
    ),
)
OFFLINE_WITHOUT_EFFECT = (
    Group("the engine is jaxinfer; --backends jaxinfer,vllm measures vLLM's LLM too", "--backend"),
    Group("LLM.generate is what is measured", "", "--async-engine --prequeue-requests"),
    Group("texts are made while the device computes", "", "--disable-detokenize"),
)
OFFLINE_REFUSED = (
    Group("measure transformers with `jaxinfer bench compare`", "--hf-max-batch-size"),
    Group("measure transformers with `jaxinfer bench compare`", "--hf-enable-torch-compile"),
    Group("give --dataset-name and --dataset-path", "--dataset"),
)
STARTUP_REFUSED = (
    Group("result.json in the folder of the run has all figures", "--output-json"),
    Group("a cold start uses no cache, so nothing is warmed up", "--num-iters-warmup"),
)
# datasets of vLLM: the advice of each
DATASETS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(
            ("hf", "sonnet", "spec_bench", "speed_bench", "burstgpt"), REFUSED[1].advice
        ),
        **dict.fromkeys(
            ("random_mm", "custom_audio", "custom_image", "custom_mm"), "models read text alone"
        ),
        "random_rerank": "embeddings and scores are not measured",
        "timed_trace": REFUSED[4].advice,
    }
)
# subcommands of `vllm bench sweep`
SWEEPS = ("serve", "serve_workload", "serve_sla", "startup", "plot", "plot_pareto")


class _Told(argparse.Action):
    """A flag that has no effect, of which the user is told, or that is refused."""

    def __init__(self, *args: Any, advice: str, refused: bool, **options: Any) -> None:
        super().__init__(*args, default=argparse.SUPPRESS, help=argparse.SUPPRESS, **options)
        self._advice, self._refused = advice, refused

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Print the advice, or end with it."""
        if self._refused:
            parser.error(f"{option_string} is not supported: {self._advice}")
        print(f"{option_string} has no effect: {self._advice}", file=sys.stderr)


def add_told(
    parser: argparse.ArgumentParser, without_effect: Sequence[Group], refused: Sequence[Group] = ()
) -> None:
    """Flags of vLLM that a command answers with a sentence."""
    for group in without_effect:
        for flag in group.flags.split():
            parser.add_argument(flag, nargs=1, action=_Told, advice=group.advice, refused=False)
        for flag in group.switches.split():
            parser.add_argument(flag, nargs=0, action=_Told, advice=group.advice, refused=False)
    for group in refused:
        for flag in group.flags.split():
            parser.add_argument(flag, nargs="*", action=_Told, advice=group.advice, refused=True)


class Backend(argparse.Action):
    """``--backend`` of ``vllm bench serve``: the route, unless --endpoint names another."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        """Set the route; end for a backend whose route does not generate text."""
        name = str(values)
        if name not in ROUTES:
            known = ", ".join(ROUTES)
            parser.error(f"--backend {name} is not measured; every server is asked as by {known}")
        setattr(namespace, self.dest, name)
        if getattr(namespace, "endpoint", COMPLETIONS) == COMPLETIONS:
            namespace.endpoint = ROUTES[name]
