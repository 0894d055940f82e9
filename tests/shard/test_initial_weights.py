"""Initial weights are a function of the seed alone: the same bits at any number of ranks, under any strategy,
drawn or sent.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdp import config as configuration
from fsdp.config import ModelSection
from fsdp.distributed.env import DistEnv
from fsdp.distributed.mesh import build_mesh
from fsdp.models import build_real
from fsdp.run.job import meta_model, prepare
from fsdp.shard.checks import state_digest
from fsdp.shard.materialize import materialize
from fsdp.shard.shard import shard_model
from tests.support.marks import quick_are
from tests.support.user_code import Uneven
from tests.support.world import run_world

WORLDS = {1: ("fsdp",), 2: ("fsdp", "ddp"), 3: ("fsdp", "ddp"), 4: ("fsdp", "hsdp", "ddp")}
WORDS = "--data.name text --model.name transformer --model.args.width 24 --model.args.heads 2"
OWN = "tests.support.user_code"
MODELS = {
    "vit": "--data.name digits --model.name vit --model.args.layers 2 --model.args.width 34",
    "transformer": WORDS,
    "transformer, tied": f"{WORDS} --model.args.tied true",
    "mlp": "--data.name digits --model.name mlp --model.args.hidden 37",
    "a user's own": f"--data.name {OWN}:vectors --model.name {OWN}:Uneven",
    "a user's own, tied": f"--data.name {OWN}:sentences --model.name {OWN}:TiedWords",
}


def digests(env: DistEnv, words: str) -> dict[str, dict[str, int]]:
    """Of each way to make the model: one number a tensor."""
    found = {}
    for strategy in WORLDS[env.world_size]:
        for init in ("shard", "broadcast"):
            config = configuration.load([*words.split(), "--mesh.strategy", strategy, "--model.init", init])
            job = prepare(config, world_size=env.world_size, num_nodes=1, device=env.device)
            sharded = shard_model(meta_model(job.spec), job.sharding, build_mesh(job.sizes, env.device))
            materialize(sharded, spec=job.spec, seed=3, init=init, rank=env.rank)
            found[f"{strategy} {init}"] = state_digest(sharded.root)
    return found


def check(words: str) -> None:
    expected = run_world(1, digests, words)[0]["fsdp shard"]
    assert expected
    for ranks in WORLDS:
        for rank, ways in enumerate(run_world(ranks, digests, words)):
            for way, found in ways.items():
                assert found == expected, f"{way} on rank {rank} of {ranks}"


@pytest.mark.parametrize("model", quick_are(["a user's own, tied"], MODELS, []))
def test_the_same_bits_however_many_ranks(model: str) -> None:
    check(MODELS[model])


def test_they_are_what_one_process_builds_and_another_seed_gives_others() -> None:
    from fsdp.models import resolve

    spec = resolve(ModelSection(name="tests.support.user_code:Uneven"), {})

    def weights(seed: int) -> dict[str, Tensor]:
        return dict(build_real(spec, seed).named_parameters())

    torch.manual_seed(3)
    by_hand = dict(Uneven().named_parameters())
    assert all(torch.equal(by_hand[name], value) for name, value in weights(3).items())
    assert not torch.equal(by_hand["head.weight"], weights(4)["head.weight"])
