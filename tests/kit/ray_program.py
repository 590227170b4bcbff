"""Ray Serve on this machine: ``python -m kit.ray_program ARGUMENTS``.

ARGUMENTS are those of ``build_app`` as JSON. It prints the port once every replica is ready. Each
line of its standard input has new arguments, with which it deploys again and prints the port again;
it ends in order when the input ends. Ray gets 8 CPUs, however many there are.
"""

from __future__ import annotations

import json
import socket
import sys
from itertools import chain

import ray
from ray import serve

from jaxinfer.ray import build_app

CPUS = 8
OBJECT_STORE = 100 << 20  # bytes


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    ray.init(
        num_cpus=CPUS,
        num_gpus=0,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE,
        log_to_driver=True,
        configure_logging=False,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    for arguments in chain(sys.argv[1:], sys.stdin):
        serve.run(build_app(json.loads(arguments)))
        print(port, flush=True)
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
