"""A lint of the Dockerfile and of ``configs/deploy``, for machines without Docker and systemd.

Each ``*_problems`` function takes the text of one file, and returns a sentence for each path, flag,
variable, port or metric in it that the project does not have.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import click
import yaml

from jaxinfer.cli.main import cli
from jaxinfer.cli.serve import check_settings
from jaxinfer.cli.serve_options import EVERY, SETTINGS
from jaxinfer.cli.settings import CONFIG_VARIABLE, PREFIX, File, resolve_settings
from jaxinfer.core.errors import JaxinferError
from jaxinfer.core.server_config import ServerConfig
from jaxinfer.server.http.guard import OPEN_PATHS
from jaxinfer.server.http.run import FLUSH_SECONDS
from jaxinfer.server.service.traces import CLOSE_SECONDS
from kit.sample_metrics import busy_metrics, samples_of

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "configs" / "deploy"
DOCKERFILE = ROOT / "Dockerfile"
# A short name of Docker's own registry with a tag; a registry's host has a dot or a port.
IMAGE = re.compile(r"[a-z0-9_-]+(/[a-z0-9._-]+)?:(?!latest$)[\w.-]+")
INSTRUCTIONS = {
    *("COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK"),
    *("RUN", "USER", "VOLUME", "WORKDIR"),
}
BY_USER = ("keys",)  # docs/deploy.md says how to make it
# for open requests, their last events, connections that are slow to close, and the last spans
STOP_SECONDS = ServerConfig().shutdown_timeout + 2 * FLUSH_SECONDS + CLOSE_SECONDS
DIRECTIVES: Mapping[str, str] = {  # of systemd.unit, systemd.exec, systemd.service, systemd.kill
    "Unit": "Description Documentation Wants After",
    "Service": "Type User Group Environment EnvironmentFile ExecStart ExecReload KillMode "
    "TimeoutStopSec Restart RestartSec LimitNOFILE CacheDirectory CacheDirectoryMode UMask "
    "MemoryMax NoNewPrivileges CapabilityBoundingSet RestrictAddressFamilies RestrictNamespaces "
    "PrivateTmp ProtectHome ProtectSystem ProtectKernelModules ProtectKernelTunables "
    "ProtectControlGroups RestrictSUIDSGID LockPersonality",
    "Install": "WantedBy",
}
# What keeps a server that was taken over from the rest of the machine, and its memory bounded.
HARDENED: Mapping[str, str] = {
    "CapabilityBoundingSet": "",
    "NoNewPrivileges": "yes",
    "PrivateTmp": "yes",
    "ProtectHome": "yes",
    "ProtectSystem": "strict",
    "RestrictAddressFamilies": "AF_INET AF_INET6 AF_UNIX",
    "RestrictNamespaces": "yes",
    "UMask": "0077",
}
WRITABLE = ("/tmp", "/home/jaxinfer")  # compilers and pip have files there
SERVICE_KEYS = {
    *("build", "cap_drop", "command", "depends_on", "deploy", "environment", "image", "init"),
    *("mem_limit", "ports", "read_only", "restart", "security_opt", "stop_grace_period", "tmpfs"),
    "volumes",
}


# shared


def script_problems(words: list[str]) -> Iterator[str]:
    """Of a command that runs the package's program: its name, its subcommand and its flags."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    program, command, *arguments = words
    if Path(program).name not in scripts or command not in cli.commands:
        yield f"{program} {command} is no program of this project"
        return
    try:
        cli.commands[command].make_context(command, arguments)
    except click.ClickException as error:
        yield f"{command}: {error.format_message()}"


def variable_problems(names: Iterator[str] | list[str]) -> Iterator[str]:
    """Of environment variables: those with the prefix of settings that are no settings."""
    known = {CONFIG_VARIABLE, *(name for one in EVERY for name in one.variables)}
    known.add("JAXINFER_CACHE_DIR")
    unknown = [name for name in names if name.startswith(PREFIX) and name not in known]
    yield from (f"{name} is no setting" for name in unknown)


def image_problems(name: str) -> Iterator[str]:
    if not IMAGE.fullmatch(name):
        yield f"the image {name} is not NAME:TAG without a registry and latest"


