"""State that DCP alone loses or mixes without an error, a test each (found by running torch 2.13)."""

from __future__ import annotations

import json
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp.base.errors import CheckpointError
from fsdp.checkpoint import Checkpointer
from fsdp.checkpoint.save import Staging
from fsdp.config import CheckpointSection
from fsdp.distributed.env import DistEnv
from fsdp.optim.optimizer import TrainState
from tests.checkpoint.small import Run, bits, build, build_state, save_once
from tests.support.world import run_world

CHECKPOINTS = "checkpoints"


def folders(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / CHECKPOINTS).iterdir())


# ---- 1: a folder that is written over keeps its old metadata: killed in between, half is old and half new


def save_twice(env: DistEnv, run_dir: str) -> list[int]:
    run = build(env, "fsdp", run_dir)
    run.step()
    run.save(wait=True)
    first = [path.stat().st_ino for path in sorted(Path(run_dir, CHECKPOINTS, "step-00000001").iterdir())]
    run.save(wait=True)
    run.checkpointer.close()
    return first


def test_a_sealed_step_is_never_written_over(tmp_path: Path) -> None:
    first = run_world(2, save_twice, str(tmp_path))[0]
    assert [
        path.stat().st_ino for path in sorted((tmp_path / CHECKPOINTS / "step-00000001").iterdir())
    ] == first
    assert folders(tmp_path) == ["step-00000001"]


# ---- 2: an error while writing, in another thread, is lost and the metadata is written all the same


def fail_then_mend(
    env: DistEnv, run_dir: str, rank: int, failures: tuple[int, ...], mode: str
) -> tuple[list[int], str]:
    """Rank `rank` cannot write large files during the saves of these numbers."""
    run, said = build(env, "fsdp", run_dir, width=4000, section={"mode": mode}), ""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    sealed: list[int] = []
    try:
        for nth in range(4):
            if env.rank == rank:
                resource.setrlimit(resource.RLIMIT_FSIZE, (100_000 if nth in failures else hard, hard))
            run.step()
            run.save()
            run.step()
            if run.checkpointer.flight is not None:
                # or the limit would be lifted before the file is written
                run.checkpointer.flight.done.wait()
            sealed += [one.step for one in run.checkpointer.sealed()]
    except CheckpointError as error:
        said = str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        run.checkpointer.close()
    return sealed + [one.step for one in run.checkpointer.sealed()], said


@pytest.mark.parametrize(("rank", "mode"), [(0, "async"), (1, "async"), (1, "blocking")])
def test_a_failed_write_on_one_rank_seals_nothing_and_the_run_continues(
    tmp_path: Path, rank: int, mode: str
) -> None:
    assert run_world(2, fail_then_mend, str(tmp_path), rank, (0,), mode) == [([3, 5, 7], "")] * 2
    assert folders(tmp_path) == ["step-00000003", "step-00000005", "step-00000007"]


def fail_at_the_end(env: DistEnv, run_dir: str) -> str:
    """The last save fails in the background, and no later save reports it."""
    run = build(env, "fsdp", run_dir, width=4000)
    run.step()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        run.save()
        run.checkpointer.close()
    except CheckpointError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    return "closed"


def test_a_failed_last_save_raises(tmp_path: Path) -> None:
    assert all(
        "step 1 was not saved: rank 0: " in said for said in run_world(2, fail_at_the_end, str(tmp_path))
    )


def test_the_second_failure_in_a_row_ends_the_run_and_names_rank_and_reason(tmp_path: Path) -> None:
    for sealed, said in run_world(2, fail_then_mend, str(tmp_path), 1, (0, 1), "async"):
        assert sealed == []
        assert "the save of step 3 failed, as did the one before: rank 1: " in said
        assert "__1_0.distcp: EFBIG, File too large" in said
    assert folders(tmp_path) == []


def test_failures_with_a_whole_save_between_them_end_nothing(tmp_path: Path) -> None:
    assert run_world(2, fail_then_mend, str(tmp_path), 1, (0, 2), "async") == [([3, 7], "")] * 2


