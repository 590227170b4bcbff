"""The sources of a command's settings (flags, environment, a YAML file) and their readers.

Owns: the readers, which turn text or YAML into values, and precedence: flag, environment, file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxinfer.core.errors import ConfigError
from jaxinfer.core.json_text import parse_json

PREFIX = "JAXINFER_"
CONFIG_VARIABLE = "JAXINFER_CONFIG"  # the path of the YAML file
TEXTS = "a text or a list of texts"
# a Service called jaxinfer sets JAXINFER_PORT=tcp://ADDRESS:PORT in other pods
KUBERNETES = "; Kubernetes sets it for a Service of that name: set enableServiceLinks: false"
# vLLM's reading of 32k and 32K
DECIMAL = MappingProxyType({"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12})
BINARY = MappingProxyType({"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40})
SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)(?P<unit>[kmgtKMGT])")
YES = ("1", "true", "yes", "on")
NO = ("0", "false", "no", "off")

type Reader = Callable[[Any], Any]  # raises ValueError with the expected form


@dataclass(frozen=True)
class Setting:
    """One setting: its name in the config classes (or vLLM's), its reader and its help."""

    name: str
    read: Reader
    help: str
    aliases: tuple[str, ...] = ()  # further flags, such as -tp
    environment: tuple[str, ...] = ()  # further variables, from other servers
    secret: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        """``--max-model-len`` and the aliases."""
        return (f"--{self.name.replace('_', '-')}", *self.aliases)

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys in a file, one for each long flag: ``max_model_len``."""
        return tuple(flag[2:].replace("-", "_") for flag in self.flags if flag.startswith("--"))

    @property
    def variables(self) -> tuple[str, ...]:
        """The environment variables; the first one that is set counts."""
        return (*(PREFIX + key.upper() for key in self.keys), *self.environment)


class Group(NamedTuple):
    """Settings under one heading of the help."""

    title: str
    settings: tuple[Setting, ...]

    def without(self, *names: str) -> Group:
        """The group without these settings, for commands where they have no meaning."""
        assert {*names} <= {one.name for one in self.settings}, names
        return Group(self.title, tuple(one for one in self.settings if one.name not in names))


class Value(NamedTuple):
    """A setting's value and its source: "flag", "environment NAME" or "file NAME"."""

    value: Any
    source: str


class File(NamedTuple):
    """A YAML file's mapping, and its name for messages."""

    name: str
    entries: Mapping[str, Any]


def resolve_settings(
    known: Iterable[Setting],
    flags: Mapping[str, Any],
    environ: Mapping[str, str],
    file: File | None = None,
    elsewhere: Iterable[Setting] = (),
) -> dict[str, Value]:
    """The settings that a source sets, by name, in the order of ``known``.

    A flag wins over the environment, which wins over the file. ``flags`` has None, or nothing, for
    a flag that was not given. Keys of the file that are settings ``elsewhere``, of other commands,
    are passed over. Raises ``ConfigError`` naming the source, for a value that cannot be read and
    for an unknown key of the file.
    """
    known = tuple(known)
    in_file = _settings_in_file(file, known, elsewhere) if file else {}
    settings: dict[str, Value] = {}
    for setting in known:
        # (source, name of the setting in the source, value)
        candidates: list[tuple[str, str, Any]] = []
        if flags.get(setting.name) not in (None, ()):
            candidates.append(("flag", setting.flags[0], flags[setting.name]))
        candidates += [
            (f"environment {variable}", variable, environ[variable])
            for variable in setting.variables
            if variable in environ
        ]
        if file and setting.name in in_file:
            key, value = in_file[setting.name]
            candidates.append((f"file {file.name}", f"{key} in {file.name}", value))
        for source, word, value in candidates[:1]:
            settings[setting.name] = Value(_read(setting, word, value), source)
    return settings


def unknown_variables(known: Iterable[Setting], environ: Mapping[str, str]) -> list[str]:
    """Variables with the prefix of settings that are not settings."""
    names = {CONFIG_VARIABLE}.union(*(setting.variables for setting in known))
    return sorted(name for name in environ if name.startswith(PREFIX) and name not in names)


def read_config_file(path: Path) -> File:
    """The mapping in a YAML file; raises ``ConfigError`` if it is not one."""
    import yaml

    try:
        entries = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} cannot be read: {error}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # such as for 2001-02-30
        words = " ".join(str(error).split())
        raise ConfigError(f"the configuration file {path} is no YAML: {words}") from error
    if entries is not None and not isinstance(entries, dict):
        raise ConfigError(f"the configuration file {path} holds no settings; use `name: value`")
    return File(str(path), entries or {})


