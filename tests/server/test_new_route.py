"""A new route touches two files: the handlers, where its record stands, and the structs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
PATCH = TESTS / "data/new_route.patch"  # ``GET /load``, as vLLM has it
ASK = """
import gc

from kit.engines import tiny_engine
from kit.server import serving

with serving(tiny_engine()) as server, server.client() as client:
    print(client.get("/load").text)
    print(client.get("/openapi.json").text)
gc.freeze()  # as ``cli.main`` does, and why
"""


def test_a_new_route_touches_two_files(tmp_path: Path) -> None:
    for package in ("jaxinfer", "pallas_kernels", "configs"):
        shutil.copytree(TESTS.parent / package, tmp_path / package)
    subprocess.run(["git", "apply", PATCH], cwd=tmp_path, check=True)
    assert PATCH.read_text().count("\n+++ ") == 2
    asked = subprocess.run(
        [sys.executable, "-c", ASK],
        env={**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(TESTS)))},
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        timeout=300,
        check=True,
    )
    answer, document = (json.loads(line) for line in asked.stdout.splitlines())
    assert answer == {"server_load": 0}
    assert document["paths"]["/load"]["get"]["operationId"] == "load"
    field = document["components"]["schemas"]["Load"]["properties"]["server_load"]
    assert field["description"] == "Requests whose answers have not ended."
