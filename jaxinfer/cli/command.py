"""A command whose options are settings: flags as vLLM's parser takes them, grouped help, defaults.

Values stay text until the readers of ``settings`` read them, so a flag, a variable and a YAML file
take the same values.
"""

from __future__ import annotations

import json
import os
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from jaxinfer.cli.serve_options import EVERY
from jaxinfer.cli.settings import (
    CONFIG_VARIABLE,
    Group,
    Reader,
    Setting,
    Value,
    anything,
    boolean,
    integer,
    integers,
    mapping,
    number,
    plain_texts,
    read_config_file,
    resolve_settings,
    size,
    size_or_auto,
    texts,
)
from jaxinfer.core.json_text import parse_json

if TYPE_CHECKING:
    from jaxinfer.core.config import EngineConfig

METAVARS: Mapping[Reader, str] = MappingProxyType(
    {
        integer: "N",
        size: "N",
        size_or_auto: "N",
        number: "X",
        mapping: "JSON",
        texts: "TEXT ...",
        integers: "N,...",
    }
)
REPEATED = (texts, plain_texts, integers)
OBJECTS = (mapping, anything)


class SettingsCommand(click.Command):
    """A command with the settings of ``groups``, and ``hidden`` ones that the help leaves out.

    ``several``: whether a flag takes several values (``--api-key a b``), as vLLM's parser allows;
    only for commands without positional texts.
    """

    def __init__(
        self,
        *arguments: Any,
        groups: Sequence[Group],
        hidden: Sequence[Setting] = (),
        several: bool = False,
        **options: Any,
    ) -> None:
        self.groups = groups
        self.settings = (*(setting for group in groups for setting in group.settings), *hidden)
        self._several = several
        made = [_option(setting, hidden=setting in hidden) for setting in self.settings]
        options["params"] = [*made, CONFIG, *(options.get("params") or ())]
        super().__init__(*arguments, **options)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """``--max_model_len`` as well as ``--max-model-len``; several values after one flag;
        ``--kv-events-config.topic t`` for an entry of an object.
        """
        objects = {flag for one in self.settings if one.read in OBJECTS for flag in one.flags}
        args = _joined(_dashed(args), objects)
        if self._several:
            lists = {flag for one in self.settings if one.read is texts for flag in one.flags}
            args = _repeated(args, lists)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The options under the headings of the groups, each with its default."""
        from jaxinfer.cli.defaults import default_text

        records = {
            parameter.name: record
            for parameter in self.get_params(ctx)
            if isinstance(parameter, click.Option)
            and (record := parameter.get_help_record(ctx)) is not None
        }
        for group in self.groups:
            lines: list[tuple[str, str]] = []
            for setting in group.settings:
                flags, words = records.pop(setting.name)
                default = default_text(setting.name, self.name or "")
                shown = "" if not default or "No effect" in words else f" [default: {default}]"
                lines.append((flags, words + shown))
            with formatter.section(group.title):
                formatter.write_dl(lines, col_max=28)
        with formatter.section("More"):
            formatter.write_dl(list(records.values()), col_max=28)

    def resolved(
        self, flags: Mapping[str, Any], elsewhere: Sequence[Setting] = ()
    ) -> dict[str, Value]:
        """The settings that flags, the environment or the file of ``--config`` give."""
        path = flags.get("config") or os.environ.get(CONFIG_VARIABLE)
        file = read_config_file(Path(path)) if path else None
        return resolve_settings(self.settings, flags, os.environ, file, elsewhere)


CONFIG = click.Option(
    ["--config"],
    metavar="FILE",
    help=f"YAML with these settings; keys as the flags. [default: ${CONFIG_VARIABLE}]",
)


def with_model(flags: Mapping[str, Any], reference: str | None) -> dict[str, Any]:
    """The flags with the MODEL argument; raises ``UsageError`` if ``--model`` is there as well."""
    if reference is None:
        return dict(flags)
    if flags["model"] is not None:
        raise click.UsageError("the model is given twice; leave out MODEL or --model")
    return {**flags, "model": reference}


def planned_config(
    ctx: click.Context, flags: Mapping[str, Any], reference: str | None
) -> EngineConfig:
    """The settings of a command that only plans an engine and reads no tokenizer."""
    from jaxinfer.engine.api.vllm_args import engine_config

    assert isinstance(ctx.command, SettingsCommand)
    settings = ctx.command.resolved(with_model(flags, reference), EVERY)
    if "model" not in settings:
        raise click.UsageError("give MODEL")
    values = {name: value.value for name, value in settings.items()}
    return engine_config(None, {**values, "skip_tokenizer_init": True})


def _option(setting: Setting, *, hidden: bool) -> click.Option:
    if setting.read is boolean:
        spelled = [f"{flag}/--no-{flag[2:]}" for flag in setting.flags]
        return click.Option(
            [setting.name, *spelled], default=None, help=setting.help, hidden=hidden
        )
    return click.Option(
        [setting.name, *setting.flags],
        multiple=setting.read in REPEATED,
        metavar=METAVARS.get(setting.read, "TEXT"),
        help=setting.help,
        hidden=hidden,
    )


def _dashed(arguments: Sequence[str]) -> list[str]:
    """Flags with dashes in place of underscores; values are unchanged.

    What follows ``--`` is no flag.
    """
    dashed: list[str] = []
    end = arguments.index("--") if "--" in arguments else len(arguments)
    for argument in arguments[:end]:
        flag, equals, value = argument.partition("=")
        if flag.startswith("--"):
            argument = flag.replace("_", "-") + equals + value
        dashed.append(argument)
    return dashed + list(arguments[end:])


def _joined(arguments: Sequence[str], objects: Container[str]) -> list[str]:
    """``--flag.a.b 1 --flag.c x`` as ``--flag {"a": {"b": 1}, "c": "x"}``, for flags that take an
    object, as in vLLM: a value that is no JSON is text.
    """
    joined: list[str] = []
    found: dict[str, dict[str, Any]] = {}
    end = arguments.index("--") if "--" in arguments else len(arguments)
    given = iter(arguments[:end])
    for argument in given:
        path, equals, value = argument.partition("=")
        flag, *keys = path.split(".")
        if flag not in objects or not keys:
            joined.append(argument)
            continue
        value = value if equals else next(given, "")
        entries = found.setdefault(flag, {})
        for key in keys[:-1]:
            entries = entries.setdefault(key.replace("-", "_"), {})
        entries[keys[-1].replace("-", "_")] = _json_or_text(value)
    for flag, entries in found.items():
        joined += [flag, json.dumps(entries)]
    return joined + list(arguments[end:])


def _json_or_text(value: str) -> Any:
    try:
        return parse_json(value)
    except ValueError:
        return value


def _repeated(arguments: Sequence[str], several: Container[str]) -> list[str]:
    """``--flag a b`` as ``--flag a --flag b``, for flags that take several values."""
    repeated: list[str] = []
    flag, has_value = "", False
    for argument in arguments:
        if argument.startswith("-"):
            flag, has_value = (argument if argument in several else ""), False
        elif flag:
            if has_value:
                repeated.append(flag)
            has_value = True
        repeated.append(argument)
    return repeated
