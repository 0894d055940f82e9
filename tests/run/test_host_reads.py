"""An ordinary step reads no number of the device: the host waits at printed lines, evaluations and saves.

CPU ranks take the paths of a CUDA device here; each read of a tensor by the host is counted with the place in
fsdp/ that makes it. On a GPU `python -m bench.gpu --only syncs` counts them by torch's sync debug mode.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp import config as configuration
from fsdp.distributed.env import DistEnv
from fsdp.optim import gradients as nonfinite
from fsdp.record import recorder
from fsdp.run.loop import train
from fsdp.run.training_loop import TrainingLoop
from tests.support.marks import quick_are
from tests.support.runs import flags
from tests.support.world import run_world

ROOT = str(Path(configuration.__file__).parents[1])
PRINTED = 3
ON_THE_HOST = {"distributed/stop.py:_decision", "run/step.py:weight"}
"""Sums over ranks of numbers that each rank made on the host, over gloo: stop requests, counts of tokens."""
AT_A_LINE = {"record/recorder.py:flush", "optim/gradients.py:settle"}

SENTENCES = (
    "--data.name tests.support.user_code:sentences --model.name transformer --model.args.vocab_size 31 "
    "--model.args.width 24 --model.args.heads 2 --model.args.max_seq_len 9"
)
CASES = {
    "masked tokens, micro-batches": f"{SENTENCES} --train.micro_batch 2",
    "samples": "",
    "loss in chunks": f"{SENTENCES} --memory.loss_chunk 7",
    "a loss of the user": "--train.loss tests.run.test_host_reads:spread",
    "hsdp": "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 1",
    "ddp": "--mesh.strategy ddp",
    "recomputed": f"{SENTENCES} --memory.activation_checkpointing ops",
    "adapters": f"{SENTENCES} --lora.rank 2",
    "skipped updates": "--train.nonfinite skip",
}


def spread(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    """A loss for each sample."""
    return output.float().logsumexp(-1)


class _Reads(TorchDispatchMode):
    """The places in fsdp/ that read tensors, by step. item(), bool(), float() and int() are one operation."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.places = 0, defaultdict[int, set[str]](set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.note()
        return func(*args, **(kwargs or {}))

    def note(self) -> None:
        frame: Any = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith(ROOT):
            frame = frame.f_back
        where = frame.f_code.co_filename.removeprefix(f"{ROOT}/") if frame else "outside"
        self.places[self.step].add(f"{where}:{frame.f_code.co_name if frame else ''}")


def _counted(reads: _Reads, name: str) -> Any:
    """A method of tensors that no dispatched operation shows."""
    plain = getattr(Tensor, name)

    def method(self: Tensor, *args: Any, **kwargs: Any) -> Any:
        reads.note()
        return plain(self, *args, **kwargs)

    return method


def reads_of_a_run(env: DistEnv, words: list[str]) -> dict[int, set[str]]:
    """Reads by step of a run whose CPU rank takes a device's paths; 0 is outside of steps."""
    reads = _Reads()
    one_step = TrainingLoop._one_step

    def step(self: TrainingLoop) -> None:
        reads.step = self.state.step + 1
        with reads:
            one_step(self)
        reads.step = 0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nonfinite, "DEVICES_THAT_SKIP", ("cuda", "cpu"))
        patch.setattr(recorder, "ASYNCHRONOUS_DEVICES", ("cuda", "cpu"))
        patch.setattr(TrainingLoop, "_one_step", step)
        for name in ("tolist", "cpu", "numpy"):
            patch.setattr(Tensor, name, _counted(reads, name))
        train(configuration.load(words), env)
    return dict(reads.places)


@pytest.mark.parametrize("case", quick_are(["masked tokens, micro-batches"], CASES, ["samples"]))
def test_the_host_reads_at_printed_lines_alone(case: str, tmp_path: Path) -> None:
    words = flags(
        f"--train.steps 7 --run.log_every_steps {PRINTED} --optim.fused true --run.dir {tmp_path}",
        CASES[case],
    )
    for places in run_world(2, reads_of_a_run, words):
        ordinary = set().union(*(places.get(step, set()) for step in (2, 4, 5)))
        assert ordinary <= ON_THE_HOST
        assert "distributed/stop.py:_decision" in ordinary, "the count sees reads"
        assert places[2 * PRINTED] >= AT_A_LINE
