"""The Python API: train() in this process, and the parts for a loop of one's own, as examples/own_loop.py."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.tensor import DTensor

import shardrun
from fsdp.base.errors import ConfigError, NotFiniteError
from fsdp.distributed.env import DistEnv
from fsdp.optim import gradients as nonfinite
from fsdp.run import own_loop as own_loop_module
from tests.launch.test_local import ROOT
from tests.support.processes import eventually
from tests.support.runs import QUIET
from tests.support.world import run_world

SHORT = ["--checkpoint.every_steps", "4", "--train.clip_grad_norm", "0", "--watch.enabled", "false"]


def test_train_in_this_process(tmp_path: Path) -> None:
    config = shardrun.load_config(QUIET, run__dir=str(tmp_path / "run"), train__steps=4)
    outcome = shardrun.train(config)
    assert (outcome.step, outcome.stopped, outcome.run_dir) == (4, None, tmp_path / "run")
    again = shardrun.train([*QUIET, "--run.dir", str(tmp_path / "run"), "--train.steps", "6"])
    assert again.step == 6
    record = shardrun.record_of(again)
    assert b"fsdp" not in pickle.dumps(record)
    assert record["step"] == 6


def tasks() -> set[int]:
    return {int(one.name) for one in Path("/proc/self/task").iterdir()}


def run_thrice(env: DistEnv, run_dir: str, more: str) -> None:
    """The second and third run leave no thread in the process."""
    known = set[int]()
    for number in range(3):
        words = [*QUIET, "--train.steps", "3", "--run.dir", f"{run_dir}/{number}"]
        with contextlib.suppress(ConfigError, NotFiniteError):
            shardrun.train([*words, *more.format(run_dir).split()])
        gc.collect()
        known = known or tasks()
    # a thread that is joined leaves the system a moment later
    eventually("their threads have ended", lambda: tasks() <= known, 20, lambda: str(threading.enumerate()))


@pytest.mark.parametrize("more", ["", "--optim.lr 1e30 --checkpoint.local_dir {}/own"])
def test_runs_leave_no_threads(more: str, tmp_path: Path) -> None:
    """Each group of gloo has three; a run that fails has a save thread too, and its staging buffer."""
    assert run_world(1, run_thrice, str(tmp_path), more) == [None]


def test_an_error_is_raised() -> None:
    with pytest.raises(shardrun.ShardrunError, match=r"HINT: leave it out in a worker of Ray Train"):
        shardrun.train(["--backend", "ray"])
    with pytest.raises(shardrun.ShardrunError, match=r"HINT: did you mean --train\.steps"):
        shardrun.load_config(train__stepz=3)
    with pytest.raises(AttributeError, match="shardrun has no attribute trane"):
        _ = shardrun.trane


def build() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 2))


def rows_of(step: int) -> torch.Tensor:
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def own_loop(env: DistEnv, folder: str, last: int) -> dict[str, torch.Tensor]:
    """Steps of SGD up to `last`; the whole parameters."""
    config = shardrun.load_config([*SHORT, "--precision.master", "fp64"], run__dir=folder)
    model = shardrun.shard(build, config, env)
    optimizer = torch.optim.SGD(model.root.parameters(), lr=0.1, momentum=0.9)
    with shardrun.Training(config, env, model, optimizer) as training:
        for step in training.steps(last):
            with model.micro_batch(last=True):
                loss = model.called(rows_of(step)[env.rank :: env.world_size]).square().mean()
                loss.backward()
            training.update()
            training.record(loss=loss)
    return {name: cast(DTensor, p.detach()).full_tensor() for name, p in model.root.named_parameters()}


def plain_loop(parameters: dict[str, torch.Tensor], first: int, last: int) -> dict[str, torch.Tensor]:
    """The same steps from these parameters, unsharded, with no code of fsdp/."""
    model = build().double()
    model.load_state_dict(parameters)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(first, last + 1):
        optimizer.zero_grad()
        model(rows_of(step)).square().mean().backward()
        optimizer.step()
    return dict(model.state_dict())


def test_a_loop_of_ones_own_is_that_of_the_unsharded_module_and_resumes(tmp_path: Path) -> None:
    """Stopped after 3 steps on two ranks and continued on one: momentum is restored too."""
    start, *_ = run_world(2, own_loop, str(tmp_path / "start"), 0)
    whole, *_ = run_world(2, own_loop, str(tmp_path / "whole"), 6)
    expected = plain_loop(start, 1, 6)
    for name, tensor in whole.items():
        torch.testing.assert_close(tensor, expected[name], rtol=1e-10, atol=1e-12)
    run_world(2, own_loop, str(tmp_path / "parts"), 3)
    parts, *_ = run_world(1, own_loop, str(tmp_path / "parts"), 6)
    for name, tensor in parts.items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-10, atol=1e-12)
    lines = (tmp_path / "parts/metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4, 5, 6]


def loop_with_a_bad_step(env: DistEnv, folder: str, on_device: bool, *words: str) -> tuple[str, bool, int]:
    """A row of rank 1 is infinite in step 3: the error, whether the parameters are finite, the steps done."""
    with pytest.MonkeyPatch.context() as patch:
        if on_device:
            patch.setattr(nonfinite, "DEVICES_THAT_SKIP", ("cuda", "cpu"))
        patch.setattr(own_loop_module, "CHECKED_EVERY", 5)
        config = shardrun.load_config([*SHORT, *words], run__dir=folder)
        model = shardrun.shard(build, config, env)
        optimizer = torch.optim.AdamW(model.root.parameters(), fused=True)
        said = ""
        try:
            with shardrun.Training(config, env, model, optimizer) as training:
                for step in training.steps(6):
                    rows = rows_of(step).float()[env.rank :: env.world_size]
                    if (step, env.rank) == (3, 1):
                        rows[0] = math.inf
                    with model.micro_batch(last=True):
                        model.called(rows).square().mean().backward()
                    training.update()
                    if step % 2 == 0:
                        training.save("a check")
        except shardrun.ShardrunError as error:
            said = str(error)
    finite = all(bool(cast(DTensor, p).to_local().isfinite().all()) for p in model.root.parameters())
    return said, finite, training.step


@pytest.mark.parametrize("on_device", [False, True])
def test_a_loop_of_ones_own_ends_at_a_gradient_that_is_not_finite(on_device: bool, tmp_path: Path) -> None:
    """Before, it trained on and saved NaN."""
    for said, finite, done in run_world(2, loop_with_a_bad_step, str(tmp_path), on_device):
        assert said.startswith("step 3: gradient norm nan, first in 0.weight on rank")
        assert "HINT: a lower rate of the optimizer, " in said
        assert "or --train.nonfinite skip to skip such updates" in said
        # The device's verdict is read at a save.
        assert (finite, done) == (True, 4 if on_device else 2)
    assert [folder.name for folder in sorted((tmp_path / "checkpoints").glob("step-*"))] == ["step-00000002"]


def test_a_loop_of_ones_own_skips_it_if_asked(tmp_path: Path) -> None:
    asked = ("--train.nonfinite", "skip")
    assert run_world(2, loop_with_a_bad_step, str(tmp_path), False, *asked) == [("", True, 6)] * 2


class OfARank(torch.optim.SGD):
    """Keeps a tensor of its rank's part, which no other number of ranks could load."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["seen"] = torch.zeros_like(parameter.to_local())


