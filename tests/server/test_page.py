"""The page at ``/`` as files: routes, headers, access, and what its sources may contain."""

from __future__ import annotations

import asyncio
import re
import tomllib
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import httpx
import pytest

from jaxinfer.core.server_config import ServerConfig
from jaxinfer.server.http.log import EventLog
from jaxinfer.server.openai.schema import ChatCompletionRequest
from jaxinfer.server.routes.app import create_app
from jaxinfer.server.routes.page import page_files
from jaxinfer.server.service.service import Service
from kit.api_calls import error_of
from kit.scripted import scripted_engine
from kit.server import Serving, serving

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "jaxinfer/server/ui"
FILES = {path.name: path.read_text() for path in sorted(FOLDER.iterdir())}
PATHS = {name: "/" if name == "index.html" else f"/ui/{name}" for name in FILES}
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
KEY = "open sesame"


@pytest.fixture(scope="module")
def server() -> Iterator[Serving]:
    """A server with a key, below the path of a proxy."""
    with serving(scripted_engine("qwen3")[0], api_key=(KEY,), root_path="/llm") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Serving) -> Iterator[httpx.Client]:
    with server.client() as made:
        yield made


@pytest.mark.parametrize("name", FILES)
def test_files_need_no_key(client: httpx.Client, name: str) -> None:
    response = client.get(PATHS[name])
    assert response.status_code == 200
    assert response.headers["content-type"] == TYPES[Path(name).suffix]
    assert response.text == FILES[name].replace('="ui/', '="/llm/ui/')
    head = client.head(PATHS[name])
    assert (head.status_code, head.content) == (200, b"")
    for header in ("content-type", "content-length", "etag", "content-security-policy"):
        assert head.headers[header] == response.headers[header]
    assert client.get(f"{PATHS[name].rstrip('/')}/").content == response.content
    refused = error_of(client.post(PATHS[name]), 405)
    assert refused["code"] == "method_not_allowed"


def test_a_file_is_sent_again_only_if_it_has_changed(client: httpx.Client) -> None:
    tags = {name: client.get(path).headers["etag"] for name, path in PATHS.items()}
    assert len(set(tags.values())) == len(tags)
    for given in (tags["main.js"], f'"other", W/{tags["main.js"]}'):
        response = client.get("/ui/main.js", headers={"If-None-Match": given})
        assert (response.status_code, response.content) == (304, b"")
        assert response.headers["etag"] == tags["main.js"]
    stale = client.get("/ui/main.js", headers={"If-None-Match": tags["api.js"]})
    assert stale.status_code == 200 and stale.headers["cache-control"] == "no-cache"


def test_headers_allow_nothing_from_elsewhere(client: httpx.Client) -> None:
    headers = client.get("/").headers
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    sources = {name: value for name, value in policy.items() if name.endswith("-src")}
    assert sources.pop("default-src") == "'none'"
    assert sources == dict.fromkeys(("script-src", "style-src", "img-src", "connect-src"), "'self'")
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["trusted-types"] == "'none'"
    assert policy["require-trusted-types-for"] == "'script'"
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["referrer-policy"] == "no-referrer"


def test_the_page_opens_nothing_else(client: httpx.Client) -> None:
    for path in ("/ui", "/ui/", "/ui/nothing.js", "/ui/../metrics", "/ui/%2e%2e/page.py", "/stats"):
        assert error_of(client.get(path), 401)["code"] == "invalid_api_key"
    key = {"Authorization": f"Bearer {KEY}"}
    for path in ("/ui", "/ui/nothing.js", "/ui/%2e%2e/page.py", "/ui/__init__.py"):
        assert error_of(client.get(path, headers=key), 404)["code"] == "not_found"


def asked(path: str, *, ui: bool = True) -> httpx.Response:
    """The response of a server whose model is still being loaded."""
    app = create_app(Service(ServerConfig(ui=ui), EventLog()))

    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return await client.get(path)

    return asyncio.run(get())


def test_the_page_is_there_while_the_model_is_loaded() -> None:
    assert asked("/").text == FILES["index.html"]
    assert error_of(asked("/v1/models"), 503)["code"] == "loading"


def test_no_ui() -> None:
    for path in PATHS.values():
        assert error_of(asked(path, ui=False), 404)["code"] == "not_found"


# the sources


def test_wheels_have_the_files() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    patterns = setuptools["package-data"]["jaxinfer.server.ui"]
    assert all(any(fnmatch(name, pattern) for pattern in patterns) for name in FILES)
    assert "jaxinfer.*" in setuptools["packages"]["find"]["include"]
    assert set(page_files("")) == set(PATHS.values())


def test_links_stay_here() -> None:
    linked = re.findall(r'(?:href|src)="([^"]*)"', FILES["index.html"])
    imported = {name for text in FILES.values() for name in re.findall(r'from "\./([^"]+)"', text)}
    assert {f"ui/{name}" for name in FILES if name != "index.html"} == {
        *linked,
        *(f"ui/{name}" for name in imported),
    }
    for name, text in FILES.items():
        own = text.replace("http://www.w3.org/2000/svg", "")  # a name, which is not fetched
        assert not re.search(r"https?://\w|@import|\burl\(|\bimport\(", own), name


def test_text_is_never_read_as_html() -> None:
    for name, text in FILES.items():
        assert not re.search(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|srcdoc|DOMParser|\beval\(",
            text,
        ), name
    assert not re.search(r"<style|<script(?![^>]*src=)|\sstyle=|\son\w+=", FILES["index.html"])


def test_sizes() -> None:
    assert all(text.count("\n") < 400 for text in FILES.values())


def test_series_exist(client: httpx.Client) -> None:
    series = re.findall(r'series\.get\("([^"]+)"\)', FILES["metrics.js"])
    text = client.get("/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
    assert len(series) >= 6
    assert all(re.search(rf"^{re.escape(name)}\{{", text, re.MULTILINE) for name in series)


def test_fields_exist() -> None:
    own = {"system", "schema", "others", "markdown"}  # `arranged` makes other fields of these
    names = set(re.findall(r'(?:number|text|json|choice)\(\s*"(\w+)"', FILES["fields.js"]))
    assert own < names and len(names) > 15
    assert names - own <= set(ChatCompletionRequest.__struct_fields__)
