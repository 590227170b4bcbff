"""``jaxinfer run-batch``: the requests of a file, answered into another file as a server would."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, BinaryIO

import click

from jaxinfer.cli.command import SettingsCommand, with_model
from jaxinfer.cli.serve import check_settings, describe, engine_start, loaded, log_settings
from jaxinfer.cli.serve_options import EVERY, GROUPS
from jaxinfer.core.errors import ConfigError

if TYPE_CHECKING:
    from jaxinfer.cli.serve import Start
    from jaxinfer.core.config import EngineConfig
    from jaxinfer.core.server_config import ServerConfig
    from jaxinfer.server.routes.batch import BatchCounts

_BY_TITLE = MappingProxyType({group.title: group for group in GROUPS})
_GROUPS = (
    _BY_TITLE["Model"],
    _BY_TITLE["The model in the API"],
    _BY_TITLE["Memory and batching"],
    _BY_TITLE["Limits"].without(
        "max_num_queued_reqs",
        "max_num_queued_tokens",
        "shutdown_timeout",
        "health_timeout",
        "h11_max_incomplete_event_size",
        "max_buffered_bytes",
        "max_connections",
    ),
    _BY_TITLE["Answers"],
    _BY_TITLE["Process and log"].without("disable_uvicorn_access_log"),
)


@click.command("run-batch", cls=SettingsCommand, groups=_GROUPS, several=True)
@click.argument("reference", metavar="[MODEL]", required=False)
@click.option(
    "-i",
    "--input-file",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Requests: a JSON object a line, of custom_id, method, url and body.",
)
@click.option(
    "-o",
    "--output-file",
    required=True,
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Where the responses go; it appears once all are there.",
)
@click.pass_context
def run_batch(
    ctx: click.Context,
    reference: str | None,
    input_file: Path,
    output_file: Path,
    **flags: Any,
) -> None:
    """Answer a batch file in OpenAI's form with MODEL.

    The output has a line for each request, in their order: with its custom_id, and with the
    response that `jaxinfer serve` would send or with an error. A failed line leaves the others
    unharmed; the exit code is then 1. The settings are those of `serve`.
    """
    assert isinstance(ctx.command, SettingsCommand)
    settings = ctx.command.resolved(with_model(flags, reference), EVERY)
    engine_config, server_config = check_settings(settings)
    if engine_config.prefill_first is None:  # no token is streamed
        engine_config = replace(engine_config, prefill_first=True)
    if engine_config.seed is None:  # the same file has the same answers again
        engine_config = replace(engine_config, seed=0)
    server_config = replace(server_config, disable_uvicorn_access_log=True)

    from jaxinfer.core.log import SERVER_LOGGER, log_to

    log = log_settings(server_config)
    log_to(sys.stderr, log, {SERVER_LOGGER: log.number})
    lines = _lines(input_file)
    with written_whole(output_file) as target:
        describe(settings, engine_config, server_config)
        counts = _run(engine_config, server_config, lines, target)
    click.echo(f"{counts.total} requests, {counts.failed} of them failed: {output_file}", err=True)
    ctx.exit(1 if counts.failed else 0)


def _lines(path: Path) -> list[bytes]:
    """The lines of the input, which may be a pipe; raises ``ConfigError`` if it cannot be read."""
    try:
        with path.open("rb") as file:
            return file.readlines()
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}; choose another --input-file"
        ) from error


def _run(
    engine_config: EngineConfig, server_config: ServerConfig, lines: list[bytes], target: BinaryIO
) -> BatchCounts:
    import asyncio  # here, as the engine's process is to begin before other imports

    with engine_start(engine_config, server_config) as start:
        return asyncio.run(_batch(engine_config, server_config, start, lines, target))


async def _batch(
    engine_config: EngineConfig,
    server_config: ServerConfig,
    start: Start,
    lines: list[bytes],
    target: BinaryIO,
) -> BatchCounts:
    import asyncio

    from jaxinfer.engine.start.progress import logged_progress, progress_on
    from jaxinfer.server.http.log import EventLog, configure_logging
    from jaxinfer.server.routes.app import create_app
    from jaxinfer.server.routes.batch import run_batch as answer_lines
    from jaxinfer.server.service.service import Service

    # SIGTERM ends the run like Ctrl-C, so that no partial file stays
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, signal.raise_signal, signal.SIGINT)
    log = log_settings(server_config)
    configure_logging(sys.stderr, log)
    service = Service(server_config, EventLog(requests=server_config.enable_log_requests))
    progress = progress_on(sys.stderr) if sys.stderr.isatty() else logged_progress(log)
    async with loaded(engine_config, start, service):
        with progress.task("batch", len(lines), "requests") as advance:
            return await answer_lines(
                create_app(service),
                lines,
                target.write,
                # twice as many as run, so that one that ends is replaced at once
                num_at_once=2 * service.client.limits.max_num_seqs,
                advance=advance,
            )


@contextmanager
def written_whole(path: Path) -> Generator[BinaryIO]:
    """A file that appears at ``path`` when the block ends; an error leaves what was there before.

    Raises ``ConfigError`` if it cannot be written.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        file = partial.open("xb")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror}; choose another --output-file"
        ) from error
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
