"""One Ray worker as one rank of a prediction. A module of its own: workers import it by name."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def predict(given: Mapping[str, Any]) -> str:
    """train_loop_per_worker: what this rank prints; rank 0's is the answer."""
    import ray.train
    import torch

    from fsdp.predict.__main__ import answer_as_rank
    from launch.ray_output import redirect_output
    from launch.ray_settings import threads_of
    from launch.ray_worker import dist_env, rank_failure

    rank = ray.train.get_context().get_world_rank()
    redirect_output(Path(given["logs"]), rank, f"{os.getpid()}")
    torch.set_num_threads(threads_of(os.environ["OMP_NUM_THREADS"]) or 1)
    if Path(given["folder"]).is_dir():
        os.chdir(given["folder"])  # relative paths in flags
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            answer_as_rank(given["argv"], dist_env())
    except Exception as error:
        raise rank_failure(rank, error) from None
    return printed.getvalue()