def url_problems(text: str, hosts: tuple[str, ...] = ()) -> Iterator[str]:
    """URLs of other machines than this one and ``hosts``."""
    allowed = ("127.0.0.1", "localhost", *hosts)
    found = re.findall(r"\w+://([\w.-]+)", text)
    yield from (f"the host {host} is of another machine" for host in found if host not in allowed)


def metric_problems(expression: str) -> Iterator[str]:
    """Metrics of a PromQL expression that the server does not export."""
    plain = re.sub(r"\{[^}]*\}|\b(by|without) \([^)]*\)", "", expression)
    exported = {name for name, _ in samples_of(busy_metrics())} | {"up"}
    named = set(re.findall(r"(?:\w+:\w+|\b(?:http|process)_\w+|\bup\b)", plain))
    yield from (f"the metric {name} is not exported" for name in sorted(named - exported))
    if not named:
        yield f"{expression} names no metric"


# the Dockerfile


@dataclass
class Stage:
    """One stage: the stage or image that it begins with, and its instructions."""

    base: str
    steps: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])

    def all(self, name: str) -> list[str]:
        """The arguments of every instruction of this name."""
        return [rest for known, rest in self.steps if known == name]


def stages_of(text: str) -> dict[str, Stage]:
    """The stages of a Dockerfile by name; raises ``ValueError`` for an unknown instruction."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    stages: dict[str, Stage] = {}
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if not line.strip():
            continue
        name, _, rest = line.partition(" ")
        if name not in INSTRUCTIONS:
            raise ValueError(f"{name} is no instruction that this lint knows")
        if name == "FROM":
            base, _, stage = rest.partition(" AS ")
            stages[stage] = Stage(base, [*(stages[base].steps if base in stages else ())])
        else:
            stages[[*stages][-1]].steps.append((name, " ".join(rest.split())))
    return stages


def environment_of(stage: Stage) -> dict[str, str]:
    words = [word for rest in stage.all("ENV") for word in shlex.split(rest)]
    return dict(word.split("=", 1) for word in words)


def ignored(path: str) -> bool:
    """True if .dockerignore keeps a path of the repository out of the build."""
    out = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        pattern = line.removeprefix("!")
        parents = [path, *(str(one) for one in Path(path).parents)]
        if not line.startswith("#") and any(fnmatch(one, pattern) for one in parents):
            out = not line.startswith("!")
    return out


def dockerfile_problems(text: str) -> list[str]:
    """Of the whole file."""
    try:
        stages = stages_of(text)
    except ValueError as error:
        return [str(error)]
    found = [*url_problems(text)]
    if not {"cpu", "cuda"} <= stages.keys():
        found.append("there are no targets cpu and cuda")
    for name, stage in stages.items():
        found += [] if stage.base in stages else image_problems(stage.base)
        found += variable_problems([*environment_of(stage)])
        found += [problem for rest in stage.all("COPY") for problem in _copy_problems(rest, stages)]
        found += [problem for rest in stage.all("RUN") for problem in _pip_problems(rest)]
        if name in ("cpu", "cuda"):
            found += [f"{name}: {problem}" for problem in _server_problems(stage)]
    return list(dict.fromkeys(found))


def _copy_problems(rest: str, stages: Mapping[str, Stage]) -> Iterator[str]:
    *sources, _ = rest.split()
    if sources[0].startswith("--from="):
        stage = stages.get(sources.pop(0).removeprefix("--from="))
        for source in sources:
            if stage is None or not any(source in run.split() for run in stage.all("RUN")):
                yield f"COPY {rest}: no such stage, or it does not make {source}"
        return
    for source in sources:
        if not (ROOT / source).exists() or ignored(source):
            yield f"COPY {source}: there is no such path, or .dockerignore leaves it out"


def _pip_problems(rest: str) -> Iterator[str]:
    if not rest.startswith("pip install"):
        return
    words = shlex.split(rest)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = re.findall(r"\w+", words[-1])
    yield from (
        f"there is no extra {extra}"
        for extra in extras
        if extra not in project["optional-dependencies"]
    )
    if not (ROOT / words[words.index("-c") + 1]).exists():
        yield "the file of constraints does not exist"


def _server_problems(stage: Stage) -> Iterator[str]:
    """Of a stage that runs the server."""
    environment = environment_of(stage)
    users = stage.all("USER")
    if not users or not any(f" {users[-1]} " in f"{run} " for run in stage.all("RUN")):
        yield "USER is missing, or no RUN makes that user"
    elif users[-1] in ("root", "0"):
        yield "it runs as root"
    if stage.all("VOLUME") != [environment.get("JAXINFER_CACHE_DIR")]:
        yield "VOLUME is not JAXINFER_CACHE_DIR"
    if stage.all("EXPOSE") != [environment.get("JAXINFER_PORT")]:
        yield "EXPOSE is not JAXINFER_PORT"
    if environment.get("JAXINFER_HOST") != "0.0.0.0":
        yield "no published port reaches JAXINFER_HOST"
    checks = stage.all("HEALTHCHECK")
    paths = re.findall(r"'(/\w+)'", checks[-1]) if checks else []
    if not paths or not {*paths} <= {*OPEN_PATHS}:
        yield "HEALTHCHECK does not request a route that needs no key"
    entry = stage.all("ENTRYPOINT") or ['["none", "none"]']
    yield from script_problems(json.loads(entry[-1]))
    target = stage.all("COPY")[-1].split()[-1]
    if f"{target}/bin" not in environment.get("PATH", "").split(":"):
        yield "PATH does not have the installed program"


# compose, Prometheus, Grafana


def compose_problems(text: str) -> list[str]:
    """Of a compose file, and of the files that it mounts."""
    composed = yaml.safe_load(text)
    services: Mapping[str, Any] = composed["services"]
    found: list[str] = []
    for name, service in services.items():
        unknown = [key for key in service if key not in SERVICE_KEYS]
        found += [f"{name} has an unknown key {key}" for key in unknown]
        found += _service_problems(name, service, composed)
    return found


def _service_problems(name: str, service: Mapping[str, Any], composed: Any) -> Iterator[str]:
    mounts = dict(volume.split(":")[:2][::-1] for volume in service.get("volumes", ()))
    for target, source in mounts.items():
        if source.startswith(".") and Path(source).name not in BY_USER:
            if not (DEPLOY / source).exists():
                yield f"{name} mounts {source}, which does not exist"
        elif not source.startswith(".") and source not in composed["volumes"]:
            yield f"{name} mounts the volume {source}, which is not declared"
        if source.endswith((".yaml", ".yml")):
            yield from _mounted_problems(name, DEPLOY / source, target, composed)
    yield from (
        f"{name} depends on {other}, which is no service"
        for other in service.get("depends_on", ())
        if other not in composed["services"]
    )
    if not all(port.startswith("127.0.0.1:") for port in service.get("ports", ())):
        yield f"{name} has ports for other machines"
    if (build := service.get("build")) is None:
        yield from image_problems(service["image"])
    else:
        yield from _built_problems(name, service, build, mounts)


def _built_problems(
    name: str, service: Mapping[str, Any], build: Mapping[str, str], mounts: Mapping[str, str]
) -> Iterator[str]:
    """Of a service whose image is built here: the server."""
    if "context" in build and (DEPLOY / build["context"]).resolve() != ROOT:
        yield f"{name} is not built from the repository"
    stage = stages_of(DOCKERFILE.read_text()).get(build["target"])
    if stage is None:
        yield f"{name} has the target {build['target']}, which the Dockerfile does not have"
        return
    yield from variable_problems([*service.get("environment", ())])
    command = service.get("command", [])
    yield from script_problems([*json.loads(stage.all("ENTRYPOINT")[-1]), *command])
    for path in [word for word in command if word.startswith("/")]:
        if not any(Path(path).is_relative_to(target) for target in mounts):
            yield f"{name} has no mount with {path}"
    if mounts and environment_of(stage)["JAXINFER_CACHE_DIR"] not in mounts:
        yield f"{name} has no volume for the cache"
    for port in service.get("ports", ()):
        if port.split(":")[-1] != environment_of(stage)["JAXINFER_PORT"]:
            yield f"{name} listens on another port than {port}"
    if not re.fullmatch(r"\d+g", str(service.get("mem_limit"))):
        yield f"{name} has no limit of memory"
    if "context" in build:  # a file on top of another one changes what it names
        places = [place.split(":")[0] for place in service.get("tmpfs", ())]
        if service.get("read_only") is not True or any(one not in places for one in WRITABLE):
            yield f"{name} may write elsewhere than in its volume, {' and '.join(WRITABLE)}"
        if service.get("cap_drop") != ["ALL"]:
            yield f"{name} keeps capabilities"
    grace = service.get("stop_grace_period")
    if grace is not None and int(grace.removesuffix("s")) <= STOP_SECONDS:
        yield f"{name} is killed before its requests have had {STOP_SECONDS:g} s to end"


def _mounted_problems(name: str, path: Path, target: str, composed: Any) -> Iterator[str]:
    """Of a mounted file of Prometheus or Grafana."""
    if not path.exists():
        return
    text = path.read_text()
    content, services = yaml.safe_load(text), composed["services"]
    yield from url_problems(text, (*services,))
    mounts = [volume.split(":")[1] for volume in services[name]["volumes"]]
    paths = [*content.get("rule_files", ())]
    for job in content.get("scrape_configs", ()):
        paths.append(job["authorization"]["credentials_file"])
        for address in job["static_configs"][0]["targets"]:
            service, _, port = address.partition(":")
            if f"127.0.0.1:{port}:{port}" not in services.get(service, {}).get("ports", ()):
                yield f"{target} scrapes {address}, which is no service"
    for provider in content.get("providers", ()):
        paths.append(provider["options"]["path"])
    for inside in paths:
        if not any(Path(inside).is_relative_to(mount) for mount in mounts):
            yield f"{target} names {inside}, which {name} does not mount"
    for source in content.get("datasources", ()):
        service, _, port = source["url"].removeprefix("http://").partition(":")
        if f"127.0.0.1:{port}:{port}" not in services.get(service, {}).get("ports", ()):
            yield f"{target} has the data source {source['url']}, which is no service"


def alert_problems(text: str) -> list[str]:
    """Of Prometheus's rules."""
    rules = [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]
    return [problem for rule in rules for problem in metric_problems(rule["expr"])]


