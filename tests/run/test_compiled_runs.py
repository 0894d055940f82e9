"""Compiled units: equal ones share their code, and nothing is compiled again after the first step of a start.

The compiler's backend is a stand-in that counts graphs, so that no code is generated; on a GPU
`python -m bench.gpu --only resume` counts recompilations of real ones.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fsdp import config as configuration
from fsdp.distributed.env import DistEnv
from fsdp.optim.small_states import compiled as compiled_update
from fsdp.run.loop import train
from fsdp.run.training_loop import TrainingLoop
from tests.support.marks import quick_are
from tests.support.runs import flags
from tests.support.world import run_world

MODEL = (
    "--data.name tests.support.user_code:sentences --model.name transformer --model.args.vocab_size 31 "
    "--model.args.width 24 --model.args.heads 2 --model.args.max_seq_len 9 --speed.compile true"
)
CASES = {
    "fsdp": "",
    "hsdp": "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 1",
    "ddp": "--mesh.strategy ddp",
    "micro-batches": "--train.micro_batch 2",
    "loss in chunks": "--memory.loss_chunk 7",
    "small states": "--optim.state 8bit",
}


def graphs_of_a_run(env: DistEnv, words: list[str]) -> int:
    """Graphs that were compiled; a compilation after the first step raises."""
    graphs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        graphs.append(graph)
        return graph.forward

    one_step, compiled, begun = TrainingLoop._one_step, nn.Module.compile, list[int]()

    def step(self: TrainingLoop) -> None:
        strict = torch.compiler.set_stance("fail_on_recompile") if begun else contextlib.nullcontext()
        begun.append(self.state.step)
        with strict:
            one_step(self)

    torch.compiler.reset()
    compiled_update.cache_clear()  # of an earlier run in this process
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
        patch.setattr(nn.Module, "compile", lambda self: compiled(self, backend=backend))
        patch.setattr(TrainingLoop, "_one_step", step)
        train(configuration.load(words), env)
    torch.compiler.reset()
    compiled_update.cache_clear()
    assert len(begun) >= 2
    return len(graphs)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("case", quick_are(["fsdp"], CASES, []))
def test_equal_units_share_their_code_and_no_step_compiles_again(case: str, tmp_path: Path) -> None:
    counted = []
    for layers in (2, 5):
        folder = f"--run.dir {tmp_path}/{layers} --model.args.layers {layers}"
        first = flags(MODEL, CASES[case], folder, "--train.steps 6 --train.stop_after 3")
        resumed = flags(MODEL, CASES[case], folder, "--train.steps 6")
        counted += [run_world(2, graphs_of_a_run, words) for words in (first, resumed)]
    assert all(one == counted[0] for one in counted), counted
    assert min(counted[0]) > 0
