"""The same run under Ray: its losses to the bit, its words once, its processes gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from fsdp.checkpoint import inspect
from fsdp.checkpoint.store import open_store
from tests.processes import eventually, pids_with
from tests.ray.cluster import Cluster
from tests.ray.runs import HSDP, STEPS, Driver, Run, torchrun

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_ray_of_its_own_trains_to_the_same_bits_and_is_gone(tmp_path: Path, undisturbed: Run) -> None:
    driver = Driver(tmp_path / "run")
    run = driver.finish()
    assert run.losses == undisturbed.losses
    assert (run.path / "DONE").exists()
    assert (run.path / "full_model" / "full-model.pt").exists()
    assert run.starts[0]["launcher"] == "ray"
    eventually("no process left", lambda: not pids_with(driver.marker), 15, lambda: str(pids_with(driver.marker)))


def test_progress_is_shown_once_and_the_end_as_torchrun_says_it(tmp_path: Path, joined: Cluster) -> None:
    driver = Driver(tmp_path / "run", cluster=joined)
    driver.finish()
    lines = driver.out.splitlines()
    assert [line.split()[1] for line in lines if line.startswith("step")] == [f"{step}/{STEPS}" for step in range(1, STEPS + 1)]
    assert sum(line.startswith("finished at step") for line in lines) == 1
    assert any(line.startswith("held-out accuracy") for line in lines)
    assert "(RayTrainWorker" not in driver.said()
    assert driver.err.count("rank 0(2)") == 1


@pytest.mark.parametrize(("ranks", "mesh"), [(4, HSDP), (2, ("--mesh.strategy", "ddp"))], ids=["hsdp 2×2", "ddp"])
def test_losses_on_every_mesh(tmp_path: Path, joined: Cluster, ranks: int, mesh: tuple[str, ...]) -> None:
    under_ray = Driver(tmp_path / "ray", "--ray.num_workers", str(ranks), *mesh, cluster=joined).finish()
    assert under_ray.losses == torchrun(tmp_path / "torchrun", ranks, *mesh).losses
    assert joined.alive(), "a cluster that was joined is left running"


def test_one_run_through_torchrun_and_ray_and_back(tmp_path: Path, joined: Cluster, undisturbed: Run) -> None:
    torchrun(tmp_path / "run", 2, "--train.stop_after", "7")
    Driver(tmp_path / "run", "--train.stop_after", "15", cluster=joined).finish()
    run = torchrun(tmp_path / "run", 2)
    assert run.losses == undisturbed.losses
    assert run.steps == list(range(1, STEPS + 1))
    assert [start["launcher"] for start in run.starts] == ["torchrun", "ray", "torchrun"]
    assert [start["from_step"] for start in run.starts] == [0, 7, 15]


def test_checkpoints_are_told_to_ray_and_kept_by_us(tmp_path: Path, joined: Cluster) -> None:
    run = Driver(tmp_path / "run", "--checkpoint.keep_last", "2", cluster=joined).finish()
    kept = [found.step for found in inspect.scan(open_store(str(run.path / "checkpoints")))]
    assert sorted(kept) == [STEPS - 4, STEPS]
    told = (run.path / "checkpoint_manager_snapshot.json").read_text()
    assert f"checkpoints/step-{STEPS:08}" in told
    assert not list(run.path.glob("checkpoint_0*")), "no copy of Ray's own"
