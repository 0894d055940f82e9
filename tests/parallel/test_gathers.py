"""When parameters are gathered: how often a step, and how far ahead. Counted at the collective itself."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from fsdp import config as configuration
from fsdp.config import Config
from fsdp.dist.env import DistEnv
from fsdp.dist.mesh import build_mesh, resolve
from fsdp.parallel.shard import shard_model, sharding_of
from fsdp.run.loop import train
from tests.support import comm_hooks, user_code
from tests.support.runs import flags
from tests.support.world import run_world

COUNTED = "--comm.all_gather tests.support.comm_hooks:gather"


def gathers(env: DistEnv, words: list[str]) -> int:
    comm_hooks.SEEN.clear()
    train(configuration.load(words), env)
    return len(comm_hooks.SEEN)


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


def ahead(env: DistEnv, words: list[str]) -> dict[str, list[int]]:
    """How many gathers are out when each block's forward, and each block's backward, begins."""
    config: Config = configuration.load([*COUNTED.split(), *words])
    sizes = resolve(config.mesh, env.world_size)
    model = user_code.Uneven()
    sharded = shard_model(model, sharding_of(config, sizes, env.device), build_mesh(sizes, env.device))
    seen: dict[str, list[int]] = {"forward": [], "backward": []}

    def note(way: str, *_: object) -> None:
        seen[way].append(len(comm_hooks.SEEN))

    for block in model.blocks:
        block.get_submodule("norm").register_forward_pre_hook(partial(note, "forward"))
        block.get_submodule("down").register_full_backward_pre_hook(partial(note, "backward"))
    comm_hooks.SEEN.clear()
    sharded.called(torch.randn(2, 12)).sum().backward()
    return seen


def test_a_deeper_prefetch_gathers_earlier() -> None:
    """The root and three blocks. Backward looks one ahead by itself; the first block in backward has none
    before it.
    """
    [near, _] = run_world(2, ahead, [])
    assert near == {"forward": [2, 3, 4], "backward": [5, 6, 6]}
    [far, _] = run_world(2, ahead, ["--speed.prefetch_forward", "2", "--speed.prefetch_backward", "2"])
    assert far == {"forward": [4, 4, 4], "backward": [6, 6, 6]}
