"""examples/kubernetes: manifest, image and page agree with each other and with requirements.txt."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.docs.pages import ROOT, text_of

yaml = pytest.importorskip("yaml")
FOLDER = ROOT / "examples" / "kubernetes"
DOCKERFILE = text_of(FOLDER / "Dockerfile")
PINNED = dict(re.findall(r"^([\w\[\]-]+)==(\S+)$", text_of(ROOT / "requirements.txt"), re.MULTILINE))


@pytest.fixture(scope="module")
def job() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load(text_of(FOLDER / "rayjob.yaml"))
    return loaded


def pods(job: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


def test_one_image_of_the_pinned_ray(job: dict[str, Any]) -> None:
    (image,) = {container["image"] for pod in pods(job) for container in pod["containers"]}
    assert f"-t {image} ." in DOCKERFILE
    assert f"-t {image} ." in text_of(ROOT / "docs" / "first-kubernetes.md")
    assert job["spec"]["rayClusterSpec"]["rayVersion"] == PINNED["ray[train]"]


FIELDS: dict[str, Any] = {
    "apiVersion": "ray.io/v1",
    "kind": "RayJob",
    "metadata.name": str,
    "spec.entrypoint": str,
    "spec.shutdownAfterJobFinishes": bool,
    "spec.ttlSecondsAfterFinished": int,
    "spec.rayClusterSpec.rayVersion": str,
    "spec.rayClusterSpec.authOptions.mode": "token",
    "spec.rayClusterSpec.headGroupSpec.rayStartParams.dashboard-host": str,
    "spec.rayClusterSpec.headGroupSpec.rayStartParams.num-cpus": str,
    "spec.rayClusterSpec.workerGroupSpecs.groupName": str,
    **dict.fromkeys(
        [
            f"spec.rayClusterSpec.workerGroupSpecs.{name}"
            for name in ("replicas", "minReplicas", "maxReplicas")
        ],
        int,
    ),
}
"""Of rayjobs.ray.io in the CRD of KubeRay (August 2026), outside the pods: a type, or one of the values."""


def fields(value: Any, path: str = "") -> dict[str, Any]:
    if path.endswith(".template"):
        return {}
    if isinstance(value, list):
        return {name: leaf for item in value for name, leaf in fields(item, path).items()}
    if not isinstance(value, dict):
        return {path: value}
    pairs = ((f"{path}.{name}".lstrip("."), item) for name, item in value.items())
    return {name: leaf for key, item in pairs for name, leaf in fields(item, key).items()}


def test_the_rayjob_has_fields_of_kuberay(job: dict[str, Any]) -> None:
    found = {
        name: value if isinstance(FIELDS.get(name), str) else type(value)
        for name, value in fields(job).items()
    }
    assert found == FIELDS


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


@pytest.mark.needs("kubeflow_trainer_api")
def test_the_trainjob_has_the_fields_of_kubeflow_and_that_image(job: dict[str, Any]) -> None:
    """Unknown fields are lost on the way through its models."""
    models = pytest.importorskip("kubeflow_trainer_api.models")
    text = text_of(FOLDER / "trainjob.yaml")
    loaded = yaml.safe_load(text)
    kept = models.TrainerV1alpha1TrainJob.from_dict(loaded).to_dict()
    assert json.loads(json.dumps(kept)) == loaded
    assert loaded["spec"]["trainer"]["image"] == pods(job)[0]["containers"][0]["image"]
    assert all((ROOT / path).exists() for path in re.findall(r"/shardrun/([\w./-]+)", text))


def test_the_file_of_skypilot_starts_train_py_on_every_node() -> None:
    task = yaml.safe_load(text_of(ROOT / "examples" / "skypilot.yaml"))
    words = task["run"].replace("\\\n", " ").split()
    assert {"torchrun", "train.py", '--node_rank="$SKYPILOT_NODE_RANK"'} <= set(words)
    assert all(name in task["envs"] for name in re.findall(r"\$(?!SKYPILOT_|\()(\w+)", task["run"]))
