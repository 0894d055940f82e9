"""What is unusual about a person's model trains, or is refused in one line with a HINT; never in a traceback
of torch's.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from fsdp import config as configuration
from fsdp.distributed.env import DistEnv, from_environment
from fsdp.models import build_real, resolve
from fsdp.predict.trained import open_run
from tests.support.plain_loop import relative_difference, train_plainly
from tests.support.runs import failures, finished, flags, on_a_rank, run, settings
from tests.support.world import run_world

HERE = "tests.models.unusual"
THREE = "--train.steps 3 --checkpoint.every_steps 1000 --optim.warmup_steps 0"


FP64 = "--precision.master fp64 --precision.param fp64"


def plainly(folder: Path, words: str, ranks: int, expected: str = "") -> None:
    """Trained on these ranks as by a loop in one process; `expected` are that loop's own flags."""
    loop = train_plainly(settings(THREE, FP64, expected or words), dtype="fp64", steps=3)
    ours = run(ranks, folder, THREE, FP64, words).parameters
    assert relative_difference(ours, loop.parameters) < 1e-10


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["fsdp", "ddp"])
def test_a_lone_temperature_is_trained_as_in_one_process(strategy: str, tmp_path: Path) -> None:
    """All else is frozen: no rank has a shard that is trained."""
    frozen = "--model.name tests.support.user_code:Scalar --model.frozen stem.*,blocks.*,head.*"
    plainly(tmp_path / "run", f"{frozen} --mesh.strategy {strategy}", 2)


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        "InPlace --mesh.reshard_after_forward false", "Hiding --mesh.reshard_after_forward false",
        "Forces --mesh.wrap root", "ByMethod --mesh.wrap root", "InPlace --mesh.strategy ddp",
        "FastWeights --mesh.strategy ddp --model.frozen blocks.1.up.weight",
        "FastWeights --model.args.inner true --model.frozen blocks.*.up.weight",
    ],
)  # fmt: skip
def test_a_hint_trains_what_was_refused(words: str, tmp_path: Path) -> None:
    plainly(tmp_path / "run", f"--model.name {HERE}:{words}", 2)


def test_experts_of_a_lone_mixture_are_those_of_one_process(tmp_path: Path) -> None:
    """One row a micro-batch, so that each rank calls one expert of the two, and often not the same one."""
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        pytest.skip("FSDP of this torch cannot reduce zeros")
    plainly(tmp_path / "run", f"--model.name {HERE}:Routed --train.micro_batch 1", 2)


def from_other_streams(env: DistEnv, words: list[str]) -> str | None:
    """A run of ranks whose processes have drawn different numbers before."""
    random.seed(env.rank)
    np.random.seed(env.rank)
    torch.manual_seed(env.rank)
    return on_a_rank(env, words)


@pytest.mark.parametrize("name", ["Shuffled"])
def test_what_a_constructor_draws_is_the_same_on_every_rank(name: str, tmp_path: Path) -> None:
    """As in one process with the run's seed: an order of features, and a tensor that is no buffer."""
    words = flags(THREE, FP64, f"--model.name {HERE}:{name} --run.seed 3")
    folder = tmp_path / "run"
    assert run_world(2, from_other_streams, ["--run.dir", str(folder), *words]) == [None, None]
    loop = train_plainly(configuration.load(words), dtype="fp64", steps=3)
    assert relative_difference(finished(folder).parameters, loop.parameters) < 1e-10
    trusted = [f"{HERE}:{name}", "tests.support.user_code:vectors"]
    with open_run(folder, from_environment({}), trusted=trusted) as opened:
        predicting: Any = opened.model
    plain: Any = build_real(resolve(configuration.load(words).model, {}), 3)
    assert predicting.order == plain.order
    assert torch.equal(predicting.turn, plain.turn)


@pytest.mark.long
def test_a_forward_that_draws_from_python_and_numpy_resumes_to_the_bit(tmp_path: Path) -> None:
    words = f"--train.steps 6 --checkpoint.every_steps 1000 --model.name {HERE}:HostNoise"
    whole = run(2, tmp_path / "whole", words)
    assert failures(2, tmp_path / "parts", words, "--train.stop_after 3") == [None, None]
    parts = run(2, tmp_path / "parts", words)
    assert all(torch.equal(parts.parameters[name], value) for name, value in whole.parameters.items())


REFUSED = {
    "Follows": "the forward writes into slow.weight",
    "FastWeights": "torch.func.functional_call replaces blocks.1.up.weight",
    "ByMethod": "the forward computes with a parameter of which this rank has a shard alone",
    "InPlace": "the output of blocks.0 is a view, and the forward writes into it afterwards (x += y)",
    "Hiding": "blocks.0 returns a Hidden, in which FSDP finds no tensors",
    "Detached": "the loss does not depend on a trained parameter",
    "Uneven --train.loss {HERE}:centres": "centres has a parameter of its own, centres",
    "Words --model.args.sparse true --data.name {HERE}:sentences": "Words: words has sparse gradients",
    "GradientHook": "parameter blocks.0.up.weight has a gradient hook",
    "InStages": "requires_grad_(True) was called on blocks.1.norm.weight after the start",
    "Remembers": "a list or dictionary of a module keeps parameters as they were before sharding",
    "Lazy": "stem.weight has no shape before the first forward",
    "Unused --mesh.strategy ddp": "does not depend on extra.*, and",
    "Words --model.args.positions 5 --data.name {HERE}:sentences": "an embedding of the model is read",
    "Counting --memory.activation_checkpointing full": "the forward of a Counts changes calls in place",
    "Alternating --memory.activation_checkpointing full": "a unit's forward computes something else",
}


@pytest.mark.parametrize("words", REFUSED)
def test_a_model_is_refused_in_a_line(words: str, tmp_path: Path) -> None:
    refused(f"--model.name {HERE}:" + words.replace("{HERE}", HERE), REFUSED[words], tmp_path)


OTHERS = {
    f"--data.name {HERE}:float_targets": "a target is not the index of a class",
    f"--data.name {HERE}:many_classes": "a target is not the index of a class",
}


@pytest.mark.parametrize("words", OTHERS)
def test_data_and_hooks_are_refused_in_a_line(words: str, tmp_path: Path) -> None:
    refused(words, OTHERS[words], tmp_path)


def refused(words: str, line: str, folder: Path) -> None:
    for said in failures(2, folder / "run", words, THREE):
        assert said is not None
        assert said.startswith("ConfigError: "), said
        assert line in said
        assert " HINT: " in said
        assert "\n" not in said