def beside(env: DistEnv, folder: str, kind: str) -> str:
    """What is said of a loop that would train something else than it seems to."""
    words = ["--lora.rank", "2"] if kind == "adapters" else []
    config = shardrun.load_config([*SHORT, *words, "--precision.master", "fp64"], run__dir=folder)
    both: Any = lambda: (build(), build())  # noqa: E731
    try:
        model = shardrun.shard(both if kind == "two models" else build, config, env)
        scale = torch.ones(4, requires_grad=True)
        parameters = [*model.root.parameters(), *([scale] if kind == "a tensor beside" else [])]
        optimizer = (OfARank if kind == "states of a rank" else torch.optim.SGD)(parameters, lr=0.1)
        with shardrun.Training(config, env, model, optimizer) as training:
            for step in training.steps(3):
                rows = rows_of(step)[env.rank :: env.world_size]
                with model.micro_batch(last=kind != "no last micro-batch"):
                    if kind == "other weights" and step == 2:
                        others = {
                            name: torch.zeros(p.shape).double() for name, p in build().named_parameters()
                        }
                        torch.func.functional_call(model.root, others, (rows,))
                    loss = model.called(rows.requires_grad_()).square().mean()
                    if kind == "a penalty":
                        (slope,) = torch.autograd.grad(loss, rows, create_graph=True)
                        loss = loss + slope.square().sum()
                    loss.backward()
                training.update()
    except shardrun.ShardrunError as error:
        return str(error)
    return ""


BESIDE = {
    "two models": "<lambda> returned a tuple, not an nn.Module. HINT: return one module; of several models",
    "a tensor beside": "the optimizer holds a tensor of the shape (4,) that is no parameter of the model: "
        "its gradient would be one rank's, and no checkpoint would hold it. HINT: make it a part of the",
    "no last micro-batch": "update() without a micro_batch(last=True) before it: gradients are not "
        "averaged over the ranks. HINT: with model.micro_batch(last=True) around the last forward",
    "other weights": "torch.func.functional_call replaces 0.weight, in whose place FSDP gathers the "
        "model's own",
    "a penalty": "backward reads a parameter that FSDP has freed",
    "adapters": "--lora.rank 2 has no effect in a loop of your own. HINT: leave --lora.rank out",
    "states of a rank": "the optimizer OfARank: state seen of 0.weight is a plain tensor of",
}  # fmt: skip


@pytest.mark.parametrize("kind", BESIDE)
def test_a_loop_of_ones_own_that_would_train_something_else_is_refused(kind: str, tmp_path: Path) -> None:
    for said in run_world(2, beside, str(tmp_path / "run"), kind):
        assert said.startswith(BESIDE[kind]), said


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.ray
def test_the_example_of_tune(tmp_path: Path) -> None:
    program = ROOT / "examples/ray_tune.py"
    done = subprocess.run(
        [sys.executable, str(program), "--train.steps", "3"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr
    assert "best lr 0.00" in done.stdout
    assert len(list((tmp_path / "runs/tune").iterdir())) == 2
