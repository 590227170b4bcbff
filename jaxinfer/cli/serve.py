"""``jaxinfer serve``: reads the settings and starts an OpenAI-compatible server.

Owns: the order of a start: all settings are read, checked and shown before the port is bound and
the model loaded.
"""

from __future__ import annotations

import gc
import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxinfer.cli.command import SettingsCommand, with_model
from jaxinfer.cli.replicas import config_of_rank, replica_environments
from jaxinfer.cli.serve_options import EVERY, GROUPS, HIDDEN, SETTINGS
from jaxinfer.cli.settings import Value, unknown_variables
from jaxinfer.core.errors import ConfigError, JaxinferError, TokenizerError
from jaxinfer.core.version import VERSION

if TYPE_CHECKING:
    from jaxinfer.core.config import EngineConfig
    from jaxinfer.core.limits import Limits
    from jaxinfer.core.log import LogSettings
    from jaxinfer.core.server_config import ServerConfig
    from jaxinfer.engine.link.link import Link
    from jaxinfer.engine.link.spawn import Spawned
    from jaxinfer.server.http.run import Served
    from jaxinfer.server.service.service import Service

    type Start = Callable[[EngineConfig], Link]

LONGEST_SHOWN = 100  # characters of a value in the list of settings


@click.command(cls=SettingsCommand, groups=GROUPS, hidden=HIDDEN, several=True)
@click.argument("reference", metavar="[MODEL]", required=False)
@click.pass_context
def serve(ctx: click.Context, reference: str | None, **flags: Any) -> None:
    """Serve MODEL over OpenAI's HTTP API.

    A setting comes from its flag, else from the environment variable JAXINFER_<FLAG IN CAPITALS>,
    else from the --config file, else from the model and the device.
    """
    assert isinstance(ctx.command, SettingsCommand)
    settings = ctx.command.resolved(with_model(flags, reference))
    engine_config, server_config = check_settings(settings)

    from jaxinfer.core.log import SERVER_LOGGER, log_to

    log = log_settings(server_config)
    log_to(sys.stderr, log, {SERVER_LOGGER: log.number})  # the others once their modules are needed
    describe(settings, engine_config, server_config)
    try:
        _serve(engine_config, server_config)
    except JaxinferError as error:  # in the format of all lines before it
        _tell("failed", f"jaxinfer: error: {error}", level=logging.ERROR)
        ctx.exit(1)


def read_chat_template(given: str) -> str:
    """The template in a file if ``given`` is a path, or ``given`` itself if it is a template.

    Raises ``ConfigError`` if there is no such file, or its text is not a template.
    """
    from jaxinfer.text.chat import ChatTemplate

    template, place = given, ""
    if set(given).isdisjoint("{}\n"):
        place = f" (file {given})"
        try:
            template = Path(given).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"the chat template {given} cannot be read: {error}") from error
    try:
        ChatTemplate(template)
    except TokenizerError as error:
        raise ConfigError(f"chat_template is unusable{place}: {error}") from error
    return template


def check_settings(settings: Mapping[str, Value]) -> tuple[EngineConfig, ServerConfig]:
    """The two configurations; raises ``ConfigError`` naming the invalid setting."""
    from dataclasses import fields

    from jaxinfer.core.server_config import ServerConfig
    from jaxinfer.engine.api.vllm_args import engine_config
    from jaxinfer.weights.names import model_name

    server_fields = {field.name for field in fields(ServerConfig)}
    values = {name: value.value for name, value in settings.items()}
    server = {name: value for name, value in values.items() if name in server_fields}
    engine = {name: value for name, value in values.items() if name not in server_fields}
    if "chat_template" in server:
        server["chat_template"] = read_chat_template(server["chat_template"])
    engine_settings = engine_config(None, engine)
    if engine_settings.hosts is not None and server.get("data_parallel_size", 1) > 1:
        raise ConfigError("data_parallel_size is of one host; leave it out, or num_hosts")
    if not server.get("served_model_name"):
        name = model_name(engine_settings.model)
        server["served_model_name"] = (name,)
        if name != engine_settings.model:  # clients of vLLM send the path
            server["unlisted_model_name"] = engine_settings.model
    return engine_settings, ServerConfig(**server)


