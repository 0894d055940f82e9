"""A step that both nodes have sealed survives a power cut at any moment: --checkpoint.local_dir.

Two ranks, each on a node of its own, are two threads of this process: one clock orders the operations on the
three disks. A state after a crash is one state of each disk, each with its own unsynced data lost.
"""

from __future__ import annotations

import bisect
import itertools
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp.base.errors import CheckpointError
from fsdp.checkpoint import Checkpointer, checkpointer, inspect, local_tier, manifest
from fsdp.checkpoint.local_tier import LocalTier, Offer, local_folder_name, offers_of, whole_over_nodes
from fsdp.checkpoint.manifest import MANIFEST, Broken, final_name, parse_name
from fsdp.checkpoint.sealing import SaveOutcome, Sealing
from fsdp.checkpoint.store import LocalStore
from fsdp.config import CheckpointSection
from fsdp.distributed.env import DistEnv
from fsdp.distributed.mesh import MeshSizes
from fsdp.optim.optimizer import TrainState
from tests.checkpoint.crashes import Change, Left, Recorder, Tree, states
from tests.checkpoint.test_crashes import ENV, no_fsync_of, violations
from tests.support.processes import eventually

NODES = 2
Forgets = Callable[[Change], bool]


class ThreadGroup:
    """Object collectives between threads, each a rank; in place of ObjectGroup."""

    def __init__(self, rank: int, barrier: threading.Barrier, values: list[bytes]) -> None:
        self.rank, self.size = rank, NODES
        self._barrier, self._values = barrier, values

    def _all(self, value: Any) -> list[Any]:
        self._values[self.rank] = pickle.dumps(value)
        self._barrier.wait(60)
        found = [pickle.loads(one) for one in self._values]
        self._barrier.wait(60)
        return found

    def gather(self, value: Any) -> list[Any] | None:
        found = self._all(value)
        return found if self.rank == 0 else None

    def broadcast(self, value: Any = None) -> Any:
        return self._all(value if self.rank == 0 else None)[0]

    def any_rank(self, value: bool) -> bool:
        return any(self._all(value))

    def on_main(self, act: Callable[[], Any]) -> Any:
        return self.broadcast(act() if self.rank == 0 else None)


class Groups:
    """Makes the nth group of each rank meet the nth of the others."""

    def __init__(self) -> None:
        self._lock, self._count = threading.Lock(), [0] * NODES
        self._meetings: list[tuple[threading.Barrier, list[bytes]]] = []

    def __call__(self) -> ThreadGroup:
        rank = int(threading.current_thread().name.removeprefix("rank "))
        with self._lock:
            nth, self._count[rank] = self._count[rank], self._count[rank] + 1
            if nth == len(self._meetings):
                self._meetings.append((threading.Barrier(NODES), [b""] * NODES))
            return ThreadGroup(rank, *self._meetings[nth])


