"""A Ray of the run's own: the same bits; a node that is lost, a driver that dies or is told to stop; mistakes
in few words.
"""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from fsdp.rundir.history import RunDir
from tests.ray.cluster import Cluster
from tests.ray.runs import SLOWLY, Driver, Run, check_whole, rank_pid, torchrun
from tests.support.processes import command_line, eventually, pids_with

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_a_ray_of_its_own_trains_to_the_same_bits_and_is_gone(tmp_path: Path, undisturbed: Run) -> None:
    driver = Driver(tmp_path / "run")
    run = driver.finish()
    assert run.losses == undisturbed.losses
    assert (run.path / "DONE").exists()
    assert (run.path / "full_model" / "full-model.pt").exists()
    assert run.starts[0]["launcher"] == "ray"
    eventually(
        "no process left", lambda: not pids_with(driver.marker), 60, lambda: str(pids_with(driver.marker))
    )


@pytest.mark.long
def test_a_signal_to_the_process_group_saves_with_a_ray_of_its_own(tmp_path: Path) -> None:
    """As `timeout` and a closed terminal send it. Ray's processes are in a session of their own."""
    home = tmp_path / "home"
    home.mkdir()
    driver = Driver(tmp_path / "run", *SLOWLY, HOME=str(home))
    driver.until(2)
    os.killpg(driver.process.pid, signal.SIGTERM)
    run = driver.finish()
    assert f"stopped by SIGTERM at step {max(run.steps)}" in driver.out
    assert (run.path / "checkpoints" / f"step-{max(run.steps):08}").is_dir()
    assert not (home / ".ray").exists(), "a token there would close the next `ray start --head` to drivers"


@pytest.mark.long
def test_a_signal_before_the_ranks_start_ends_the_driver_in_a_line(tmp_path: Path) -> None:
    """While it connects to something that is no Ray, and while its own Ray starts."""
    with socket.create_server(("", 0)) as server:  # Ray connects to another address of this machine
        server.settimeout(60)
        address = f"127.0.0.1:{server.getsockname()[1]}"
        own = Driver(tmp_path / "own")
        joined = Driver(tmp_path / "joined", "--ray.address", address)
        eventually(
            "ray start", lambda: "ray.scripts" in "".join(map(command_line, pids_with(own.marker))), 60
        )
        own.signal(signal.SIGTERM)
        for _ in range(2):  # the second connection is Ray's
            server.accept()
        joined.signal(signal.SIGINT)
        for driver, number in ((own, signal.SIGTERM), (joined, signal.SIGINT)):
            assert driver.wait(60) == 128 + number
            assert f"{number.name} before the ranks started" in driver.err.splitlines()[-1]
            assert "Traceback" not in driver.err
    stopped = RunDir(tmp_path / "joined").stopped.read_text()
    assert stopped == "SIGINT at step 0\n", "after SIGTERM a Slurm job is requeued"
    eventually("no process left", lambda: not pids_with(own.marker), 60)


def test_a_mistake_is_found_before_any_ray_starts(tmp_path: Path) -> None:
    nobody = Driver(tmp_path / "nobody", "--ray.address", "127.0.0.1:1")
    driver = Driver(tmp_path / "run", "--mesh.strategy", "fsdp", "--mesh.shard", "3")
    assert driver.wait() == 2
    assert "shard 3 = 3 ranks, but 2 were started" in driver.err
    assert not driver.run.path.exists()
    assert nobody.wait() == 3
    assert "--ray.address 127.0.0.1:1: no Ray answers there" in nobody.err


@pytest.mark.long
def test_a_node_is_lost_and_one_will_be_taken_away(tmp_path: Path, undisturbed: Run) -> None:
    """Three nodes of one CPU: two train, the third takes the lost one's place. A cloud's notice reaches Ray
    as a drained node: the ranks save, and continue where they may stay.
    """
    flags = (*SLOWLY, "--mesh.strategy", "fsdp")  # on two nodes the mesh would be HSDP by default
    with Cluster([1, 1, 1]) as cluster:
        lost = Driver(tmp_path / "lost", *flags, cluster=cluster)
        lost.until(6)
        node = 2 if _has_worker(cluster, lost.run) else 1
        cluster.lose(node)
        check_whole(lost.finish(), undisturbed)
        assert len(lost.run.starts) == 2
        cluster.start(node)
        taken = Driver(tmp_path / "taken", *flags, cluster=cluster)
        taken.until(6)
        cluster.drain(2 if _has_worker(cluster, taken.run) else 1)
        check_whole(taken.finish(), undisturbed)
    assert "before nodes are preempted; continuing on the others" in taken.err
    assert taken.run.starts[1]["from_step"] >= 6, "nothing was lost"
    assert "restarting the workers" not in taken.err


@pytest.mark.long
def test_elastic_it_goes_on_with_what_there_is(tmp_path: Path) -> None:
    """Four workers on two nodes, a node lost, two go on; the node is back, four again: the same samples all
    the way.
    """
    with Cluster([2, 2]) as cluster:
        words = "--ray.num_workers 2:4 --mesh.strategy fsdp --train.steps 200 --data.args.seconds 0.4"
        flags = (*words.split(), "--optim.schedule", "constant")
        driver = Driver(tmp_path / "run", *SLOWLY, *flags, cluster=cluster)
        driver.until(6)
        cluster.lose(1)
        driver.until(driver.run.steps[-1] + 6, starts=2)
        cluster.start(1)
        driver.until(driver.run.steps[-1] + 6, starts=3)
        driver.signal(signal.SIGINT)
        run = driver.finish()
    assert [start["ranks"] for start in run.starts] == [4, 2, 4]
    assert run.steps == list(range(1, run.steps[-1] + 1))
    stop = ("--train.stop_after", str(run.steps[-1]))
    whole = torchrun(tmp_path / "whole", 2, *flags[2:6], *flags[8:], *stop)
    for step, loss in whole.losses.items():
        assert run.losses[step] == pytest.approx(loss, abs=1e-5)


def _has_worker(cluster: Cluster, run: Run) -> bool:
    return rank_pid(run, 1) in cluster.pids_of(2) or rank_pid(run, 0) in cluster.pids_of(2)
