"""Clients that connect at once are accepted together, not one in each iteration of the loop."""

from __future__ import annotations

import asyncio
import socket
from contextlib import ExitStack

from starlette.types import Receive, Scope, Send

from jaxinfer.core.server_config import ServerConfig
from jaxinfer.server.http.run import ACCEPTED_AT_ONCE, Server, bound_sockets, uvicorn_config

NUM_CLIENTS = 8 * ACCEPTED_AT_ONCE


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("nothing is asked")


async def iterations_to_accept(server: Server, config: ServerConfig) -> int:
    """Iterations of the loop until all clients that connected before are accepted."""
    with bound_sockets(config) as sockets, ExitStack() as clients:
        address = sockets[0].getsockname()
        serving = asyncio.create_task(server.serve(sockets))
        while not server.started:
            await asyncio.sleep(0.01)
        for _ in range(NUM_CLIENTS):  # the loop does not run here
            clients.enter_context(socket.create_connection(address))
        turns = 0
        while len(server.server_state.connections) < NUM_CLIENTS and turns < 2 * NUM_CLIENTS:
            await asyncio.sleep(0)
            turns += 1
        server.should_exit = True
        server.drop_connections()
        await serving
        with socket.socket() as late:
            assert late.connect_ex(address) != 0, "somebody still listens"
    return turns


def test_a_burst_of_clients_is_accepted_in_a_few_iterations() -> None:
    config = ServerConfig(host="127.0.0.1", port=0)
    server = Server(uvicorn_config(config, app))
    turns = asyncio.run(
        iterations_to_accept(server, config), loop_factory=server.config.get_loop_factory()
    )
    assert turns < NUM_CLIENTS // 4
