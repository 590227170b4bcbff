"""/start_profile and /stop_profile, and `jaxinfer bench serve --profile` with them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jaxinfer.bench import serve, verify
from jaxinfer.bench.client import Answer
from jaxinfer.bench.folder import Folder
from jaxinfer.bench.offer import in_loop
from jaxinfer.bench.profile import profile_server
from jaxinfer.bench.profile_table import Profiled
from jaxinfer.bench.records import Run
from jaxinfer.core.errors import BenchError, ConfigError
from jaxinfer.core.profile import Steps
from jaxinfer.core.server_config import ServerConfig
from jaxinfer.server.routes.admin import PROFILE_ROUTES
from kit.engines import tiny_engine
from kit.server import Serving, serving

ADMIN = {"Authorization": "Bearer admin-secret"}
BODY = {"prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def server(profiles: Path) -> Iterator[Serving]:
    engine = tiny_engine()
    engine.profiler._weights = None  # those of the tests have no model
    options: dict[str, Any] = {"admin_api_key": ("admin-secret",), "api_key": ("user",)}
    with serving(engine, profiler_dir=str(profiles), **options) as made:
        yield made


def test_a_profile_has_the_steps_of_its_requests(server: Serving, profiles: Path) -> None:
    with server.client(headers=ADMIN) as client:
        assert client.post("/stop_profile").status_code == 409
        started = client.post("/start_profile?num_steps=3")
        assert (started.status_code, started.json()) == (200, {"profiler_dir": str(profiles)})
        again = client.post("/start_profile")
        assert again.status_code == 409 and "a profile is being taken" in again.text
        done = client.post("/v1/completions", json=BODY, headers={"X-Request-Id": "mine"})
        assert done.status_code == 200
        assert client.post("/stop_profile").json() == {"profiler_dir": str(profiles)}
        assert client.post("/v1/completions", json=BODY).status_code == 200
    (file,) = profiles.glob("*/steps.json")
    steps = msgspec.json.decode(file.read_bytes(), type=Steps).steps
    assert [one.tokens for one in steps] == [3, 1, 1]
    assert {name.rpartition("-")[0] for one in steps for name in one.requests} == {"mine"}


@pytest.mark.parametrize("steps", ["0", "-1", "x", "1001"])
def test_a_window_has_a_number_of_steps(server: Serving, steps: str) -> None:
    with server.client(headers=ADMIN) as client:
        refused = client.post(f"/start_profile?num_steps={steps}")
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "num_steps"


def test_only_the_admin_key_and_a_folder_open_the_routes(server: Serving) -> None:
    for route in PROFILE_ROUTES:
        for key in ({}, {"Authorization": "Bearer user"}):
            with server.client(headers=key) as client:
                assert client.post(route.path).status_code == 401
    with serving(tiny_engine(), admin_api_key=("admin-secret",)) as made:
        with made.client(headers=ADMIN) as client:
            assert {client.post(route.path).status_code for route in PROFILE_ROUTES} == {404}
        flags = [f"--base-url={made.url}", "--vocab-size=300", "--profile", "--num-prompts=1"]
        with pytest.raises(BenchError, match="the server has no profiler; start `jaxinfer serve`"):
            serve.main([*flags, "--output=/nonexistent/never"])
    with pytest.raises(ConfigError, match="profiler_dir needs admin_api_key"):
        ServerConfig(profiler_dir="profiles")


def test_a_served_run_has_a_profile(server: Serving, tmp_path: Path) -> None:
    run = tmp_path / "run"
    flags = [f"--base-url={server.url}", "--vocab-size=300", "--num-prompts=2", "--ignore-eos"]
    flags += ["--random-input-len=5", "--random-output-len=3", "--profile", f"--output={run}"]
    assert serve.main([*flags, "--header", "Authorization=Bearer admin-secret"]) == 0
    profiled = msgspec.json.decode((run / "profile.json").read_bytes(), type=Profiled)
    known = {one.step for one in profiled.steps}
    assert 3 <= len(known) <= 6 and known <= {one.step for one in profiled.kernels}
    assert len({name for one in profiled.steps for name in one.requests}) == 2
    assert verify.main([str(run)]) == 0
    report = (run / "report.md").read_text()
    assert "## Profile" in report and "gpu_telemetry: missing: the server's process" in report
    assert not any(b"admin-secret" in one.read_bytes() for one in run.iterdir() if one.is_file())


class Other:
    """A server with the routes whose profile is not jaxinfer's."""

    def __init__(self, status: int, body: bytes) -> None:
        self.status, self.body = status, body

    async def post(self, path: str, body: bytes) -> Answer:
        return Answer(0.0, status=self.status, body=self.body, error="no")


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (200, b"", "not one of jaxinfer's"),
        (200, b'{"profiler_dir": "/nonexistent"}', "no new profile with steps on this machine"),
        (401, b"", "needs its admin key"),
        (500, b"", "takes no profile"),
    ],
)
def test_other_servers_are_told_apart(
    status: int, body: bytes, message: str, tmp_path: Path
) -> None:
    async def offer() -> None:
        pass

    folder = Folder.create(tmp_path, Run(command="serve", created="now", settings={}))
    client: Any = Other(status, body)
    with pytest.raises(BenchError, match=message):
        in_loop(profile_server(client, offer, 4, folder))
