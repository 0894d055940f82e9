"""When parameters are gathered: how often a step, and how far ahead. Counted at the collective itself."""

from __future__ import annotations

import pytest

from fsdp import config as configuration
from fsdp.distributed.env import DistEnv
from fsdp.run.loop import train
from tests.support import comm_hooks
from tests.support.runs import flags
from tests.support.world import run_world

COUNTED = "--comm.all_gather tests.support.comm_hooks:gather"


def gathers(env: DistEnv, words: list[str]) -> int:
    comm_hooks.SEEN.clear()
    train(configuration.load(words), env)
    return len(comm_hooks.SEEN)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "a_step"),
    [
        # each unit twice a micro-batch; the last one and the root stay to their backward
        ("true", 3 * (2 * 2 + 2)),
        ("false", 3 * (3 + 1)),  # each once a micro-batch
        ("step", 3 + 1),  # each once a step, whatever the micro-batches
    ],
)
def test_gathers_of_three_micro_batches(
    policy: str, a_step: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    words = f"{COUNTED} --mesh.reshard_after_forward {policy} --train.micro_batch 2 --data.args.count 48"
    counts = []
    for steps in (2, 4):
        more = flags(words, f"--train.steps {steps} --optim.warmup_steps 0 --checkpoint.export false")
        counts.append(run_world(2, gathers, ["--run.dir", str(tmp_path_factory.mktemp("run")), *more])[0])
    assert counts[1] - counts[0] == 2 * a_step