# ---- 3: an object of each rank under one key: all get the last rank's; statistics of ranks are mixed


def save_with_own_buffer(env: DistEnv, run_dir: str) -> None:
    run = build(env, "fsdp", run_dir)
    run.step()
    run.state.model.seen.fill_(100 + env.rank)  # type: ignore[operator, union-attr]
    run.save(wait=True)
    run.checkpointer.close()


def read_buffer(env: DistEnv, run_dir: str) -> int:
    run = build(env, "fsdp", run_dir)
    run.checkpointer.restore(run.state)
    run.checkpointer.close()
    return int(run.state.model.seen)  # type: ignore[arg-type]


def test_a_buffer_that_differs_between_ranks_is_saved_from_rank_0(tmp_path: Path) -> None:
    run_world(3, save_with_own_buffer, str(tmp_path))
    assert run_world(2, read_buffer, str(tmp_path)) == [100, 100]


# ---- 4: asking for the optimizer's state before its first step makes one, with its step at 1


def save_before_first_step(env: DistEnv, run_dir: str) -> tuple[dict[str, int], list[float]]:
    run = build(env, "fsdp", run_dir)
    run.save(wait=True)
    saved = bits(run.state)
    losses = [run.step() for _ in range(3)]
    run.checkpointer.close()
    return saved, losses


def resume_before_first_step(env: DistEnv, run_dir: str) -> tuple[dict[str, int], list[float]]:
    run = build(env, "fsdp", run_dir, seed=99)
    run.checkpointer.restore(run.state)
    found = bits(run.state)
    losses = [run.step() for _ in range(3)]
    run.checkpointer.close()
    return found, losses


def test_a_save_before_the_first_step_counts_no_step(tmp_path: Path) -> None:
    assert run_world(2, save_before_first_step, str(tmp_path)) == run_world(
        2, resume_before_first_step, str(tmp_path)
    )


# ---- 5: with gradients about, the optimizer's part comes out empty, and nothing says so


def load_bits(env: DistEnv, run_dir: str) -> dict[str, int]:
    run = build(env, "fsdp", run_dir, seed=99)
    run.checkpointer.restore(run.state)
    run.checkpointer.close()
    return bits(run.state)


# ---- 6: a save in another thread on the default group meets the step's own collectives and aborts the
# process


# ---- 7: another dtype is cast in silence, 8: keys that nobody wants are ignored, 9: a smaller optimizer is
# filled in part


def restore_as(env: DistEnv, run_dir: str, how: dict[str, Any]) -> str:
    run = build(env, "fsdp", run_dir, **how)
    try:
        run.checkpointer.restore(run.state)
        return "restored"
    except CheckpointError as error:
        return str(error)
    finally:
        run.checkpointer.close()


def test_another_precision_is_refused(tmp_path: Path) -> None:
    run_world(2, save_once, "fsdp", str(tmp_path))
    for said in run_world(2, restore_as, str(tmp_path), {"dtype": torch.float64}):
        assert "in torch.float32 and this run in torch.float64. HINT: --precision.master fp32" in said


