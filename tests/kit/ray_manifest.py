"""A lint of KubeRay's ``RayService``, for machines without Kubernetes.

The fields are those of the operator's CRD (ray.io/v1, KubeRay 1.5) that the file may have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from jaxinfer.core.errors import ConfigError
from jaxinfer.ray.settings import configs, deployment_options
from kit.deploy_files import DOCKERFILE, STOP_SECONDS, environment_of, stages_of

# By the path of an object; a path that ends with ``[]`` is a list of objects.
FIELDS: Mapping[str, str] = {
    "": "apiVersion kind metadata spec",
    "spec": "serveConfigV2 rayClusterConfig",
    "spec.rayClusterConfig": "rayVersion enableInTreeAutoscaling autoscalerOptions headGroupSpec "
    "workerGroupSpecs",
    "spec.rayClusterConfig.headGroupSpec": "rayStartParams template serviceType",
    "spec.rayClusterConfig.workerGroupSpecs[]": "groupName replicas minReplicas maxReplicas "
    "rayStartParams template numOfHosts",
}
POD = "containers volumes terminationGracePeriodSeconds"
CONTAINER = "name image ports resources volumeMounts env"
APPLICATION = "name import_path route_prefix args runtime_env"


def manifest_problems(text: str) -> list[str]:
    """A sentence for each part that KubeRay, Ray or the project does not have."""
    manifest = yaml.safe_load(text)
    if found := [*_field_problems("", manifest)]:
        return found
    if (manifest["apiVersion"], manifest["kind"]) != ("ray.io/v1", "RayService"):
        found.append("it is no RayService of ray.io/v1")
    cluster = manifest["spec"]["rayClusterConfig"]
    workers = cluster["workerGroupSpecs"]
    groups = [cluster["headGroupSpec"], *workers]
    found += [one for group in groups for one in _pod_problems(group["template"]["spec"])]
    for group in workers:
        if not group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]:
            found.append(f"{group['groupName']} does not start between its bounds")
    (application,) = yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"]
    unknown = sorted(application.keys() - {*APPLICATION.split()})
    found += [f"an application has no field {name}" for name in unknown]
    if application["import_path"] != "jaxinfer.ray:build_app":
        found.append(f"{application['import_path']} is not build_app")
    return [*found, *_application_problems(application["args"], workers)]


def _field_problems(path: str, value: Any) -> Iterator[str]:
    if path not in FIELDS:
        return
    for name in value:
        if name not in FIELDS[path].split():
            yield f"{path or 'the manifest'} has no field {name}"
        inner = value[name]
        for one in inner if isinstance(inner, list) else [inner]:
            suffix = "[]" if isinstance(inner, list) else ""
            yield from _field_problems(f"{path}.{name}{suffix}".lstrip("."), one)


def _pod_problems(pod: Mapping[str, Any]) -> Iterator[str]:
    yield from (f"a pod has no field {name}" for name in pod if name not in POD.split())
    if pod.get("terminationGracePeriodSeconds", STOP_SECONDS + 1) <= STOP_SECONDS:
        yield f"a pod is killed before its requests have had {STOP_SECONDS:g} s to end"
    (container,) = pod["containers"]
    for name in container:
        if name not in CONTAINER.split():
            yield f"{container['name']} has no field {name}"
    image, _, stage = container["image"].partition(":")
    stages = stages_of(DOCKERFILE.read_text())
    if image != "jaxinfer" or stage not in stages:
        yield f"{container['image']} is no target of the Dockerfile"
        return
    resources = container["resources"]
    if resources["limits"] != resources["requests"] or "memory" not in resources["limits"]:
        yield f"{container['name']} has other limits than requests, or no limit of memory"
    volumes = {volume["name"] for volume in pod.get("volumes", ())}
    for mount in container.get("volumeMounts", ()):
        if mount["name"] not in volumes:
            yield f"{container['name']} mounts {mount['name']}, which is no volume of the pod"
        if mount["mountPath"] != environment_of(stages[stage])["JAXINFER_CACHE_DIR"]:
            yield f"{mount['mountPath']} is not JAXINFER_CACHE_DIR"


def _application_problems(
    arguments: Mapping[str, Any], workers: list[Mapping[str, Any]]
) -> Iterator[str]:
    settings = dict(arguments)
    given = settings.pop("deployment")
    try:
        engine, server = configs(settings)
    except ConfigError as error:
        yield str(error)
        return
    options = deployment_options(given, engine, server)
    actor, scaling = options["ray_actor_options"], options["autoscaling_config"]
    limits = workers[0]["template"]["spec"]["containers"][0]["resources"]["limits"]
    if actor["num_gpus"] > int(limits.get("nvidia.com/gpu", 0)):
        yield "a replica needs more GPUs than a pod has"
    if actor["num_cpus"] > int(re.sub(r"\D", "", str(limits["cpu"]))):
        yield "a replica needs more CPUs than a pod has"
    if scaling["max_replicas"] > workers[0]["maxReplicas"]:
        yield "there are not as many pods as replicas"