def describe(
    settings: Mapping[str, Value],
    engine_config: EngineConfig,
    server_config: ServerConfig,
) -> None:
    """Log what is given, a line for each source, and what has no effect; defaults at level debug.

    What the engine derives from the model and the device is logged when it is planned.
    """
    from jaxinfer.engine.api.vllm_args import RENAMED, notices

    model = engine_config.model
    source = f" ({settings['model'].source})" if "model" in settings else " (default)"
    _tell("start", f"jaxinfer {VERSION} serves {model}{source}", version=VERSION, model=model)
    debugs = server_config.uvicorn_log_level in ("debug", "trace")
    by_source: dict[str, dict[str, str]] = {}
    for setting in SETTINGS:
        name = RENAMED.get(setting.name, setting.name)
        owner = server_config if hasattr(server_config, name) else engine_config
        if not hasattr(owner, name) or name == "model":
            continue
        if setting.name in settings:
            value = getattr(owner, name)
            shown = f"{len(value)} given" if setting.secret else _display_text(value)
            kind = settings[setting.name].source
            if kind.startswith("environment "):
                kind, shown = "environment", f"{shown} ({kind.removeprefix('environment ')})"
            by_source.setdefault(kind, {})[setting.name] = shown
        elif debugs:
            _tell("default", _default(setting.name), level=logging.DEBUG, name=setting.name)
    order = ("flag", "environment")  # then files
    for kind in sorted(by_source, key=lambda kind: (kind not in order, kind != "flag")):
        values = by_source[kind]
        words = ", ".join(f"{name} {shown}" for name, shown in values.items())
        place = {"flag": "flags", "environment": "the environment"}.get(kind, kind)
        _tell("settings", f"from {place}: {words}", source=kind, settings=values)
    ignored = {name: value for name, value in settings.items() if not hasattr(server_config, name)}
    if words := notices(ignored):
        _tell("no_effect", "; ".join(words))
    if unknown := unknown_variables(EVERY, os.environ):
        names = ", ".join(unknown)
        text = f"environment variables that are no settings: {names}"
        _tell("unknown_variables", text, level=logging.WARNING)


def _tell(event: str, text: str, *, level: int = logging.INFO, **fields: Any) -> None:
    from jaxinfer.core.log import SERVER_LOGGER, tell

    tell(logging.getLogger(SERVER_LOGGER), level, event, text, **fields)


def _default(name: str) -> str:
    from jaxinfer.cli.defaults import default_text

    return f"{name} {default_text(name, 'serve')} (default)"


def _display_text(value: Any) -> str:
    text = ", ".join(value) if isinstance(value, tuple) else str(value)
    text = " ".join(text.split()) or "none"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def log_settings(config: ServerConfig) -> LogSettings:
    """The format and the level of the log."""
    from jaxinfer.core.log import LogSettings

    return LogSettings(config.log_format == "json", config.uvicorn_log_level)


def _serve(engine_config: EngineConfig, server_config: ServerConfig) -> None:
    if engine_config.host_rank:  # host 0 has the server
        _follow(engine_config, log_settings(server_config))
        return
    with engine_start(engine_config, server_config) as start:
        _run(engine_config, server_config, start)


def _follow(config: EngineConfig, log: LogSettings) -> None:
    """Follow host 0 until it ends."""
    from jaxinfer.core.log import log_to
    from jaxinfer.engine.start.follow import follow
    from jaxinfer.engine.start.progress import LOGGER, logged_progress

    log_to(sys.stderr, log, {"jaxinfer": log.library_number, LOGGER: log.number})
    follow(config, logged_progress(log))


@contextmanager
def engine_start(engine_config: EngineConfig, server_config: ServerConfig) -> Iterator[Start]:
    """The function that starts the engine, in its own process or in a thread.

    A process that it has not started when the block ends is killed.
    """
    if server_config.disable_frontend_multiprocessing:
        yield partial(_engine_thread, log=log_settings(server_config))
        return
    from jaxinfer.engine.link.spawn import spawn

    count, devices = server_config.data_parallel_size, engine_config.tensor_parallel_size or 1
    own = replica_environments(count, devices, os.environ)
    environments = [os.environ | each for each in own]
    # before any other import, so that it imports JAX while this process imports the server
    with spawn(environment=environments[0]) as spawned:
        start: Start = partial(_engine_process, spawned, log=log_settings(server_config))
        if count > 1:
            start = partial(_replicas, start, environments, log_settings(server_config))
        yield start


