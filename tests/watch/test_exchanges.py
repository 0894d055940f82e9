"""Real runs of four ranks, of which one leaves out the exchanges of one layer in one step: it is named, not
the rank that waits in such an exchange, nor those that wait in FSDP's gathers.

    python -m tests.watch.test_exchanges FOLDER AXIS      the watch's verdict, as JSON
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from bench import faults
from bench.fault_kinds import Kind, Where
from bench.fault_runs import import_once
from fsdp.base.torch_private import functional_collectives
from tests.support.marks import sample_are

RANK, STEP = 1, 5
FLAGS = "--config recipes/text.toml --train.steps 1000 --checkpoint.export false"
EXCHANGES = {
    "context": "an exchange of tokens over context or expert ranks (all_to_all_single)",
    "tensor": "a sum over tensor ranks or replicas (all_reduce)",
}


def leave_out(where: Where, mine: bool) -> None:
    """In the forward of the first block: context's are torch.distributed's, those of DTensor functional."""
    from fsdp.models.transformer import Block

    forward, calls, functional = Block.forward, list[Block](), functional_collectives()

    def kept(arrived: Tensor, sent: Tensor, **_: Any) -> None:
        where.now()
        arrived.copy_(sent)

    def returned(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        where.now()
        return tensor.clone()

    def called(self: Block, *args: Any) -> Any:
        calls.extend([self] * (self.training and (not calls or self is calls[0])))
        if not mine or self not in calls[:1] or len(calls) != where.step:
            return forward(self, *args)
        of_tensor = mock.patch.object(functional, "all_reduce", returned)
        with of_tensor, mock.patch.object(dist, "all_to_all_single", kept):
            return forward(self, *args)

    Block.forward = called  # type: ignore[method-assign, assignment]


@pytest.mark.slow
@pytest.mark.parametrize("axis", sample_are([], EXCHANGES))
def test_a_rank_that_leaves_out_an_exchange_of_an_axis_is_named(axis: str, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "tests.watch.test_exchanges", str(tmp_path), axis]
    done = subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    case = faults.Case(**json.loads(done.stdout))
    assert (case.said_kind, case.said_ranks) == ("skipped", [RANK]), case
    what = f"has left out {EXCHANGES[axis]} of step {STEP}, forward, and is already in all_"
    assert what in case.what


if __name__ == "__main__":
    import_once()
    kind, axis = Kind("exchange left out", leave_out, "skipped"), sys.argv[2]
    with mock.patch.object(faults, "FLAGS", [*FLAGS.split(), f"--mesh.{axis}", "2"]):
        print(json.dumps(vars(faults.once(kind, RANK, STEP, Path(sys.argv[1])))))