class Smaller(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(37, 29)


def restore_smaller(env: DistEnv, run_dir: str) -> str:
    model = Smaller()
    state = TrainState(model, torch.optim.AdamW(model.parameters()))
    checkpointer = Checkpointer(
        CheckpointSection(), Path(run_dir), env, build_state(env, "ddp")[2], config_hash="another"
    )
    try:
        checkpointer.restore(state)
    except CheckpointError as error:
        return str(error)
    return "restored"


def test_a_checkpoint_that_holds_more_than_the_model_is_refused_by_name(tmp_path: Path) -> None:
    run_world(1, save_once, "ddp", str(tmp_path))
    said = run_world(1, restore_smaller, str(tmp_path))[0]
    assert "is not of this model: it holds model.embed.weight and 5 more that this model lacks" in said


def freeze_and_restore(env: DistEnv, run_dir: str) -> str:
    run = build(env, "ddp", run_dir)
    first: Any = run.state.model.first
    run.state.optimizer = torch.optim.AdamW(first.parameters())
    try:
        run.checkpointer.restore(run.state)
    except CheckpointError as error:
        return str(error)
    return "restored"


def test_optimizer_state_of_what_is_no_longer_trained_is_refused_by_name(tmp_path: Path) -> None:
    run_world(1, save_once, "ddp", str(tmp_path))
    assert (
        "holds optimizer state of embed.weight, which this run does not train"
        in run_world(1, freeze_and_restore, str(tmp_path))[0]
    )


# ---- 10: the checkpoint's hyperparameters replace what the person asks for now; another grouping is an error


def restore_regrouped(env: DistEnv, run_dir: str) -> tuple[list[float], int]:
    run = build(env, "fsdp", run_dir)
    parameters = list(run.state.model.parameters())
    groups: list[dict[str, Any]] = [
        {"params": parameters[:2], "lr": 0.5},
        {"params": parameters[2:], "lr": 0.25},
    ]
    run.state.optimizer = torch.optim.AdamW(groups)
    run.checkpointer.restore(run.state)
    run.checkpointer.close()
    return [group["lr"] for group in run.state.optimizer.param_groups], len(run.state.optimizer.state)


def test_a_restore_keeps_the_optimizers_groups_and_learning_rates(tmp_path: Path) -> None:
    run_world(2, save_once, "fsdp", str(tmp_path))
    assert run_world(2, restore_regrouped, str(tmp_path)) == [([0.5, 0.25], 5)] * 2  # `unused` never had any


# ---- beside them: the copy is taken before the optimizer writes, and buffers before the next forward


def save_slowly(env: DistEnv, run_dir: str) -> dict[str, int]:
    run = build(env, "fsdp", run_dir)
    run.step()
    copy = Staging.copy

    def late(self: Staging, *args: Any) -> Any:
        _forward_begun(run)
        return copy(self, *args)

    Staging.copy = late  # type: ignore[method-assign, assignment]
    try:
        saved = bits(run.state)
        run.save()
        for _ in range(3):
            run.step()
        run.checkpointer.close()
    finally:
        Staging.copy = copy  # type: ignore[method-assign]
    return saved


def _forward_begun(run: Run) -> None:
    """Returns once the next forward pass has changed the buffer: the copy is as late as possible."""
    while int(run.state.model.seen) < 2:  # type: ignore[arg-type]
        pass


def test_a_late_copy_has_the_state_of_its_step(tmp_path: Path) -> None:
    saved = run_world(2, save_slowly, str(tmp_path))
    assert run_world(2, load_bits, str(tmp_path)) == saved


@pytest.mark.slow
def test_each_rank_writes_its_part_once(tmp_path: Path) -> None:
    """Also under DDP, where every rank holds everything, and with a tied weight, written once."""
    sizes: dict[str, list[int]] = {}
    for kind, ranks in (("ddp", 1), ("ddp", 4), ("hsdp", 4)):
        run_dir = tmp_path / f"{kind}{ranks}"
        run_world(ranks, save_with_width, kind, str(run_dir))
        about = json.loads((run_dir / CHECKPOINTS / "step-00000001" / "manifest.json").read_text())[
            "manifest"
        ]
        sizes[f"{kind}{ranks}"] = [
            size for file, (size, _) in about["files"].items() if file.endswith(".distcp")
        ]
    whole = sizes["ddp1"][0]
    for shape in ("ddp4", "hsdp4"):
        assert sum(sizes[shape]) == pytest.approx(whole, rel=0.02), "written once"
        assert max(sizes[shape]) == pytest.approx(whole / 4, rel=0.15), (
            "by all alike, but for small tensors, which one rank writes"
        )


def save_with_width(env: DistEnv, kind: Any, run_dir: str) -> None:
    save_once(env, kind, run_dir, 1, width=20_000)
