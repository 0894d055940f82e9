"""--checkpoint.local_dir: sealed on the nodes' own disks, copied to shared storage behind the steps.

Killed at each point of that, or without a node, a run resumes the newest step that is whole.

Two nodes are four ranks, two a node, with a local folder for each node.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fsdp.base.errors import CheckpointError
from fsdp.checkpoint import local_tier
from fsdp.checkpoint.inspect import scan
from fsdp.checkpoint.local_tier import LocalTier
from fsdp.checkpoint.manifest import data_file
from fsdp.checkpoint.sealing import Sealing
from fsdp.checkpoint.store import Buffer, LocalStore
from fsdp.distributed.env import DistEnv
from tests.checkpoint.small import Kind, Run, bits, build, save_once
from tests.support.world import WorldError, run_world

PER_NODE = 2


def on_node(env: DistEnv, folder: str, kind: Kind = "fsdp", **section: Any) -> Run:
    node = env.rank // PER_NODE
    env = replace(
        env,
        local_rank=env.rank % PER_NODE,
        local_world_size=PER_NODE,
        node_rank=node,
        num_nodes=env.world_size // PER_NODE,
    )
    return build(env, kind, folder, section={"local_dir": f"{folder}/node{node}", **section})


def train(
    env: DistEnv, folder: str, steps: int, every: int = 1, dies: str = "", kind: Kind = "fsdp"
) -> tuple[int, dict[str, int]]:
    """Restores, trains to `steps`, saves each `every`; the step that it resumed from, and the final bits.
    From the last save on, `dies` names a method of the tier's sealing at which every rank is killed.
    """
    run = on_node(env, folder, kind)
    run.checkpointer.restore(run.state)
    resumed = run.state.step
    while run.state.step < steps:
        run.step()
        if run.state.step % every == 0:
            if dies and run.state.step == steps:
                kills(dies)
            run.save(wait=True)
    found = bits(run.state)
    run.checkpointer.close()
    return resumed, found


def kills(name: str) -> None:
    """Ends the process at the copy, or at its seal."""
    if name == "_copy":
        LocalTier._copy = lambda *_, **__: os._exit(9)  # type: ignore[method-assign, assignment]
        return
    seal = Sealing._seal

    def dies(self: Sealing, *args: Any) -> Any:
        if "/checkpoints" in self.store.where:
            os._exit(9)
        return seal(self, *args)

    Sealing._seal = dies  # type: ignore[method-assign, assignment]


def shared_steps(folder: Path) -> list[int]:
    return [one.step for one in scan(LocalStore(folder / "checkpoints")) if one.manifest is not None]


def local_folder(folder: Path, node: int) -> Path:
    (found,) = (folder / f"node{node}").iterdir()
    return found


def local_steps(folder: Path, node: int) -> list[str]:
    return sorted(one.name for one in local_folder(folder, node).iterdir())


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def killed(folder: Path, at: str, kind: Kind = "fsdp", ranks: int = 4) -> None:
    """Step 2 in the shared store and on the nodes; then steps 3 and 4, killed within the copy of 4."""
    run_world(ranks, train, str(folder), 2, 2, "", kind)
    with pytest.raises(WorldError):
        run_world(ranks, train, str(folder), 4, 2, at, kind)


@pytest.fixture(scope="module")
def after(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, int]]:
    """The bits after steps 2 and 4 of a run without local folders."""
    folder = tmp_path_factory.mktemp("plain")
    return {steps: run_world(4, save_once, "fsdp", str(folder / str(steps)), steps)[0] for steps in (2, 4)}


@pytest.mark.parametrize("at", ["_copy", pytest.param("_seal", marks=pytest.mark.long)])
def test_killed_within_the_copy_it_resumes_from_the_local_disks(
    at: str, tmp_path: Path, after: dict[int, dict[str, int]]
) -> None:
    """At `_seal` the shared store holds all files of step 4 without the manifest: a torn copy."""
    killed(tmp_path, at)
    names = [one.name for one in (tmp_path / "checkpoints").iterdir()]
    assert any(name.startswith("step-00000004.tmp-") for name in names) == (at == "_seal")
    assert shared_steps(tmp_path) == [2]
    assert "step-00000004" in local_steps(tmp_path, 0)
    assert run_world(4, train, str(tmp_path), 4) == [(4, after[4])] * 4
    assert shared_steps(tmp_path) == [4, 2]


@pytest.mark.long
def test_a_lost_node_leaves_the_step_before(tmp_path: Path, after: dict[int, dict[str, int]]) -> None:
    killed(tmp_path, "_seal")
    shutil.rmtree(tmp_path / "node1")
    assert run_world(4, train, str(tmp_path), 2) == [(2, after[2])] * 4
    assert shared_steps(tmp_path) == [2]


@pytest.mark.long
def test_damage_on_a_local_disk_is_found_before_the_copy(
    tmp_path: Path, after: dict[int, dict[str, int]]
) -> None:
    killed(tmp_path, "_copy")
    damage(local_folder(tmp_path, 1) / "step-00000004" / data_file(2))
    assert run_world(4, train, str(tmp_path), 2) == [(2, after[2])] * 4
    assert shared_steps(tmp_path) == [2]


def test_a_new_run_in_the_place_of_a_deleted_one_starts_at_step_0(tmp_path: Path) -> None:
    run_world(2, train, str(tmp_path), 2, 2)
    shutil.rmtree(tmp_path / "checkpoints")
    assert [step for step, _ in run_world(2, train, str(tmp_path), 1)] == [0, 0]


def slow_copies(env: DistEnv, folder: str) -> list[list[str]]:
    """The folders on this node after each of four saves, while the copy of the first is held up."""
    run = on_node(env, folder, keep_last=1)
    held, copy = threading.Event(), local_tier.copy_file

    def waits(*args: Any) -> None:
        held.wait(60)
        copy(*args)

    setattr(local_tier, "copy_file", waits)  # noqa: B010
    seen = []
    try:
        for _ in range(4):
            run.step()
            run.save(wait=True)
            seen.append(local_steps(Path(folder), env.rank // PER_NODE))
        held.set()
        run.checkpointer.close()
    finally:
        local_tier.copy_file = copy
    return [*seen, local_steps(Path(folder), env.rank // PER_NODE)]


def test_the_newest_and_the_one_in_copy_stay_on_a_slow_store(tmp_path: Path) -> None:
    for seen in run_world(4, slow_copies, str(tmp_path))[::PER_NODE]:
        assert all(f"step-{at:08d}" in names for at, names in enumerate(seen[:4], 1))
        assert max(map(len, seen)) <= 2
        assert "step-00000004" in seen[4]
    assert shared_steps(tmp_path) == [4], "in between only the newest was copied"


class FullStore(LocalStore):
    def write(self, folder: str, file: str, buffers: Iterable[Buffer]) -> None:
        part = memoryview(next(iter(buffers)))[1:]
        raise OSError(errno.ENOSPC, f"No space left on device, {len(part)} bytes to go")


def copy_to_a_full_store(env: DistEnv, folder: str) -> list[str]:
    """The errors of the save and of the end."""
    run = on_node(env, folder)
    tier = run.checkpointer._tier
    assert tier is not None
    tier._shared = FullStore(Path(folder) / "checkpoints")
    run.step()
    run.save(wait=True)
    try:
        run.checkpointer.close()
    except CheckpointError as error:
        return [str(error)]
    return []


def test_a_copy_that_fails_is_named_and_the_next_start_makes_it(tmp_path: Path) -> None:
    for said in run_world(2, copy_to_a_full_store, str(tmp_path)):
        assert len(said) == 1
        assert "the last checkpoint is on the nodes' own disks alone: rank 0: " in said[0]
        assert "No space left on device" in said[0]
        assert f"HINT: findmnt -T {tmp_path / 'checkpoints'} and df -h" in said[0]
    assert not [one.name for one in (tmp_path / "checkpoints").iterdir() if one.is_dir()], (
        "no torn copy stays"
    )
    assert [step for step, _ in run_world(2, train, str(tmp_path), 1)] == [1, 1]


def refused(env: DistEnv, folder: str, name: str) -> str:
    try:
        build(
            replace(env, local_rank=0, node_rank=env.rank, num_nodes=2),
            "fsdp",
            folder,
            section={"local_dir": name},
        )
    except CheckpointError as error:
        return str(error)
    return ""


def test_a_folder_that_nodes_share_or_cannot_write_is_refused(tmp_path: Path) -> None:
    for said in run_world(2, refused, str(tmp_path), str(tmp_path / "same")):
        assert "is another node's folder too" in said
        assert "HINT: --checkpoint.local_dir a folder on each node's own disk" in said
    (tmp_path / "file").write_text("")
    for said in run_world(2, refused, str(tmp_path), str(tmp_path / "file" / "under")):
        assert "cannot be written on" in said
