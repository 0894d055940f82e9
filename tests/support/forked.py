"""Rank processes that are forked from one that has imported what a rank needs: three seconds that each would
take by itself.
"""

from __future__ import annotations

import multiprocessing

FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["fsdp.run.loop", "torch._dynamo", "torch.utils.tensorboard"])
