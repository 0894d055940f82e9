"""Rank processes forked from one that has imported everything, which saves three seconds a rank."""

from __future__ import annotations

import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    ["fsdp.run.loop", "torch._dynamo", "torch.utils.tensorboard", "tests.support.frozen_imports"]
)
