"""What a start on CUDA sets, in which order, and gives to its parts. torch.cuda is replaced by stand-ins."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from fsdp.config import Config
from fsdp.distributed.env import DistEnv
from fsdp.run import build, loop
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
