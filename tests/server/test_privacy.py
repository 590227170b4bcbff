"""What one client may learn of another: cached tokens, prefixes by key; and who may ask at all."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from jaxinfer.cli import serve
from jaxinfer.core.config import EngineConfig
from jaxinfer.core.errors import ConfigError
from jaxinfer.core.server_config import ServerConfig
from jaxinfer.server.service.service import Service
from kit.raw_http import RawClient, Reply
from kit.server import Serving, serving
from kit.watched_executor import watched_engine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PROMPT = {"prompt": [9] * 40, "max_tokens": 2}
USER = [{"role": "user", "content": "hello " * 20}]


def ask(server: Serving, path: str, key: str = "a", **fields: Any) -> Reply:
    with RawClient(server.port) as client:
        body = json.dumps(fields).encode()
        return client.post_body(path, body, f"authorization: Bearer {key}").reply()


# cached tokens


def cached(server: Serving, key: str = "a", **fields: Any) -> int | None:
    usage = ask(server, COMPLETIONS, key, **PROMPT, **fields).json["usage"]
    details = usage.get("prompt_tokens_details")
    return None if details is None else details["cached_tokens"]


@pytest.mark.parametrize("shown", [True, False])
def test_cached_tokens_are_shown_unless_switched_off(shown: bool) -> None:
    with serving(watched_engine()[0], enable_prompt_tokens_details=shown) as server:
        assert [cached(server), cached(server)] == ([0, 32] if shown else [None, None])
        chat = {"messages": USER, "max_tokens": 2}
        for _ in range(2):
            usage = ask(server, CHAT, **chat).json["usage"]
            assert ("prompt_tokens_details" in usage) is shown
        stream = ask(server, CHAT, **chat, stream=True, stream_options={"include_usage": True})
        assert ("prompt_tokens_details" in stream.events[-1]["usage"]) is shown
        for _ in range(2):
            response = ask(server, "/v1/responses", input=USER, max_output_tokens=2).json["usage"]
            message = ask(server, "/v1/messages", **chat).json["usage"]
        assert (response["input_tokens_details"]["cached_tokens"] > 0) is shown
        assert (message["cache_read_input_tokens"] > 0) is shown
        count = ask(server, "/v1/messages/count_tokens", messages=USER).json["input_tokens"]
        assert message["input_tokens"] + message["cache_read_input_tokens"] == count
        assert server.engine.stats().num_cached_tokens > 0


# stored responses

RESPONSES = "/v1/responses"


def by_id(server: Serving, method: str, path: str, key: str) -> int:
    with server.client() as client:
        headers = {"Authorization": f"Bearer {key}"}
        return client.request(method, f"{RESPONSES}/{path}", headers=headers).status_code


@pytest.mark.parametrize("background", [False, True], ids=["ended", "running"])
def test_a_response_is_known_to_the_key_that_made_it(background: bool) -> None:
    engine, executor = watched_engine()
    fields: dict[str, Any] = {"input": "a", "max_output_tokens": 2, "background": background}
    with serving(engine, api_key=("a", "b"), admin_api_key=("c",)) as server, ExitStack() as stack:
        if background:
            stack.enter_context(executor.held())
        made = ask(server, RESPONSES, "a", **fields).json["id"]
        for key in "bc":
            assert by_id(server, "GET", made, key) == 404
            assert by_id(server, "GET", f"{made}?stream=true", key) == 404
            assert by_id(server, "POST", f"{made}/cancel", key) == 404
            assert by_id(server, "DELETE", made, key) == 404
            error = ask(server, RESPONSES, key, input="b", previous_response_id=made).error
            assert error["code"] == "previous_response_not_found"
            assert "is not stored" in error["message"]
        assert by_id(server, "GET", made, "a") == 200
        follow = ask(server, RESPONSES, "a", **{**fields, "previous_response_id": made})
        assert follow.status == (400 if background else 200)
        assert not background or "is still running" in follow.error["message"]
        stack.close()
        assert by_id(server, "DELETE", made, "a") == 200
        assert by_id(server, "GET", made, "a") == 404


# prefixes by key


@pytest.mark.parametrize("by_key", [True, False])
def test_prefixes_are_reused_by_key(by_key: bool) -> None:
    settings = {"api_key": ("a", "b"), "prefix_caching_by_key": by_key}
    with serving(watched_engine()[0], **settings) as server:
        assert [cached(server, "a"), cached(server, "a")] == [0, 32]
        assert cached(server, "b") == (0 if by_key else 32)
        salted = [cached(server, key, cache_salt="s") for key in ("a", "a", "b")]
        assert salted == [0, 32, 0 if by_key else 32]


def test_a_salt_is_no_way_into_the_prefixes_of_another_key() -> None:
    settings = {"api_key": ("a", "b"), "prefix_caching_by_key": True}
    with serving(watched_engine()[0], **settings) as server:
        keys = server.service.keys
        assert keys is not None
        salts = [key.salt for key in keys._keys]
        assert len({*salts}) == 2 and {len(salt) for salt in salts} == {32}
        assert cached(server, "a") == 0
        assert cached(server, "b", cache_salt=salts[0]) == 0


def test_prefixes_by_key_need_keys() -> None:
    with pytest.raises(ConfigError, match="prefix_caching_by_key needs api_key"):
        ServerConfig(prefix_caching_by_key=True)
    assert ServerConfig(prefix_caching_by_key=True, api_key_file="there")


# hosts


def host_status(server: Serving, host: str, path: str = "/v1/models", *more: str) -> int:
    lines = [f"GET {path} HTTP/1.1", *([f"host: {host}"] if host else []), *more, "", ""]
    with RawClient(server.port) as client:
        return client.send("\r\n".join([*lines]).encode()).reply().status


@pytest.fixture(scope="module")
def local() -> Iterator[Serving]:
    """A server on the loopback interface, without a key."""
    with serving(watched_engine()[0]) as running:
        yield running


LOCAL_HOSTS = [
    "localhost",
    "LOCALHOST:8000",
    "app.localhost",
    "127.0.0.1:8000",
    "10.1.2.3",
    "[::1]:80",
]
OTHER_HOSTS = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.nip.io",
    "x",
]


@pytest.mark.parametrize("host", [*LOCAL_HOSTS, "localhost.", ""])
def test_local_hosts(local: Serving, host: str) -> None:
    assert host_status(local, host) == 200


@pytest.mark.parametrize("host", OTHER_HOSTS)
def test_other_hosts_are_refused_by_a_local_server_without_a_key(local: Serving, host: str) -> None:
    assert host_status(local, host) == 403
    assert host_status(local, host, "/") == host_status(local, host, "/nowhere") == 403
    assert host_status(local, host, "/health") == host_status(local, host, "/ready") == 200
    with RawClient(local.port) as client:
        reply = client.post_body(COMPLETIONS, b"{}", f"host: {host}").reply()
    assert reply.error["code"] == "host_not_allowed"
    assert "--allowed-hosts" in reply.error["message"] and host in reply.error["message"]


def test_named_hosts_and_a_key() -> None:
    names = ("api.example", "*.lan")
    with serving(watched_engine()[0], api_key=("a",), allowed_hosts=names) as server:
        key = "authorization: Bearer a"
        for host in ("api.example", "API.example:80", "box.lan", "a.box.lan", *LOCAL_HOSTS):
            assert host_status(server, host, "/v1/models", key) == 200
        for host in ("lan", "evil.example", "xapi.example", "boxlan"):
            assert host_status(server, host, "/v1/models", key) == 403


@pytest.mark.parametrize(
    ("settings", "checked"),
    [
        ({}, ("127.0.0.1",)),
        ({"host": "0.0.0.0"}, None),
        ({"host": "10.0.0.1"}, None),
        ({"host": "127.0.0.1"}, ("127.0.0.1",)),
        ({"host": "LocalHost"}, ("LocalHost",)),
        ({"host": "::1"}, ("::1",)),
        ({"host": "127.0.0.1", "api_key": ("a",)}, None),
        ({"host": "127.0.0.1", "api_key_file": "there"}, None),
        ({"uds": "there"}, None),
        ({"allowed_hosts": ("a",)}, ("a",)),
        ({"host": "127.0.0.1", "allowed_hosts": ("*",)}, None),
    ],
)
def test_when_hosts_are_checked(settings: dict[str, Any], checked: Any) -> None:
    assert ServerConfig(**settings).checked_hosts == checked


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "::"}, True),
        ({"host": "127.0.0.1"}, False),
        ({"uds": "there"}, False),
        ({"host": "0.0.0.0", "api_key": ("a",)}, False),
    ],
)
def test_an_open_server_is_told_at_its_start(
    settings: dict[str, Any],
    warns: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("jaxinfer.server.http.run.run", lambda *_: None)
    monkeypatch.setattr("jaxinfer.server.http.log.configure_logging", lambda *_: None)
    caplog.set_level(logging.INFO, "jaxinfer.server")
    serve._run(EngineConfig(), ServerConfig(**settings), lambda _: pytest.fail("it starts"))
    warnings = [one for one in caplog.records if one.levelname == "WARNING"]
    assert len(warnings) == warns
    if warns:
        text = vars(warnings[0])["text"]
        assert "need no key" in text and "--api-key" in text


# clients behind a proxy

PROXIES = [
    ({}, "127.0.0.1"),
    ({"forwarded_allow_ips": ("127.0.0.1",)}, "203.0.113.7"),
    ({"forwarded_allow_ips": ("10.0.0.0/8, 127.0.0.0/8", "::1")}, "203.0.113.7"),
    ({"forwarded_allow_ips": ("10.0.0.0/8",)}, "127.0.0.1"),
]


@pytest.mark.parametrize(("settings", "client"), PROXIES, ids=[str(one) for one, _ in PROXIES])
def test_the_client_is_the_one_that_a_trusted_proxy_names(
    settings: dict[str, Any], client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes before the proxy's own entry was written by the client."""
    callers: list[str] = []
    open_answer = Service.open

    def noting(self: Service, *given: Any, **options: Any) -> Any:
        callers.append(given[5].client)
        return open_answer(self, *given, **options)

    monkeypatch.setattr(Service, "open", noting)
    with serving(watched_engine()[0], **settings) as server, RawClient(server.port) as sender:
        body = json.dumps(PROMPT).encode()
        header = "x-forwarded-for: 198.51.100.1, 203.0.113.7"
        assert sender.post_body(COMPLETIONS, body, header).reply().status == 200
    assert callers == [client]


@pytest.mark.parametrize("wrong", ["*", "proxy", "10.0.0.1/8", "10.0.0.1,"])
def test_proxies_are_addresses_or_networks(wrong: str) -> None:
    with pytest.raises(ConfigError, match="forwarded_allow_ips must be addresses or networks"):
        ServerConfig(forwarded_allow_ips=(wrong,))
