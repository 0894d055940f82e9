"""--comm.*: the user's own communication is called and trains the same, and the logged bytes are the bytes
sent.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fsdp import config as configuration
from fsdp.base.errors import ConfigError
from fsdp.config import CommSection
from fsdp.distributed.env import DistEnv
from fsdp.run.loop import train
from fsdp.shard.compute import load_hooks
from tests.support import comm_hooks
from tests.support.marks import quick_are
from tests.support.runs import flags, run
from tests.support.world import run_world

HERE = "tests.support.comm_hooks"
HSDP = "--mesh.strategy hsdp --mesh.replicate 2 --mesh.shard 2"


def called(env: DistEnv, words: list[str]) -> Counter[str]:
    comm_hooks.SEEN.clear()
    train(configuration.load(words), env)
    return Counter(what for what, _, _ in comm_hooks.SEEN)


OWN = (
    f"--comm.all_gather {HERE}:gather --comm.reduce_scatter {HERE}:Scatter --comm.all_reduce_hook {HERE}:hook"
)


@pytest.mark.parametrize(("ranks", "mesh"), quick_are([(4, HSDP)], [(2, ""), (4, HSDP)], []))
def test_a_users_function_is_called_and_trains_the_same(ranks: int, mesh: str, tmp_path: Path) -> None:
    words = flags(mesh, OWN, "--train.steps 3")
    for found in run_world(ranks, called, ["--run.dir", str(tmp_path / "own"), *words]):
        # four units: three blocks and the root; the last block and the root stay gathered between forward and
        # backward
        assert found["reduce_scatter"] == found["hook"] == 3 * 4
        assert found["all_gather"] == 3 * (4 + 2)
    own = torch.load(tmp_path / "own/full_model/full-model.pt", weights_only=True)
    usual = run(ranks, tmp_path / "usual", mesh, "--train.steps 3").parameters
    assert all(torch.equal(own[name], usual[name]) for name in usual)


@pytest.mark.parametrize(
    ("flag", "path", "said"),
    [
        ("all_gather", "nowhere:f", "there is no module nowhere"),
        ("all_reduce_hook", f"{HERE}:NOTHING", "cannot be called"),
        ("all_reduce_hook", f"{HERE}:too_few", "it is called with (gradient)"),
        ("reduce_scatter", f"{HERE}:hook", "it is called with (output, input, group, op)"),
    ],
)
def test_an_uncallable_object_is_refused_before_any_process_group(flag: str, path: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_hooks(replace(CommSection(), **{flag: path}))  # type: ignore[arg-type]
    assert said in str(caught.value)