def _settings_in_file(
    file: File, known: Iterable[Setting], elsewhere: Iterable[Setting]
) -> dict[str, tuple[str, Any]]:
    """(key as written, value) of each setting in the file; an empty value counts as absent."""
    names = {key: setting.name for setting in known for key in setting.keys}
    others = {key for setting in elsewhere for key in setting.keys}
    in_file: dict[str, tuple[str, Any]] = {}
    for key, value in file.entries.items():
        plain = str(key).replace("-", "_")
        if plain in others and plain not in names:
            continue
        name = names.get(plain)
        if name is None:
            raise ConfigError(f"{key!r} in {file.name} is no setting; see `jaxinfer serve --help`")
        if name in in_file:
            raise ConfigError(
                f"{in_file[name][0]!r} and {key!r} in {file.name} are the same setting; "
                "leave one out"
            )
        if value is not None:
            in_file[name] = (str(key), value)
    return in_file


def _read(setting: Setting, word: str, value: Any) -> Any:
    try:
        return setting.read(value)
    except ValueError as error:
        shown = "" if setting.secret else f", got {value!r}"
        hint = KUBERNETES if word.startswith(PREFIX) and value.startswith("tcp://") else ""
        raise ConfigError(f"{word} must be {error}{shown}{hint}") from None


# Readers: each returns the value, or raises ValueError with the expected form


def text(value: Any) -> str:
    """A text."""
    if not isinstance(value, str):
        raise ValueError("text (quote it in YAML)")
    return value


def integer(value: Any) -> int:
    """An integer."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,30}", value.strip()):
        return int(value)
    raise ValueError("a whole number")


def size(value: Any) -> int:
    """An integer with vLLM's units: 32k is 32,000, 32K is 32,768, 1.5k is 1,500."""
    given = SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if given is None:
        try:
            return integer(value)
        except ValueError:
            raise ValueError("a whole number, such as 4096, 32k (32,000) or 32K (32,768)") from None
    number, unit = given["number"], given["unit"]
    if unit in BINARY:
        if "." in number:
            raise ValueError("a whole number of binary units (K, M, G, T)")
        return int(number) * BINARY[unit]
    digits, _, fraction = number.partition(".")
    scale = DECIMAL[unit]
    return int(digits) * scale + (int(fraction) * scale // 10 ** len(fraction) if fraction else 0)


def size_or_auto(value: Any) -> int | None:
    """A size, or None for "auto" and vLLM's -1: derived from the model and the device."""
    return None if value in ("auto", -1, "-1") else size(value)


def number(value: Any) -> float:
    """A real number."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("a number")
    try:
        return float(value)
    except (ValueError, OverflowError):
        raise ValueError("a number") from None


def boolean(value: Any) -> bool:
    """A boolean."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and (word := value.strip().lower()) in YES + NO:
        return word in YES
    raise ValueError("true or false")


def texts(value: Any) -> tuple[str, ...]:
    """Several texts: a repeated flag, a list of YAML or JSON, or a single text."""
    several = [value] if isinstance(value, str) else value
    if not isinstance(several, list | tuple):
        raise ValueError(TEXTS)
    found: list[str] = []
    for one in several:
        is_list = isinstance(one, str) and one.lstrip().startswith("[")
        found += _json(one, TEXTS) if is_list else [one]
    if not all(isinstance(one, str) for one in found):
        raise ValueError(TEXTS)
    return tuple(found)


def plain_texts(value: Any) -> tuple[str, ...]:
    """Several texts, each as it is: a repeated flag, a list of YAML, or a single text."""
    several = (value,) if isinstance(value, str) else value
    if not isinstance(several, list | tuple) or not all(isinstance(one, str) for one in several):
        raise ValueError(TEXTS)
    return tuple(several)


def integers(value: Any) -> tuple[int, ...]:
    """Several integers: a repeated flag, a list of YAML, or numbers joined by commas."""
    several = value if isinstance(value, list | tuple) else [value]
    words = [
        word for one in several for word in (one.split(",") if isinstance(one, str) else [one])
    ]
    try:
        return tuple(integer(word) for word in words)
    except ValueError:
        raise ValueError("whole numbers, such as 1,2") from None


def mapping(value: Any) -> dict[str, Any]:
    """An object, as JSON or YAML."""
    value = _json(value, "a JSON object") if isinstance(value, str) else value
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ValueError("a JSON object")
    return value


def anything(value: Any) -> Any:
    """A setting that has no effect here."""
    return value


def _json(value: str, expected: str) -> Any:
    try:
        return parse_json(value)
    except ValueError as error:
        raise ValueError(f"{expected} ({error})") from None
