"""``jaxinfer generate``: answers on stdout in the order of the prompts, failures on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxinfer.cli.command import SettingsCommand
from jaxinfer.cli.options import GENERATING_MODEL, HOSTS, MEMORY, SAMPLING
from jaxinfer.cli.serve_options import EVERY
from jaxinfer.core.errors import ConfigError, RequestError
from jaxinfer.core.progress import NO_PROGRESS
from jaxinfer.engine.start.progress import progress_on

if TYPE_CHECKING:
    from jaxinfer.core.request import SamplingParams
    from jaxinfer.engine.api.llm import LLM
    from jaxinfer.engine.requests.outputs import (
        Collector,
        CompletionOutput,
        Delta,
        PositionLogprobs,
        RequestOutput,
    )
    from jaxinfer.engine.requests.prompts import Prompt

TEMPLATE_TOKENS = 256  # more than a chat template adds to its messages
# SamplingParams' default of 16, as in vLLM, would cut off nearly every answer
DEFAULT_MAX_TOKENS = 256
EMPTY_PROMPT = "the prompt is empty; give some text"


@click.command(cls=SettingsCommand, groups=(SAMPLING, GENERATING_MODEL, MEMORY, HOSTS))
@click.argument("prompts", metavar="[PROMPT]...", nargs=-1)
@click.option("--chat/--no-chat", default=None, help="Use the chat template; default if any.")
@click.option("--system", metavar="TEXT", help="The system message of a chat.")
@click.option(
    "--stream/--no-stream", default=None, help="Show text as it comes; default on a terminal."
)
@click.option(
    "--json-schema",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Answer with JSON that follows this schema.",
)
@click.option("--regex", metavar="PATTERN", help="Answer with a text that matches all of this.")
@click.option(
    "--choice",
    "choices",
    multiple=True,
    metavar="TEXT",
    help="Answer with one of these; repeat it.",
)
@click.option(
    "--grammar",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Answer with a text of this grammar, in Lark's or llama.cpp's GBNF syntax.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for each prompt.")
@click.option("--stats", "show_stats", is_flag=True, help="Report times and memory on stderr.")
@click.pass_context
def generate(
    ctx: click.Context,
    prompts: tuple[str, ...],
    chat: bool | None,
    system: str | None,
    stream: bool | None,
    json_schema: Path | None,
    regex: str | None,
    choices: tuple[str, ...],
    grammar: Path | None,
    as_json: bool,
    show_stats: bool,
    **flags: Any,
) -> None:
    """Answer each PROMPT, or all of stdin as one prompt when none is given.

    Several prompts run side by side. A prompt that cannot be answered leaves the others unharmed;
    the exit code is then 1. A setting comes from its flag, else from the environment variable
    JAXINFER_<FLAG IN CAPITALS>, else from the --config file, else from the model and the device.
    """
    assert isinstance(ctx.command, SettingsCommand)
    given = ctx.command.resolved(flags, EVERY)
    sources = {one.name: given[one.name].source for one in SAMPLING.settings if one.name in given}
    chosen: dict[str, Any] = {"max_tokens": DEFAULT_MAX_TOKENS}
    chosen |= {name: given[name].value for name in sources}
    forms = {
        "json": None if json_schema is None else _file_text(json_schema),
        "regex": regex,
        "choice": choices or None,
        "grammar": None if grammar is None else _file_text(grammar),
    }
    if any(form is not None for form in forms.values()):
        chosen["structured_outputs"] = forms
    _check_usage(ctx.params, chosen)
    settings = {name: value.value for name, value in given.items() if name not in sources}
    if settings.get("host_rank"):
        _follow(settings, verbose=show_stats)
        return
    prompts = prompts or (_read_stdin(),)

    import msgspec

    from jaxinfer.cli.stats import RunClock, describe_run, describe_sampling
    from jaxinfer.core.host_memory import release_startup_memory
    from jaxinfer.core.request import RequestSpec, SamplingParams
    from jaxinfer.engine.api.llm import LLM
    from jaxinfer.text.grammar.library import load_llguidance

    checked = SamplingParams(**chosen)  # an invalid flag fails before the model is loaded
    if checked.structured_outputs is not None:
        chosen["structured_outputs"] = checked.structured_outputs
        load_llguidance()
    # the sizes of several hosts do not depend on the prompt, which only one of them reads
    is_one = len(prompts) == 1 and chosen.get("n", 1) == 1
    if is_one and "bundle" not in settings and settings.get("num_hosts", 1) == 1:
        settings = _single_prompt_settings(
            prompts[0] + (system or ""), chosen["max_tokens"], settings
        )
    progress = progress_on(sys.stderr, verbose=show_stats)
    llm = LLM(settings.pop("model", None), progress=progress, **settings)
    release_startup_memory()
    defaults = llm.get_default_sampling_params()
    sampling = msgspec.structs.replace(defaults, **chosen)
    is_text = len(prompts) == 1 and sampling.n == 1 and not as_json
    on_terminal = sys.stdout.isatty() and is_text
    printer = OutputPrinter(as_json=as_json, stream=on_terminal if stream is None else stream)
    clock = RunClock()
    requests = _accept(llm, prompts, chat, system, sampling, printer)
    quiet = NO_PROGRESS if printer.streams else progress
    with quiet.phase("generate", "tokens") as advance:
        specs = [RequestSpec(prompt.token_ids, sampling) for prompt in requests.values()]
        for number, delta in llm.stream(specs):
            clock.token()
            advance(len(delta.token_ids))
            printer.add(list(requests)[number], delta)
    if show_stats:
        sampling_text = describe_sampling(sampling, defaults, sources, llm.config.seed or 0)
        lines = [("sampling", sampling_text)]
        for name, text in lines + describe_run(llm.stats(), clock):
            click.echo(f"{name:14} {text}", err=True)
    ctx.exit(1 if printer.any_failed else 0)


def _follow(settings: Mapping[str, Any], *, verbose: bool) -> None:
    """Follow host 0, which prints the answers."""
    from jaxinfer.engine.api.vllm_args import engine_config

    config = engine_config(None, settings)
    from jaxinfer.engine.start.follow import follow

    follow(config, progress_on(sys.stderr, verbose=verbose))


def _single_prompt_settings(text: str, max_tokens: int, settings: dict[str, Any]) -> dict[str, Any]:
    """The engine's settings for one prompt, for those that the user did not set."""
    from jaxinfer.engine.api.one_prompt import settings_for_one

    text_bytes = len(text.encode(errors="replace"))  # no tokenizer makes more tokens than bytes
    return settings_for_one(text_bytes + TEMPLATE_TOKENS + max_tokens, settings)


