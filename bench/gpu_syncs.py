"""Synchronisations of the host with a CUDA device, counted by torch in each step of one run of train.py.

    python -m bench.gpu_syncs FLAGS OF train.py

The last line is JSON: the step, and torch's warnings in it with the lines of code that made them.
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from fsdp import config as configuration
from fsdp.distributed.env import from_environment
from fsdp.run import loop

WORDS = "synchronizing CUDA operation"


def counted(argv: Sequence[str]) -> dict[int, list[str]]:
    """The places of the synchronisations of each step."""
    found: dict[int, list[str]] = {}
    plain = loop.TrainingLoop._one_step

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if WORDS in str(message):
            stack = [f"{f.filename}:{f.lineno}" for f in traceback.extract_stack() if "/fsdp/" in f.filename]
            found[max(found)].append(stack[-1] if stack else "outside fsdp/")

    def step(self: Any) -> None:
        found[self.state.step + 1] = []
        torch.cuda.set_sync_debug_mode("warn")
        try:
            plain(self)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    config = configuration.load(list(argv))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        loop.TrainingLoop._one_step = step  # type: ignore[method-assign]
        loop.train(config, from_environment(device=config.run.device))
    return found


if __name__ == "__main__":
    print(json.dumps(counted(sys.argv[1:])))