def on_ranks(act: Callable[[DistEnv], None]) -> None:
    failures: list[BaseException] = []

    def one(env: DistEnv) -> None:
        try:
            act(env)
        except BaseException as error:
            failures.append(error)

    envs = [
        replace(ENV, rank=rank, world_size=NODES, node_rank=rank, num_nodes=NODES) for rank in range(NODES)
    ]
    threads = [threading.Thread(target=one, args=(env,), name=f"rank {env.rank}") for env in envs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures, failures


@dataclass
class Recording:
    nodes: list[Recorder]
    shared: Recorder
    seals: list[tuple[int, str, str]] = field(default_factory=list)
    """Time, root and staged folder, whose name has the attempt, of each seal that has returned."""

    def sealed_by(self, moment: int) -> int:
        """The newest step that every node has sealed."""
        done = [
            {staged for at, root, staged in self.seals if at <= moment and root == node.root}
            for node in self.nodes
        ]
        both = [name for staged in set.intersection(*done) if (name := parse_name(staged)) is not None]
        return max((name.step for name in both), default=0)


@contextmanager
def recording(folder: Path, forgets: Forgets) -> Iterator[Recording]:
    shared = folder / "checkpoints"
    name = local_folder_name(LocalStore(shared))
    nodes = [Recorder(folder / f"node{node}" / name, forgets) for node in range(NODES)]
    found, seal = Recording(nodes, Recorder(shared, forgets)), LocalStore.seal

    def noting(self: LocalStore, staged: str, final: str) -> None:
        seal(self, staged, final)
        found.seals.append((time.perf_counter_ns(), str(self.root), staged))
        if self.root == shared:
            found.shared.note(final)

    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        groups = Groups()
        for module in (checkpointer, local_tier):
            patch.setattr(module, "ObjectGroup", groups)
        patch.setattr(LocalStore, "seal", noting)
        for recorder in (*nodes, found.shared):
            stack.enter_context(recorder)
        yield found


def copied(run: Checkpointer) -> bool:
    assert run._tier is not None
    return max(run._tier._waiting, run._tier._copying) < 0


def train(env: DistEnv, folder: Path, steps: list[int], fails: bool) -> None:
    """A start that saves these steps. `fails`: the last is sealed on node 0 alone, and the one before is not
    copied to the shared store.
    """
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, 0.5)
    nn.init.constant_(model.bias, 0.25)
    state = TrainState(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    section = CheckpointSection(local_dir=str(folder / f"node{env.rank}"), keep_last=2)
    run = Checkpointer(section, folder, env, MeshSizes("ddp", NODES, 1), config_hash="c0ffee", locks=None)
    run.has_checkpoint()
    try:
        for step in steps:
            model(torch.full((1, 3), float(step))).sum().backward()
            run.before_update()
            state.optimizer.step()
            state.step = step
            run.save(state, metrics={}, reason="test", wait=True)
            # A copy that starts late, on a busy machine, would pass over a step that a newer one follows.
            eventually("the copy", lambda: copied(run), 60)
        run.close()
    except CheckpointError:
        if not fails:
            raise


def record(folder: Path, forgets: Forgets = lambda change: False) -> Recording:
    """Saves 1 to 4, 3 not copied, 4 sealed on node 0 alone; then a start that copies 3 and saves 4, 5."""
    with recording(folder, forgets) as found:
        copy, write = LocalTier._copy, LocalStore.write

        def lossy(self: LocalTier, group: Any, step: int, *args: Any) -> SaveOutcome:
            if step >= 3:
                return SaveOutcome(step, "", "the store does not answer")
            return copy(self, group, step, *args)

        def failing(self: LocalStore, staged: str, file: str, buffers: Any) -> None:
            late = file == MANIFEST and staged >= final_name(4)
            if late and self.root.parent.name == "node1":
                raise OSError(5, "Input/output error", file)
            write(self, staged, file, buffers)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LocalTier, "_copy", lossy)
            patch.setattr(LocalStore, "write", failing)
            on_ranks(lambda env: train(env, folder, [1, 2, 3, 4], fails=True))
        on_ranks(lambda env: train(env, folder, [4, 5], fails=False))
    return found


Summary = frozenset[tuple[Offer, frozenset[str]]]
"""A node's offers after a crash, each with those of its files whose bytes are not those that were sealed."""


def summary(tree: Tree) -> Summary:
    store: Any = Left(tree)
    return frozenset((one, _damaged(store, one)) for one in offers_of(store))


def _damaged(store: Any, offer: Offer) -> frozenset[str]:
    folder, found = final_name(offer.step), set()
    sealed = manifest.decode(store.read(folder, MANIFEST))
    for file in offer.held:
        try:
            inspect.check_file(store, folder, file, *sealed.files[file])
        except Broken:
            found.add(file)
    return frozenset(found)


def resumed(nodes: tuple[Summary, ...]) -> int:
    """The newest step that a start copies to the shared store: those that are damaged are passed over."""
    for step, holders in whole_over_nodes([[offer for offer, _ in found] for found in nodes]):
        damaged = {
            (rank, file) for rank in range(NODES) for o, bad in nodes[rank] if o.step == step for file in bad
        }
        if not damaged & {(rank, file) for file, rank in holders.items()}:
            return step
    return 0


