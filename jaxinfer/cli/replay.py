"""``jaxinfer replay``: runs a recording of an engine again, and names the first difference."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from jaxinfer.core.errors import RecordingError
from jaxinfer.core.version import VERSION

if TYPE_CHECKING:
    from jaxinfer.engine.record.check import Check
    from jaxinfer.engine.record.file import Header
    from jaxinfer.engine.record.replay import Recording, Report

DIFFERS = 3  # the exit code if the replay is not the recording


@click.command()
@click.argument("file", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--until", type=int, metavar="STEP", help="Stop after this step.")
@click.option("--check", is_flag=True, help="Run the steps too, and compare the tokens.")
@click.option("--model", metavar="MODEL", help="With --check: where the model is here.")
@click.option("--cache-dir", metavar="DIR", help="With --check: the cache folder.")
@click.pass_context
def replay(
    ctx: click.Context,
    file: Path,
    until: int | None,
    check: bool,
    model: str | None,
    cache_dir: str | None,
) -> None:
    """Run a recording of `jaxinfer serve --record FILE` again.

    The scheduler gets the recorded events and must plan the recorded steps, on any machine. With
    --check the steps run on this machine's device, which must be of the recorded kind, and each
    row must draw the recorded tokens. The exit code is 3 if something differs.
    """
    from jaxinfer.engine.record.replay import Recording
    from jaxinfer.engine.record.replay import replay as run_again

    recording = Recording(file)
    click.echo(described(recording.header))
    if check:
        report, lines = checked(recording, until, model, cache_dir)
    else:
        report, lines = run_again(recording, until=until), []
    if report.num_calls == 0 and report.difference is None:
        raise RecordingError(f"the recording {file} has no call of the scheduler; it is empty")
    for line in (*lines_of(report), *lines):
        click.echo(line)
    ctx.exit(0 if report.difference is None else DIFFERS)


def checked(
    recording: Recording, until: int | None, model: str | None, cache_dir: str | None
) -> tuple[Report, list[str]]:
    """Replay a recording with its steps; the report, and lines about the rows."""
    from jaxinfer.engine.record.locate import locate
    from jaxinfer.engine.record.replay import replay as run_again
    from jaxinfer.engine.start.checked import check_of, checked_plan
    from jaxinfer.engine.start.progress import progress_on

    progress = progress_on(sys.stderr)
    plan, notes = checked_plan(recording.header, progress, model=model, cache_dir=cache_dir)
    for note in notes:
        click.echo(f"note: {note}", err=True)
    check, runner = check_of(plan, recording.header, progress)
    report = run_again(recording, until=until, follower=check)
    check.drain()
    lines = rows_of(check, report)
    if check.found is not None:
        lines.append(locate(check.found, runner))
    return report, lines


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


def rows_of(check: Check, report: Report) -> list[str]:
    """How many rows were compared, and why others were not."""
    equal = "" if report.difference else ", all equal"
    found = [f"{check.counts.compared} rows of steps were compared{equal}"]
    if check.counts.unknown:
        found.append(
            f"{check.counts.unknown} rows were not, as they depend on pages from before the "
            "recording"
        )
    if check.blind:
        found.append(f"no later row was compared: {check.blind}")
    return found
