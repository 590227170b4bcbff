"""API keys from a file: its lines, names in logs and metrics, and SIGHUP."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from starlette.datastructures import Headers

from jaxinfer.core.errors import ConfigError
from jaxinfer.core.server_config import ServerConfig
from jaxinfer.server.http import keys as module
from jaxinfer.server.http.keys import api_keys, read_key_file
from jaxinfer.server.service.service import Service
from kit.engines import tiny_engine
from kit.server import Serving, serving
from kit.server_process import SIM_SERVE, server_process, sim_arguments, wait_until

LINES = "# for the team\nred-key team-red\n\n  blue-key\tteam.blue \nplain-key\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "keys"
    file.write_text(LINES)
    return file


def bearer(key: str) -> Headers:
    return Headers({"authorization": f"Bearer {key}"})


def test_lines(path: Path) -> None:
    assert read_key_file(str(path)) == {
        "red-key": "team-red",
        "blue-key": "team.blue",
        "plain-key": "",
    }


UNUSABLE = {
    "": "has no keys; write one into each line",
    "# only a comment\n": "has no keys",
    "good\ncaf\u00e9 name\n": "the key in line 2 of the key file",
    "good\nsecret name more": "line 2 of the key file",
    "secret n\u00e4me": "must be KEY or KEY NAME",
    f"secret {'n' * 65}": "must be KEY or KEY NAME",
    "secret a\nother\nsecret b\n": "the key in line 3 of the key file",
    "\n".join(map(str, range(module.MAX_KEYS + 1))): "1001 keys, and 1000 are allowed",
}


@pytest.mark.parametrize("text", UNUSABLE)
def test_unusable_lines_are_named_by_their_number(path: Path, text: str) -> None:
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_key_file(str(path))
    assert UNUSABLE[text] in str(caught.value)
    assert "secret" not in str(caught.value)


def test_unusable_files(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none cannot be read: No such file"):
        Service(ServerConfig(api_key_file=str(tmp_path / "none")), None)  # type: ignore[arg-type]
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="cannot be read: it is not UTF-8"):
        read_key_file(str(path))


@pytest.mark.parametrize("also", ["api_key", "admin_api_key"])
def test_a_key_has_one_place(path: Path, also: str) -> None:
    config = replace(ServerConfig(api_key_file=str(path)), **{also: ("blue-key",)})
    with pytest.raises(ConfigError, match="has a key that api_key or admin_api_key has as well"):
        api_keys(config)


def test_keys_of_all_sources(path: Path) -> None:
    keys = api_keys(ServerConfig(api_key=("one",), admin_api_key=("a",), api_key_file=str(path)))
    assert keys is not None
    names = [found.name if (found := keys.find(bearer(key))) else None for key in KEYS]
    assert names == ["", "", "team-red", "team.blue", "", None, None]
    assert api_keys(ServerConfig(admin_api_key=("a",))) is None


def test_the_header_of_anthropics_clients(path: Path) -> None:
    keys = api_keys(ServerConfig(api_key_file=str(path)))
    assert keys is not None
    headers = Headers({"x-api-key": "red-key", "authorization": "Bearer wrong"})
    found = keys.find(headers)
    assert found is not None and found.name == "team-red"
    assert keys.find(Headers({"x-api-key": "wrong"})) is None


KEYS = ("one", "a", "red-key", "blue-key", "plain-key", "team-red", "red-key team-red")


def test_every_key_is_compared(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that ends at the first match would tell a key's place by its time."""
    keys = api_keys(ServerConfig(api_key_file=str(path)))
    assert keys is not None
    compared: list[bytes] = []
    monkeypatch.setattr(
        module.hmac, "compare_digest", lambda a, b: compared.append(b) is None and a == b
    )
    assert keys.accept(bearer("red-key"))
    assert len(compared) == len(keys) == 3


def test_reloading(path: Path) -> None:
    keys = api_keys(ServerConfig(api_key=("one",), api_key_file=str(path)))
    assert keys is not None
    path.write_text("new-key team-red\n")
    assert keys.accept(bearer("red-key")) and not keys.accept(bearer("new-key"))
    keys.reload()
    assert keys.accept(bearer("new-key")) and keys.accept(bearer("one"))
    assert not keys.accept(bearer("red-key"))
    path.write_text("")
    with pytest.raises(ConfigError):
        keys.reload()
    assert keys.accept(bearer("new-key"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    file = tmp_path_factory.mktemp("keys") / "keys"
    file.write_text(LINES)
    with serving(tiny_engine(), api_key_file=str(file)) as running:
        yield running


def ask(server: Serving, key: str, method: str = "POST", path: str = "/v1/completions") -> str:
    body = {"prompt": "abcd", "max_tokens": 3, "ignore_eos": True}
    with server.client(headers={"Authorization": f"Bearer {key}"}) as client:
        response = client.request(method, path, json=body if method == "POST" else None)
        assert response.status_code == (200 if key in LINES else 401)
        return response.text


def test_metrics_count_by_name(server: Serving) -> None:
    for key in ("red-key", "red-key", "blue-key", "plain-key", "no-key"):
        ask(server, key)
    lines = [
        line
        for line in ask(server, "plain-key", "GET", "/metrics").splitlines()
        if line.startswith("jaxinfer:key_")
    ]
    labels = 'engine="0",key="{}",model_name="tiny-llama"'
    series = {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}
    assert series == {
        f"jaxinfer:key_{name}_total{{{labels.format(key)}}}": float(count * times)
        for key, times in (("team-red", 2), ("team.blue", 1))
        for name, count in (("requests", 1), ("prompt_tokens", 4), ("generation_tokens", 3))
    }
    assert "red-key" not in str(lines)


def test_sighup_reads_the_file_again(path: Path) -> None:
    """The server's process: keys change without a restart, a broken file changes nothing."""
    options = ("--api-key-file", str(path), "--log-format", "json")

    def status(key: str) -> int:
        url = f"http://127.0.0.1:{server.port}/v1/models"
        return client.get(url, headers={"Authorization": f"Bearer {key}"}).status_code

    def hang_up(text: str, event: str) -> None:
        path.write_text(text)
        server.signal(signal.SIGHUP)
        wait_until(lambda: any(event in line for line in server.lines), event)

    with (
        server_process(*SIM_SERVE, *sim_arguments(0.001), *options) as server,
        httpx.Client(trust_env=False, verify=False) as client,
    ):
        assert (status("red-key"), status("new-key")) == (200, 401)
        hang_up("new-key other\n", '"keys_reloaded", "num_keys": 1')
        assert (status("red-key"), status("new-key")) == (401, 200)
        hang_up("broken line here", "line 1 of the key file")
        assert status("new-key") == 200
        wait_until(lambda: any('"key": "other"' in line for line in server.lines), "its name")
        text = "".join(server.lines)
        assert "new-key" not in text and "red-key" not in text
