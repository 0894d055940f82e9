"""examples/kubernetes: manifest, image and page agree with each other and with requirements.txt."""

from __future__ import annotations

import re
import shlex
from typing import Any

import pytest

from fsdp import config as configuration
from fsdp.config import worker_range
from fsdp.dist.mesh import plan_batch, resolve
from tests.docs.pages import ROOT, text_of

yaml = pytest.importorskip("yaml")
FOLDER = ROOT / "examples" / "kubernetes"
DOCKERFILE = text_of(FOLDER / "Dockerfile")
PINNED = dict(re.findall(r"^([\w\[\]-]+)==(\S+)$", text_of(ROOT / "requirements.txt"), re.MULTILINE))
FIELDS = {
    "spec": {"entrypoint", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished", "rayClusterSpec"},
    "cluster": {"rayVersion", "headGroupSpec", "workerGroupSpecs"},
    "head": {"rayStartParams", "template"},
    "workers": {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"},
}
"""Fields of ray.io/v1 that the manifest uses, as KubeRay's schema spells them."""


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(text_of(FOLDER / "rayjob.yaml"))
    return loaded


def pods(job: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def flags(job: dict[str, Any]) -> list[str]:
    words = shlex.split(job["spec"]["entrypoint"])
    assert words[:2] == ["python", "/shardrun/train.py"]
    return [word.replace("/shardrun/", f"{ROOT}/") for word in words[2:]]


def test_fields_are_those_of_the_schema(job: dict[str, Any]) -> None:
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    assert job["spec"].keys() == FIELDS["spec"]
    assert cluster.keys() == FIELDS["cluster"]
    assert cluster["headGroupSpec"].keys() == FIELDS["head"]
    assert all(group.keys() == FIELDS["workers"] for group in cluster["workerGroupSpecs"])
    params = [group["rayStartParams"] for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"])]
    assert all(isinstance(value, str) for one in params for value in one.values())


def test_the_workers_have_a_gpu_for_each_rank(job: dict[str, Any]) -> None:
    config = configuration.load(flags(job))
    assert (config.backend, config.ray.address) == ("ray", "auto")
    gpus = 0
    for group in job["spec"]["rayClusterSpec"]["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        (container,) = group["template"]["spec"]["containers"]
        assert container["resources"]["limits"] == container["resources"]["requests"]
        gpus += group["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert worker_range(config.ray.num_workers) == (gpus, gpus)
    resolve(config.mesh, gpus)
    plan_batch(config.train, gpus)


def test_every_pod_mounts_the_run_directory(job: dict[str, Any]) -> None:
    run = configuration.load(flags(job)).run.dir
    for pod in pods(job):
        volumes = {volume["name"] for volume in pod["volumes"]}
        for container in pod["containers"]:
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert set(mounts.values()) <= volumes
            assert run.startswith("/shared/")
            assert mounts["/shared"] == "shared"
    assert pods(job)[1]["volumes"][0]["persistentVolumeClaim"]["claimName"] == "shared"


def test_one_image_of_the_pinned_ray(job: dict[str, Any]) -> None:
    (image,) = {container["image"] for pod in pods(job) for container in pod["containers"]}
    assert f"-t {image} ." in DOCKERFILE
    assert f"-t {image} ." in text_of(ROOT / "docs" / "first-kubernetes.md")
    assert job["spec"]["rayClusterSpec"]["rayVersion"] == PINNED["ray[train]"]


def test_the_image_has_what_train_py_imports() -> None:
    copied = re.findall(r"^COPY (\S+) /shardrun/(\S*)$", DOCKERFILE, re.MULTILINE)
    assert all((ROOT / source).exists() and target in ("", source) for source, target in copied)
    assert {source for source, _ in copied} >= {"requirements.txt", "train.py", "fsdp", "launch", "recipes"}
    steps = re.findall(r"^(?:COPY|RUN pip) .*", DOCKERFILE, re.MULTILINE)
    assert "requirements.txt" in steps[0]
    assert "pip install" in steps[1], "packages before the code"
    assert re.search(r"^FROM python:3\.1[1-9]-slim$", DOCKERFILE, re.MULTILINE)
    assert "wget" in DOCKERFILE, "KubeRay's probes"
    expression = r"s/^ray\[train\]==/ray[default]==/p"
    assert expression in DOCKERFILE