# systemd and the settings


def unit_problems(text: str) -> list[str]:
    """Of the unit of systemd."""
    found: list[str] = []
    entries: dict[str, list[str]] = {}
    section = ""
    for line in filter(None, map(str.strip, text.splitlines())):
        if line.startswith("["):
            section = line.strip("[]")
        elif not line.startswith("#"):
            key, _, value = line.partition("=")
            if key not in DIRECTIVES.get(section, "").split():
                found.append(f"{key} is no directive of [{section}]")
            entries.setdefault(key, []).append(value)
    one = {key: values[-1] for key, values in entries.items()}
    environment = dict(value.split("=", 1) for value in entries.get("Environment", ()))
    found += variable_problems([*environment])
    found += script_problems(shlex.split(one.get("ExecStart", "none none")))
    cache = f"/var/cache/{one.get('CacheDirectory')}"
    if environment.get("JAXINFER_CACHE_DIR") != cache:
        found.append(f"JAXINFER_CACHE_DIR is not {cache}, the one folder that it may write")
    settings = Path(environment.get(CONFIG_VARIABLE, ""))
    if not (DEPLOY / settings.name).is_file():
        found.append(f"there is no example of {settings}")
    found += [f"{key} is not {value}" for key, value in HARDENED.items() if one.get(key) != value]
    if not one.get("MemoryMax"):
        found.append("it has no limit of memory")
    if one.get("User") in (None, "root"):
        found.append("it runs as root")
    if "-HUP" not in one.get("ExecReload", ""):
        found.append("ExecReload does not send SIGHUP")
    if one.get("KillMode") != "mixed":
        found.append("KillMode is not mixed, so the engine's process would get SIGTERM as well")
    if int(one.get("TimeoutStopSec", 0)) <= STOP_SECONDS:
        found.append(f"it is killed before its requests have had {STOP_SECONDS:g} s to end")
    return found


def settings_problems(text: str) -> list[str]:
    """Of the example of a file of settings."""
    try:
        check_settings(resolve_settings(SETTINGS, {}, {}, File("serve.yaml", yaml.safe_load(text))))
    except JaxinferError as error:
        return [str(error)]
    return []
