"""What a start on CUDA sets, in which order, and gives to its parts. torch.cuda is replaced by stand-ins."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from fsdp.config import Config
from fsdp.dist.env import DistEnv
from fsdp.models import loss
from fsdp.parallel import compute as compiler
from fsdp.run import build, loop
from tests.support.env import env_of
from tests.support.runs import settings
from tests.support.world import run_world

GPU = torch.device("cuda", 1)


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
    job: Any = SimpleNamespace(
        loss=None, sharding=SimpleNamespace(compiled=compiler.compiles(config.speed, device))
    )
    parts, root = build.RunParts(), SimpleNamespace(root=None)
    parts.config, parts.env, parts.job = config, replace(env_of(), device=device), job
    parts.sharded = root  # type: ignore[assignment]
    build.optimizer(parts)
    assert built == [update]
    build.loss_function(parts, nn.Linear(2, 2))
    assert compiled == [loss.summed_entropy] * entropy
