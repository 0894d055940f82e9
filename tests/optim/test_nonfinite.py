"""The verdict on a step's numbers where the device reaches it: the host asks when a line is printed, and
nothing is spoilt.

The fused kernels of the CPU read a verdict as those of CUDA do, so the whole path is tried here on gloo's
ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fsdp import config as configuration
from fsdp.config import TrainSection
from fsdp.distributed.env import DistEnv
from fsdp.optim import gradients as nonfinite
from fsdp.optim.gradients import Gradients
from fsdp.record import recorder
from fsdp.run.loop import train
from fsdp.run.training_loop import TrainingLoop
from tests.optim.test_nonfinite_runs import SPOILT, step_of
from tests.shard.test_gathers import launched
from tests.support.marks import quick_are
from tests.support.runs import failures, flags
from tests.support.world import run_world


@contextmanager
def as_on_cuda() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nonfinite, "DEVICES_THAT_SKIP", ("cuda", "cpu"))
        patch.setattr(recorder, "ASYNCHRONOUS_DEVICES", ("cuda", "cpu"))
        yield


def decided_by_device(env: DistEnv, words: list[str]) -> tuple[str | None, bool]:
    """The error, and whether all of a rank's values are finite afterwards."""
    loops: list[TrainingLoop] = []
    begin = TrainingLoop.run_to_end

    def spy(self: TrainingLoop) -> Any:
        assert self.verdicts.device_decides
        loops.append(self)
        return begin(self)

    said = None
    TrainingLoop.run_to_end = spy  # type: ignore[method-assign]
    try:
        with as_on_cuda():
            train(configuration.load(words), env)
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    finally:
        TrainingLoop.run_to_end = begin  # type: ignore[method-assign]
    held = [*loops[0].sharded.root.parameters()]
    held += [v for s in loops[0].state.optimizer.state.values() for v in s.values()]
    return said, all(bool((getattr(t, "_local_tensor", t)).isfinite().all()) for t in held)


def test_nothing_behind_a_bad_step_is_saved(tmp_path: Path) -> None:
    bad = step_of(7)
    words = flags(SPOILT, f"--run.log_every_steps 1000 --checkpoint.every_steps {bad + 1}")
    for said, _ in run_world(2, decided_by_device, ["--run.dir", str(tmp_path), *words]):
        assert f"step {bad}: loss nan" in str(said)
    assert not list((tmp_path / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("optimizer", quick_are(["adamw"], ["adamw", "adam"], []))
def test_skipping_leaves_the_same_bits_as_where_the_host_decides(optimizer: str, tmp_path: Path) -> None:
    words = f"{SPOILT} --train.nonfinite skip --train.steps 8 --run.log_every_steps 5"
    words += f" --optim.name {optimizer} --train.clip_grad_norm 0"  # the kernel's clipping divides
    assert failures(2, tmp_path / "host", words) == [None, None]
    there = run_world(2, decided_by_device, ["--run.dir", str(tmp_path / "device"), *flags(words)])
    assert there == [(None, True)] * 2
    models = [
        torch.load(tmp_path / who / "full_model/full-model.pt", weights_only=True)
        for who in ("host", "device")
    ]
    assert all(torch.equal(models[0][name], models[1][name]) for name in models[0])


def clipped_by_kernel(env: DistEnv, words: list[str]) -> tuple[Counter[str], list[tuple[float, float]]]:
    with as_on_cuda():
        return launched(env, words)


@pytest.mark.parametrize(("precision", "saved"), [("fp32", 4), ("fp64", 0)])
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_kernel_clips(ranks: int, precision: str, saved: int, tmp_path: Path) -> None:
    """A step of fp32 multiplies no gradients; one of fp64, whose kernels take a number in fp32, does."""
    words = f"--train.steps 4 --train.clip_grad_norm 0.01 --precision.master {precision} --checkpoint.export"
    here, there = (
        run_world(ranks, function, ["--run.dir", str(tmp_path / function.__name__), *flags(words, "false")])[
            0
        ]
        for function in (launched, clipped_by_kernel)
    )
    assert here[0]["_foreach_mul_"] - there[0]["_foreach_mul_"] == saved
    assert all(norm > 0.01 for _, norm in here[1])
    for step, other in zip(here[1], there[1], strict=True):
        assert other == pytest.approx(step, rel=1e-6 if saved else 0)


def test_a_loss_that_is_not_finite_skips_and_only_skips_in_a_row_count() -> None:
    model = torch.nn.Linear(1, 1)
    section = TrainSection(nonfinite="skip", max_skipped=1)
    optimizer = torch.optim.SGD(model.parameters())
    gradients = Gradients(model.parameters(), None)
    verdicts = nonfinite.Verdicts(section, gradients, optimizer, model, scaler=None, whole_update=False)
    one, bad = torch.ones(()), torch.full((), float("nan"))
    found = [verdicts.may_update(step, loss, one) for step, loss in enumerate([bad, one, bad, one], 1)]
    assert found == [False, True, False, True]
