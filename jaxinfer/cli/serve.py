"""``jaxinfer serve``: reads the settings and starts an OpenAI-compatible server.

Owns: the order of a start: all settings are read, checked and shown before the port is bound and
the model loaded.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jaxinfer.cli.command import SettingsCommand, with_model
from jaxinfer.cli.serve_options import EVERY, GROUPS, REFUSED, SETTINGS
from jaxinfer.cli.settings import Value, unknown_variables
from jaxinfer.core.errors import ConfigError

if TYPE_CHECKING:
    from jaxinfer.core.config import EngineConfig
    from jaxinfer.core.server_config import ServerConfig
    from jaxinfer.engine.link.client import Link
    from jaxinfer.engine.link.spawn import Spawned
    from jaxinfer.server.routes.service import Service

    type Start = Callable[[EngineConfig], Link]

LONGEST_SHOWN = 100  # characters of a value in the list of settings


@click.command(cls=SettingsCommand, groups=GROUPS, hidden=REFUSED, several=True)
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
    for line in describe(settings, engine_config, server_config):
        click.echo(line, err=True)
    _serve(engine_config, server_config)


def read_chat_template(given: str) -> str:
    """The template in a file if ``given`` is a path, or ``given`` itself if it is a template."""
    if not set(given).isdisjoint("{}\n"):
        return given
    try:
        return Path(given).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {given} cannot be read: {error}") from error


def check_settings(settings: Mapping[str, Value]) -> tuple[EngineConfig, ServerConfig]:
    """The two configurations; raises ``ConfigError`` naming the invalid setting."""
    from dataclasses import fields

    from jaxinfer.core.server_config import ServerConfig
    from jaxinfer.engine.api.vllm_args import engine_config

    server_fields = {field.name for field in fields(ServerConfig)}
    values = {name: value.value for name, value in settings.items()}
    server = {name: value for name, value in values.items() if name in server_fields}
    engine = {name: value for name, value in values.items() if name not in server_fields}
    if "chat_template" in server:
        server["chat_template"] = read_chat_template(server["chat_template"])
    engine_settings = engine_config(None, engine)
    # as with vLLM, the model's name in the API is the one given on the command line
    server.setdefault("served_model_name", (engine_settings.model,))
    return engine_settings, ServerConfig(**server)


def describe(
    settings: Mapping[str, Value], engine_config: EngineConfig, server_config: ServerConfig
) -> Iterator[str]:
    """A line for each setting in force, with its source, and for each that has no effect."""
    from jaxinfer.engine.api.vllm_args import RENAMED, notices

    for setting in SETTINGS:
        name = RENAMED.get(setting.name, setting.name)
        owner = server_config if hasattr(server_config, name) else engine_config
        if not hasattr(owner, name):
            continue
        value = getattr(owner, name)
        given = settings.get(setting.name)
        source = given.source if given else "default"
        unset = "auto" if owner is engine_config else "none"
        shown = f"{len(value)} given" if setting.secret else _display_text(value, unset)
        yield f"{setting.name} {shown} ({source})"
    ignored = {name: value for name, value in settings.items() if not hasattr(server_config, name)}
    yield from notices(ignored)
    if unknown := unknown_variables(EVERY, os.environ):
        yield f"environment variables that are no settings: {', '.join(unknown)}"


def _display_text(value: Any, unset: str) -> str:
    if value is None:
        return unset
    text = ", ".join(value) or "none" if isinstance(value, tuple) else str(value)
    text = " ".join(text.split()) or "none"
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def _serve(engine_config: EngineConfig, server_config: ServerConfig) -> None:
    if server_config.disable_frontend_multiprocessing:
        _run(engine_config, server_config, _engine_thread)
        return
    from jaxinfer.engine.link.spawn import spawn

    # before any other import, so that it imports JAX while this process imports the server
    with spawn() as spawned:
        _run(engine_config, server_config, partial(_engine_process, spawned))


def _run(engine_config: EngineConfig, server_config: ServerConfig, start: Start) -> None:
    """Serve the engine from ``start``, which is called once the port is bound."""
    from jaxinfer.server.http.log import EventLog, configure_logging
    from jaxinfer.server.http.run import run
    from jaxinfer.server.routes.app import create_app
    from jaxinfer.server.routes.service import Service

    configure_logging(sys.stderr, server_config.uvicorn_log_level)
    service = Service(server_config, EventLog(requests=server_config.enable_log_requests))
    run(
        create_app(service),
        service.drain,
        lambda: _load(engine_config, start, service),
        server_config,
        lambda line: click.echo(f"jaxinfer: {line}", err=True),
    )


@asynccontextmanager
async def _load(config: EngineConfig, start: Start, service: Service) -> AsyncIterator[str]:
    """The engine, attached to the service; yields the summary for the ready line."""
    import asyncio

    from jaxinfer.engine.link.client import EngineClient
    from jaxinfer.server.metrics.registry import Metrics

    link = await asyncio.to_thread(start, config)
    limits, name = link.limits, service.config.served_model_name[0]
    metrics = Metrics(name, limits, config, start=link.stats)
    client = EngineClient(link, metrics.observe)
    try:
        service.attach(client, metrics)
        gc.freeze()  # collecting the objects of the start takes 25 ms, in the middle of a burst
        yield (
            f"model {name}, context of {limits.max_model_len} tokens, "
            f"{limits.max_num_seqs} sequences, {limits.num_usable_pages * limits.page_size} "
            "tokens of KV cache"
        )
    finally:
        await client.shutdown()


def _engine_process(spawned: Spawned, config: EngineConfig) -> Link:
    from jaxinfer.core.host_memory import release_startup_memory
    from jaxinfer.engine.link.process import EngineProcess

    process = EngineProcess(config, spawned, progress=True).ready()
    release_startup_memory()
    return process


def _engine_thread(config: EngineConfig) -> Link:
    from jaxinfer.engine.link.thread import EngineThread
    from jaxinfer.engine.start.progress import progress_on
    from jaxinfer.engine.start.start import start_engine

    return EngineThread(start_engine(config, progress_on(sys.stderr)))
