"""What a start on CUDA sets, in which order, and gives to its parts. torch.cuda is replaced by stand-ins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fsdp import config as configuration
from fsdp.config import Config
from fsdp.dist.env import DistEnv
from fsdp.models import loss
from fsdp.parallel import compute as compiler
from fsdp.run import build, evaluate, loop
from tests.support.env import env_of
from tests.support.runs import flags, settings
from tests.support.world import run_world

GPU = torch.device("cuda", 1)
ON_GPU = replace(env_of(), device=GPU)


class Reached(Exception):
    """The start has come as far as the test looks."""


def order_of_a_start(env: DistEnv) -> list[Any]:
    said: list[Any] = []

    def prepare(config: Config, *, device: torch.device, **_: Any) -> None:
        said.append(("flags", device))
        raise Reached

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(build, "set_allocator", lambda text, device: said.append((text, device)))
        patched.setattr(loop, "prepare", prepare)
        with pytest.raises(Reached):
            loop.train(settings(), replace(env, device=GPU))
    return said


def test_the_allocator_and_the_processors_are_set_before_anything_asks_the_gpu() -> None:
    """torch reads the allocator's variable when CUDA starts, and threads inherit processors from then on."""
    (said,) = run_world(1, order_of_a_start)
    assert said == [("expandable_segments:True", GPU), ("flags", GPU)]


def given_to_parts(env: DistEnv, words: list[str]) -> dict[str, Any]:
    """What the parts of a run receive that it passes on to them."""
    found: dict[str, Any] = {}

    def noting(name: str, of: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **named: Any) -> Any:
            found[name] = of(*args, **named)
            return plain(*args, **named)

        return noted

    mesh, group, optimizer = build.build_mesh, build.process_group, build.build_optimizer
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(build, "build_mesh", noting("mesh", lambda sizes, device, timeout: timeout, mesh))
        patched.setattr(build, "process_group", noting("group", lambda env, timeout: timeout, group))
        patched.setattr(
            build,
            "build_optimizer",
            lambda section, root, compiled: found.update(compiled=compiled) or optimizer(section, root),
        )
        loop.train(configuration.load(words), env)
    return found


def test_flags_of_a_run_reach_its_groups_and_its_update(tmp_path: Path) -> None:
    words = flags(f"--run.dir {tmp_path} --train.steps 1 --run.process_group_timeout_s 77")
    assert run_world(1, given_to_parts, words) == [{"group": 77.0, "mesh": 77.0, "compiled": False}]


@pytest.mark.parametrize(
    ("words", "device", "update", "entropy"),
    [
        ("", GPU, True, True),
        ("", torch.device("cpu"), False, False),
        ("--speed.compile false", GPU, False, False),
        ("--memory.cpu_offload true", GPU, False, True),  # its states rest on the host
    ],
)
def test_on_cuda_the_cross_entropy_and_the_update_are_compiled_by_default(
    words: str, device: torch.device, update: bool, entropy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(compiler, "missing", lambda: "")

    def compiling(function: Any) -> Any:
        compiled.append(function)
        return function

    monkeypatch.setattr(torch, "compile", compiling)
    config, built = settings(words), list[bool]()
    monkeypatch.setattr(build, "build_optimizer", lambda section, root, compiled: built.append(compiled))
    job: Any = SimpleNamespace(loss=None, compiled=compiler.compiles(config.speed, device))
    start = started(config, device, job)
    build.optimizer(start, SimpleNamespace(root=None))  # type: ignore[arg-type]
    assert built == [update]
    build.loss_function(start, nn.Linear(2, 2))
    assert compiled == [loss.summed_entropy] * entropy


def started(config: Config, device: torch.device, job: Any) -> build.RunStart:
    absent: Any = None
    return build.RunStart(config, replace(env_of(), device=device), absent, job, absent, None, False)


def test_batches_come_from_pinned_memory_and_on_to_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[bool, Any]] = []

    def reader(*args: Any, pin: bool, device: Any, **_: Any) -> None:
        given.append((pin, device))

    monkeypatch.setattr(build, "Loader", reader)
    monkeypatch.setattr(evaluate, "heldout_batches", reader)
    nothing: Any = SimpleNamespace(train=None, sources=None)
    batch: Any = SimpleNamespace(micro_batch=1, accumulation=1)
    job: Any = SimpleNamespace(data=nothing, cursor=None, batch=batch)
    for device, words, expected in (
        (GPU, "", (True, GPU)),
        (torch.device("cpu"), "", (False, torch.device("cpu"))),
    ):
        given.clear()
        config = settings(words)
        build.loader(started(config, device, job), job)
        sharded: Any = SimpleNamespace(device=device)
        absent: Any = None
        evaluator = evaluate.Evaluator(
            sections=(config.train, config.data),
            sharded=sharded,
            loss_function=absent,
            data=nothing,
            batch=batch,
            rank=absent,
            ema=None,
            before_swap=absent,
            after_swap=absent,
            asked_to_stop=absent,
        )
        evaluator._batches(absent)
        assert given == [expected] * 2
