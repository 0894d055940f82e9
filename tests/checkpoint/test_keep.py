"""Which checkpoints stay, and that the old go only after the new is sealed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fsdp.checkpoint.inspect import Found
from fsdp.checkpoint.keep import superfluous
from fsdp.checkpoint.manifest import Manifest
from fsdp.checkpoint.store import LocalStore
from fsdp.claim import FILE, Claim
from fsdp.config import CheckpointSection
from fsdp.env import DistEnv
from fsdp.errors import CheckpointError, RefusedError
from tests.checkpoint.small import build
from tests.world import run_world


def whole(step: int, **metrics: float) -> Found:
    about = Manifest(
        step=step, attempt="", created=0.0, torch="", strategy="fsdp", replicate=1, shard=1, ranks=1, config="", reason="",
        counters={}, metrics=metrics, files={}, digests={},
    )  # fmt: skip
    return Found(f"step-{step}", step, about)


LOSSES = {1: 5.0, 2: 3.0, 3: 4.0, 4: 2.0, 5: 9.0, 6: 8.0}


@pytest.mark.parametrize(
    ("rules", "stay"),
    [
        ({"keep_last": 2}, [5, 6]),
        ({"keep_last": 0}, [1, 2, 3, 4, 5, 6]),
        ({"keep_last": 1, "keep_every_steps": 3}, [3, 6]),
        ({"keep_last": 1, "keep_best": 2}, [2, 4, 6]),
        ({"keep_last": 1, "keep_best": 1, "keep_best_metric": "-eval_loss"}, [5, 6]),
        ({"keep_last": 1, "keep_best": 3, "keep_best_metric": "accuracy"}, [6]),
        ({"keep_last": 1, "keep_best": 1, "keep_every_steps": 5}, [4, 5, 6]),
    ],
)
def test_the_rules_add_up(rules: dict[str, Any], stay: list[int]) -> None:
    founds = [whole(step, eval_loss=loss) for step, loss in LOSSES.items()]
    gone = {found.step for found in superfluous(CheckpointSection(**rules), founds)}
    assert [step for step in LOSSES if step not in gone] == stay


def save_all(env: DistEnv, run_dir: str, section: dict[str, Any], steps: int) -> None:
    run = build(env, "fsdp", run_dir, section=section)
    run.checkpointer.restore(run.state)
    for _ in range(steps):
        run.step()
        run.save(metrics={"eval_loss": LOSSES[run.state.step]})
    run.checkpointer.close()


def steps(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_run_keeps_what_it_was_told_over_restarts(tmp_path: Path) -> None:
    section = {"keep_last": 1, "keep_best": 1}
    for _ in range(2):
        run_world(2, save_all, str(tmp_path), section, 3)
    assert steps(tmp_path) == ["step-00000004", "step-00000006"]


def test_only_whole_ones_count_and_others_are_left_to_people(tmp_path: Path) -> None:
    run_world(2, save_all, str(tmp_path), {"keep_last": 3}, 3)
    (tmp_path / "checkpoints" / "step-00000003" / "__1_0.distcp").write_bytes(b"")
    run_world(2, save_all, str(tmp_path), {"keep_last": 2}, 2)
    # Resumed from 2, since 3 is broken; 3 and 4 are new, and the broken 3 counts for neither.
    assert steps(tmp_path) == ["step-00000003", "step-00000003.broken-size", "step-00000004"]


def test_what_a_dead_attempt_left_is_swept_by_the_next(tmp_path: Path) -> None:
    run_world(2, save_all, str(tmp_path), {}, 1)
    for name in ("step-00000002.tmp-deadbeef", "step-00000001.gone-deadbeefabc"):
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / name / "__0_0.distcp").write_bytes(b"half")
    (tmp_path / "checkpoints" / "somebody-elses").mkdir()
    run_world(2, save_all, str(tmp_path), {}, 0)
    assert steps(tmp_path) == ["somebody-elses", "step-00000001"]


def fail_to_save(env: DistEnv, run_dir: str) -> tuple[list[str], str]:
    """A save that ends with its manifest unwritten: what there is must still be there."""
    run = build(env, "fsdp", run_dir, section={"keep_last": 1})
    run.checkpointer.restore(run.state)
    seal = LocalStore.seal

    def torn(self: LocalStore, staged: str, final: str) -> None:
        raise OSError(5, "Input/output error")

    LocalStore.seal = torn  # type: ignore[method-assign]
    said = ""
    try:
        run.step()
        run.save(wait=True)
    except CheckpointError as error:
        said = str(error)
    finally:
        LocalStore.seal = seal  # type: ignore[method-assign]
        run.checkpointer.close()
    return steps(Path(run_dir)), said


def test_the_old_stays_while_the_new_is_not_sealed(tmp_path: Path) -> None:
    run_world(2, save_all, str(tmp_path), {}, 2)
    for left, said in run_world(2, fail_to_save, str(tmp_path)):
        assert left == ["step-00000001", "step-00000002"]
        assert "step 3 was not saved: rank 0: EIO, Input/output error" in said


def save_ousted(env: DistEnv, run_dir: str) -> str:
    claim = Claim.acquire(Path(run_dir), "torchrun") if env.is_main else None
    run = build(env, "fsdp", run_dir, claim=claim)
    run.checkpointer.restore(run.state)
    run.step()
    if env.is_main:
        file = Path(run_dir, FILE)
        file.write_text(file.read_text().replace(claim.holder.token, "1234"))  # type: ignore[union-attr]
    try:
        run.save(wait=True)
    except CheckpointError as error:
        return str(error)
    finally:
        run.checkpointer.close()
        if claim is not None:
            claim.release()
    return "sealed"


def test_an_ousted_writer_seals_nothing_and_stops(tmp_path: Path) -> None:
    assert all("was taken over by process" in said for said in run_world(2, save_ousted, str(tmp_path)))
    assert steps(tmp_path) == []


def two_runs_one_folder(env: DistEnv, folder: str) -> str:
    """The second run has its own directory and keeps its checkpoints where the first does."""
    runs = [Path(folder, name) for name in ("one", "two")]
    claims = [Claim.acquire(run_dir, "torchrun") for run_dir in runs]
    first, second = (
        build(env, "ddp", str(run_dir), claim=claim, section={"dir": str(Path(folder, "shared"))})
        for run_dir, claim in zip(runs, claims, strict=True)
    )
    first.checkpointer.restore(first.state)
    try:
        second.checkpointer.restore(second.state)
    except RefusedError as error:
        return str(error)
    finally:
        for run, claim in ((first, claims[0]), (second, claims[1])):
            run.checkpointer.close()
            claim.release()
    return "restored"


def test_two_runs_do_not_share_a_folder_of_checkpoints(tmp_path: Path) -> None:
    said = run_world(1, two_runs_one_folder, str(tmp_path))[0]
    assert f"{tmp_path / 'shared'} is being written by process" in said
    assert list((tmp_path / "shared").iterdir()) == []


def save_apart(env: DistEnv, run_dir: str) -> str:
    run = build(env, "fsdp", str(Path(run_dir, str(env.rank))))
    try:
        run.checkpointer.restore(run.state)
    except CheckpointError as error:
        return str(error)
    finally:
        run.checkpointer.close()
    return "restored"


def test_storage_that_is_not_shared_is_named_before_training(tmp_path: Path) -> None:
    for said in run_world(3, save_apart, str(tmp_path)):
        assert "is not shared: rank 1 on" in said
        assert ", rank 2 on" in said


def test_a_place_that_cannot_be_written_is_named_before_training(tmp_path: Path) -> None:
    (tmp_path / "0").write_text("a file where the run directory should be")
    for said in run_world(1, save_apart, str(tmp_path)):
        assert "cannot be written" in said