def _check_usage(given: Mapping[str, Any], sampling: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` for arguments that contradict each other for any model."""
    if given["system"] is not None and given["chat"] is False:
        raise click.UsageError("--system needs a chat; leave out --no-chat")
    if given["stream"] and given["as_json"]:
        raise click.UsageError("--stream shows text; leave out --json")
    if given["stream"] and len(given["prompts"]) > 1:
        raise click.UsageError("--stream shows one answer; give one PROMPT")
    if given["stream"] and sampling.get("n", 1) != 1:
        raise click.UsageError("--stream shows one answer; leave out --n")
    if not given["as_json"] and not sampling.keys().isdisjoint({"logprobs", "prompt_logprobs"}):
        raise click.UsageError("logprobs are part of the JSON; add --json")


def _file_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"{path} cannot be read as text: {error}") from None


def _read_stdin() -> str:
    """The whole of stdin, without the newline that ends its last line."""
    if sys.stdin.isatty():
        click.echo("Reading the prompt from the terminal; Ctrl-D ends it.", err=True)
    try:
        text = sys.stdin.buffer.read().decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"stdin is not UTF-8 text (byte {error.start}); convert it first"
        ) from None
    if not text:
        raise RequestError(EMPTY_PROMPT)
    return text


def _accept(
    llm: LLM,
    texts: Sequence[str],
    chat: bool | None,
    system: str | None,
    sampling: SamplingParams,
    printer: OutputPrinter,
) -> dict[int, Prompt]:
    """The valid prompts, by number; the others are reported as failed."""
    from jaxinfer.core.request import RequestSpec

    has_template = llm.get_tokenizer().has_chat_template
    if not has_template and (chat or system is not None):
        raise ConfigError("this model has no chat template; leave out --chat and --system")
    chat = has_template if chat is None else chat
    accepted: dict[int, Prompt] = {}
    for number, text in enumerate(texts):
        try:
            prompt = _prompt(llm, text, chat, system)
            llm.check(RequestSpec(prompt.token_ids, sampling))
        except RequestError as error:
            printer.fail(number, f"prompt {number}: {error}" if len(texts) > 1 else str(error))
        else:
            printer.expect(number, prompt, sampling)
            accepted[number] = prompt
    return accepted


def _prompt(llm: LLM, text: str, chat: bool, system: str | None) -> Prompt:
    from jaxinfer.engine.requests.prompts import Prompt, encode

    tokenizer = llm.get_tokenizer()
    if not text:
        raise RequestError(EMPTY_PROMPT)
    if not chat:
        return Prompt(text, encode(text, tokenizer))
    messages = [{"role": "user", "content": text}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    rendered = tokenizer.render_chat(messages)
    return Prompt(rendered, encode(rendered, tokenizer, add_special_tokens=False))


class OutputPrinter:
    """Collects the deltas of each prompt and prints them at once, or each whole answer in order."""

    def __init__(self, *, as_json: bool, stream: bool) -> None:
        self.any_failed = False
        self._as_json = as_json
        self.streams = stream
        self._collectors: dict[int, Collector] = {}
        self._ready: dict[int, str | None] = {}
        self._next = 0

    def expect(self, number: int, prompt: Prompt, sampling: SamplingParams) -> None:
        """Register a prompt whose answer will follow."""
        from jaxinfer.engine.requests.outputs import Collector

        self._collectors[number] = Collector(str(number), prompt, sampling)

    def add(self, number: int, delta: Delta) -> None:
        """Add a delta of a prompt's answer."""
        collector = self._collectors[number]
        collector.add(delta)
        if delta.error:
            self.fail(number, delta.error)
            return
        if self.streams:
            click.echo(delta.text, nl=collector.output.finished)
        elif collector.output.finished:
            answer, several = collector.output, len(collector.output.outputs) > 1
            texts = [completion.text for completion in answer.outputs]
            if self._as_json:
                texts = [json.dumps(one) for one in records(answer, with_index=several)]
            self._print_in_order(number, "\n".join(texts))

    def fail(self, number: int, error: str) -> None:
        """Report a prompt without an answer; in JSON an object with the error takes its place."""
        self.any_failed = True
        click.echo(f"jaxinfer: error: {error}", err=True)
        self._print_in_order(number, json.dumps({"error": error}) if self._as_json else None)

    def _print_in_order(self, number: int, text: str | None) -> None:
        self._ready[number] = text
        while self._next in self._ready:
            line = self._ready.pop(self._next)
            if line is not None:
                click.echo(line)
            self._next += 1


def records(answer: RequestOutput, *, with_index: bool = False) -> list[dict[str, Any]]:
    """A JSON object for each completion; ``usage`` has OpenAI's names and prefix cache hits."""
    found = [_record(answer, completion) for completion in answer.outputs]
    return [{"index": index} | one for index, one in enumerate(found)] if with_index else found


def _record(answer: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
    prompt_tokens, completion_tokens = len(answer.prompt_token_ids), len(completion.token_ids)
    fields: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "prompt_token_ids": answer.prompt_token_ids,
        "finish_reason": completion.finish_reason,
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "num_cached_tokens": answer.num_cached_tokens,
        },
    }
    if completion.logprobs is not None:
        fields["logprobs"] = _logprobs(completion.logprobs)
    if answer.prompt_logprobs is not None:
        fields["prompt_logprobs"] = _logprobs(answer.prompt_logprobs)
    return fields


def _logprobs(positions: Sequence[PositionLogprobs | None]) -> list[list[dict[str, Any]] | None]:
    """For each token, the chosen one first and then the likeliest; None for a prompt's first."""
    return [
        None
        if position is None
        else [
            {
                "token_id": token_id,
                "token": entry.decoded_token,
                "logprob": entry.logprob,
                "rank": entry.rank,
            }
            for token_id, entry in position.items()
        ]
        for position in positions
    ]
