"""The Dockerfile and configs/deploy name only things that the project has."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from kit.deploy_files import (
    DEPLOY,
    DOCKERFILE,
    ROOT,
    alert_problems,
    compose_problems,
    dockerfile_problems,
    ignored,
    settings_problems,
    stages_of,
    unit_problems,
    url_problems,
)
from kit.ray_manifest import manifest_problems

type Lint = Callable[[str], list[str]]

LINTS: dict[Path, Lint] = {
    DOCKERFILE: dockerfile_problems,
    DEPLOY / "compose.yaml": compose_problems,
    DEPLOY / "compose.cuda.yaml": compose_problems,
    DEPLOY / "alerts.yaml": alert_problems,
    DEPLOY / "jaxinfer.service": unit_problems,
    DEPLOY / "serve.yaml": settings_problems,
    DEPLOY / "ray-service.yaml": manifest_problems,
}
FILES = [path for path in DEPLOY.rglob("*") if path.is_file()]


@pytest.mark.parametrize("path", LINTS, ids=lambda path: path.name)
def test_nothing_is_named_that_is_not_there(path: Path) -> None:
    assert LINTS[path](path.read_text()) == []


# file, a text in it, its replacement, words of the problem
BROKEN = [
    ("Dockerfile", "COPY configs configs", "COPY config configs", "COPY config: there is no"),
    ("Dockerfile", "COPY configs configs", "COPY docs docs", "COPY docs: there is no"),
    ("Dockerfile", "--from=build-cuda", "--from=built", "no such stage"),
    (
        "Dockerfile",
        "COPY --from=build /opt/jaxinfer",
        "COPY --from=build /opt/j",
        "not make /opt/j",
    ),
    ("Dockerfile", "AS cuda", "AS gpu", "no targets cpu and cuda"),
    ("Dockerfile", "USER jaxinfer", "USER nobody", "cpu: USER is missing"),
    ("Dockerfile", "USER jaxinfer\n", "", "cuda: USER is missing"),
    ("Dockerfile", "VOLUME /cache", "VOLUME /data", "VOLUME is not JAXINFER_CACHE_DIR"),
    ("Dockerfile", "EXPOSE 8000", "EXPOSE 80", "EXPOSE is not JAXINFER_PORT"),
    ("Dockerfile", "'/health'", "'/v1/models'", "HEALTHCHECK does not request"),
    ("Dockerfile", "'/health'", "'/healthz'", "HEALTHCHECK does not request"),
    ("Dockerfile", "JAXINFER_PORT=", "JAXINFER_PROT=", "JAXINFER_PROT is no setting"),
    ("Dockerfile", "JAXINFER_HOST=0.0.0.0", "JAXINFER_HOST=127.0.0.1", "no published port reaches"),
    ("Dockerfile", "[otel,", "[trace,", "there is no extra trace"),
    ("Dockerfile", "-c constraints.txt '.[c", "-c pins.txt '.[c", "constraints does not exist"),
    ("Dockerfile", '"serve"]', '"server"]', "jaxinfer server is no program"),
    (
        "Dockerfile",
        "FROM python:3.12-slim",
        "FROM registry.example/x/python:3.12",
        "image registry.example/x/python",
    ),
    ("Dockerfile", "FROM python:3.12-slim", "FROM python:latest", "image python:latest"),
    ("Dockerfile", "PIP_NO_CACHE_DIR=1", "PIP_INDEX_URL=http://a.b/c", "the host a.b"),
    ("Dockerfile", "EXPOSE 8000", "EXPSE 8000", "EXPSE is no instruction"),
    ("compose.yaml", "--api-key-file", "--api-keys-file", "No such option"),
    ("compose.yaml", "[smollm2-135m-instruct,", "[smollm2-135m-instruct, surplus,", "surplus"),
    ("compose.yaml", "/etc/jaxinfer/api-keys", "/keys/api-keys", "no mount with /keys/api-keys"),
    ("compose.yaml", "cache:/cache", "cache:/data", "no volume for the cache"),
    ("compose.yaml", "cache:/cache", "caches:/cache", "the volume caches, which is not"),
    ("compose.yaml", "./alerts.yaml", "./rules.yaml", "mounts ./rules.yaml, which does not"),
    ("compose.yaml", "/etc/prometheus/alerts.yaml", "/alerts.yaml", "names /etc/prometheus/alerts"),
    ("compose.yaml", "../grafana:/etc/grafana", "../grafana:/etc", "names /etc/grafana/dashboards"),
    ("compose.yaml", "../grafana:", "../board:", "mounts ../board"),
    ("compose.yaml", "target: cpu", "target: tpu", "the target tpu"),
    ("compose.yaml", "context: ../..", "context: ..", "not built from the repository"),
    ("compose.yaml", "127.0.0.1:8000:8000", "127.0.0.1:8000:80", "another port"),
    ("compose.yaml", "127.0.0.1:9090", "9090", "ports for other machines"),
    ("compose.yaml", "  prometheus:\n    image", "  prom:\n    image", "which is no service"),
    ("compose.yaml", "stop_grace_period: 60s", "stop_grace_period: 40s", "killed before"),
    ("compose.yaml", "    init:", "    inti:", "unknown key inti"),
    (
        "compose.yaml",
        "grafana/grafana:12.1.0",
        "registry.example/g/grafana:12.1.0",
        "registry.example",
    ),
    ("compose.yaml", "read_only: true", "read_only: false", "may write elsewhere than"),
    ("compose.yaml", "tmpfs: [/tmp, ", "tmpfs: [", "may write elsewhere than in its volume, /tmp"),
    ("compose.yaml", "cap_drop: [ALL]", "cap_drop: [CHOWN]", "keeps capabilities"),
    ("compose.yaml", "    mem_limit: 8g", "    # mem_limit: 8g", "no limit of memory"),
    ("compose.cuda.yaml", "mem_limit: 64g", "mem_limit: much", "no limit of memory"),
    ("compose.cuda.yaml", "target: cuda", "target: cuda13", "the target cuda13"),
    ("alerts.yaml", "jaxinfer:late_compiles_total", "jaxinfer:late_total", "jaxinfer:late_total"),
    ("alerts.yaml", "up{", "down{", "names no metric"),
    ("jaxinfer.service", "jaxinfer serve\n", "jaxinfer serve --no-such\n", "No such option"),
    ("jaxinfer.service", "bin/jaxinfer serve", "bin/jaxinferd serve", "is no program"),
    ("jaxinfer.service", "JAXINFER_CONFIG", "JAXINFER_CONF", "JAXINFER_CONF is no setting"),
    ("jaxinfer.service", "serve.yaml", "server.yaml", "no example of /etc/jaxinfer/server.yaml"),
    ("jaxinfer.service", "CacheDirectory=j", "CacheDirectory=k", "is not /var/cache/kaxinfer"),
    ("jaxinfer.service", "LimitNOFILE", "LimitNoFile", "LimitNoFile is no directive"),
    ("jaxinfer.service", "[Service]", "[Servis]", "no directive of [Servis]"),
    ("jaxinfer.service", "User=jaxinfer", "User=root", "runs as root"),
    ("jaxinfer.service", "UMask=0077", "UMask=0022", "UMask is not 0077"),
    ("jaxinfer.service", "MemoryMax=80%\n", "", "no limit of memory"),
    ("jaxinfer.service", "BoundingSet=", "BoundingSet=CAP_CHOWN", "CapabilityBoundingSet is not"),
    (
        "jaxinfer.service",
        " AF_UNIX",
        " AF_UNIX AF_PACKET",
        "RestrictAddressFamilies is not AF_INET",
    ),
    ("jaxinfer.service", "Namespaces=yes", "Namespaces=no", "RestrictNamespaces is not yes"),
    ("jaxinfer.service", "-HUP", "-USR1", "does not send SIGHUP"),
    ("jaxinfer.service", "=mixed", "=control-group", "KillMode is not mixed"),
    ("jaxinfer.service", "TimeoutStopSec=60", "TimeoutStopSec=40", "killed before"),
    ("ray-service.yaml", "kind: RayService", "kind: RayCluster", "no RayService"),
    ("ray-service.yaml", "rayVersion", "version", "rayClusterConfig has no field version"),
    ("ray-service.yaml", "maxReplicas: 4", "maximum: 4", "has no field maximum"),
    (
        "ray-service.yaml",
        "replicas: 1\n        min",
        "replicas: 9\n        min",
        "between its bounds",
    ),
    ("ray-service.yaml", "max_replicas: 4", "max_replicas: 5", "not as many pods as replicas"),
    ("ray-service.yaml", "jaxinfer:ray", "jaxinfer:rays", "jaxinfer:rays is no target"),
    ("ray-service.yaml", "build_app", "build", "jaxinfer.ray:build is not build_app"),
    ("ray-service.yaml", "max_model_len", "max_len", "'max_len' in the arguments of build_app"),
    ("ray-service.yaml", "max_model_len", "tensor_parallel_size", "more GPUs than a pod has"),
    ("ray-service.yaml", "num_cpus: 4", "num_cpus: 9", "more CPUs than a pod has"),
    ("ray-service.yaml", "mountPath: /cache", "mountPath: /c", "/c is not JAXINFER_CACHE_DIR"),
    ("ray-service.yaml", "- name: cache", "- name: caches", "which is no volume"),
    ("ray-service.yaml", "Seconds: 60", "Seconds: 40", "killed before"),
    (
        "ray-service.yaml",
        "memory: 48Gi, nvidia.com/gpu: 1}\n                  r",
        "}\n                  r",
        "memory",
    ),
    ("serve.yaml", "port: 8000", "prot: 8000", "'prot' in serve.yaml is no setting"),
    ("serve.yaml", "log_format: json", "log_format: xml", "log_format 'xml' is unknown"),
]


@pytest.mark.parametrize(("name", "old", "new", "words"), BROKEN)
def test_what_is_broken_is_found(name: str, old: str, new: str, words: str) -> None:
    (path,) = [path for path in LINTS if path.name == name]
    text = path.read_text()
    assert old in text
    assert words in "\n".join(LINTS[path](text.replace(old, new)))


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_health_check_of_the_image(status: int, code: int) -> None:
    """Its command, against a server with this status of /health."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    check = stages_of(DOCKERFILE.read_text())["cpu"].all("HEALTHCHECK")[-1]
    _, *words = json.loads(check.partition("CMD ")[2])
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        environment = {"JAXINFER_PORT": str(server.server_port), "http_proxy": "http://127.0.0.1:9"}
        assert subprocess.run([sys.executable, *words], env=environment).returncode == code
        thread.join()


def test_secrets_stay_out_of_the_image_and_of_git() -> None:
    for path in ("configs/deploy/keys/api-keys", "configs/deploy/.env"):
        assert ignored(path)
        lines = (ROOT / ".gitignore").read_text().splitlines()
        assert any(path.startswith(line.rstrip("/")) for line in lines if line)
    assert not ignored("configs/deploy/compose.yaml") and ignored("docs/deploy.md")


def test_no_file_names_another_machine() -> None:
    for path in FILES:
        assert [*url_problems(path.read_text(), ("prometheus",))] == [], path
    (problem,) = url_problems("http://prometheus:9090")
    assert problem == "the host prometheus is of another machine"


def test_the_page_describes_every_file() -> None:
    page = (ROOT / "docs" / "deploy.md").read_text()
    names = {path.name for path in FILES if path.parent == DEPLOY}
    assert [name for name in sorted(names) if f"/{name})" not in page and name not in page] == []
    mentioned = re.findall(r"configs/deploy/([\w./-]+\w)", page)
    missing = [one for one in mentioned if not (DEPLOY / one).exists() and "keys" not in one]
    assert mentioned and missing == []
    assert len(page.splitlines()) <= 80
