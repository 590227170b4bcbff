"""The sockets that the server listens on: in use, on another host, left behind, or unusable."""

import socket
from pathlib import Path

import pytest

from jaxinfer.core.errors import ConfigError
from jaxinfer.core.server_config import ServerConfig
from jaxinfer.server.http.run import bound_sockets, shown_address


def test_a_taken_port_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = ServerConfig(host="127.0.0.1", port=port)
        with (
            pytest.raises(ConfigError, match=f"^port {port} is in use; stop the program"),
            bound_sockets(config),
        ):
            pass


@pytest.mark.parametrize("host", ["no.such.host.invalid", "203.0.113.1"])
def test_a_foreign_address_is_one_sentence(host: str) -> None:
    with (
        pytest.raises(ConfigError, match=f"the server cannot listen on {host}, port 0: "),
        bound_sockets(ServerConfig(host=host, port=0)),
    ):
        pass


def test_every_address_of_a_name_has_the_same_port() -> None:
    with bound_sockets(ServerConfig(host="localhost", port=0)) as sockets:
        assert len({one.getsockname()[1] for one in sockets}) == 1


@pytest.mark.parametrize(
    ("settings", "shown", "reached"),
    [
        ({}, "http://127.0.0.1:{port}", ("127.0.0.1",)),
        ({"host": "0.0.0.0"}, "http://127.0.0.1:{port}", ("127.0.0.1",)),
        ({"host": "::1", "root_path": "/llm"}, "http://[::1]:{port}/llm", ("::1",)),
        ({"host": "::"}, "http://[::1]:{port}", ("::1", "127.0.0.1")),
    ],
)
def test_the_shown_address_can_be_opened(
    settings: dict[str, str], shown: str, reached: tuple[str, ...]
) -> None:
    config = ServerConfig(**settings, port=0)  # type: ignore[arg-type] # pyright: ignore
    with bound_sockets(config) as sockets:
        name, port = sockets[0].getsockname()[:2]
        assert name == config.host
        assert shown_address(config, sockets[0]) == shown.format(port=port)
        for host in reached:
            socket.create_connection((host, port), timeout=5).close()


def test_a_socket_file_of_a_dead_server_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    config = ServerConfig(uds=str(path))
    with bound_sockets(config), pytest.raises(ConfigError, match="is in use"):
        with bound_sockets(config):
            pass
        assert path.exists()
    assert not path.exists()


UNUSABLE = {
    "no socket": ("file", "exists and is no socket"),
    "no folder": ("none/s", "cannot listen on the socket"),
    "too long": ("x" * 200, "cannot listen on the socket"),
}


@pytest.mark.parametrize(("name", "message"), UNUSABLE.values(), ids=UNUSABLE)
def test_unusable_socket_files(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "file").write_text("mine")
    config = ServerConfig(uds=str(tmp_path / name))
    with pytest.raises(ConfigError, match=message), bound_sockets(config):
        pass
    assert (tmp_path / "file").read_text() == "mine"
