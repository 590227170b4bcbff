"""``jaxinfer chat``: reads the settings, and starts the engine or finds the server."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxinfer.cli.command import SettingsCommand, with_model
from jaxinfer.cli.options import GENERATING_MODEL, MEMORY, SAMPLING
from jaxinfer.cli.serve_options import EVERY, GROUPS, REMOTE
from jaxinfer.cli.settings import Group, Value

if TYPE_CHECKING:
    from jaxinfer.cli.chat.events import Answerer
    from jaxinfer.core.chat_config import ChatConfig
    from jaxinfer.core.config import EngineConfig
    from jaxinfer.engine.link.link import Link

# of requests that bring one answer as text
CHAT_SAMPLING = SAMPLING.without(
    *("n", "logprobs", "logprob_token_ids", "temperature_scaled_logprobs", "prompt_logprobs"),
    "detokenize",
)
_ANSWERING = (
    *("chat_template", "default_chat_template_kwargs", "tool_call_parser", "reasoning_parser"),
)
ANSWERS = Group(
    "Chats", tuple(one for group in GROUPS for one in group.settings if one.name in _ANSWERING)
)
HISTORY = "chat_history"  # in the cache folder


@click.command(
    cls=SettingsCommand, groups=(CHAT_SAMPLING, ANSWERS, GENERATING_MODEL, MEMORY, REMOTE)
)
@click.argument("reference", metavar="[MODEL]", required=False)
@click.argument("message", metavar="[MESSAGE]", required=False)
@click.option("--system", metavar="TEXT", help="The system message.")
@click.option(
    "--load",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Go on with a conversation that /save has written.",
)
@click.option(
    "--tools",
    "tools_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="FILE",
    help="A JSON list of OpenAI's tools, which the model may call; none is run.",
)
@click.pass_context
def chat(
    ctx: click.Context,
    reference: str | None,
    message: str | None,
    system: str | None,
    load: Path | None,
    tools_file: Path | None,
    **flags: Any,
) -> None:
    """Talk with MODEL in the terminal, or answer each line of stdin.

    MESSAGE is the first message. With --url a running server answers. /help lists the commands.
    A setting comes from its flag, else from the environment variable JAXINFER_<FLAG IN CAPITALS>,
    else from the --config file, else from the model and the device.
    """
    assert isinstance(ctx.command, SettingsCommand)
    given = ctx.command.resolved(with_model(flags, reference), EVERY)
    sampling = {
        one.name: given.pop(one.name).value for one in CHAT_SAMPLING.settings if one.name in given
    }

    from jaxinfer.cli.chat.conversation import Conversation, read_json_list
    from jaxinfer.cli.chat.reader import Entry, Reader, piped_lines, terminal_lines
    from jaxinfer.cli.chat.screen import Screen
    from jaxinfer.cli.chat.session import Session
    from jaxinfer.core.chat_config import ChatConfig
    from jaxinfer.core.config import cache_root
    from jaxinfer.core.request import SamplingParams
    from jaxinfer.text.tools import check_tools

    SamplingParams(**sampling)  # an invalid flag fails before the model is loaded
    remote = {one.name: given.pop(one.name) for one in REMOTE.settings if one.name in given}
    config = ChatConfig(**{name: value.value for name, value in remote.items()})
    if config.url is None and any(value.source == "flag" for value in remote.values()):
        raise click.UsageError("--api-key is of a server; give its --url, or leave it out")
    conversation = Conversation()
    if load is not None:
        conversation.load(load)
    conversation.system = system or conversation.system
    tools = [] if tools_file is None else read_json_list(tools_file, "tools")
    check_tools(tools)
    is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
    has_colours = os.environ.get("TERM", "dumb") != "dumb" and not os.environ.get("NO_COLOR")
    screen = Screen(sys.stdout, sys.stderr, colours=has_colours)
    cache_dir = given["cache_dir"].value if "cache_dir" in given else None
    with _answerer(config, given) as answerer:
        session = Session(
            answerer, conversation, screen, sampling, tools, is_interactive=is_interactive
        )
        if is_interactive:
            screen.remark(_greeting(answerer, config))
            lines = terminal_lines(cache_root(cache_dir) / HISTORY)
        else:
            lines = piped_lines
        if message:
            session.enter(Entry(None, message))
        session.run(Reader(lines))
    ctx.exit(1 if session.any_failed and not is_interactive else 0)


def _greeting(answerer: Answerer, config: ChatConfig) -> str:
    place = f" at {config.address}" if config.address else ""
    length = answerer.max_model_len
    context = f", context of {length} tokens" if length else ""
    return f"{answerer.model}{place}{context}. /help lists the commands, Ctrl-D ends."


@contextmanager
def _answerer(config: ChatConfig, given: dict[str, Value]) -> Generator[Answerer]:
    if config.address is not None:
        from jaxinfer.cli.chat.remote import RemoteAnswerer

        for name, value in given.items():
            if value.source == "flag" and name not in ("model", "cache_dir"):
                flag = f"--{name.replace('_', '-')}"
                raise click.UsageError(f"{flag} is of an engine here; leave it or --url out")
        model = given["model"].value if "model" in given else None
        yield RemoteAnswerer(config.address, next(iter(config.api_key), ""), model)
        return
    from jaxinfer.cli.chat.local import local_answerer
    from jaxinfer.cli.serve import check_settings
    from jaxinfer.engine.api.one_prompt import SINGLE_CHUNK

    # one conversation needs few executables, so that the first token comes sooner
    few = {"max_num_seqs": 1, "max_num_batched_tokens": SINGLE_CHUNK}
    sizes = {} if "bundle" in given else {name: Value(n, "chat") for name, n in few.items()}
    with local_answerer(*check_settings(sizes | given), _start) as answerer:
        yield answerer


def _start(config: EngineConfig) -> Link:
    from jaxinfer.core.host_memory import release_startup_memory
    from jaxinfer.engine.link.thread import EngineThread
    from jaxinfer.engine.start.progress import progress_on
    from jaxinfer.engine.start.start import start_engine

    engine = start_engine(config, progress_on(sys.stderr))
    release_startup_memory()
    return EngineThread(engine)