def losses(found: Recording) -> tuple[int, list[str]]:
    """The number of states of the nodes' disks tried, and each in which a sealed step is lost."""
    kinds = [_summaries(recorder) for recorder in found.nodes]
    shared = _newest_shared(found.shared)
    count, lost = 0, []
    for moment in sorted(itertools.chain(*(one.times for one in (*found.nodes, found.shared)))):
        done = [bisect.bisect_right(one.times, moment) for one in found.nodes]
        safe = shared[bisect.bisect_right(found.shared.times, moment)]
        sealed = found.sealed_by(moment)
        for nodes in itertools.product(*(kind[at] for kind, at in zip(kinds, done, strict=True))):
            count += 1
            if max(resumed(nodes), safe) < sealed:
                have = [sorted((offer.step, sorted(bad)) for offer, bad in node) for node in nodes]
                lost.append(f"after {done} operations {have} and {safe} shared, and step {sealed} was sealed")
    return count, lost


def _summaries(recorder: Recorder) -> list[set[Summary]]:
    found: list[set[Summary]] = [set() for _ in range(len(recorder.changes) + 1)]
    for done, tree in states(recorder):
        found[done].add(summary(tree))
    return found


def _newest_shared(recorder: Recorder) -> list[int]:
    """The newest whole step of the shared store in the worst state after each number of operations."""
    found: list[set[int]] = [set() for _ in range(len(recorder.changes) + 1)]
    for done, tree in states(recorder):
        store: Any = Left(tree)
        whole = [one for one in inspect.scan(store) if one.manifest is not None]
        found[done].add(max((one.step for one in whole if not _broken(store, one)), default=0))
    return [min(steps) for steps in found]


def _broken(store: Any, found: inspect.CheckpointListing) -> bool:
    assert found.manifest is not None
    try:
        for file, (size, crc) in found.manifest.files.items():
            inspect.check_file(store, found.folder, file, size, crc)
    except Broken:
        return True
    return False


def test_no_crash_of_both_nodes_loses_what_they_sealed(tmp_path: Path) -> None:
    found = record(tmp_path)
    count, lost = losses(found)
    operations = [len(one.changes) for one in (*found.nodes, found.shared)]
    print(f"{operations} operations on the disks, {count} states after a crash, {len(lost)} wrong")
    assert found.sealed_by(time.perf_counter_ns()) == 5
    assert [text for _, text in found.shared.notes] == [f"step-{step:08d}" for step in (1, 2, 3, 4, 5)]
    assert not lost, lost[:3]
    assert count > 300
    assert not violations(found.shared)[1]


# ---- the simulator finds each of these


@pytest.mark.long
@pytest.mark.parametrize("what", ["file", "folder", "root"])
def test_a_missing_fsync_on_a_nodes_disk_is_found(tmp_path: Path, what: str) -> None:
    forgets = no_fsync_of(what, "/shardrun-")
    assert losses(record(tmp_path, forgets))[1]


def prune(store: Any, keep: str) -> None:
    if "/node" in store.where:
        for folder in inspect.finals(store):
            if folder != keep:
                store.remove(folder, "00000000")


def prune_before_the_seal(patch: pytest.MonkeyPatch) -> None:
    """Deletes a node's older folders while the new one is staged."""
    seal = Sealing._seal

    def late(self: Sealing, *args: Any) -> Any:
        prune(self.store, "")
        return seal(self, *args)

    patch.setattr(Sealing, "_seal", late)


def prune_before_all_nodes_sealed(patch: pytest.MonkeyPatch) -> None:
    """Deletes a node's older folders when this node has sealed, whatever the others have."""
    seal = Sealing._seal

    def early(self: Sealing, folder: str, final: str, manifest: bytes) -> Any:
        failure = seal(self, folder, final, manifest)
        prune(self.store, final)
        return failure

    patch.setattr(Sealing, "_seal", early)


@pytest.mark.long
@pytest.mark.parametrize(
    "fault", [prune_before_the_seal, prune_before_all_nodes_sealed], ids=lambda fault: fault.__name__
)
def test_a_wrong_order_on_the_nodes_is_found(
    tmp_path: Path, fault: Callable[[pytest.MonkeyPatch], None]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        fault(patch)
        found = record(tmp_path)
    assert losses(found)[1]