def _run(engine_config: EngineConfig, server_config: ServerConfig, start: Start) -> None:
    """Serve the engine from ``start``, which is called once the port is bound."""
    from jaxinfer.server.http.log import EventLog, configure_logging
    from jaxinfer.server.http.run import run
    from jaxinfer.server.routes.app import create_app
    from jaxinfer.server.service.service import Service

    configure_logging(sys.stderr, log_settings(server_config))
    log = EventLog(
        requests=server_config.enable_log_requests, max_characters=server_config.max_log_len
    )
    service = Service(server_config, log)
    if not (server_config.needs_key or server_config.is_local):
        _tell(
            "open",
            "requests need no key, and other machines can reach the server; set --api-key, or "
            "leave out --host",
            level=logging.WARNING,
        )
    run(
        create_app(service),
        service.drain,
        lambda: loaded(engine_config, start, service),
        server_config,
        partial(_tell, "server"),
        service.reload_keys if server_config.api_key_file else None,
    )


def offered(config: ServerConfig, limits: Limits) -> str:
    """The interfaces at the address of the server: the page, if there is one, and the API."""
    has_page = config.ui and config.uds is None and not limits.pooling
    return f"{'a page for chats is there; ' if has_page else ''}OpenAI's API at /v1"


@asynccontextmanager
async def loaded(config: EngineConfig, start: Start, service: Service) -> AsyncIterator[Served]:
    """The engine, attached to the service."""
    import asyncio

    from jaxinfer.engine.link.client import EngineClient
    from jaxinfer.server.http.run import Served
    from jaxinfer.server.metrics.registry import Metrics

    link = await asyncio.to_thread(start, config)
    limits, name = link.limits, service.config.served_model_name[0]
    metrics = Metrics(name, limits, config, start=link.start_stats)
    client = EngineClient(link, metrics.observe)
    try:
        service.attach(client, metrics)
        if service.has_chats:
            service.renderer.start()
        gc.freeze()  # collecting the objects of the start takes 25 ms, in the middle of a burst
        summary = (
            f"{offered(service.config, limits)}; model {name}, "
            f"{'' if link.num_replicas == 1 else f'{link.num_replicas} engines, each with a '}"
            f"context of {limits.max_model_len} tokens, {limits.max_num_seqs} sequences, "
            f"{limits.num_usable_pages * limits.page_size} "
            f"tokens of KV cache, tool calls in the form {service.form_of_calls or 'none'}"
        )
        yield Served(summary, client.ended)
    finally:
        await service.renderer.close()
        await client.shutdown()
        if service.traces is not None:
            await asyncio.to_thread(service.traces.close)


def _engine_process(
    spawned: Spawned, config: EngineConfig, *, log: LogSettings | None = None
) -> Link:
    from jaxinfer.core.host_memory import release_startup_memory
    from jaxinfer.engine.link.process import EngineProcess

    process = EngineProcess(config, spawned, log=log).ready()
    release_startup_memory()
    return process


def _replicas(
    start: Start,
    environments: Sequence[Mapping[str, str]],
    log: LogSettings,
    config: EngineConfig,
) -> Link:
    """Engines of their own processes, the first from ``start``."""
    from jaxinfer.engine.link.replicas import Replicas
    from jaxinfer.engine.link.spawn import spawn

    def start_rank(rank: int) -> Link:
        spawned = spawn(environment=environments[rank])
        try:
            return _engine_process(spawned, config_of_rank(config, rank), log=log)
        except BaseException:
            spawned.__exit__()
            raise

    return Replicas(start(config), len(environments), start_rank)


def _engine_thread(config: EngineConfig, *, log: LogSettings) -> Link:
    from jaxinfer.engine.link.thread import EngineThread
    from jaxinfer.engine.start.progress import logged_progress
    from jaxinfer.engine.start.start import start_engine

    return EngineThread(
        start_engine(config, logged_progress(log), tell_plan=True, serves_early=True)
    )
