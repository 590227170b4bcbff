"""``jaxinfer replay``: runs a recording of an engine again, and names the first difference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from jaxinfer.core.errors import RecordingError
from jaxinfer.core.version import VERSION

if TYPE_CHECKING:
    from jaxinfer.engine.record.file import Header
    from jaxinfer.engine.record.replay import Report

DIFFERS = 3  # the exit code if the replay is not the recording


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--until", type=int, metavar="STEP", help="Stop after this step.")
@click.pass_context
def replay(ctx: click.Context, file: Path, until: int | None) -> None:
    """Run a recording of `jaxinfer serve --record FILE` again.

    The scheduler gets the recorded events and must plan the recorded steps, on any machine. The
    exit code is 3 if something differs.
    """
    from jaxinfer.engine.record.replay import Recording
    from jaxinfer.engine.record.replay import replay as run_again

    recording = Recording(file)
    click.echo(described(recording.header))
    report = run_again(recording, until=until)
    if report.num_calls == 0 and report.difference is None:
        raise RecordingError(f"the recording {file} has no call of the scheduler; it is empty")
    for line in lines_of(report):
        click.echo(line)
    ctx.exit(0 if report.difference is None else DIFFERS)


def described(header: Header) -> str:
    """A line about what was recorded."""
    device = header.machine.get("device", "no device")
    redacted = ", tokens redacted" if header.is_redacted else ""
    other = "" if header.jaxinfer == VERSION else f" (this is {VERSION})"
    return f"{header.model} on {device}, by jaxinfer {header.jaxinfer}{other}{redacted}"


def lines_of(report: Report) -> list[str]:
    """The result of a replay as lines."""
    found = [
        f"{report.num_calls} calls of the scheduler from call {report.first_call} on: "
        f"{report.num_steps} steps up to step {report.last_step}, {report.num_tokens} tokens"
    ]
    if report.is_torn:
        found.append("the recording ends within a record: its last calls are missing")
    if (difference := report.difference) is None:
        found.append("every plan is equal")
    else:
        step = f", step {difference.step_id}" if difference.step_id >= 0 else ""
        found.append(f"call {difference.call}{step}: {difference.text}")
    return found
